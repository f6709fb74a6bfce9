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


def test_blocks_are_read_as_they_were_written(written) -> None:
    path, summed = written
    with BlockReader(path, summed) as reader:
        assert b"".join(reader.read(number) for number in range(3)) == path.read_bytes()
        reader.verify()


def test_a_changed_byte_is_noticed_by_reads_of_its_block_alone(written) -> None:
    path, summed = written
    flip(path, BLOCK_BYTES + 5)
    with BlockReader(path, summed) as reader:
        reader.read(0)
        reader.read(2)
        with pytest.raises(DamagedBlockError) as caught:
            reader.read(1)
        assert (caught.value.start, caught.value.stop) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
        with pytest.raises(DamagedBlockError):
            reader.verify()


def test_the_end_of_a_file_that_is_cut_is_noticed(written) -> None:
    path, summed = written
    path.write_bytes(path.read_bytes()[:-1])
    with BlockReader(path, summed) as reader:
        reader.read(1)
        with pytest.raises(DamagedBlockError):
            reader.read(2)


def test_bytes_after_the_end_are_not_part_of_the_file(written) -> None:
    path, summed = written
    with BlockReader(path, summed) as reader, pytest.raises(DamagedBlockError):
        reader.read(3)
