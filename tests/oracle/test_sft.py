"""Fine-tuning on answers, against a plain loop of transformers, and against TRL's tokens."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from equipoise.data.chat.encode import Encoder, Recipe
from equipoise.data.stream import DocumentStream
from equipoise.spec.model.presets import ModelSpec
from equipoise.train import run
from support.chat.corpus import write_model, write_run, write_talks
from support.chat.template import CHATML

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=320, head_width=16)
WINDOW, STEPS, RATE = 1280, 4, 1e-3
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", MODEL)
    return tmp_path


def talks() -> list[list[dict[str, str]]]:
    """Conversations of one to three turns, from two words to a window."""
    draw = random.Random(0)

    def say(words: int) -> str:
        return " ".join(draw.choices(["rank", "waits", "for", "ä", "🙂"], k=words))

    made = []
    for number in range(40):
        talk = [{"role": "system", "content": say(3)}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            talk += [
                {"role": "user", "content": say(draw.randint(1, 12))},
                {"role": "assistant", "content": say(80 if number % 13 == 0 else 5)},
            ]
        made.append(talk)
    return made


def plain_losses(folder: Path, rows: list[list[dict[str, str]]]) -> list[float]:
    """A loop over the conversations of each step, one by one; the loss on answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    encoded = [
        tokenizer.apply_chat_template(
            talk, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        for talk in rows
    ]
    lengths = [len(each["input_ids"]) for each in encoded]
    assert max(lengths) <= WINDOW
    stream = DocumentStream(lengths, seed=0, context_tokens=WINDOW, whole=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        batch = stream.step(step * 2 * WINDOW, 2 * WINDOW)[:, 0].tolist()
        labels = []
        for document in batch:
            tokens = torch.tensor(encoded[document]["input_ids"])
            mask = torch.tensor(encoded[document]["assistant_masks"]).bool()
            labels.append((tokens, tokens[1:].masked_fill(~mask[1:], -100)))
        count = sum(int((each != -100).sum()) for _, each in labels)
        total = 0.0
        for tokens, each in labels:
            loss = cross_entropy(model(tokens[None]).logits[0, :-1], each, reduction="sum")
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses


def test_losses_on_answers_are_those_of_transformers(folder: Path) -> None:
    rows = talks()
    write_talks(folder, rows)
    train = {"steps": STEPS, "lr": RATE, "schedule": "constant", "weight_decay": 0.0, "eps": 1e-6}
    file = write_run(folder, window=WINDOW, layout="dp = 2", **train)
    record = run(file, out=folder / "run")
    expected = plain_losses(folder, rows)
    print(f"\n{record.loss} beside {expected}")
    assert np.allclose(record.loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompts_and_completions_have_the_tokens_of_trl(folder: Path, adds_bos: bool) -> None:
    """As SFTTrainer: one text with its end token; what both have in common is the prompt."""
    model = folder / "model"
    if adds_bos:
        core = json.loads((model / "tokenizer.json").read_text())
        begin = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        core["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": begin},
        }
        (model / "tokenizer.json").write_text(json.dumps(core))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(model)
    encoder = Encoder(Recipe(model, "prompt-completion", "answers"))
    pairs = [
        ("2 + 2 =", " 4"),
        ("", "user"),
        ("ass", "istant"),
        ("🙂", "🙃 ä"),
        ("a\n", "b<|im_end|>"),
    ]
    for prompt, completion in pairs:
        made = encoder.encode_row({"prompt": prompt, "completion": completion})
        end = "" if completion.endswith("<|im_end|>") else "<|im_end|>"
        whole, before = theirs(prompt + completion + end).input_ids, theirs(prompt).input_ids
        common = 0
        while common < len(before) and before[common] == whole[common]:
            common += 1
        assert made.tokens.tolist() == whole
        assert made.is_learned is not None
        assert made.is_learned.tolist() == [at >= common for at in range(len(whole))]
        assert (made.tokens[0] == 0) == adds_bos
