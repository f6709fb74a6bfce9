"""Several sources as one store: documents, tokens and names, and what its digest names."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore, open_store, prepare
from equipoise.data.progress import SilentProgress
from equipoise.data.reading import describe_reading, read_sources
from equipoise.spec.run.mix import MixRow
from equipoise.spec.run.spec import DataSpec, PackSpec, RunSpec, TrainSpec

ROWS = (
    MixRow(path="lines.jsonl", source="jsonl", field="body", weight=3.0),
    MixRow(path="texts"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * 40)
    rows = [json.dumps({"body": f"line {number} " * 9}) for number in range(5)]
    (tmp_path / "lines.jsonl").write_text("\n".join([*rows, '{"body": ""}']))
    return tmp_path


def prepared(folder: Path, rows: tuple[MixRow, ...] = ROWS, **keys: object) -> TokenStore:
    spec = DataSpec(source="text", mix=rows, cache="cache", vocab=300, **keys)  # type: ignore[arg-type]
    return prepare(spec, folder, progress=SilentProgress(), workers=1)


def test_documents_are_those_of_the_sources(folder: Path) -> None:
    store = prepared(folder)
    lines, texts = store.sources
    assert (store.documents, lines.documents, texts.documents) == (8, 5, 3)
    assert store.tokens[:].tolist() == [*lines.tokens[:], *texts.tokens[:]]
    for first, stop in ((0, 0), (3, 9), (len(lines.tokens) - 2, len(lines.tokens) + 3)):
        assert store.tokens[first:stop].tolist() == store.tokens[:].tolist()[first:stop]
    assert store.read(5, 0, 4).tolist() == texts.read(0, 0, 4).tolist()
    assert [store.name(0), store.name(5)] == ["lines.jsonl at byte 0", "0.txt"]
    assert [store.names[file] for file in store.origins[[0, 5], 0]] == ["lines.jsonl", "0.txt"]
    assert store.left_out == "1 empty document was left out"
    assert store.mixture is not None
    assert store.mixture.names == ("jsonl:lines.jsonl", "text:texts")
    again = open_store(store.folder)
    assert (again.digest, again.mixture) == (store.digest, store.mixture)
    again.verify()


def test_weights_and_order_are_part_of_the_digest_and_cost_no_tokens(folder: Path) -> None:
    stores = [
        prepared(folder),
        prepared(folder, (ROWS[0], MixRow(path="texts", weight=2.0))),
        prepared(folder, ROWS[::-1], tokenizer=str(prepared(folder).tokenizer_file)),
    ]
    assert len({store.digest for store in stores}) == 3
    assert len(list((folder / "cache").glob("tokens-*"))) == 2
    doubled = (MixRow("lines.jsonl", 6.0, "jsonl", "body"), MixRow("texts", 2.0))
    assert prepared(folder, doubled).digest == stores[0].digest


def test_a_source_alone_keeps_its_cache(folder: Path) -> None:
    file = prepared(folder).tokenizer_file
    spec = DataSpec(source="text", path="texts", tokenizer=str(file), cache="cache")
    alone = prepare(spec, folder, progress=SilentProgress())
    assert alone.folder == prepared(folder).sources[1].folder
    beside = DataSpec(source="text", path="texts", mix=ROWS, tokenizer=str(file), cache="cache")
    assert prepare(beside, folder, progress=SilentProgress()).digest == alone.digest


def test_a_changed_list_is_noticed(folder: Path) -> None:
    file = prepared(folder).folder / "mix.json"
    file.write_text(file.read_text().replace("3.0", "4.0"))
    with pytest.raises(DataError) as caught:
        open_store(file.parent)
    assert str(caught.value) == (
        f"{file} is damaged: its bytes have changed since it was written. Delete the folder "
        f"{file.parent}; the next run makes it again."
    )


def test_what_a_run_reads_of_each_source(folder: Path) -> None:
    store = prepared(folder)
    spec = RunSpec(pack=PackSpec(context_tokens=64, step_tokens=256), train=TrainSpec(steps=2))
    sources = read_sources(spec, store.source_name, store.doc_tokens, store.mixture)
    lines, texts = (int(np.sum(each.doc_tokens)) for each in store.sources)
    assert [each.epochs for each in sources] == [384 / lines, 128 / texts]
    said = describe_reading(spec, sources)
    assert said[0] == (
        f"jsonl:lines.jsonl: 5 documents, {lines:,} tokens; 75.0% of every step; 2 steps of 256 "
        f"read {384 / lines:.2f} epochs."
    )
    assert len(said) == 2 + (sources[0].epochs > 2)
