"""Blocks: damage is noticed by the read that touches it, and by no other."""

from pathlib import Path

import pytest

from equipoise.checkpoint.blocks import (
    BLOCK_BYTES,
    BlockReader,
    DamagedBlockError,
    SummedFile,
    blocks,
    sum_block,
)

SIZE = 2 * BLOCK_BYTES + 1000


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, SummedFile]:
    """A file of three blocks."""
    data = bytes(range(256)) * (SIZE // 256 + 1)
    path = tmp_path / "shard-00000.bin"
    path.write_bytes(data[:SIZE])
    sums = tuple(sum_block(data[start:stop]) for start, stop in blocks(SIZE))
    return path, SummedFile(SIZE, sums)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize("start", [0, 17, BLOCK_BYTES - 3, BLOCK_BYTES, 2 * BLOCK_BYTES + 990])
@pytest.mark.parametrize("size", [0, 1, 10, BLOCK_BYTES + 5])
def test_a_part_is_read_as_it_was_written(written, start: int, size: int) -> None:
    path, summed = written
    size = min(size, SIZE - start)
    with BlockReader(path, summed) as reader:
        assert reader.read(start, size) == path.read_bytes()[start : start + size]
        last = (start + size - 1) // BLOCK_BYTES
        assert reader.verified == (set(range(start // BLOCK_BYTES, last + 1)) if size else set())


def test_a_changed_byte_is_noticed_by_reads_of_its_block_alone(written) -> None:
    path, summed = written
    flip(path, BLOCK_BYTES + 5)
    with BlockReader(path, summed) as reader:
        reader.read(0, BLOCK_BYTES)
        reader.read(2 * BLOCK_BYTES, 1000)
        with pytest.raises(DamagedBlockError) as caught:
            reader.read(BLOCK_BYTES - 1, 2)
        assert (caught.value.start, caught.value.stop) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
        with pytest.raises(DamagedBlockError):
            reader.verify_rest()
        assert reader.verified == {0, 2}


def test_the_end_of_a_file_that_is_cut_is_noticed(written) -> None:
    path, summed = written
    path.write_bytes(path.read_bytes()[:-1])
    with BlockReader(path, summed) as reader:
        reader.read(0, 2 * BLOCK_BYTES)
        with pytest.raises(DamagedBlockError):
            reader.read(2 * BLOCK_BYTES, 1)


def test_bytes_after_the_end_are_no_part_of_the_file(written) -> None:
    path, summed = written
    with BlockReader(path, summed) as reader, pytest.raises(DamagedBlockError):
        reader.read(SIZE - 1, 2)
