"""Which documents an evaluation reads, how they are cut, and which of them are also trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.held_out import (
    bucket_of,
    cut_documents,
    draw_documents,
    find_trained,
    held_out_data,
    prepare_held_out,
)
from equipoise.data.progress import SilentProgress
from equipoise.data.text.tokenizer import load_tokenizer, read_token_bytes
from equipoise.spec.run.spec import DataSpec, EvalSpec, RunSpec

LENGTHS = st.lists(st.integers(2, 90), min_size=1, max_size=30).map(np.array)


@given(LENGTHS, st.integers(2, 40))
def test_each_token_is_in_one_piece_and_none_is_over_the_window(lengths, window: int) -> None:
    pieces = cut_documents(np.arange(len(lengths)), lengths, window)
    assert (pieces[:, 2] - pieces[:, 1]).max() <= window
    for document, tokens in enumerate(lengths.tolist()):
        rows = pieces[pieces[:, 0] == document]
        assert np.concatenate([np.arange(*row) for row in rows[:, 1:]]).tolist() == [*range(tokens)]


@given(LENGTHS, st.integers(2, 500), st.integers(2, 500))
def test_a_larger_cap_holds_the_documents_of_a_smaller(lengths, one: int, other: int) -> None:
    few, many = (set(draw_documents(lengths, cap).tolist()) for cap in sorted((one, other)))
    assert few <= many
    assert few
    for drawn, cap in ((few, min(one, other)), (many, max(one, other))):
        assert len(drawn) == 1 or lengths[sorted(drawn)].sum() <= cap
    assert draw_documents(lengths, "all").tolist() == [*range(len(lengths))]


@given(st.integers(1, 1 << 50))
def test_a_bucket_is_the_power_of_two_that_a_length_reaches(tokens: int) -> None:
    assert bucket_of(np.array([tokens])).tolist() == [tokens.bit_length() - 1]


def _store(folder: Path, cache: Path, texts: dict[str, str], **data: str) -> TokenStore:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    spec = DataSpec(source="text", path=str(folder), cache=str(cache), vocab=300, **data)
    return prepare(spec, folder, progress=SilentProgress(), workers=1)


def test_documents_that_are_also_trained_are_found_wherever_they_stand(tmp_path, cache) -> None:
    long = "the quick brown fox " * 300
    trained = _store(tmp_path / "a", cache, {"1": long, "2": "jumps", "3": long + "over"})
    tokenizer = str(trained.tokenizer_file)
    texts = {"a": "new " * 9, "b": long + "over", "c": long[:-1] + "!", "d": "jumps", "e": "jumps"}
    held = _store(tmp_path / "b", cache, texts, tokenizer=tokenizer)
    every = np.arange(held.documents)
    assert find_trained(held, every, trained).tolist() == [1, 3, 4]
    assert find_trained(held, np.array([0, 3]), trained).tolist() == [3]
    assert find_trained(held, np.array([0, 2]), trained).tolist() == []


def test_what_the_held_out_documents_share_with_the_corpus() -> None:
    data = DataSpec(source="jsonl", path="train.jsonl", field="body", vocab=512)
    tokenizer = Path("/somewhere/tokenizer.json")

    def made(**asked: str) -> tuple[str, str]:
        made = held_out_data(RunSpec(data=data, eval=EvalSpec(**asked)), tokenizer)
        assert (made.tokenizer, made.vocab) == (str(tokenizer), 512)
        return made.source, made.field

    assert made(path="held") == ("jsonl", "body")
    assert made(path="held.parquet", field="text") == ("parquet", "text")
    assert made(path="held.parquet", source="text") == ("text", "body")
    named = RunSpec(data=DataSpec(tokenizer="folder"), eval=EvalSpec(path="held"))
    assert held_out_data(named, tokenizer).tokenizer == "folder"
    shipped = RunSpec(eval=EvalSpec(path="held"))
    assert held_out_data(shipped, tokenizer).source == "text"


@pytest.mark.parametrize("content", [None, ""])
def test_a_fault_of_the_held_out_documents_names_their_keys(tmp_path, cache, content) -> None:
    trained = _store(tmp_path / "a", cache, {"1": "some text"})
    if content is not None:
        (tmp_path / "held").write_text(content)
    spec = RunSpec(
        data=DataSpec(source="text", path="a", cache=str(cache)), eval=EvalSpec(path="held")
    )
    with pytest.raises(DataError) as caught:
        prepare_held_out(spec, tmp_path, trained, progress=SilentProgress())
    expected = {
        None: f"eval.path {tmp_path}/held does not exist. Set eval.path to a file or folder; a "
        f"relative one starts at {tmp_path}.",
        "": f"eval.path {tmp_path}/held holds no text: every document is empty (0 bytes). "
        "Set eval.path to a corpus with text in it.",
    }
    assert str(caught.value) == expected[content]


def test_bytes_of_tokens_are_those_of_the_text(tmp_path, cache) -> None:
    text = "naïve 日本語 text, 12 ≤ 34\n" * 9
    store = _store(tmp_path / "a", cache, {"1": text})
    per_token = read_token_bytes(store.tokenizer_file)
    assert per_token is not None
    assert int(per_token[store.read(0, 0, int(store.doc_tokens[0]))].sum()) == len(text.encode())
    assert per_token[load_tokenizer(store.tokenizer_file).end] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"normalizer": null', '"normalizer": {"type": "Lowercase"}'),
        ('"add_prefix_space": false', '"add_prefix_space": true'),
        ('"pre_tokenizer": {"type": "ByteLevel"', '"pre_tokenizer": {"type": "Whitespace"'),
    ],
)
def test_bytes_are_unknown_where_text_is_changed_first(tmp_path, cache, old, new) -> None:
    store = _store(tmp_path / "a", cache, {"1": "some text"})
    text = json.dumps(json.loads(store.tokenizer_file.read_text()))
    assert old in text
    file = tmp_path / "tokenizer.json"
    file.write_text(text.replace(old, new, 1))
    assert read_token_bytes(file) is None
