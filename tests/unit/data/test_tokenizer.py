"""Byte-level BPE: trained alike everywhere, loses no byte; other people's files load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore
from equipoise.data.text import tokenizer as module
from equipoise.data.text.tokenizer import load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + 1\n" * 20, "äöü ∑ 🎈" * 9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, 290, file)
    return load_tokenizer(file)


@given(st.text(max_size=60))
def test_decoding_is_the_identity(trained, text):
    tokens = trained.encode(text)
    assert tokens.dtype == np.int64
    assert trained.decode(tokens) == text


def test_every_byte_has_a_token(trained):
    vocab = trained.core.get_vocab()
    assert trained.vocab == len(vocab) == 290
    assert trained.end == vocab["<|end|>"] == 0
    text = "".join(map(chr, range(0x250)))
    assert trained.decode(trained.encode(text)) == text
    assert sum(len(token) == 1 for token in vocab) == 256


@given(st.text(alphabet="<|end> ", max_size=40))
def test_no_text_becomes_the_end_token(trained, text):
    assert trained.end not in trained.encode(text + "<|end|>" + text)


def test_a_batch_equals_its_texts_one_by_one(trained):
    for one, many in zip(map(trained.encode, TEXTS), trained.encode_batch(TEXTS), strict=True):
        assert np.array_equal(one, many)


def test_training_does_not_depend_on_threads(tmp_path, store: TokenStore, corpus: Path):
    code = (
        "import sys; from pathlib import Path\n"
        "from equipoise.data.text.tokenizer import train_tokenizer\n"
        "files = sorted(Path(sys.argv[1]).rglob('*.py'))[:60]\n"
        "train_tokenizer((f.read_text() for f in files), 400, Path(sys.argv[2]))\n"
    )
    made = []
    for threads in ("1", "4"):
        file = tmp_path / f"threads-{threads}.json"
        subprocess.run(
            [sys.executable, "-c", code, str(corpus), str(file)],
            check=True,
            env={**os.environ, "RAYON_NUM_THREADS": threads},
        )
        made.append(file.read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("count", [1, 50, 1001, 4000])
def test_the_sample_is_bounded_and_spread_evenly(count):
    texts = [f"{index:5d} " + "x" * (10_000 + 37 * index % 5000) for index in range(count)]
    sample = module._sample(texts)
    total = sum(map(len, sample))
    assert total <= 6_000_000
    if sum(map(len, texts)) <= 6_000_000:
        assert sample == texts
    else:
        assert total > 5_900_000
        taken = np.array([int(text[:5]) for text in sample])
        quarters = np.histogram(taken, bins=4, range=(0, count))[0]
        assert quarters.max() <= quarters.min() * 1.15 + 2


def test_a_long_text_is_cut():
    assert [len(text) for text in module._sample(["a" * 1_000_000, "b"])] == [60_000, 1]


@pytest.mark.parametrize(
    "end", ["<|end|>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>"]
)
def test_foreign_end_tokens_are_found(tmp_path, trained, end):
    file = tmp_path / "tokenizer.json"
    file.write_text(trained.file.read_text().replace("<|end|>", end))
    foreign = load_tokenizer(file)
    assert (foreign.end, foreign.vocab) == (0, 290)
    assert foreign.digest != trained.digest or end == "<|end|>"


def test_foreign_padding_truncation_and_templates_are_left_out(tmp_path, trained):
    core = load_tokenizer(trained.file).core
    core.enable_padding(length=64)
    core.enable_truncation(max_length=2)
    core.post_processor = module.tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    foreign = load_tokenizer(tmp_path / "tokenizer.json")
    assert np.array_equal(foreign.encode(TEXTS[0]), trained.encode(TEXTS[0]))


def test_a_missing_file(message, tmp_path):
    assert message(DataError, load_tokenizer, tmp_path / "no.json") == (
        f'data.tokenizer {tmp_path}/no.json does not exist. Set data.tokenizer to "train" or to '
        "the path of a tokenizer.json."
    )


def test_a_file_that_is_none(message, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    assert message(DataError, load_tokenizer, file) == (
        f"data.tokenizer {file} is not a tokenizer.json: it is not JSON (line 1, "
        'column 1). Set data.tokenizer to a file written by the tokenizers library, or to "train".'
    )


def test_a_file_without_an_end(message, tmp_path, trained):
    file = tmp_path / "tokenizer.json"
    content = json.loads(trained.file.read_text().replace("<|end|>", "<stop>"))
    file.write_text(json.dumps(content))
    assert message(DataError, load_tokenizer, file) == (
        f"data.tokenizer {file} has none of the 6 known end tokens (<|end|>, <|endoftext|>, </s>, "
        "<|end_of_text|>, <|im_end|>, <eos>) among its 290 tokens. Add one of them to the file's "
        'added_tokens, or set data.tokenizer to "train".'
    )


def test_too_small_a_vocabulary(message, tmp_path):
    assert message(DataError, train_tokenizer, TEXTS, 256, tmp_path / "t.json") == (
        "data.vocab = 256 is too small: 256 bytes and the end token are 257 tokens before the "
        "first merge. Set data.vocab to at least 257."
    )


def test_nothing_to_train_on(message, tmp_path):
    assert message(DataError, train_tokenizer, [], 290, tmp_path / "t.json") == (
        "There is no text to train a tokenizer on: all documents are empty. Set data.path to a "
        "corpus with text in it."
    )
    assert list(tmp_path.iterdir()) == []
