"""The program of one rank: ``python -m equipoise.train.worker RUN``, under any torchrun."""

import argparse
import dataclasses
import fcntl
import importlib
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

import equipoise
from equipoise.base.errors import (
    CorruptError,
    EquipoiseError,
    FaultError,
    HungError,
    LayoutError,
    MismatchError,
)
from equipoise.comm.group import Ranks, join_from_environment
from equipoise.comm.standstill import Standstill
from equipoise.comm.watchdog import Watchdog
from equipoise.data.cache.store import open_store
from equipoise.fault.drill.inside import Injector
from equipoise.launch.agent import end_with_agent
from equipoise.launch.last_words import say, say_late, say_process
from equipoise.launch.local import LOCK, folder_taken, folder_unlocked
from equipoise.observe.console import make_view
from equipoise.observe.event import Kind
from equipoise.observe.fence import Fence
from equipoise.observe.journal import Journal
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile, read_resolved
from equipoise.train.health.links import LinkWatch
from equipoise.train.loop import Trainer
from equipoise.train.process import StopRequest, settle
from equipoise.train.proof import prove_layout
from equipoise.train.watch import FolderGoneError


class FolderTakenError(LayoutError):
    """Another run holds the folder, so this one must not write a word into it."""


@contextmanager
def _sole_owner(folder: Path, ranks: Ranks) -> Iterator[Fence]:
    """Hold the run's folder, so that two runs never write one journal; its epoch is theirs.

    Raises:
        FolderTakenError: another run holds it.
        LayoutError: it cannot be locked at all.
    """
    with ExitStack() as stack:
        fault: LayoutError | None = None
        fence: Fence | None = None
        if ranks.rank == 0:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                lock = os.open(folder / LOCK, flags, 0o666)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fence = Fence.take(folder / LOCK, lock)
            except BlockingIOError:
                fault = FolderTakenError(folder_taken(folder))
            except OSError as error:
                fault = LayoutError(folder_unlocked(folder, error))
        fault, fence = ranks.gather_objects((fault, fence))[0]
        if fault is not None or fence is None:
            raise fault or FolderTakenError(folder_taken(folder))
        yield fence


_OF_A_HOST = ("data.path", "data.mix", "data.cache", "data.tokenizer", "eval.path", "model.init")
"""Keys that name files: they may lie elsewhere on another host, and what is in them is compared."""


def run_facts(resolved: ResolvedFile) -> dict[str, str]:
    """What must be the same on every rank of a run, by the names that a user knows.

    Raises:
        DataError: the corpus cannot be opened.
    """
    keys: dict[str, Any] = {}
    for section, table in dataclasses.asdict(resolved.spec).items():
        if isinstance(table, dict):
            keys |= {f"{section}.{key}": value for key, value in table.items()}
    keys |= {f"model.{key}": value for key, value in dataclasses.asdict(resolved.model).items()}
    held_out = resolved.eval_corpus and open_store(Path(resolved.eval_corpus)).digest
    return {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "the corpus": open_store(Path(resolved.corpus)).digest,
        "the held-out documents": held_out,
        "what auto prices by": str(resolved.context_machine),
        **{key: str(value) for key, value in keys.items() if key not in _OF_A_HOST},
    }


class _WatchedJournal(Journal):
    """A journal whose phases are those that the watchdog names, and where a drill strikes."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        watchdog: Watchdog | None,
        fence: Fence | None,
        injector: Injector | None,
    ) -> None:
        super().__init__(folder, rank, fence)
        self._watchdog, self._injector = watchdog, injector

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        """Be in a block, as the watchdog knows it."""
        step = f" of step {fields['step']}" if "step" in fields else ""
        with nullcontext() if self._watchdog is None else self._watchdog.phase(name + step):
            if self._injector is not None:
                self._injector.reach(name, fields.get("step", 0))
            yield

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        """Append one event; from steps the watchdog learns how long they take."""
        super().write(kind, name, t=t, **fields)
        if self._watchdog is not None and (kind, name) == ("scalar", "step"):
            self._watchdog.patience.learn(fields["step_s"])


def _train(
    folder: Path,
    resolved: ResolvedFile,
    ranks: Ranks,
    *,
    quiet: bool,
    proves: bool = True,
    watchdog: Watchdog | None = None,
    fence: Fence | None = None,
) -> None:
    if ranks.world != resolved.ranks:
        data_ranks, left = divmod(ranks.world, resolved.spec.layout.sharing)
        other = "" if left else f", or --layout.dp {data_ranks}"
        raise LayoutError(
            f"torchrun started {ranks.world} ranks and the run wants {resolved.ranks}. Pass "
            f"--nproc-per-node {resolved.ranks}{other}."
        )
    stop, injector = StopRequest(), Injector.from_environment(ranks.rank)
    with ExitStack() as stack:
        journals = [
            stack.enter_context(
                _WatchedJournal(each / "journal", ranks.rank, watchdog, fence, injector)
            )
            for each, _ in resolved_sides(folder, resolved)
        ]
        if ranks.device.type != "cpu":
            cache = Path(resolved.corpus).parent if proves else None
            for journal, (_, side) in zip(journals, resolved_sides(folder, resolved), strict=True):
                prove_layout(side, ranks, journal, cache)
        trainer = Trainer(folder, resolved, ranks, journals)
        if injector is not None:
            injector.trainer = trainer
        label = " | ".join(resolved.compare or [resolved.spec.pack.policy])
        with make_view(
            label,
            rank=ranks.rank,
            steps=resolved.spec.train.steps,
            done=trainer.position.step,
            quiet=quiet,
        ) as view:
            trainer.resume(view)
            trainer.run(view, stop)


@contextmanager
def _told(folder: Path, resolved: ResolvedFile, rank: int) -> Iterator[None]:
    """Leave word of what went wrong: for the launcher, and in the run's journals."""
    try:
        yield
    except BaseException as error:
        _write_fault(folder, resolved, rank, error)
        raise


def _write_fault(
    folder: Path, resolved: ResolvedFile, rank: int, error: BaseException, **more: Any
) -> None:
    known = isinstance(error, EquipoiseError)
    name, message = "error" if known else "exception", str(error)
    exit_code = error.exit_code if isinstance(error, EquipoiseError) else 6
    trace = "" if known else traceback.format_exc()
    kind = type(error).__name__
    blamed = error.rank if isinstance(error, CorruptError | HungError) else rank
    missing = error.missing if isinstance(error, HungError) else ()
    told = {"rank": blamed, "name": name, "type": kind, "message": message, "missing": missing}
    say({**told, "exit_code": exit_code, "traceback": trace})
    if isinstance(error, FolderTakenError | FolderGoneError) or not folder.is_dir():
        return
    for side, _ in resolved_sides(folder, resolved):
        with suppress(OSError, FaultError), Journal(side / "journal", rank) as journal:
            journal.write(
                "fault",
                name,
                type=kind,
                message=message,
                exit_code=exit_code,
                traceback=trace,
                **more,
            )


def _tell(folder: Path, resolved: ResolvedFile, rank: int, standstill: Standstill) -> None:
    """Leave word of a standstill; the process ends after it."""
    fields = dataclasses.asdict(standstill)
    text, waiting_rank = fields.pop("text"), fields.pop("rank")
    culprit = standstill.culprits[0] if len(standstill.culprits) == 1 else None
    error = MismatchError(text) if standstill.calls else HungError(text, rank=culprit)
    _write_fault(folder, resolved, rank, error, waiting_rank=waiting_rank, **fields)
    _complain(standstill.text)


def _tell_late(folder: Path, resolved: ResolvedFile, rank: int, standstill: Standstill) -> None:
    """Leave word of a long wait, or of its end; the run goes on."""
    say_late(standstill.text)
    fields = dataclasses.asdict(standstill)
    text, waiting_rank = fields.pop("text"), fields.pop("rank")
    name = "late" if standstill.culprits else "came"
    for side, _ in resolved_sides(folder, resolved):
        with suppress(OSError, FaultError), Journal(side / "journal", rank) as journal:
            journal.write("instant", name, message=text, waiting_rank=waiting_rank, **fields)


def main() -> int:
    """Run one rank; the exit code of what happened."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.train.worker")
    parser.add_argument("run", type=Path, help="folder with resolved.json")
    parser.add_argument("--quiet", action="store_true", help="no line and no bar")
    parser.add_argument(
        "--no-proof", action="store_true", help="train a layout that no check has proven here"
    )
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    folder: Path = args.run
    end_with_agent()
    say_process(rank)
    try:
        resolved = read_resolved(folder)
        settle(int(os.environ.get("LOCAL_RANK", rank)), pin=resolved.spec.layout.pin)
        with ExitStack() as stack, _told(folder, resolved, rank):
            joined = join_from_environment(
                run_facts(resolved),
                deadline_s=resolved.spec.layout.deadline_s,
                tell=partial(_tell, folder, resolved, rank),
                tell_late=partial(_tell_late, folder, resolved, rank),
                hear_links=LinkWatch([each for each, _ in resolved_sides(folder, resolved)]).hear,
            )
            ranks, watchdog = stack.enter_context(joined)
            fence = stack.enter_context(_sole_owner(folder, ranks))
            _train(
                folder,
                resolved,
                ranks,
                quiet=args.quiet,
                proves=not args.no_proof,
                watchdog=watchdog,
                fence=fence,
            )
    except EquipoiseError as error:
        _complain(str(error))
        return error.exit_code
    return 0


def _complain(text: str) -> None:
    """Write to stderr, which may be a file on a disk that is full."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """End at once: nothing of the run is open any more, and destructors of C++ threads may abort.

    One rank in some hundreds died so after its last step had been saved ("terminate called
    without an active exception", torch 2.13 with gloo), and its run was reported as failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def import_ahead() -> None:
    """Import what a first step would: torch's compiler, which optimizers load (torch 2.13)."""
    importlib.import_module("torch._dynamo")


def run_and_leave() -> NoReturn:
    """Run one rank, and end this process with the exit code of what happened."""
    try:
        _leave(main())
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        _leave(1)


if __name__ == "__main__":
    run_and_leave()
