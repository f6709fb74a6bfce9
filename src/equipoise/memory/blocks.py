"""A file of blocks that a crash in the middle of a write leaves as it was last committed.

Why
    Rows that leave the cache are written back at any time. Half of them new and half old is a table
    that no step ever had.

What it decides
    A block that a commit holds is never overwritten: its next version goes to a free place, and a
    table in memory says where each block lies. A commit syncs the file and then replaces a small
    manifest with that table and each block's checksum, in one rename. Whoever opens the file reads
    a manifest, so that all blocks are those of its commit; what was written after it is free space.
    The last commits are kept, as many as the run keeps checkpoints.

Kept true (tests/unit/memory/test_blocks.py, by Hypothesis)
    After any writes and a crash between any two of them, the blocks are those of the last commit;
    a damaged block is named; bytes read and written are whole blocks.

Sources
    Shadow paging: R. Lorie, "Physical integrity in a large segmented database", 1977. Tables on
    flash: MTrainS, arXiv:2305.01515.
"""

import errno
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from equipoise.base.digest import digest_bytes
from equipoise.base.disk import explain_refusal
from equipoise.base.durable import sync
from equipoise.base.errors import CheckpointError

PAGE_BYTES = 4096
_KEEP = 2


class BlockFile:
    """Numbered blocks of one size; those never written do not exist."""

    def __init__(
        self,
        folder: Path,
        count: int,
        pages: int = 1,
        commit: int | None = None,
        *,
        is_read_only: bool = False,
    ) -> None:
        """Begin anew, or open a commit.

        Args:
            folder: Its own; it is made.
            count: Blocks.
            pages: Of 4,096 bytes in a block.
            commit: Which to open; None: no block exists, and commits of before are forgotten.
            is_read_only: Whether the commit is only read, while a run may go on writing others.

        Raises:
            CheckpointError: there is no such commit, or it has other blocks.
        """
        if not is_read_only:
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.block_bytes = folder, pages * PAGE_BYTES
        self.blocks_read = self.blocks_written = 0
        self._place = np.full(count, -1, dtype=np.int64)
        self._sum = np.zeros(count, dtype=np.uint32)
        self._commits: dict[int, np.ndarray] = {}
        self._free: list[int] = []
        flags = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
        if commit is None:
            for file in folder.glob("commit-*.npz"):
                file.unlink()
            flags |= os.O_TRUNC
        else:
            self._open(commit, count)
            if not is_read_only:
                self._keep_older(commit)
        self._file = os.open(folder / "blocks", flags | os.O_CLOEXEC, 0o644)
        self._places = os.fstat(self._file).st_size // self.block_bytes
        self._find_free()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def has(self, block: int) -> bool:
        """Whether a block was ever written."""
        return bool(self._place[block] >= 0)

    def mark(self) -> np.ndarray:
        """What tells this content from another, wherever blocks lie: uint8 [16]."""
        return np.frombuffer(bytes.fromhex(digest_bytes(self._sum.tobytes())), dtype=np.uint8)

    def require(self, mark: np.ndarray | None) -> None:
        """Refuse blocks of another run than the checkpoint that has this mark; None: it has none.

        Raises:
            CheckpointError: they are others.
        """
        if mark is not None and not np.array_equal(mark, self.mark()):
            raise CheckpointError(
                f"{self.folder} holds rows of another run than its checkpoint. Restore the "
                "checkpoints and the files of one run, or choose another folder with --out."
            )

    def read(self, block: int) -> bytearray:
        """A block that exists.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        data = bytearray(self.block_bytes)
        begin = int(self._place[block]) * self.block_bytes
        count = os.preadv(self._file, [data], begin)
        self.blocks_read += 1
        if count != self.block_bytes or zlib.crc32(data) != self._sum[block]:
            raise CheckpointError(
                f"Block {block:,} of {self.folder / 'blocks'} is damaged. Remove the run's newest "
                "checkpoint, so that it goes on from the one before."
            )
        return data

    def write(self, block: int, data: bytes | bytearray) -> None:
        """A block's new bytes.

        Raises:
            CheckpointError: the disk did not take them; commits stay as they are.
        """
        if self._place[block] < 0 or self._is_committed(int(self._place[block])):
            if not self._free:
                self._free = list(range(self._places, self._places + 64))[::-1]
                self._places += 64
            self._place[block] = self._free.pop()
        begin = int(self._place[block]) * self.block_bytes
        with self._written_by_disk():
            if os.pwrite(self._file, data, begin) != len(data):  # the disk filled up in the middle
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._sum[block] = zlib.crc32(data)
        self.blocks_written += 1

    def commit(self, number: int) -> None:
        """Make all that was written the commit of this number.

        Raises:
            CheckpointError: the disk did not take it; commits stay as they are.
        """
        final = self._manifest(number)
        partial = final.with_suffix(".partial")
        with self._written_by_disk():
            os.fsync(self._file)
            with partial.open("wb") as table:
                np.savez(table, place=self._place, sums=self._sum)
            sync(partial)
            partial.replace(final)
            sync(self.folder)
        self._commits[number] = self._place.copy()
        for old in sorted(self._commits)[:-_KEEP]:
            del self._commits[old]
            self._manifest(old).unlink(missing_ok=True)
        self._find_free()

    @contextmanager
    def _written_by_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = explain_refusal(error, self.folder)
            raise CheckpointError(
                f"{self.folder / 'blocks'} could not be written ({why}). Make room there; the same "
                "command goes on from the last checkpoint."
            ) from error

    def _manifest(self, number: int) -> Path:
        return self.folder / f"commit-{number:06d}.npz"

    def _open(self, number: int, count: int) -> None:
        file = self._manifest(number)
        if not file.is_file():
            raise CheckpointError(
                f"{self.folder} has no commit {number:,}. Choose another folder with --out, or "
                "remove this one."
            )
        self._place, self._sum = _read_commit(file)
        if len(self._place) != count:
            raise CheckpointError(
                f"{file} has {len(self._place):,} blocks, and this run's rows take {count:,}. Go "
                "on with the layout and the tables that it was made with."
            )
        self._commits = {number: self._place.copy()}

    def _keep_older(self, number: int) -> None:
        """Keep the blocks of older commits; forget newer ones."""
        for other in self.folder.glob("commit-*.npz"):
            own = int(other.stem.removeprefix("commit-"))
            if own > number:
                other.unlink()  # of steps that the run is about to repeat
            elif own < number:
                self._commits[own], _ = _read_commit(other)

    def _find_free(self) -> None:
        """Places that no commit and no block holds, the first ones last."""
        self._held = np.zeros(self._places, dtype=bool)
        for place in self._commits.values():
            self._held[place[place >= 0]] = True
        used = self._held.copy()
        used[self._place[self._place >= 0]] = True
        self._free = np.flatnonzero(~used)[::-1].tolist()

    def _is_committed(self, place: int) -> bool:
        return place < len(self._held) and bool(self._held[place])


def _read_commit(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Where each block of a commit lies, int64 [blocks], and its checksum, uint32 [blocks].

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with file.open("rb") as data, np.load(data) as table:
            return table["place"], table["sums"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{file} is damaged. Remove the run's newest checkpoint, so that it goes on from the "
            "one before."
        ) from error
