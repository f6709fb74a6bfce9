"""Items of a corpus: tokenized, kept in a cache, read again, and refused when they changed."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.held_out import find_trained
from equipoise.data.modality.files import table_file
from equipoise.data.modality.rules import ItemRules
from equipoise.data.progress import SilentProgress
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.run.spec import DataSpec

RULES = ItemRules(VisionSpec(layers=1, patch=4), AudioSpec(layers=1))

ROWS = [
    [{"text": "Look: "}, {"image": "a.png"}, {"text": " is a picture."}],
    [{"text": "Only words, which say nothing of it."}],
    [{"image": "b.png"}, {"audio": "t.wav"}, {"text": "both, one after the other"}],
]


@pytest.fixture
def corpus(tmp_path: Path, picture: Callable[..., Path], tone: Callable[..., Path]) -> Path:
    picture("a.png", 40, 24)
    picture("b.png", 16, 16)
    tone("t.wav", seconds=0.2)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"parts": row}) + "\n" for row in ROWS))
    return file


def _open(corpus: Path, rules: ItemRules = RULES) -> TokenStore:
    cache = str(corpus.parent / "cache")
    data = DataSpec("jsonl", str(corpus), format="parts", vocab=300, cache=cache)
    return prepare(data, corpus.parent, progress=SilentProgress(), workers=1, rules=rules)


def test_stand_ins_lie_where_items_are_and_are_not_learned(corpus: Path) -> None:
    store = _open(corpus)
    items = store.require_items()
    assert items.first.tolist() == [0, 1, 1, 3]
    assert items.grid.tolist() == [[6, 10], [4, 4], [6, 1]]
    assert items.rows.tolist() == [15, 4, 3]
    assert items.kind.tolist() == [0, 0, 1]
    assert items.begin[1:].tolist() == [0, 4]
    assert store.learned is not None
    for document in range(3):
        tokens = int(store.doc_tokens[document])
        first = int(store.offsets[document])
        stands = np.zeros(tokens, dtype=bool)
        for item in items.within(document, 0, tokens):
            stands[items.begin[item] : items.begin[item] + items.rows[item]] = True
        assert (store.learned.mask(first, first + tokens) == ~stands).all()
        assert (store.read(document, 0, tokens)[stands] == store.end).all()
    assert [items.load(item).shape for item in range(3)] == [(60, 48), (16, 48), (6, 160)]
    assert items.within(0, 0, int(items.begin[0])).tolist() == []
    assert items.within(2, 3, 5).tolist() == [1, 2]


def test_a_document_is_trained_if_its_images_are_too(
    corpus: Path, picture: Callable[..., Path]
) -> None:
    trained, every = _open(corpus), np.arange(3)
    assert find_trained(trained, every, trained).tolist() == [0, 1, 2]
    held = corpus.parent / "held" / "rows.jsonl"
    held.parent.mkdir()
    held.write_text(corpus.read_text().replace("a.png", "c.png"))
    for name in ("b.png", "t.wav"):
        (held.parent / name).write_bytes((corpus.parent / name).read_bytes())
    picture("held/c.png", 39, 24)  # another picture of as many tokens
    other = prepare(
        DataSpec(
            "jsonl",
            str(held),
            format="parts",
            tokenizer=str(trained.tokenizer_file),
            cache=str(corpus.parent / "cache"),
        ),
        corpus.parent,
        progress=SilentProgress(),
        workers=1,
        rules=RULES,
    )
    assert find_trained(other, every, trained).tolist() == [1, 2]


def test_keys_that_change_no_token_keep_the_cache(corpus: Path) -> None:
    folder = _open(corpus).folder
    wider = ItemRules(VisionSpec(layers=3, hidden=128, patch=4), AudioSpec(layers=2, hidden=32))
    assert _open(corpus, wider).folder == folder
    fewer = ItemRules(dataclasses.replace(RULES.vision, most_tokens=9), RULES.audio)
    assert _open(corpus, fewer).folder != folder


def test_a_file_that_changed_is_refused_by_name(corpus: Path, picture: Callable[..., Path]) -> None:
    store = _open(corpus)
    picture("b.png", 16, 20)
    with pytest.raises(DataError) as refused:
        store.require_items().load(1)
    assert str(refused.value) == (
        f"{corpus.parent}/b.png has changed since its corpus was tokenized. Restore it, or delete "
        f"the folder {store.folder}; the next run makes it again."
    )
    (corpus.parent / "b.png").unlink()
    with pytest.raises(DataError) as refused:
        store.require_items().load(1)
    assert str(refused.value) == (
        f"{corpus.parent}/b.png cannot be read (no such file or directory). Correct the path."
    )


def test_what_a_row_names_is_refused_with_its_line(corpus: Path) -> None:
    (corpus.parent / "b.png").write_text("no picture")
    with pytest.raises(DataError) as refused:
        _open(corpus)
    assert str(refused.value) == (
        f"{corpus}:3 names {corpus.parent}/b.png, which is not an image that Pillow reads. Save it "
        "as PNG or JPEG, or remove the row."
    )
    (corpus.parent / "b.png").unlink()
    os.mkfifo(corpus.parent / "b.png")  # nobody writes to it
    with pytest.raises(DataError) as refused:
        _open(corpus)
    assert str(refused.value) == (
        f"{corpus}:3 names {corpus.parent}/b.png, which cannot be read (it is a pipe, a socket or "
        "a device, not a file). Correct the path."
    )


def test_sound_without_an_encoder_for_it_is_refused(corpus: Path) -> None:
    with pytest.raises(DataError) as refused:
        _open(corpus, ItemRules(RULES.vision, AudioSpec()))
    assert str(refused.value) == (
        f"{corpus}:3 has sound ({corpus.parent}/t.wav), and the run has no encoder for it. Set "
        "audio.layers, or remove the row."
    )


def test_a_changed_table_is_damage(corpus: Path) -> None:
    folder = _open(corpus).folder
    table = folder / "items.bin"
    data = bytearray(table.read_bytes())
    data[8] ^= 1
    table.write_bytes(bytes(data))
    with pytest.raises(DataError, match="bytes have changed since it was written"):
        _open(corpus)


def test_a_corpus_of_text_has_no_items(corpus: Path) -> None:
    store = dataclasses.replace(_open(corpus), items=None)
    with pytest.raises(DataError) as refused:
        store.require_items()
    assert str(refused.value) == (
        "jsonl:rows.jsonl has no images or sound, and the run has encoders for them. Set "
        'data.format = "parts", or set vision.layers and audio.layers to 0.'
    )
    assert table_file(Path("a/shard-1")).name == "shard-1.items"
