"""Compressed files: the same bytes, and one sentence for every file that is not whole."""

import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.compressed import SUFFIXES, compression_of, open_plain

DATA = b"".join(b"line %d of a corpus\n" % number for number in range(4000))
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def read(path: Path) -> bytes:
    with open_plain(path) as file:
        return file.read()


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bytes_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](DATA))
    assert (compression_of(path), read(path)) == (suffix, DATA)
    with open_plain(path) as file:
        assert [next(file) for _ in range(2)] == DATA.splitlines(keepends=True)[:2]
    path.write_bytes(PACK[suffix](DATA[:70]) + PACK[suffix](DATA[70:]))
    assert read(path) == DATA  # as `cat a.gz b.gz` joins them


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_bytes_say_it_whatever_the_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(PACK[suffix](DATA))
    assert read(path) == DATA
    path.write_bytes(DATA)
    assert (compression_of(path), read(path)) == ("", DATA)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(share=st.floats(0.01, 0.99))
def test_a_torn_file_is_refused(tmp_path_factory, suffix: str, share: float) -> None:
    whole = PACK[suffix](DATA)
    path = tmp_path_factory.mktemp("torn") / f"a{suffix}"
    path.write_bytes(whole[: max(6, int(len(whole) * share))])
    text = refusal(path)
    assert text.startswith(f"{path} is damaged ")
    assert text.endswith(". Copy or compress it again.")


def test_the_whole_text_of_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(PACK[".gz"](DATA)[:-9])
    assert refusal(path) == (
        f"{path} is damaged gzip data: it ends in the middle. Copy or compress it again."
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_byte_is_noticed(tmp_path: Path, suffix: str) -> None:
    whole = bytearray(PACK[suffix](DATA))
    whole[len(whole) // 2] ^= 0x40
    path = tmp_path / f"a{suffix}"
    path.write_bytes(whole)
    assert refusal(path).startswith(f"{path} is damaged ")


def test_names_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(b"plain")
    assert refusal(path) == (
        f"{path} is not gzip data: it begins with 70 6c 61 69 instead of 1f 8b. Compress it "
        "again, or rename it if it is plain."
    )
    path = tmp_path / "a.zst"
    path.write_bytes(b"")
    assert refusal(path) == (
        f"{path} is not Zstandard data: it is empty. Compress it again, "
        "or rename it if it is plain."
    )


def test_zstandard_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "a.zst"
    path.write_bytes(PACK[".zst"](DATA))
    assert refusal(path) == (
        f"Reading {path} needs zstandard, which is not installed. Run: "
        "pip install 'equipoise[zstd]'"
    )
