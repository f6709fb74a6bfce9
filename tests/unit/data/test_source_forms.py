"""Forms of a corpus: compressed, nested, with a mark of byte order; and paths that are none."""

import gzip
import json
import lzma
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from equipoise.base.errors import DataError
from equipoise.data import source as source_module
from equipoise.data.cache import shard as shard_module
from equipoise.data.cache.store import prepare
from equipoise.data.progress import SilentProgress
from equipoise.data.source import open_source
from equipoise.spec.run.spec import DataSpec

TEXTS = ["first one", "second: äöü 🎈", "third " * 50]
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def spec_of(kind: str, path: object, field: str = "text") -> DataSpec:
    return DataSpec(source=kind, path=str(path), field=field)


def read(kind: str, path: Path, field: str = "text") -> list[str]:
    source = open_source(spec_of(kind, path, field), path.parent)
    return [text for shard in source.shards() for text in shard.read()]


def refusal(kind: str, path: object, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        read(kind, Path(str(path)), field)
    return str(caught.value)


def lines(field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in TEXTS).encode()


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_SHARD_BYTES_MIN", 40)


@pytest.mark.parametrize("suffix", PACK)
def test_every_kind_is_read_compressed(tmp_path: Path, small_shards: None, suffix: str) -> None:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number}.txt{suffix}").write_bytes(PACK[suffix](text.encode()))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACK[suffix](lines()))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "plain", row_group_size=1)
    packed = PACK[suffix]((tmp_path / "plain").read_bytes())
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / f"a.parquet{suffix}").write_bytes(packed)
    assert read("text", tmp_path / "text") == TEXTS
    assert read("jsonl", tmp_path / f"a.jsonl{suffix}") == TEXTS
    assert read("jsonl", tmp_path) == TEXTS  # found in a folder
    assert read("parquet", tmp_path / "p") == TEXTS


def test_a_compressed_copy_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines())
    before = open_source(spec_of("jsonl", tmp_path), tmp_path).digest
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    (tmp_path / "b.jsonl.gz").mkdir()
    assert read("jsonl", tmp_path) == TEXTS
    assert open_source(spec_of("jsonl", tmp_path), tmp_path).digest == before


def test_places_in_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(PACK[".zst"](b'{"text": "a"}\n{"txt": "b"}\n'))
    assert refusal("jsonl", path) == (
        f'{path}:2 has no field "text" among its 1 (txt). Nearest: "txt". Set data.field to the '
        "field that holds the text."
    )


def test_nested_fields(tmp_path: Path) -> None:
    rows = [{"a": {"b.c": [None, text]}} for text in TEXTS]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read("jsonl", path, "a.b.c.1") == TEXTS
    assert read("jsonl", path, "a.b.c.0") == []
    path = tmp_path / "a.parquet"
    structs = [{"in": {"text": text, "n": 1}} for text in TEXTS]
    pq.write_table(pa.table({"out": [*structs, None, {"in": None}], "x.y": ["z"] * 5}), path)
    assert read("parquet", path, "out.in.text") == TEXTS
    assert read("parquet", path, "x.y") == ["z"] * 5
    assert refusal("parquet", path, "out.in.txt") == (
        f'{path} has no column "out.in.txt" among its 2 (out, x.y, and in structs out.in, '
        'out.in.text, out.in.n). Nearest: "out.in.text". Set data.field to the column that holds '
        "the text."
    )
    assert refusal("parquet", path, "out.in.n") == (
        f'{path} has int64 in column "out.in.n", not text. Set data.field to the column that holds '
        "the text; the columns are out, x.y."
    )


def test_a_mark_of_byte_order_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf\n" + lines())
    assert read("text", tmp_path / "a.txt") == ["one\ufeff"]
    assert read("jsonl", tmp_path / "b.jsonl") == ["two"]
    assert read("jsonl", tmp_path / "c.jsonl") == TEXTS


def test_a_long_file_has_the_tokens_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "words of äöü and 🎈,\nline for line; " * 200
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text)
    (tmp_path / "texts" / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    spec = DataSpec(source="text", path="texts", vocab=300, cache="one")
    whole = prepare(spec, tmp_path, progress=SilentProgress(), workers=1)
    file = whole.tokenizer_file
    monkeypatch.setattr(shard_module, "_BLOCK_BYTES", 97)
    monkeypatch.setattr("equipoise.data.text.cut.cut.__defaults__", (50,))
    spec = DataSpec(source="text", path="texts", tokenizer=str(file), cache="two")
    blocks = prepare(spec, tmp_path, progress=SilentProgress(), workers=1)
    assert blocks.tokens[:].tolist() == whole.tokens[:].tolist()
    assert blocks.doc_tokens.tolist() == whole.doc_tokens.tolist()
    assert blocks.digest == whole.digest
    assert not list((tmp_path / "two").glob("*.parts*"))


def test_a_wrong_byte_far_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "_BLOCK_BYTES", 7)
    path = tmp_path / "a.txt"
    path.write_bytes("äöü".encode() * 10 + b"\xff")
    with pytest.raises(DataError) as caught:
        document = next(open_source(spec_of("text", path), tmp_path).shards()[0].documents())
        list(document.blocks)
    assert str(caught.value) == (
        f"{path} is not UTF-8: byte 0xff at offset 60. Convert the file to UTF-8 or move it out "
        "of data.path."
    )


# What is neither a file nor a folder. ------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "datasets"])
def test_paths_that_are_no_corpus(tmp_path: Path, kind: str) -> None:
    fix = f"Set data.path to a file or folder; a relative one starts at {tmp_path}."
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    for name, words in {
        "pipe": "is a pipe, not a file or folder",
        "socket": "is a socket, not a file or folder",
        "loop": "cannot be read (too many levels of symbolic links)",
        "nowhere": "does not exist",
    }.items():
        assert refusal(kind, tmp_path / name) == f"data.path {tmp_path / name} {words}. {fix}"
    device = refusal(kind, "/dev/full")
    assert device.startswith("data.path /dev/full is a device, not a file or folder.")


def test_links_and_pipes_in_a_folder_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a.txt").write_text("text")
    assert read("text", tmp_path) == ["text"]


def test_files_without_a_size_are_not_opened() -> None:
    source = open_source(spec_of("text", "/proc/self/net"), Path("/"))
    assert [text for shard in source.shards() for text in shard.read()] == []
