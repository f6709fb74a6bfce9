"""Start a run's ranks on this machine, and report how they ended.

What it decides
    Ctrl-C reaches only this process: it writes the file ``stop`` to the run's folder, which
    rank 0 sees at its next step, so all ranks finish the step, save and exit. A second one ends
    the agent at once, and the ranks with it; so does a rank that a signal has ended
    (``launch.ends``). When a rank ends otherwise, the agent ends the others, and what happened is
    the ranks' last words (``launch.last_words``) or the agent's report, in one sentence. What
    follows, ``fault.policy`` decides: the ranks may be started again.

Kept true (tests/multi/launch/test_launch.py, tests/multi/fault/test_recover.py)
    A killed rank is named; the next start resumes; SIGINT saves and exits 0.
"""

import dataclasses
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import (
    FaultError,
    LayoutError,
)
from equipoise.base.read import require_file
from equipoise.launch.explain import (
    RESUME,
    RanksEnd,
    explain,
    folder_gone,
    is_gone,
    port_taken,
    refuse,
)
from equipoise.launch.gang import Launch, RankGang
from equipoise.launch.spares import Spares, SpareState, has_room
from equipoise.launch.stem import Stem, StemAgent
from equipoise.launch.still import Note, read_traceback

LOCK = ".lock"
"""File of a run's folder that rank 0 holds locked while it runs."""

_LOOK_S = 0.25
"""How often it is looked whether ranks of the next start are due [s]."""


def require_free_port(port: int) -> None:
    """Refuse a port that is in use or that this user cannot use.

    Raises:
        LayoutError: the port cannot be used.
    """
    if not 0 < port < 65536:
        raise LayoutError(
            f"--port {port} is not a port. Choose one from 1 to 65535, or omit --port to take any "
            f"free one."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LayoutError(port_taken(port, error)) from error


def require_free_folder(folder: Path) -> None:
    """Refuse the folder of a running run, before anything in it is touched.

    Raises:
        LayoutError: rank 0 of a run holds the folder, or a pipe, a device or a link that leads
            nowhere is in the lock's place.
    """
    try:
        require_file(folder / LOCK)
    except OSError as error:
        if error.errno != errno.EINVAL and not _leads_nowhere(folder / LOCK, error):
            return  # whoever writes to it reports why that does not work
        raise LayoutError(folder_unlocked(folder, error)) from error
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LayoutError(folder_taken(folder)) from error
    except OSError:  # as above
        return


@contextmanager
def claim_folder(folder: Path) -> Iterator[None]:
    """Keep a second command from a folder, from what its ranks will read until they have ended.

    Rank 0 holds the lock only while it runs. Before, and between two starts, another command
    could write anew what ranks read. Where a folder cannot be locked, rank 0's lock has to do.

    Raises:
        LayoutError: another command has claimed it.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LayoutError(folder_taken(folder)) from error
        yield


def folder_taken(folder: Path) -> str:
    """The message for a second run on the same folder."""
    return (
        f"Another run is writing to {folder}. Wait until it ends, stop it, or choose another "
        f"folder with --out."
    )


def folder_unlocked(folder: Path, error: OSError) -> str:
    """The message for a folder that cannot be locked although nobody holds it."""
    lock = folder / LOCK
    if _leads_nowhere(lock, error):
        return (
            f"{lock} is a link to {lock.readlink()}, which leads to no file, so nothing can be "
            "locked. Remove the link, or choose another folder with --out."
        )
    return (
        f"{folder / LOCK} cannot be locked ({error.strerror}), so nothing would keep a second run "
        f"from writing to the same journal. Choose another folder with --out, or mount this one "
        f"with locks (NFS: without nolock; Lustre: with flock)."
    )


def _leads_nowhere(path: Path, error: OSError) -> bool:
    """Whether a path could not be opened because it is a link without a file at its end."""
    return error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink()


def _note_nothing(sentence: str, processes: list[int], stopped_s: float) -> None:
    """Leave no record."""


class LocalRanks:
    """Starts ranks on this machine, once or again, while the block lasts, and passes Ctrl-C on."""

    def __init__(self, *, is_quiet: bool, note: Note = _note_nothing) -> None:
        self.asked = 0
        """How often the user has asked to stop."""
        self._is_quiet, self._note = is_quiet, note
        self._starts = 0
        self._gang: RankGang | None = None
        self._dying: RankGang | None = None
        self._spares: Spares | None = None
        self._stem: Stem | None = None
        self._folder = Path()

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._dismiss_spares()
        if self._stem is not None:
            self._stem.close()
        self.see_off()

    def see_off(self) -> None:
        """Wait until the ranks of the last start are gone: two gangs never work at once."""
        if self._dying is not None:
            self._dying.wait_until_gone()
            self._dying = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked += 1
        if self.asked == 1 and not self._is_quiet:
            sys.stderr.write(
                "\nStopping after this step and saving. Ctrl-C again to end at once.\n"
            )
        if self._gang is not None:
            self._pass_on(self._gang.agent)

    def _pass_on(self, agent: "StemAgent | subprocess.Popen[bytes]") -> None:
        if self.asked > 1:
            agent.kill()
            return
        try:
            (self._folder / "stop").touch()
        except OSError:  # the disk is full or the folder is gone: its ranks will notice themselves
            agent.terminate()

    def _show(self, sentence: str) -> None:
        if not self._is_quiet:
            sys.stderr.write(f"{sentence}\n")

    def _show_stopped(self, sentence: str, processes: list[int], stopped_s: float) -> None:
        self._show(sentence)
        self._note(sentence, processes, stopped_s)

    def run(self, launch: Launch) -> RanksEnd | None:
        """Start the ranks and wait for their end; None if their work was done.

        Ranks that are ready take their places; else others are started.

        Raises:
            FaultError: the folder is gone, or logs cannot be written.
            KeyboardInterrupt: the user did not wait for the last step to be saved.
        """
        self._folder = launch.folder
        self.see_off()
        if is_gone(launch.folder):
            raise FaultError(folder_gone(launch.folder))
        if not self._starts:
            with suppress(OSError):
                (launch.folder / "stop").unlink(missing_ok=True)
        self._gang = gang = self._ready_gang(launch) or self._new_gang(launch)
        if self.asked:  # since the last start, when there was nobody to pass it on to
            self._pass_on(gang.agent)
        code = self._wait(gang, launch)
        self._gang, self._dying = None, gang
        agent_words = gang.close()
        if self.asked > 1:
            raise KeyboardInterrupt
        if not code:
            return None
        if isinstance(gang.agent, StemAgent) and gang.agent.refused is not None:
            if is_gone(launch.folder):
                raise FaultError(folder_gone(launch.folder)) from gang.agent.refused
            return refuse(launch, gang.agent.refused)
        traces = [read_traceback(rank, gang.logs, gang.earlier) for rank in range(launch.ranks)]
        ended = explain(launch, agent_words, gang.heard.errors, gang.ends.first, traces)
        if gang.starts and not gang.stopped.processes:  # it hung before there was a rank
            ((sentence, stack),) = gang.starts
            return RanksEnd("hung", sentence, advice=RESUME, more=stack)
        if gang.starts and ended.kind == "hung":
            sentence = " ".join([ended.sentence, *(each for each, _ in gang.starts)])
            stacks = "\n".join(filter(None, (each for _, each in gang.starts)))
            ended = dataclasses.replace(ended, sentence=sentence, more=stacks)
        return dataclasses.replace(ended, step=gang.heard.step)

    def _new_gang(self, launch: Launch) -> RankGang:
        logs = launch.folder / "logs"
        try:
            logs.mkdir(exist_ok=True)  # without its parents: nothing may be made in a run's place
            log = logs / "agent.log"
            if not self._starts:
                log.write_bytes(b"")
            self._starts += 1
            stem = self._ready_stem(launch.program, log)
            return RankGang(launch, self._show, self._show_stopped, log, "a+b", stem)
        except OSError as error:
            if is_gone(launch.folder):
                raise FaultError(folder_gone(launch.folder)) from error
            raise FaultError(
                f"The run's logs cannot be written to {logs} ({explain_refusal(error, logs)}). "
                f"Free some space or choose another folder with --out."
            ) from error

    def _ready_stem(self, program: str, log: Path) -> Stem:
        """The one of the last start, or another if that has ended."""
        if self._stem is not None and not self._stem.is_alive:
            self._stem.close()
            self._stem = None
        if self._stem is None:
            with log.open("ab") as errors:
                self._stem = Stem(program, errors.fileno())
        return self._stem

    @property
    def spares(self) -> SpareState:
        """Whether ranks of the next start are ready, on their way, or neither."""
        return "none" if self._spares is None else self._spares.state

    def wait_for_spares(self, most_s: float) -> bool:
        """Wait until ranks of the next start are ready; whether they came in time."""
        if self._spares is None:
            return False
        return self._spares.wait(most_s, lambda: self.asked > 0)

    def _ready_gang(self, launch: Launch) -> RankGang | None:
        spares, gang = self._spares, None
        if spares is not None and spares.state == "ready":
            gang = spares.take(launch.ranks)
        if gang is None:
            self._dismiss_spares()
        else:
            self._starts += 1
        self._spares = None
        return gang

    def _dismiss_spares(self) -> None:
        if self._spares is not None:
            self._spares.dismiss()
            self._spares = None

    def _wait(self, gang: RankGang, launch: Launch) -> int:
        """Wait for the agent's end; ranks of the next start are started in the meantime.

        That is done here, not in a thread: they end with the thread that has started them.
        """
        gang.begin()
        kept, since = launch.spares, None
        try:
            ended = None if kept is None else os.pidfd_open(gang.agent.pid)
        except OSError:  # the kernel is older than Linux 5.3
            ended = None
        while kept is not None and ended is not None:
            if select.select([ended], [], [], _LOOK_S)[0]:
                break
            if gang.heard.step is None or self.asked:
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since < kept.after_s:
                continue
            if not kept.needs_room or has_room(launch.ranks):
                log = launch.folder / "logs" / f"agent-{self._starts + 1}.log"
                with suppress(OSError):  # the disk is full: the next start says so
                    self._spares = Spares(launch, self._show, self._show_stopped, log)
            break
        if ended is not None:
            os.close(ended)
        while True:
            # The kernel may give a signal to any thread, and this one handles it once it wakes up.
            with suppress(subprocess.TimeoutExpired):
                return gang.agent.wait(_LOOK_S)
