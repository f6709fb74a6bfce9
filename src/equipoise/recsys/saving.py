"""Save a recommender in the background: copy between two steps, write while the next ones run.

Why
    A checkpoint is flushed to the disk and read back from it, and training needs nothing of that.

What it decides
    ::

        training | step 5 | settle | copy | step 6 | step 7 ... | settle | copy |
        writing  |                        | write, flush, read back, publish |

    A rank copies its shards, which takes their memory once more, and a thread writes the copy.
    One save is under way at a time: before the next begins, and when a run ends, all ranks settle
    it, which is where they hear of a part that could not be written. That save is given up, and
    older checkpoints stay. Weights that are not numbers are not saved. Where rows lie in files,
    whose last two commits are kept, the run ends there, since one more commit without a checkpoint
    would drop those of the last one.

    The folder has its name only once the parts of all ranks are on the disk and were read back;
    ranks' threads meet through files alone (``checkpoint.publish``). Older checkpoints are dropped
    while two are left of which every byte has been verified.

Kept true (tests/multi/recsys/test_saving.py, tests/multi/recsys/test_torn.py)
    A checkpoint holds what was there when its save began, to the bit, whatever is trained
    meanwhile; killed at any stage, what has a checkpoint's name is whole, and the older ones are
    there.
"""

import io
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from equipoise.base.digest import digest_file
from equipoise.base.disk import disk_of
from equipoise.base.durable import sync
from equipoise.base.errors import CheckpointError, NonFiniteError
from equipoise.checkpoint.manifest import find_checkpoints, folder_name
from equipoise.checkpoint.publish import (
    SAVING,
    collect_reports,
    discard,
    discard_partial,
    give_name,
    leave_report,
)
from equipoise.checkpoint.under_way import UnderWay
from equipoise.observe.journal import EventSink
from equipoise.recsys.embedding import ShardedTables
from equipoise.recsys.models.shards import DensePart
from equipoise.recsys.store import DENSE, RankSaved, shard_arrays
from equipoise.recsys.tiers.run import commit_files
from equipoise.recsys.whole import MANIFEST, find_damage, gather, seal, step_of
from equipoise.spec.names import CHECKPOINTS

_KEEP = 2
_LEAVE_S = 10.0
"""The longest wait for a save that nobody settles: its disk may hang."""


@dataclass(slots=True, eq=False, kw_only=True)
class _TableSave(UnderWay):
    """A save under way on this rank."""

    step: int
    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    states: Mapping[str, bytes]

    @property
    def final(self) -> Path:
        """The checkpoint that it becomes."""
        return self.root / folder_name(self.step)

    def fail(self, error: BaseException) -> None:
        """Note why this rank's part failed; the first reason counts."""
        self.fault = self.fault or f"{_why(error)}; {disk_of(self.root)}"


class TableSaver:
    """Saves tables and the dense part, one checkpoint after the other; ranks call it together."""

    def __init__(
        self,
        folder: Path,
        tables: ShardedTables,
        dense: DensePart,
        run: Mapping[str, Any],
        verified: set[Path],
        journal: EventSink,
        *,
        has_files: bool = False,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare to save.

        Args:
            folder: The run's.
            tables: This rank's shards.
            dense: The dense part.
            run: Whose checkpoints they are (``same.describe_run``).
            verified: Checkpoints of which every byte is known to be right; new ones are added.
            journal: What saves took goes here.
            has_files: Whether rows lie in files.
            reached: Called with each stage in the thread that writes: ``copied``, ``written``, and
                on rank 0 ``collected`` and ``published``.
        """
        self._root, self._tables, self._dense = folder / CHECKPOINTS, tables, dense
        self._run, self._journal = run, journal
        self._verified, self._has_files, self.reached = verified, has_files, reached
        self._session = ""
        self._save: _TableSave | None = None

    def save(self, saved: RankSaved, show: Callable[[str], None], *, is_last: bool) -> None:
        """Begin to save, once the save before is settled; settle this one, too, if it is the last.

        Raises:
            NonFiniteError: on every rank, if a weight of one of them is not a number.
            CheckpointError: on every rank, if one of them could not write and no later save
                follows, or rows lie in files.
        """
        self.settle(show, is_needed=self._has_files)
        held = (*self._tables.floats(), *self._dense.floats())
        is_right = all(bool(torch.isfinite(each).all()) for each in held)
        if not all(gather(self._tables.exchange.ranks, is_right)):
            raise NonFiniteError(
                f"Weights after step {saved.step:,} are not numbers, so they are not saved. Lower "
                "train.lr or tables.lr, and run again: it goes on from the checkpoint before."
            )
        self._journal.flush()  # what is saved is not computed again, and so not journaled again
        commit_files(self._tables, saved.step)
        self._begin(saved)
        if is_last:
            self.settle(show, is_needed=True)

    def settle(self, show: Callable[[str], None], *, is_needed: bool) -> None:
        """Wait for the save that is under way, if any, and hear whether it is published.

        Args:
            show: Gets the sentence about one that could not be written and is not needed.
            is_needed: Whether the run cannot go on without it.

        Raises:
            CheckpointError: on every rank, if a needed one could not be written.
        """
        save, began, ranks = self._save, time.perf_counter(), self._tables.exchange.ranks
        if save is None:
            return
        self.wait()
        faults = gather(ranks, save.fault)
        if not any(faults):
            save.ended.wait()
            faults = gather(ranks, save.fault)
        self._save = None
        at = next((rank for rank, fault in enumerate(faults) if fault), None)
        if at is not None:
            save.abandoned.set()
            save.ended.wait()
            if save.root_handle >= 0 and self._tables.exchange.rank == 0:
                discard(save.root_handle, save.name)
            save.close()
            sentence = (
                f"Rank {at} could not write the checkpoint {save.final} ({faults[at]}). Free some "
                "space there, or make it writable."
            )
            if is_needed:
                raise CheckpointError(sentence)
            show(f"{sentence} Training goes on.")
            return
        save.close()
        self._journal.write(
            "scalar",
            "saved",
            step=save.step,
            size_bytes=save.size_bytes,
            blocked_s=save.times.blocked_s + time.perf_counter() - began,
            staged_s=save.times.staged_s,
            written_s=save.times.written_s,
            core_s=save.times.core_s,
        )

    def wait(self) -> None:
        """Wait until this rank's part is on the disk, or refused; no other rank is waited for."""
        if self._save is not None:
            self._save.written.wait()

    def close(self) -> None:
        """Let a save end that nobody settles any more, since training has failed."""
        if self._save is not None:
            self._save.ended.wait(_LEAVE_S)

    def _begin(self, saved: RankSaved) -> None:
        began, tables = time.perf_counter(), self._tables
        rank, ranks = tables.exchange.rank, tables.exchange.ranks
        # No other attempt of this run or another writes to a folder of this name.
        self._session = self._session or gather(ranks, uuid.uuid4().hex[:8])[0]
        states: dict[str, Any] = {f"{name}.pt": part for name, part in tables.parts().items()}
        dense = self._dense.state()
        if rank == 0:
            states[DENSE] = dense
        save = self._save = _TableSave(
            self._root,
            f"{SAVING}{saved.step:06d}-{self._session}",
            began,
            step=saved.step,
            facts=self._facts(saved) if rank == 0 else {},
            arrays={name: values.copy() for name, values in shard_arrays(tables).items()},
            states={name: _serialised(state) for name, state in states.items()},
        )
        save.times.staged_s = save.times.blocked_s = time.perf_counter() - began
        try:
            save.open()
        except OSError as error:
            save.fail(error)
            save.end()
            return
        threading.Thread(target=self._work, args=(save,), name="checkpoint", daemon=True).start()

    def _facts(self, saved: RankSaved) -> dict[str, Any]:
        """What the checkpoint says of itself."""
        tables = self._tables
        return {
            **asdict(saved),
            **self._run,
            "optimizer": tables.optimizer.name,
            "number": tables.number,
            "ranks": tables.exchange.ranks,
            "parts": tables.part_names(),
            "tables": {p.table.name: [p.table.rows, p.table.width] for p in tables.plan.placements},
            "wire": tables.forward_wire,
            "kinds": {p.table.name: p.kind for p in tables.plan.placements},
        }

    # In the thread. ----------------------------------------------------------------------------

    def _work(self, save: _TableSave) -> None:
        publish = None if self._tables.exchange.rank else partial(self._publish, save)
        save.work(partial(self._write, save), publish)
        save.arrays, save.states = {}, {}

    def _write(self, save: _TableSave) -> None:
        """Write this rank's files, read them back, and leave word of them."""
        self.reached("copied")
        folder, rank = save.root / save.name, self._tables.exchange.rank
        shards = f"rank-{rank:05d}.safetensors"
        save_file(dict(save.arrays), folder / shards)
        for name, state in save.states.items():
            (folder / name).write_bytes(state)
        files = {name: _flushed(folder / name) for name in (shards, *save.states)}
        save.size_bytes = sum(size for size, _ in files.values())
        self.reached("written")
        leave_report(save.handle, rank, files)

    def _publish(self, save: _TableSave) -> None:
        ranks, folder = self._tables.exchange.ranks, save.root / save.name
        discard_partial(save.root_handle, but=save.name)
        files: dict[str, tuple[int, str]] = {}
        for report in collect_reports(save.handle, ranks, save.abandoned):
            files |= {name: (size, held) for name, (size, held) in report.items()}
        self.reached("collected")
        (folder / MANIFEST).write_text(seal(save.facts, files), encoding="utf-8")
        sync(folder / MANIFEST)
        give_name(save.root_handle, save.name, save.handle, save.final.name, ranks)
        self._verified.add(save.final)
        self.reached("published")
        self._drop_older(save)

    def _drop_older(self, save: _TableSave) -> None:
        """Remove checkpoints but for the newest that are right, and what earlier versions left."""
        for left in save.root.glob(".step-*"):
            discard(save.root_handle, left.name)
        kept = 0
        for path in find_checkpoints(save.root):
            if step_of(path) > save.step:
                continue
            if kept == _KEEP:
                discard(save.root_handle, path.name)
            elif path in self._verified or not find_damage(path):
                self._verified.add(path)
                kept += 1


def _serialised(state: Any) -> bytes:
    data = io.BytesIO()
    torch.save(state, data)
    return data.getvalue()


def _flushed(file: Path) -> tuple[int, str]:
    """Size [bytes] and digest of a file, read back from the disk."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return file.stat().st_size, digest_file(file)


def _why(error: BaseException) -> str:
    """What the system said; safetensors puts its number in words of its own."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"(?:code:|os error) (\d+)", str(error))):
        number = int(said[1])
    return os.strerror(number) if number else str(error) or type(error).__name__
