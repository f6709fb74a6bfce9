"""The keys of a first run, by what lies at a path and how long its documents are.

What it decides
    A fine-tuning run takes one epoch: the steps that its tokens fill. Its window holds the
    longest conversation, as far as the model's positions go, and a step at least a window for
    every rank, so that no rank can be without a conversation. Learning rates are usual ones of
    full fine-tuning; a run from scratch keeps the defaults.

Kept true (tests/unit/cli/test_init.py)
    The run.toml that is written trains as it is.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.data.look import Corpus, Lengths
    from equipoise.data.progress import Progress
    from equipoise.spec.run.resolve import ResolvedRun

_FEWEST_CONTEXT_TOKENS = 256
_MOST_CONTEXT_TOKENS = 8192
"""Longest window of texts, which may be cut; a conversation gets the window that holds it."""
_STEP_CONVERSATIONS = 16
"""Conversations of a mean length that a step should have."""
_LARGE_PARAMS = 1_000_000_000
_WARMUP_SHARE = 0.03


HF = "hf:"
"""What ``model.init`` begins with, before a folder."""


@dataclass
class Seen:
    """What lies at a path, as sentences, and the keys that follow from it."""

    keys: list[tuple[str, str]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


def is_model(path: Path) -> bool:
    """Whether a folder holds a model as Hugging Face writes it."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def require_model(folder: Path, preset: str | None) -> None:
    """Refuse a folder without a model, and a preset beside one.

    Raises:
        SpecError: as above.
    """
    if preset is not None:
        raise SpecError("--model and --preset both name a model. Give one of them.")
    if not is_model(folder):
        raise SpecError(
            f"{folder} has no config.json with *.safetensors. Give --model the folder of a "
            "Hugging Face model."
        )


def see(path: Path, model: Path | None, progress: "Progress") -> Seen:
    """Look at a path and say which run fits it.

    Args:
        path: A corpus: a file or a folder.
        model: The folder of the model to begin with, or None to begin from scratch.
        progress: Shows how far tokenizing is.

    Raises:
        SpecError: the corpus needs a model's folder, and none is given.
        DataError: the corpus or the tokenizer is wrong.
    """
    from equipoise.data.look import look_at, measure
    from equipoise.spec.run.load import read_run

    corpus = look_at(path)
    keys = [("data.source", corpus.source), ("data.path", str(corpus.path))]
    if corpus.format != "text":
        keys.append(("data.format", corpus.format))
    if corpus.field != "text":
        keys.append(("data.field", corpus.field))
    if corpus.format == "messages" and model is None:
        raise SpecError(
            f"{path} holds conversations, which a chat model's own template must write out. Give "
            f"the model's folder: equipoise init --from {shlex.quote(str(path))} --model DIR."
        )
    seen = Seen(keys)
    if model is None:
        seen.sentences.append(f"{path}: {_kind_of(corpus)}; a model is trained from scratch.")
        return seen
    require_model(model, None)
    run = read_run(None, [*keys, ("model.init", f"{HF}{model}")])
    lengths = measure(run.spec.data, run.base, progress)
    seen.keys += _fit(run, corpus, lengths, model)
    seen.sentences += _say(path, run, corpus, lengths, dict(seen.keys))
    return seen


def _fit(
    run: "ResolvedRun", corpus: "Corpus", lengths: "Lengths", model: Path
) -> list[tuple[str, str]]:
    from equipoise.observe.machine import own_ranks

    ranks = own_ranks()
    longest = int(lengths.doc_tokens.max())
    most = min(_positions(model), _MOST_CONTEXT_TOKENS if corpus.format == "text" else 1 << 30)
    window = min(max(_FEWEST_CONTEXT_TOKENS, 1 << (longest - 1).bit_length()), most)
    mean = lengths.tokens / lengths.documents
    windows = max(ranks, round(_STEP_CONVERSATIONS * mean / window))
    steps = -(-lengths.tokens // (windows * window))
    rate = "2e-05" if run.model.params >= _LARGE_PARAMS else "5e-05"
    return [
        ("pack.context_tokens", str(window)),
        ("pack.step_tokens", str(windows * window)),
        ("train.steps", str(steps)),
        ("train.lr", rate),
        ("train.warmup_steps", str(min(steps // 2, max(1, round(_WARMUP_SHARE * steps))))),
        ("train.weight_decay", "0.0"),
    ]


def _positions(model: Path) -> int:
    """The longest document that the model was made for [tokens]."""
    from equipoise.base.read import read_json

    given = read_json(model / "config.json").get("max_position_embeddings")
    return given if type(given) is int and given >= _FEWEST_CONTEXT_TOKENS else 1 << 30


_NAMES = {
    "text": "text",
    "messages": "conversations",
    "prompt-completion": "prompts with completions",
}


def _kind_of(corpus: "Corpus") -> str:
    kinds = dict.fromkeys((corpus.source, _NAMES[corpus.format]))
    return ", ".join(kinds)


def _say(
    path: Path, run: "ResolvedRun", corpus: "Corpus", lengths: "Lengths", keys: dict[str, str]
) -> list[str]:
    import numpy as np

    about = "" if lengths.is_whole else "about "
    longest = int(lengths.doc_tokens.max())
    window, step = int(keys["pack.context_tokens"]), int(keys["pack.step_tokens"])
    learned = f", {lengths.learned:.0%} of them answers" if run.spec.data.masks else ""
    said = [
        f"{path}: {_kind_of(corpus)}; {about}{lengths.documents:,} of them, {about}"
        f"{lengths.tokens:,} tokens{learned}; median {int(np.median(lengths.doc_tokens)):,}, "
        f"longest {longest:,} tokens.",
        f"{run.spec.model.init.removeprefix(HF)}: {run.model.params:,} parameters; its own "
        f"tokenizer{' and chat template' if corpus.format == 'messages' else ''}.",
        f"One epoch is {about}{int(keys['train.steps']):,} steps of {step:,} tokens in windows of "
        f"{window:,}.",
    ]
    if longest > window:
        count = int((lengths.doc_tokens > window).sum())
        said.append(
            f"{count:,} of {len(lengths.doc_tokens):,} are longer than a window and are cut there: "
            "what follows does not see what came before."
        )
    return said
