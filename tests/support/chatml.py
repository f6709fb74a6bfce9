"""A small chat model with ChatML's template, conversations, and a run.toml that learns the answers.

The tokenizer is byte-level, with ChatML's special tokens.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.write import write_hf
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.keys import toml

Talk = list[dict[str, str]]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(["assistant user system"], trainer)
    core.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The same, as ``write_hf`` takes what stands beside weights."""
    return {path.name: path.read_bytes() for path in write_tokenizer(folder).iterdir()}


def write_model(folder: Path, model: ModelSpec) -> None:
    """A model's folder: weights drawn from seed 0, and the tokenizer of ``support.chatml``."""
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
