"""Tokens in chunks: what is read is what was written, or a sentence."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.cache.verified import CHUNK_BYTES, ChunkTable, VerifiedTokens

PER_CHUNK = CHUNK_BYTES // 2


def write(folder: Path, count: int) -> tuple[Path, np.ndarray, bytes]:
    file = folder / "tokens.bin"
    tokens = np.arange(count).astype("<u2")
    file.write_bytes(tokens.tobytes())
    table = ChunkTable()
    for part in np.array_split(tokens, 7):
        table.update(part.tobytes())
    return file, tokens, table.finish()


def opened(file: Path, tokens: np.ndarray, table: bytes) -> VerifiedTokens:
    return VerifiedTokens(file, tokens.dtype, len(tokens), table)


@given(
    count=st.sampled_from([1, PER_CHUNK - 1, PER_CHUNK, PER_CHUNK + 1, 5 * PER_CHUNK + 17]),
    spans=st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)), min_size=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_any_slice_is_that_of_the_array(tmp_path: Path, count: int, spans: list) -> None:
    file, tokens, table = write(tmp_path, count)
    verified = opened(file, tokens, table)
    assert len(verified) == count
    for first, stop in [*spans, (0, count), (count - 1, count)]:
        np.testing.assert_array_equal(verified[first:stop], tokens[first:stop])


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_changed_bit_is_found_by_the_read_that_touches_its_chunk(
    tmp_path: Path, data: st.DataObject
) -> None:
    file, tokens, table = write(tmp_path, 3 * PER_CHUNK + 100)
    verified = opened(file, tokens, table)  # the file changes under it
    at = data.draw(st.integers(0, 2 * len(tokens) - 1))
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(damaged)
    chunk = at // CHUNK_BYTES
    with pytest.raises(DataError) as caught:
        verified[at // 2 : at // 2 + 1]
    begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, 2 * len(tokens))
    assert str(caught.value) == (
        f"{file} is damaged: bytes {begin:,} to {end:,} are not as they were written. Delete the "
        f"folder {tmp_path}; the next run makes it again."
    )
    other = (chunk + 1) % 4
    span = slice(other * PER_CHUNK, (other + 1) * PER_CHUNK)
    np.testing.assert_array_equal(verified[span], tokens[span])


def test_a_changed_table_is_found(tmp_path: Path) -> None:
    file, tokens, table = write(tmp_path, PER_CHUNK)
    verified = opened(file, tokens, bytes([table[0] ^ 1]) + table[1:])
    with pytest.raises(DataError, match="are not as they were written"):
        verified[0:1]
    with pytest.raises(DataError) as caught:
        opened(file, tokens, table + table)
    assert str(caught.value) == (
        f"{file} is damaged: its table of digests has a different number of chunks. Delete the "
        f"folder {tmp_path}; the next run makes it again."
    )


def test_a_file_that_is_cut_under_a_run_ends_in_a_sentence(tmp_path: Path) -> None:
    file, tokens, table = write(tmp_path, 3 * PER_CHUNK)
    verified = opened(file, tokens, table)
    os.truncate(file, CHUNK_BYTES + 10)
    np.testing.assert_array_equal(verified[:PER_CHUNK], tokens[:PER_CHUNK])
    with pytest.raises(DataError, match="bytes 16,384 to 32,768 are not as they were written"):
        verified[PER_CHUNK : PER_CHUNK + 3]


def test_a_file_that_is_replaced_under_a_run_is_read_as_it_was(tmp_path: Path) -> None:
    file, tokens, table = write(tmp_path, 100)
    verified = opened(file, tokens, table)
    file.unlink()
    file.write_bytes(bytes(200))
    np.testing.assert_array_equal(verified[:], tokens)
