"""Adapters against peft: the same steps, the same files, the same logits."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.export import read_checkpoint_weights
from equipoise.checkpoint.index_first import read_any_index
from equipoise.checkpoint.manifest import newest_good
from equipoise.cli.main import main
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.adapter import write_adapter
from equipoise.nn.hf.read import load_hf
from equipoise.nn.lora import add_adapters
from equipoise.optim.adamw import make_adamw
from equipoise.serve.adapter import export_adapter
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import TrainSpec

LORA = LoraSpec(rank=4, alpha=12.0)
EXACT = 1e-5

# peft 0.21 asks for it under its former name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights, without a tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def ours_on(base: Path) -> Decoder:
    model = model_from_hf_config(json.loads((base / "config.json").read_text()))
    decoder = Decoder(model)
    load_hf(decoder, base)
    add_adapters(decoder, LORA, seed=0)
    return decoder


def adapters_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    named = decoder.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if weight.requires_grad}


def their_model(base: Path, folder: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(load(base), folder, is_trainable=True).double()


def test_steps_are_those_of_transformers_with_peft(base: Path, tmp_path: Path) -> None:
    # In float64 but for their norms, whose rounding AdamW would turn into whole steps.
    ours = ours_on(base).double()
    write_adapter(tmp_path / "first", adapters_of(ours), LORA, base=str(base))
    theirs = their_model(base, tmp_path / "first")
    train = TrainSpec(lr=1e-2, weight_decay=0.1, eps=1e-5)
    optimizer = make_adamw(ours, train)
    trained = [weight for weight in theirs.parameters() if weight.requires_grad]
    other = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    assert len(trained) == len(adapters_of(ours)) == 2 * 7 * 2
    lengths = (31, 7, 18)
    labels = sum(lengths) - len(lengths)
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        documents = [torch.randint(320, (n,), generator=draw) for n in lengths]
        shifted = torch.cat([torch.cat((each[1:], torch.tensor([-1]))) for each in documents])
        loss = ours(torch.cat(documents), lengths, labels_T=shifted) / labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Their own loss is computed in fp32.
        sums = [
            cross_entropy(theirs(input_ids=each[None]).logits[0, :-1], each[1:], reduction="sum")
            for each in documents
        ]
        expected = torch.stack(sums).sum() / labels
        expected.backward()
        other.step()
        other.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    write_adapter(tmp_path / "last", adapters_of(ours), LORA, base=str(base))
    again = dict(their_model(base, tmp_path / "last").named_parameters())
    for name, weight in theirs.named_parameters():
        error = (again[name] - weight).detach().abs().max() / weight.detach().abs().max()
        assert error <= EXACT, name


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """A run of two ranks under ZeRO 3, which ended and went on: 10 s of processes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.toml").write_text(f"""
[data]
source = "text"
path = "{texts}"
vocab = 300
tokenizer = "train"
cache = "{folder / "cache"}"
[model]
init = "hf:{base}"
[pack]
context_tokens = 128
step_tokens = 512
[train]
steps = 3
warmup_steps = 0
lr = 0.01
[lora]
rank = 4
alpha = 12
targets = ["q_proj", "o_proj", "down"]
[layout]
dp = 2
zero = 3
""")
    words = ["train", str(folder / "run.toml"), "--out", str(folder / "run"), "--quiet"]
    assert main(words) == 0
    assert main([*words, "--train.steps", "5"]) == 0
    return folder / "run"


def test_a_run_comes_back_as_adapters_and_merged(base: Path, trained: Path, tmp_path: Path) -> None:
    assert main(["convert", str(trained), str(tmp_path / "merged"), "--quiet"]) == 0
    assert main(["convert", str(trained), str(tmp_path / "adapter"), "--adapter", "--quiet"]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert config["base_model_name_or_path"] == str(base)
    beside = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        first = load(base)(input_ids=tokens).logits
        merged = load(tmp_path / "merged")(input_ids=tokens).logits
        logits = beside(input_ids=tokens).logits
    largest = merged.abs().max()
    assert (logits - merged).abs().max() <= EXACT * largest
    assert (logits - first).abs().max() > 100 * EXACT * largest


def test_the_base_stays_and_has_no_moments(base: Path, trained: Path) -> None:
    path, manifest, _ = newest_good(trained / "checkpoint")
    model, merged = read_checkpoint_weights(path, manifest)
    plain = Decoder(model)
    load_hf(plain, base)
    changed = {
        name for name, weight in plain.named_parameters() if not torch.equal(weight, merged[name])
    }
    ends = ("query.weight", "output.weight", "down.weight")
    assert changed == {name for name in merged if name.endswith(ends)}
    stored = [key for key in read_any_index(path) if key.startswith("optimizer.")]
    assert stored
    assert all(".adapter.lora_" in key for key in stored)


def test_other_adapters_do_not_go_on_from_here(trained: Path, capfd) -> None:
    words = ["train", str(trained.parent / "run.toml"), "--out", str(trained), "--quiet"]
    assert main([*words, "--train.steps", "6", "--lora.alpha", "16"]) == CheckpointError.exit_code
    said = " ".join(capfd.readouterr().err.split())
    assert "has trained other weights: lora.alpha = 12.0 before and 16.0 now." in said


def test_a_run_without_a_checkpoint_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        export_adapter(tmp_path, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path} has no checkpoint yet. Train it further; checkpoint.every_steps says how "
        f"often one is written."
    )
