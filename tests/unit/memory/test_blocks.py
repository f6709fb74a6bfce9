"""Blocks survive a crash between any two writes; damage is named."""

import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import CheckpointError
from equipoise.memory.blocks import PAGE_BYTES, BlockFile

BLOCKS = 5


def page(mark: int) -> bytes:
    return bytes([mark]) * PAGE_BYTES


@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(
            st.just("commit"), st.just("crash"), st.tuples(st.integers(0, 4), st.integers(0, 255))
        ),
        max_size=25,
    )
)
def test_after_a_crash_blocks_are_those_of_the_last_commit(events: list) -> None:
    """A crash is a file that is opened again with no word to the one before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, now, committed, number = BlockFile(folder, BLOCKS), {}, {}, 0
        for event in [(2, 9), "commit", *events, "crash"]:
            if event == "commit":
                number += 1
                file.commit(number)
                committed = dict(now)
            elif event == "crash":
                if not number:
                    continue
                file.close()
                file, now = BlockFile(folder, BLOCKS, commit=number), dict(committed)
            else:
                file.write(event[0], page(event[1]))
                now[event[0]] = event[1]
            assert [file.has(block) for block in range(BLOCKS)] == [b in now for b in range(BLOCKS)]
            assert all(file.read(block) == page(mark) for block, mark in now.items())
        file.close()


def test_the_commit_before_the_last_can_be_opened(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, BLOCKS)
    for number in range(1, 5):
        file.write(1, page(number))
        file.write(3, page(10 * number))
        file.commit(number)
    assert (tmp_path / "blocks").stat().st_size <= (64 + 6) * PAGE_BYTES
    older = BlockFile(tmp_path, BLOCKS, commit=3)
    assert older.read(1) == page(3)
    assert older.read(3) == page(30)
    with pytest.raises(
        CheckpointError, match=r"has no commit 4\. Choose another folder with --out"
    ):
        BlockFile(tmp_path, BLOCKS, commit=4)  # its steps are about to be repeated
    with pytest.raises(
        CheckpointError,
        match=r"has 5 blocks, and this run's rows take 9\. Go on with the layout and the tables "
        r"that it was made with\.$",
    ):
        BlockFile(tmp_path, 9, commit=3)


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, BLOCKS)
    file.write(0, page(1))
    file.commit(1)
    data = bytearray((tmp_path / "blocks").read_bytes())
    data[100] ^= 1
    (tmp_path / "blocks").write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=r"^Block 0 of .*blocks is damaged\. Remove the run's newest checkpoint, so that it "
        r"goes on from the one before\.$",
    ):
        BlockFile(tmp_path, BLOCKS, commit=1).read(0)


@pytest.mark.parametrize(
    ("room", "why"), [(0, "File too large"), (PAGE_BYTES // 2, "No space left on device; ")]
)
def test_a_full_disk_is_named_and_commits_stay(tmp_path: Path, room: int, why: str) -> None:
    """Half a block that is written passed for a whole one, and was damaged when it was read."""
    file = BlockFile(tmp_path, BLOCKS)
    file.write(0, page(1))
    file.commit(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES + room, limits[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            file.write(0, page(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'blocks'} could not be written ({why}")
    assert said.endswith("). Make room there; the same command goes on from the last checkpoint.")
    assert BlockFile(tmp_path, BLOCKS, commit=1).read(0) == page(1)
