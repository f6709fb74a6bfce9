"""Functions in which ranks save in the background, and die or damage things meanwhile."""

import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.base.digest import digest
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint import store
from equipoise.checkpoint.background import Saver
from equipoise.checkpoint.manifest import find_checkpoints, read_manifest
from equipoise.comm.group import Ranks
from equipoise.observe.journal import Journal
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.saving.newest import load_newest
from support.ranks.on_ranks import (
    Arrays,
    _manifest,
    _stepped,
    _stepped_sharded,
    made_up_gradients,
    state_of,
)

Reached = Callable[[str], None]


class SlowSaver(Saver):
    """Begins to copy late, so that training comes first."""

    may_copy: threading.Event | None = None
    """Set when it may begin, where training does not wait for it."""

    def _stage(self, save: Any) -> None:
        if self.may_copy is None:
            time.sleep(0.3)
        else:
            self.may_copy.wait()
        super()._stage(save)


def change(decoder: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer with made-up gradients."""
    made_up_gradients(decoder)
    optimizer.step()


def save_then_step(
    ranks: Ranks, root: Path, model: ModelSpec, zero: int, is_guarded: bool
) -> list[Arrays]:
    """Save steps 1 and 2 while steps follow at once; what was there when each save began."""
    decoder, optimizer = _stepped(ranks, model, zero, 0, TrainSpec())
    states = []
    with SlowSaver(root, decoder, optimizer, ranks, keep=2) as saver:
        if not is_guarded:
            saver._hook.remove()
            saver.may_copy = threading.Event()
        for step in (1, 2):
            states.append(state_of(decoder, optimizer))
            saver.begin(_manifest(model, step, ranks.world), {})
            change(decoder, optimizer)
            change(decoder, optimizer)
            if saver.may_copy is not None:
                saver.may_copy.set()
            saver.settle()
            if saver.may_copy is not None:
                saver.may_copy.clear()
    return states


def save_replaced(ranks: Ranks, root: Path, model: ModelSpec) -> Arrays:
    """Save, let the optimizer load other moments, and save those."""
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    with Saver(root, decoder, optimizer, ranks, keep=2) as saver:
        saver.begin(_manifest(model, 1, ranks.world), {})
        saver.settle()
        moments = optimizer.state_dict()
        optimizer.load_state_dict(moments)
        change(decoder, optimizer)
        saver.begin(_manifest(model, 2, ranks.world), {})
        saver.settle()
    return state_of(decoder, optimizer)


class Counted(nn.Module):
    """A weight, and a buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        """Count, in place."""
        self.seen += 1
        return self.weight.sum()


def save_counted(ranks: Ranks, root: Path) -> list[int]:
    """Save while a forward changes a buffer; the buffer as it is loaded."""
    module = Counted()
    optimizer = torch.optim.AdamW(module.parameters())
    module().backward()
    optimizer.step()
    with SlowSaver(root, module, optimizer, ranks, keep=2) as saver:
        saver.begin(_manifest(ModelSpec(1, 32, 2, 1, 48, 320, 16), 1, ranks.world), {})
        module()
        saver.settle()
    module()
    store.load(root / "step-000001", module, optimizer)
    return module.seen.tolist()


def fingerprint(decoder: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return digest(state_of(decoder, optimizer))


def note(folder: Path, name: str, text: str = "") -> None:
    """Leave a file whole, also if this process is killed."""
    (folder / f".{name}").write_text(text)
    (folder / f".{name}").rename(folder / name)


def save_and_die(
    ranks: Ranks, root: Path, notes: Path, model: ModelSpec, stage: str, rank: int, nth: int
) -> None:
    """Save every step, and be killed when a rank reaches a stage for the nth time.

    Without a stage, killed ``nth`` milliseconds after the third save has begun.
    """
    count = 0

    def reached(name: str) -> None:
        nonlocal count
        if ranks.rank == rank and name == stage:
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    with Saver(root, decoder, optimizer, ranks, keep=2, reached=reached) as saver:
        for step in itertools.count(1):
            state = fingerprint(decoder, optimizer)
            if ranks.rank == 0:
                note(notes, f"begun-{step}", state)
            if not stage and step == 3 and ranks.rank == rank:
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(nth / 1000, os.kill, kill).start()
            saver.begin(_manifest(model, step, ranks.world), {})
            change(decoder, optimizer)
            saver.settle()
            if ranks.rank == 0:
                note(notes, f"saved-{step}")


def load_newest_of(ranks: Ranks, root: Path, model: ModelSpec) -> tuple[int, str, list[str]]:
    """Load as a resuming run does: the step, its fingerprint, and sentences about torn ones."""
    sharded, optimizer = _stepped_sharded(ranks, model, 1, 1, TrainSpec())
    decoder = sharded.decoder
    with Journal(root / "journal", ranks.rank) as journal:
        newest = load_newest(root, sharded, optimizer, ranks, journal, lambda *_: None)
    if newest is None:
        raise CheckpointError("None.")
    return newest[1].step, fingerprint(decoder, optimizer), newest[2]


def save_steps(ranks: Ranks, root: Path, model: ModelSpec, steps: int) -> list[str]:
    """Save steps 1 to ``steps`` in the background; fingerprints of all."""
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    states = []
    with Saver(root, decoder, optimizer, ranks, keep=2) as saver:
        for step in range(1, steps + 1):
            states.append(fingerprint(decoder, optimizer))
            saver.begin(_manifest(model, step, ranks.world), {})
            change(decoder, optimizer)
            saver.settle()
    return states


def load_and_save(ranks: Ranks, root: Path, model: ModelSpec) -> tuple[int, str, list[str]]:
    """``load_newest_of``, and then saves up to the step after it."""
    newest = load_newest_of(ranks, root, model)
    save_steps(ranks, root, model, newest[0] + 1)
    return newest


def count_whole(ranks: Ranks, root: Path, model: ModelSpec, steps: int) -> list[tuple[str, int]]:
    """At every stage of every save on rank 0, how many checkpoints are whole."""
    seen: list[tuple[str, int]] = []

    def look(stage: str) -> None:
        whole = 0
        for folder in find_checkpoints(root):
            read_manifest(folder)
            whole += 1
        seen.append((stage, whole))

    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    reached = look if ranks.rank == 0 else None  # rank 0 drops checkpoints after that
    with Saver(root, decoder, optimizer, ranks, keep=2, reached=reached) as saver:
        for step in range(1, steps + 1):
            saver.begin(_manifest(model, step, ranks.world), {})
            saver.settle()
    return seen


def usage() -> tuple[int, int, int]:
    """Open descriptors, threads and resident KiB of this process."""
    threads = len(os.listdir("/proc/self/task"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threads, pages * resource.getpagesize() // 1024


def save_often(
    ranks: Ranks, root: Path, model: ModelSpec, warm: int, saves: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """What this process uses after ``warm`` saves, and after ``saves`` more."""
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    with ExitStack() as stack:
        saver = stack.enter_context(Saver(root, decoder, optimizer, ranks, keep=2))
        before = usage()
        for step in range(1, warm + saves + 1):
            saver.begin(_manifest(model, step, ranks.world), {})
            change(decoder, optimizer)
            saver.settle()
            if step == warm:
                before = usage()
        return before, usage()


def save_past_a_fault(ranks: Ranks, root: Path, model: ModelSpec, spoil: str) -> tuple[str, str]:
    """A save that fails on rank 1, and one after it: the sentence, and the state of the second."""
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    said = ""
    with Saver(root, decoder, optimizer, ranks, keep=2) as saver:
        for step in (1, 2, 3):
            if step == 2 and ranks.rank == 1 and spoil == "size":
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            if step == 2 and ranks.rank == 1 and spoil == "files":
                limit = len(os.listdir("/proc/self/fd")) - 1
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
            state = fingerprint(decoder, optimizer)
            saver.begin(_manifest(model, step, ranks.world), {})
            change(decoder, optimizer)
            try:
                saver.settle()
            except CheckpointError as error:
                said = str(error)
            if step == 2 and ranks.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    return said, state
