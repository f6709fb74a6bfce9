"""Ranks that read one file between them: which bytes, and what damage they notice."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.blocks import BLOCK_BYTES, blocks, sum_block
from equipoise.checkpoint.index import Chunk, StoredTensor
from equipoise.checkpoint.manifest import Manifest
from equipoise.checkpoint.parts import RankReader, needs_of
from equipoise.checkpoint.reading import bytes_of
from equipoise.schedule.block import Block

ROWS, WIDTH = 1536, 2048
"""12 MiB: three blocks."""
FILE = "shard-00000.bin"
CHUNK = Chunk((0, 0), (ROWS, WIDTH), FILE, 0, 4 * ROWS * WIDTH)
INDEX = {"model.w": StoredTensor("float32", (ROWS, WIDTH), (CHUNK,))}


@pytest.fixture(scope="module")
def data() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.uint32).reshape(ROWS, WIDTH)


@pytest.fixture
def folder(tmp_path: Path, data: np.ndarray) -> Iterator[tuple[Path, Manifest]]:
    """A checkpoint's folder with one shard."""
    raw = data.tobytes()
    (tmp_path / FILE).write_bytes(raw)
    sums = tuple(sum_block(raw[start:stop]) for start, stop in blocks(len(raw)))
    manifest = Manifest(3, "0.1.0", 2, 0, 1, {}, "c", 0, 256, {FILE: (len(raw), "")})
    yield tmp_path, dataclasses.replace(manifest, blocks={FILE: sums})


def columns(ranks: int) -> list[list[Block]]:
    share = WIDTH // ranks
    boxes = [[(0, ROWS), (rank * share, (rank + 1) * share)] for rank in range(ranks)]
    return [[bytes_of(CHUNK, 4, box)] for box in boxes]


def rows(ranks: int) -> list[list[Block]]:
    share = ROWS // ranks
    return [
        [bytes_of(CHUNK, 4, [(rank * share, (rank + 1) * share), (0, WIDTH)])]
        for rank in range(ranks)
    ]


def system_bytes() -> int:
    """Bytes that system calls of this process have read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def read(folder: Path, manifest: Manifest | None, wanted: list[list[Block]]) -> list[bytes]:
    """What each rank reads, one after another; compared and counted."""
    needs = [needs_of({FILE: each}) for each in wanted]
    answers = []
    with ExitStack() as stack:
        readers = [
            stack.enter_context(RankReader(folder, INDEX, manifest, needs, rank))
            for rank in range(len(wanted))
        ]
        system_bytes()
        own = len(Path("/proc/self/io").read_bytes())
        for reader, mine in zip(readers, wanted, strict=True):
            before, out = system_bytes(), b""
            for block in mine:
                part = bytearray(block.elements)
                reader.fill(FILE, block, memoryview(part))
                out += part
            reader.verify_rest()
            counted = system_bytes() - before - reader.read_bytes
            assert abs(counted - own) < 10  # reading the count is counted
            assert reader.read_bytes == reader.counts.read_bytes
            answers.append(out)
        readers[0].compare([each.sums for each in readers], [each.expected for each in readers])
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_columns_are_read_alone_and_the_rest_of_the_file_once(folder, data, ranks: int) -> None:
    path, manifest = folder
    found = read(path, manifest, columns(ranks))
    for rank, part in enumerate(found):
        share = WIDTH // ranks
        assert part == data[:, rank * share : (rank + 1) * share].tobytes()


def test_rows_that_end_in_blocks(folder, data) -> None:
    path, manifest = folder
    assert b"".join(read(path, manifest, rows(4))) == data.tobytes()
    assert b"".join(read(path, None, rows(4))) == data.tobytes()  # verified before


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize("at", [0, WIDTH * 4 - 1, BLOCK_BYTES + 5, 3 * BLOCK_BYTES - 1])
@pytest.mark.parametrize("wanted", [columns(4), rows(4), [[], columns(2)[0]]])
def test_a_changed_byte_is_noticed_by_whoever_verifies_its_block(folder, at: int, wanted) -> None:
    path, manifest = folder
    flip(path / FILE, at)
    with pytest.raises(CheckpointError) as caught:
        read(path, manifest, wanted)
    first = at // BLOCK_BYTES * BLOCK_BYTES
    assert str(caught.value) == (
        f"{path} is torn: the bytes of {FILE} have changed between {first:,} and "
        f"{first + BLOCK_BYTES:,}, where it holds model.w."
    )


def test_bytes_that_one_rank_alone_gets_otherwise_are_noticed_by_their_checker(folder) -> None:
    path, manifest = folder
    wanted = columns(4)
    needs = [needs_of({FILE: each}) for each in wanted]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(RankReader(path, INDEX, manifest, needs, rank)) for rank in range(4)
        ]
        for rank, (reader, (block,)) in enumerate(zip(readers, wanted, strict=True)):
            if rank == 3:  # its disk, or its network, gives it another bit, in the second block
                flip(path / FILE, BLOCK_BYTES + 4 * WIDTH - 1)
                assert 1 not in reader.plan[FILE].verified
            reader.fill(FILE, block, memoryview(bytearray(block.elements)))
            if rank == 3:
                flip(path / FILE, BLOCK_BYTES + 4 * WIDTH - 1)
            reader.verify_rest()
        with pytest.raises(CheckpointError) as caught:
            readers[0].compare([each.sums for each in readers], [each.expected for each in readers])
    assert str(caught.value) == (
        f"{path} is torn: the bytes of {FILE} have changed between {BLOCK_BYTES + 3 * WIDTH:,} and "
        f"{2 * BLOCK_BYTES:,}, where it holds model.w."
    )


def test_a_file_that_is_cut_is_noticed_where_nothing_else_is_verified(folder) -> None:
    path, _ = folder
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"the bytes of {FILE} have changed between"):
        read(path, None, rows(4))


def test_a_disk_that_refuses_to_read_is_named(folder) -> None:
    path, manifest = folder
    (path / FILE).unlink()
    (path / FILE).symlink_to("/proc/self/mem")  # whose first bytes cannot be read
    for wanted in (rows(2), [[], columns(2)[0]]):
        with pytest.raises(CheckpointError) as caught:
            read(path, manifest, wanted)
        assert str(caught.value) == (f"{path} is torn: {FILE} cannot be read (Input/output error).")
    (path / FILE).unlink()
    with pytest.raises(CheckpointError) as caught:
        read(path, manifest, rows(2))
    assert str(caught.value) == (
        f"{path} is torn: {FILE} cannot be read (No such file or directory)."
    )


def test_one_file_of_many_is_open_at_a_time(tmp_path: Path) -> None:
    """A rank reads what thousands have written, within the thousand files of a usual shell."""
    raw, names = bytes(range(100)), [f"shard-{rank:05}.bin" for rank in range(40)]
    for name in names:
        (tmp_path / name).write_bytes(raw)
    manifest = Manifest(3, "0.1.0", 2, 0, 1, {}, "c", 0, 256, dict.fromkeys(names, (100, "")))
    manifest = dataclasses.replace(manifest, blocks={name: (sum_block(raw),) for name in names})
    whole, half = Block(0, (100,), (1,)), Block(50, (50,), (1,))
    needs = [needs_of({name: [part] for name in names}) for part in (whole, half)]
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    for rank, part in enumerate((whole, half)):
        with RankReader(tmp_path, {}, manifest, needs, rank) as reader:
            for name in names:
                out = bytearray(part.elements)
                reader.fill(name, part, memoryview(out))
                assert out == raw[part.offset :]
                assert len(list(opened.iterdir())) <= before + 2
            reader.verify_rest()
        assert len(list(opened.iterdir())) == before
        assert reader.read_bytes == reader.counts.read_bytes
