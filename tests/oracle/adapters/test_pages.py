"""Code of the pages for other trainers, with the real libraries: each under ten lines."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import preset
from support.trainers.tiny import GIVEN, VOCAB, samples, tiny_llama, words

PAGES = Path(__file__).parents[3] / "docs" / "your-code"


def run_page(page: str, block: int = 0, change: tuple[str, str] = ("", ""), **names: Any) -> Any:
    """The names that a page's block leaves, with one text of it changed."""
    source = re.findall(r"```py\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)[block]
    imports = ("import", "from")
    lines = [line for line in source.splitlines() if line and not line.startswith(imports)]
    assert len(lines) < 10
    assert change[0] in source
    exec(source.replace(*change) if change[0] else source, names)
    return names


def test_the_page_on_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words(), eos_token="1", pad_token="0"
    )
    given = {key: value for key, value in GIVEN.items() if not key.startswith("per_device")}
    given |= {"activation_checkpointing": False, "gradient_accumulation_steps": 1}
    model = tiny_llama()
    before = [weight.clone() for weight in model.parameters()]
    names = run_page(
        "hugging-face.md",
        change=("train_batch_size=8", "train_batch_size=8, max_length=None, **given"),
        given=given,
        model=model,
        dataset=samples(),
        tokenizer=tokenizer,
    )
    assert names["trainer"].state.global_step == 4
    assert any(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_the_page_on_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    verl = pytest.importorskip("verl.utils.seqlen_balancing", reason="verl is not installed")
    for name in ("get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        monkeypatch.setattr(verl, name, getattr(verl, name))  # put back afterwards
    theirs = verl.rearrange_micro_batches
    config = transformers.LlamaConfig(**hf_config(preset("7m")))
    run_page(
        "verl.md", change=('AutoConfig.from_pretrained("Qwen/Qwen3-8B")', "config"), config=config
    )
    assert verl.rearrange_micro_batches is not theirs
    assert verl.get_seqlen_balanced_partitions([3, 3, 6], 2, False) in (
        [[0, 1], [2]],
        [[2], [0, 1]],
    )


def test_the_page_on_skyrl() -> None:
    lengths = [4000, 100, 9000, 12_000, 700, 5000]
    names = run_page("verl.md", 1, dp_size=2, model=tiny_llama(), sequence_lengths=lengths)
    assert len(names["bins"]) % 2 == 0
    assert sorted(at for each in names["bins"] for at in each) == list(range(6))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_page_on_torchtitan() -> None:
    pytest.importorskip("torchtitan.components.dataloader", reason="torchtitan is not installed")
    documents = [[1] * (10 + 40 * at) for at in range(30)]
    names = run_page("torchtitan.md", documents=documents, dp_rank=1, dp_world_size=2)
    inputs, labels = next(iter(names["dataloader"]))
    assert inputs["input"].shape == labels.shape == (1, 8192)


def test_the_page_on_megatron() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    seen = []

    def model(*, tokens: Any, packed_seq_params: Any, **rest: Any) -> float:
        assert set(rest) == {"labels", "loss_mask", "position_ids", "attention_mask"}
        assert tokens.shape[1] == int(packed_seq_params.cu_seqlens_q_padded[-1])
        seen.extend(packed_seq_params.cu_seqlens_q.diff().tolist())
        return 0.0

    lengths = [50, 1, 97, 33, 8]
    dataset = [{"input_ids": torch.randint(VOCAB, (n,))} for n in lengths]
    run_page("megatron.md", model=model, dataset=dataset, lengths=lengths)
    assert sorted(seen) == sorted(lengths)


def test_modules_of_a_page_are_those_of_the_package() -> None:
    for page in ("hugging-face.md", "verl.md", "torchtitan.md", "megatron.md"):
        for module in re.findall(r"from (equipoise[\w.]*) import", (PAGES / page).read_text()):
            __import__(module)
            assert isinstance(sys.modules[module], ModuleType)
