"""A small chat model, a file of conversations, and a run.toml that learns the answers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.write import write_hf
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.keys import toml
from support.chat.template import tokenizer_files

Talk = list[dict[str, str]]


def write_model(folder: Path, model: ModelSpec) -> None:
    """A model's folder: weights of seed 0, and the tokenizer of ``support.chat.template``."""
    decoder = Decoder(model)
    initialize(decoder, 0)
    files = tokenizer_files(folder.with_name("tokenizer"))
    write_hf(folder, model, decoder.state_dict(), files=files)


def write_talks(folder: Path, talks: Iterable[Talk]) -> None:
    """``folder/chat.jsonl``, a conversation in each line."""
    lines = (json.dumps({"messages": talk}) + "\n" for talk in talks)
    (folder / "chat.jsonl").write_text("".join(lines))


def write_run(
    folder: Path, *, window: int, layout: str, data: str = "", **train: float | str
) -> Path:
    """``folder/run.toml``: steps of two windows; ``layout`` and ``data`` are lines of TOML."""
    data = data or 'path = "chat.jsonl"\nformat = "messages"'
    keys: Mapping[str, float | str] = {"warmup_steps": 0, "lr": 1e-3, **train}
    lines = "\n".join(f"{name} = {toml(value)}" for name, value in keys.items())
    file = folder / "run.toml"
    file.write_text(f"""
[model]
init = "hf:model"
[pack]
context_tokens = {window}
step_tokens = {2 * window}
[train]
{lines}
[layout]
{layout}
[data]
source = "jsonl"
cache = "cache"
{data}
""")
    return file
