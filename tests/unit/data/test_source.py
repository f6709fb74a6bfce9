"""Every kind of corpus, whole and in order, from one shard or many; every error in full."""

import dataclasses
import gzip
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data import source as module
from equipoise.data.source import open_source
from equipoise.spec.run.spec import DataSpec

TEXTS = ["first", "", "third: äöü 🎈\n", "fourth " * 50, "fifth"]
KEPT = [text for text in TEXTS if text]


def read(source) -> list[str]:
    return [text for shard in source.shards() for text in shard.read()]


def spec_of(kind: str, path: object, field: str = "text") -> DataSpec:
    return DataSpec(source=kind, path=str(path), field=field)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES_MIN", 40)


def write_jsonl(path: Path, texts=TEXTS, field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


def write_datasets(folder: Path, texts=TEXTS, *, stream: bool = True, state: bool = True) -> Path:
    folder.mkdir()
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    files = []
    for shard in range(2):
        half = table.slice(shard * 3, 3 if shard == 0 else None)
        name = f"data-{shard:05d}-of-00002.arrow"
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with pa.OSFile(str(folder / name), "wb") as sink, new(sink, half.schema) as writer:
            writer.write_table(half, max_chunksize=2)
        files.append({"filename": name})
    (folder / "dataset_info.json").write_text("{}")
    if state:
        (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    return folder


# What is read. -----------------------------------------------------------------------------


def test_the_standard_library():
    source = open_source(DataSpec(), Path("nowhere"))
    assert source.name == "python-stdlib " + ".".join(map(str, sys.version_info[:3]))
    assert len(source.names) > 500
    assert list(source.names) == sorted(source.names)
    assert "json/decoder.py" in source.names
    assert not any("site-packages" in name or "__pycache__" in name for name in source.names)
    shards = source.shards()
    assert len(shards) > 8
    assert [part.file for shard in shards for part in shard.parts] == list(range(len(source.names)))
    assert sum(shard.size_bytes for shard in shards) == source.size_bytes


def test_undecodable_files_of_the_standard_library_are_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"# \xff")
    (tmp_path / "b.py").write_text("b = 1\n")
    (tmp_path / "c.py").write_text("")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    source = open_source(DataSpec(), tmp_path)
    documents = [document for shard in source.shards() for document in shard.documents()]
    assert documents == [(0, 0, None), (1, 0, "b = 1\n"), (2, 0, "")]
    assert read(source) == ["b = 1\n"]
    assert source.documents == 1


def test_a_folder_of_texts(tmp_path):
    for index, text in enumerate(TEXTS):
        file = tmp_path / f"{'ab'[index % 2]}" / f"{index}.md"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode())
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    source = open_source(spec_of("text", "."), tmp_path)
    assert source.names == ("a/0.md", "a/2.md", "a/4.md", "b/1.md", "b/3.md")
    assert read(source) == [TEXTS[0], TEXTS[2], TEXTS[4], TEXTS[3]]
    assert source.documents == 4


def test_one_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"a\r\nb\r")
    source = open_source(spec_of("text", "one.txt"), tmp_path)
    assert (source.name, source.names, read(source)) == ("text:one.txt", ("one.txt",), ["a\r\nb\r"])


def test_jsonl_file_and_folder(tmp_path, small_shards):
    write_jsonl(tmp_path / "b.jsonl")
    write_jsonl(tmp_path / "a.jsonl", ["zeroth"])
    (tmp_path / "notes.txt").write_text("not read")
    assert read(open_source(spec_of("jsonl", tmp_path / "b.jsonl"), tmp_path)) == KEPT
    source = open_source(spec_of("jsonl", tmp_path), tmp_path)
    assert len(source.shards()) > 3
    assert read(source) == ["zeroth", *KEPT]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.none()), min_size=1), st.integers(1, 90))
def test_jsonl_lines_are_in_one_shard_each(tmp_path_factory, texts, shard_bytes):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\n\n".join(lines).encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SHARD_BYTES_MIN", shard_bytes)
        source = open_source(spec_of("jsonl", path), path.parent)
        documents = [document for shard in source.shards() for document in shard.documents()]
    assert [document.text for document in documents] == [text or "" for text in texts]
    data = path.read_bytes()
    for document in documents:
        line = data[document.row :].split(b"\n")[0]
        assert (json.loads(line)["text"] or "") == document.text


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_long_line_is_read_in_pieces(tmp_path, suffix):  # 17 MiB make a long line: 2 s
    long, rest = "é\n" * 2_300_000, "y" * (17 << 20)
    rows = [{"text": "short"}, {"more": "x" * 9, "text": long}, {"text": None, "more": rest}]
    rows += [{"text": rest}, {"text": "last"}]
    data = "\n".join(map(json.dumps, rows)).encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    shards = open_source(spec_of("jsonl", path), tmp_path).shards()
    documents = [(d.row, list(d.blocks)) for shard in shards for d in shard.documents()]
    assert ["".join(blocks) for _, blocks in documents] == [row["text"] or "" for row in rows]
    assert [len(blocks) > 1 for _, blocks in documents] == [False, True, False, True, False]
    assert [json.loads(data[row:].split(b"\n")[0]) for row, _ in documents] == rows


def test_half_surrogates_of_jsonl_become_whole_or_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud83c\udf88b\ud83cc"}')
    assert read(open_source(spec_of("jsonl", "a.jsonl"), tmp_path)) == ["a🎈b\ufffdc"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(tmp_path, small_shards, kind):
    table = pa.table({"id": [1] * 6, "text": pa.array([*TEXTS, None], kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source = open_source(spec_of("parquet", "a.parquet"), tmp_path)
    shards = source.shards()
    assert len(shards) == 3
    assert read(source) == KEPT
    documents = [document for shard in shards for document in shard.documents()]
    assert [document.row for document in documents] == list(range(6))
    assert read(open_source(spec_of("parquet", tmp_path), tmp_path)) == KEPT


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_datasets(tmp_path, monkeypatch, stream, state):
    monkeypatch.setattr(module, "_SHARD_BYTES_MIN", 8)
    folder = write_datasets(tmp_path / "corpus", stream=stream, state=state)
    source = open_source(spec_of("datasets", "corpus"), tmp_path)
    assert source.names == ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    assert read(source) == KEPT
    documents = [document for shard in source.shards() for document in shard.documents()]
    assert [(d.file, d.row) for d in documents] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert folder == source.root


def test_shards_read_the_same_after_pickling(tmp_path, small_shards):
    write_jsonl(tmp_path / "a.jsonl")
    source = open_source(spec_of("jsonl", "a.jsonl"), tmp_path)
    for shard in source.shards():
        assert list(pickle.loads(pickle.dumps(shard)).read()) == list(shard.read())
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_sample_of_many_shards_is_spread_and_short(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES_MIN", 1)
    monkeypatch.setattr(module, "_SAMPLE_SHARDS", 4)
    for index in range(12):
        (tmp_path / f"{index:02d}").write_text(f"text {index}")
    source = open_source(spec_of("text", tmp_path), tmp_path)
    assert list(source.sample()) == ["text 0", "text 3", "text 6", "text 9"]
    monkeypatch.setattr(module, "_SHARD_BYTES_MIN", 1000)
    monkeypatch.setattr(module, "_SAMPLE_SHARD_CHARS", 10)
    assert list(source.sample()) == ["text 0", "text 1"]


def test_the_digest_follows_names_sizes_times_kind_and_column(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    same = open_source(spec_of("jsonl", tmp_path), tmp_path).digest
    assert same == open_source(spec_of("jsonl", tmp_path), tmp_path).digest
    digests = {same, open_source(spec_of("jsonl", tmp_path, "id"), tmp_path).digest}
    digests.add(open_source(spec_of("text", tmp_path), tmp_path).digest)
    os.utime(path, ns=(1, 1))
    digests.add(open_source(spec_of("jsonl", tmp_path), tmp_path).digest)
    path.write_bytes(path.read_bytes() + b"\n")
    os.utime(path, ns=(1, 1))
    digests.add(open_source(spec_of("jsonl", tmp_path), tmp_path).digest)
    path.rename(tmp_path / "b.jsonl")
    digests.add(open_source(spec_of("jsonl", tmp_path), tmp_path).digest)
    assert len(digests) == 6


# What is refused. --------------------------------------------------------------------------


def test_paths_that_are_missing(message, tmp_path):
    assert message(DataError, open_source, spec_of("text", "no/such"), tmp_path) == (
        f"data.path {tmp_path}/no/such does not exist. Set data.path to a file or folder; a "
        f"relative one starts at {tmp_path}."
    )
    assert message(DataError, open_source, spec_of("jsonl", ""), tmp_path) == (
        'data.source = "jsonl" needs data.path, but it is empty. Set data.path to a file or '
        "folder; a relative one starts at the folder of run.toml."
    )
    assert message(DataError, open_source, spec_of("python-stdlib", "x"), tmp_path) == (
        'data.path is "x" but data.source is "python-stdlib", which reads no path. Set '
        'data.source to "text", "jsonl", "parquet" or "datasets", or remove data.path.'
    )


def test_conversations_that_have_no_rows(message, tmp_path):
    spec = dataclasses.replace(spec_of("text", tmp_path), format="messages")
    assert message(DataError, open_source, spec, tmp_path) == (
        'data.format = "messages" needs rows with columns, but data.source is "text". Set '
        'data.source to "jsonl", "parquet" or "datasets".'
    )


def test_corpora_that_are_empty(message, tmp_path):
    assert message(DataError, open_source, spec_of("text", tmp_path), tmp_path) == (
        f"data.path {tmp_path} has no files, or only hidden ones. Set data.path to the "
        'corpus, or data.source to its kind; now it is "text".'
    )
    (tmp_path / "a.txt").write_text("a")
    assert message(DataError, open_source, spec_of("jsonl", tmp_path), tmp_path) == (
        f"data.path {tmp_path} has no *.jsonl files (other files: 1). Set data.path to the "
        'corpus, or data.source to its kind; now it is "jsonl".'
    )


def test_a_text_that_is_not_utf8(message, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"a" * 2000 + b"\xe4")
    source = open_source(spec_of("text", tmp_path), tmp_path)
    assert message(DataError, read, source) == (
        f"{tmp_path}/latin.txt is not UTF-8: byte 0xe4 at offset 2,000. Convert the file to UTF-8 "
        "or move it out of data.path."
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            b'{"text": "a}',
            "a.jsonl:3 is not JSON: Unterminated string starting at (column 15). Correct the "
            "line or remove it.",
        ),
        (
            b"[1]",
            'a.jsonl:3 is a JSON list, not an object. Write each line as {"text": "..."}.',
        ),
        (
            b'{"id": 1, "texts": "a"}',
            'a.jsonl:3 has no field "text" among its 2 (id, texts). Nearest: "texts". Set '
            "data.field to the field that holds the text.",
        ),
        (
            b"{}",
            'a.jsonl:3 has no field "text" among its 0 (). Set data.field to the field that holds '
            "the text.",
        ),
        (
            b'{"text": 7}',
            'a.jsonl:3 has a JSON number in field "text", not text. Set data.field to the field '
            "that holds the text.",
        ),
        (
            b'{"text": "\xe4"}',
            "a.jsonl is not UTF-8: byte 0xe4 at offset 39. Convert the file to UTF-8 or move it "
            "out of data.path.",
        ),
    ],
)
def test_lines_that_are_wrong(message, tmp_path, small_shards, line, text):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    path.write_bytes(path.read_bytes() + b"\n" + b" " * 5 + line)
    source = open_source(spec_of("jsonl", path), tmp_path)
    assert message(DataError, read, source) == f"{tmp_path}/{text}"


def test_columns_that_are_wrong(message, tmp_path):
    pq.write_table(pa.table({"id": [1], "content": ["a"]}), tmp_path / "a.parquet")
    source = open_source(spec_of("parquet", tmp_path, "context"), tmp_path)
    assert message(DataError, source.shards) == (
        f'{tmp_path}/a.parquet has no column "context" among its 2 (id, content). Nearest: '
        '"content". Set data.field to the column that holds the text.'
    )
    source = open_source(spec_of("parquet", tmp_path, "id"), tmp_path)
    assert message(DataError, source.shards) == (
        f'{tmp_path}/a.parquet has int64 in column "id", not text. Set data.field to the column '
        "that holds the text; the columns are id, content."
    )


def test_pyarrow_is_missing(message, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = open_source(spec_of("parquet", tmp_path), tmp_path)
    assert message(DataError, source.shards) == (
        f"Reading {tmp_path}/a.parquet needs pyarrow, which is not installed. Run: pip install "
        "'equipoise[parquet]'"
    )


def test_files_that_are_not_what_they_are_named(message, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"x" * 100)
    source = open_source(spec_of("parquet", tmp_path), tmp_path)
    assert message(DataError, source.shards).startswith(
        f"{tmp_path}/a.parquet is not a parquet file: "
    )
    folder = write_datasets(tmp_path / "corpus")
    (folder / "data-00000-of-00002.arrow").write_bytes(b"x" * 100)
    source = open_source(spec_of("datasets", folder), tmp_path)
    assert message(DataError, source.shards).startswith(
        f"{folder}/data-00000-of-00002.arrow is not an arrow IPC stream or file: "
    )


def test_rows_that_are_damaged(message, tmp_path):
    folder = write_datasets(tmp_path / "corpus")
    file = folder / "data-00000-of-00002.arrow"
    whole = file.read_bytes()
    for size, what in ((0, "not an arrow IPC stream or file"), (len(whole) - 60, "a damaged")):
        file.write_bytes(whole[:size])
        source = open_source(spec_of("datasets", folder), tmp_path)
        said = message(DataError, source.shards)
        assert said.startswith(f"{file} is {what}"), said
        assert said.endswith(". Save the dataset again with save_to_disk.") and "\n" not in said
    # Arrow's writers let any bytes pass for text.
    ends = pa.py_buffer(np.array([0, 3], dtype=np.int32))
    text = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    (shard,) = open_source(spec_of("parquet", tmp_path / "a.parquet"), tmp_path).shards()
    assert message(DataError, lambda: list(shard.read())) == (
        f"{tmp_path}/a.parquet has text that is not UTF-8: byte 0xff. Write the file again or move "
        "it out of data.path."
    )


def test_folders_that_save_to_disk_did_not_write(message, tmp_path):
    assert message(DataError, open_source, spec_of("datasets", "."), tmp_path) == (
        f"data.path {tmp_path} is not a save_to_disk folder: it has neither state.json nor "
        "dataset_info.json. Set data.path to the folder that save_to_disk wrote."
    )
    folder = write_datasets(tmp_path / "corpus")
    (folder / "data-00001-of-00002.arrow").unlink()
    assert message(DataError, open_source, spec_of("datasets", folder), tmp_path) == (
        f"data.path {folder} has 1 of the 2 arrow files that it should have; the first missing "
        "one is data-00001-of-00002.arrow. Save the dataset again with save_to_disk."
    )
    state = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    assert message(DataError, open_source, spec_of("datasets", folder), tmp_path) == (
        f"data.path {folder} keeps its row order in 1 files of indices, which equipoise does not "
        "read. Call flatten_indices() on the dataset and save it again."
    )
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert message(DataError, open_source, spec_of("datasets", "."), tmp_path) == (
        f"data.path {tmp_path} holds 2 datasets (train, test); a corpus is a single one. Set "
        f"data.path to {tmp_path}/train, for example."
    )
    (tmp_path / "dataset_dict.json").write_text('{"splits": []}')
    assert message(DataError, open_source, spec_of("datasets", "."), tmp_path) == (
        f"data.path {tmp_path} holds no dataset: its dataset_dict.json names none. Save the "
        "datasets again with save_to_disk."
    )
