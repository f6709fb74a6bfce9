"""`equipoise generate` against transformers: the same folder, the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from equipoise.serve.generate import Generator
from equipoise.serve.source import open_model
from support.hf_families import FAMILIES, save_family

TEXTS = ["def f(x):", "naïve 你好", " ", "some words " * 20]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("hf") / "llama")


def theirs(oracle: Any, ids: list[int], tokens: int) -> list[int]:
    """Their greedy continuation, by cached decoding."""
    out = oracle.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        temperature=None,
        max_new_tokens=tokens,
        max_length=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path / family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = Generator(open_model(folder))
    ends = 0
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert generator.encode(text) == ids
        answer = generator.generate(text, tokens=40)
        expected = theirs(oracle, ids, 40)
        assert answer.prompt_ids == tuple(ids)
        is_end = expected[-1] in (0, 1)
        ends += is_end
        assert list(answer.ids) == (expected[:-1] if is_end else expected)
        assert answer.stopped == ("end" if is_end else "length")
        whole = tokenizer.decode([*ids, *answer.ids], skip_special_tokens=True)
        assert whole == tokenizer.decode(ids, skip_special_tokens=True) + answer.text
    print(f"{family}: {ends} of {len(TEXTS)} texts ended")
