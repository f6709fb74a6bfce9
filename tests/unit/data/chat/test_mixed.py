"""Conversations, prompts and plain text in one mixture: each row reads as it would alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.chat.encode import Encoder, Recipe
from equipoise.data.mixture import open_stream
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.load import read_run
from equipoise.spec.run.mix import MixRow
from equipoise.spec.run.spec import DataSpec

ROWS = (
    MixRow("chat.jsonl", 3.0, format="messages"),
    MixRow("turns.jsonl", 1.0, field="said", format="messages", loss="last-answer"),
    MixRow("pairs.jsonl", 1.0, format="prompt-completion", loss="all"),
    MixRow("books", 2.0, source="text"),
)


def talk(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a rank <|im_end|> waits for no rank. " * 9)
    rows = {
        "chat.jsonl": [{"messages": talk("Hi", "a" * n, "b", "c" * n)} for n in (1, 9, 40)],
        "turns.jsonl": [{"said": talk("1", "2", "3", "4")}],
        "pairs.jsonl": [{"prompt": "2 + 2 = ", "completion": "4"}],
    }
    for name, each in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    return tmp_path


def spec_of(tokenizer: Path, rows: tuple[MixRow, ...] = ROWS) -> DataSpec:
    return DataSpec(source="jsonl", mix=rows, tokenizer=str(tokenizer), cache="cache")


def learned_texts(store: TokenStore, tokenizer: Path, document: int) -> tuple[str, str]:
    """A document's text, and that of its learned tokens."""
    begin, stop = store.offsets[document : document + 2].tolist()
    assert store.learned is not None
    tokens, is_learned = store.read(document, 0, stop - begin), store.learned.mask(begin, stop)
    decode = Encoder(Recipe(tokenizer)).tokenizer.decode
    return decode(tokens), decode(tokens[is_learned])


def test_each_row_is_read_and_learned_as_its_format_says(folder: Path, tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    store = prepare(spec, folder, progress=SilentProgress(), workers=1)
    learned = [learned_texts(store, tokenizer, document)[1] for document in range(4)]
    assert learned[:3] == [f"{'a' * n}<|im_end|>\n{'c' * n}<|im_end|>\n" for n in (1, 9, 40)]
    assert learned[3] == "4<|im_end|>\n"
    for document, text in ((4, "2 + 2 = 4<|im_end|>"), (5, (folder / "books/a.txt").read_text())):
        whole, only = learned_texts(store, tokenizer, document)
        assert whole == only and whole.removesuffix("<|im_end|>") == text.removesuffix("<|im_end|>")
    assert (spec.whole, spec.masks) == ((True, True, True, False), True)
    for at, each in enumerate(spec.members):
        alone = prepare(each, folder, progress=SilentProgress(), workers=1)
        assert store.sources[at].folder == alone.folder


def test_conversations_stay_whole_beside_text_that_is_cut(folder: Path, tokenizer: Path) -> None:
    spec = spec_of(tokenizer)
    store = prepare(spec, folder, progress=SilentProgress(), workers=1)
    stream = open_stream(
        store.doc_tokens, seed=0, context_tokens=1024, mixture=store.mixture, whole=spec.whole
    )
    pieces = np.concatenate([stream.step(step * 100, 100) for step in range(40)])
    is_text = pieces[:, 0] == 5
    assert (pieces[~is_text, 1] == 0).all()
    assert (pieces[~is_text, 2] == store.doc_tokens[pieces[~is_text, 0]]).all()
    lengths = pieces[is_text, 2] - pieces[is_text, 1]
    assert lengths.sum() == pytest.approx(4000 * 2 / 7, abs=7)  # the share of the text, exactly


def test_a_mixture_of_texts_alone_has_no_masks() -> None:
    spec = DataSpec(source="text", mix=(MixRow("a"), MixRow("b", loss="answers")))
    assert (spec.whole, spec.masks) == ((False, False), False)
    assert not DataSpec(mix=ROWS[2:]).masks


def refusal(folder: Path, rows: str, keys: str = 'source = "jsonl"') -> str:
    (folder / "run.toml").write_text(f"[data]\n{keys}\nmix = [{rows}]\n")
    with pytest.raises(SpecError) as caught:
        read_run(folder / "run.toml")
    return str(caught.value).removeprefix(f"{folder}/")


def test_rows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, '{path = "a", format = "chat"}') == (
        'run.toml:3  data.mix: source 1: format = "chat" is not one of "text", "messages", '
        '"prompt-completion", "parts". Nearest: "parts".'
    )
    assert refusal(tmp_path, '{path = "a", loss = "answer"}') == (
        'run.toml:3  data.mix: source 1: loss = "answer" is not one of "answers", "last-answer", '
        '"all". Nearest: "answers".'
    )
    assert refusal(tmp_path, '{path = "a", format = 1}') == (
        "run.toml:3  data.mix: source 1: format needs text, got 1."
    )
    books = '{path = "a"}, {path = "b", source = "text", format = "prompt-completion"}'
    assert refusal(tmp_path, books) == (
        'run.toml:3  data.mix: source 2: format = "prompt-completion" needs rows with columns, '
        'but its source is "text". Set its source to "jsonl", "parquet" or "datasets", or its '
        'format to "text".'
    )
    assert refusal(tmp_path, '{path = "a", loss = "last-answer"}') == (
        'run.toml:3  data.mix: source 1: loss = "last-answer" needs conversations, but its format '
        'is "text". Set its format to "messages" or "prompt-completion", or remove its loss.'
    )
    assert refusal(tmp_path, '{path = "a", format = "messages"}') == (
        'run.toml:3  data.mix: "messages" needs the chat template of a model\'s folder. Set '
        'data.tokenizer to that folder, or model.init = "hf:DIR".'
    )
