"""Adapters beside modules of transformers, against peft: the same steps, files and logits."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from equipoise.base.errors import ModelError, SpecError
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.nn.hf.adapter import write_peft
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.theirs.build import load_theirs, wrap_theirs
from equipoise.parallel.theirs.lora import adapted_layers, peft_targets, require_used
from equipoise.parallel.theirs.model import TransformersModel
from equipoise.serve.generate import generate
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.resolved import read_resolved
from equipoise.spec.run.spec import TrainSpec
from support.hf.families import save_family
from support.hf.models import build_engine
from support.ranks import on_ranks

EXACT = 1e-5

# peft 0.21 asks for it under its former name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

LAYERS: dict[str, tuple[tuple[str, ...], int]] = {
    "llama": ((), 2 * 7),
    "gpt2": ((), 2 * 4),
    "phi3": (("qkv_proj", "mlp.down_proj"), 2 * 2),
    "gpt_oss": ((), 2 * 4),
    "deepseek_v3": (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "output"), 2 * 5),
    "qwen3_moe": (("query", "o_proj"), 2 * 2),
}
"""Targets of each family, and how many layers they are."""


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def in_double(theirs: Any) -> Any:
    if getattr(theirs.config, "_experts_implementation", None) is not None:
        theirs.set_experts_implementation("eager")  # the others have no fp64
    return theirs.double()


def adapters_of(model: TransformersModel) -> dict[str, torch.Tensor]:
    """A and B, by transformers' names of their layers."""
    return {
        name.removeprefix("theirs.").replace(".adapter.", "."): weight.detach().clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


@pytest.mark.parametrize("kind", LAYERS)
def test_steps_are_those_of_transformers_with_peft(tmp_path: Path, kind: str) -> None:
    targets, count = LAYERS[kind]
    lora = LoraSpec(rank=4, alpha=12.0, targets=targets)
    base = tmp_path / "base"
    build_engine(kind).save_pretrained(base)
    theirs = in_double(load_theirs(base, seed=0))
    sizes = model_from_other_config(theirs.config.to_dict())
    ours = wrap_theirs(theirs, sizes, context_tokens=64)
    ours.add_adapters(lora, seed=0)
    assert len(adapters_of(ours)) == 2 * count
    stems = sorted({name.rpartition(".")[0] for name in adapters_of(ours)})
    found, is_transposed = peft_targets(theirs, stems)
    assert is_transposed == (kind == "gpt2")

    def beside(folder: Path) -> Any:
        write_peft(folder, adapters_of(ours), lora, found, base="", is_transposed=is_transposed)
        return peft.PeftModel.from_pretrained(in_double(load(base)), folder, is_trainable=True)

    other = beside(tmp_path / "first").double()
    train = TrainSpec(lr=1e-2, weight_decay=0.1, eps=1e-5)
    optimizer = make_adamw(ours, train)
    trained = [weight for weight in other.parameters() if weight.requires_grad]
    assert len(trained) == 2 * count
    updates = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    lengths = (31, 7, 18)
    labels = sum(lengths) - len(lengths)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        documents = [torch.randint(61, (n,), generator=draw) for n in lengths]
        shifted = torch.cat([torch.cat((each[1:], torch.tensor([-1]))) for each in documents])
        loss = ours(torch.cat(documents), lengths, labels_T=shifted) / labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = [
            cross_entropy(other(input_ids=each[None]).logits[0, :-1], each[1:], reduction="sum")
            for each in documents
        ]
        expected = torch.stack(sums).sum() / labels
        expected.backward()
        updates.step()
        updates.zero_grad()
        # Norms and routers of transformers compute in fp32 whatever the weights are.
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    again = dict(beside(tmp_path / "last").named_parameters())
    for name, weight in other.named_parameters():
        if weight.requires_grad:
            scale = weight.detach().abs().max()
            assert (again[name] - weight).detach().abs().max() <= 1e-3 * scale, name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks: adapters of GPT-2 and Gemma 2 under ZeRO 3 and over one document."""
    home = tmp_path_factory.mktemp("lora")
    text = home / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x ** {n}\n" for n in range(99)))
    for kind, layout in (("gpt2", "layout.zero=3"), ("gemma2", "layout.cp=2")):
        source = save_family(kind, home / kind / "hf")
        flags = {
            "data.source": "text",
            "data.path": str(text),
            "data.cache": str(home / "cache"),
            "model.init": f"hf:{source}",
            "model.engine": "transformers",
            "pack.context_tokens": "64",
            "pack.step_tokens": "256",
            "train.steps": "3",
            "train.warmup_steps": "0",
            "train.lr": "0.01",
            "lora.rank": "4",
            "layout.dp": "1" if "cp" in layout else "2",
        }
        argv = [f"--{name}={value}" for name, value in flags.items()]
        run = home / kind / "run"
        assert main(["train", *argv, f"--{layout}", "--out", str(run), "--prepare", "--quiet"]) == 0
    runs = [home / kind / "run" for kind in ("gpt2", "gemma2")]
    run_ranks(2, on_ranks.train_all, {run: read_resolved(run) for run in runs})
    return home


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_a_run_comes_back_as_adapters_and_merged(
    home: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, source = home / kind / "run", home / kind / "hf"
    merged, adapter = home / kind / "merged", home / kind / "adapter"
    assert main(["convert", str(run), str(merged), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["convert", str(run), str(adapter), "--adapter", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rank"], said["step"], said["base"]) == (4, 3, str(source))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        first = load(source)(input_ids=tokens).logits
        whole = load(merged)(input_ids=tokens).logits
        logits = peft.PeftModel.from_pretrained(load(source), adapter)(input_ids=tokens).logits
    largest = whole.abs().max()
    bound = EXACT * (1 if kind == "gpt2" else 10)  # logits capped at 0.3 are differences of large
    assert (logits - whole).abs().max() <= bound * largest
    assert (logits - first).abs().max() > 100 * EXACT * largest
    assert (merged / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert generate(run, "def ", tokens=9) == generate(merged, "def ", tokens=9)


def refused(home: Path, *flags: str) -> list[str]:
    """What ``train`` says before it reads a corpus."""
    argv = ["train", "--model.engine=transformers", f"--model.init=hf:{home / 'gpt2' / 'hf'}"]
    argv += ["--pack.context_tokens=64", "--out", str(home / "other"), *flags]
    assert main(argv) == 2
    return argv


def test_targets_and_patterns_that_match_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    refused(home, "--lora.rank=4", '--lora.targets=["query"]')
    assert capsys.readouterr().err == (
        'lora.targets: "query" (q_proj in Hugging Face folders) is the name of no linear layer of '
        "GPT2LMHeadModel. Its linear layers are c_attn, c_fc, c_proj.\n"
    )
    refused(home, '--train.freeze=["transformer.h.0-1.atn"]')
    assert capsys.readouterr().err == (
        'train.freeze: "transformer.h.0-1.atn" matches none of the model\'s 28 weights. Nearest: '
        '"transformer.h.0.attn".\n'
    )
    assert not (home / "other").exists()


def test_blocks_with_experts_have_no_adapters_unless_they_are_named() -> None:
    names = list(adapted_layers(build_engine("deepseek_v3"), LoraSpec(rank=2)))
    assert len(names) == 2 * 5 + 3  # attention of two layers; the feed-forward of the first
    named = adapted_layers(build_engine("deepseek_v3"), LoraSpec(rank=2, targets=("down",)))
    assert list(named) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.shared_experts.down_proj",
    ]


def test_an_adapter_that_would_not_be_used_is_refused() -> None:
    theirs = build_engine("llama")
    layers = adapted_layers(theirs, LoraSpec(rank=2, targets=("gate_proj",)))
    assert list(layers) == [f"model.layers.{n}.mlp.gate_proj" for n in range(2)]
    with pytest.raises(ModelError) as caught:
        require_used(lambda: None, dict.fromkeys(layers, torch.nn.Identity()))
    assert str(caught.value) == (
        "The model reads the weights of model.layers.0.mlp.gate_proj without calling it, so that "
        "an adapter there would not be used. Leave it out of lora.targets."
    )
    for layer in theirs.model.layers:
        layer.mlp = torch.nn.Identity()
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(SpecError) as told:
        adapted_layers(theirs, LoraSpec(rank=2))
    assert str(told.value) == (
        "lora.rank = 2, but LlamaForCausalLM has no linear layer outside its experts. Name some in "
        "lora.targets, or remove lora.rank."
    )
