"""Start a run's ranks on this machine under torchrun's elastic agent, and report how they ended.

What it decides
    Ctrl-C reaches only this process: it writes the file ``stop`` to the run's folder, which
    rank 0 sees at its next step, so all ranks finish the step, save and exit. A second one ends
    the agent at once, and the ranks with it. When a rank dies, the agent ends the others, and what
    happened is the ranks' last words (``launch.last_words``) or the agent's report, in one
    sentence. What follows, ``fault.policy`` decides: the ranks may be started again.

Kept true (tests/multi/launch/test_launch.py, tests/multi/fault/test_recover.py)
    A killed rank is named; the next start resumes; SIGINT saves and exits 0.
"""

import ctypes
import dataclasses
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import (
    EquipoiseError,
    FaultError,
    HungError,
    LayoutError,
    NonFiniteError,
)
from equipoise.launch.agent import WORKER, agent_command, whole_environment
from equipoise.launch.last_words import VARIABLE, Words, listen

LOCK = ".lock"
"""File of a run's folder that rank 0 holds locked while it runs."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """Ranks to start: the folder of a resolved run, how many, and how loud."""

    folder: Path
    ranks: int
    quiet: bool
    port: int
    proves: bool = True
    """Whether ranks on devices that are not CPUs prove the layout before the first step."""


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
            raise LayoutError(
                f"Port {port} cannot be used ({error.strerror}). Choose another with --port, or "
                f"omit --port to take any free one."
            ) from error


def require_free_folder(folder: Path) -> None:
    """Refuse the folder of a running run, before anything in it is touched.

    Raises:
        LayoutError: rank 0 of a run holds the folder.
    """
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError as error:
        raise LayoutError(folder_taken(folder)) from error
    except OSError:  # whoever writes to it reports whether that works
        return


def folder_taken(folder: Path) -> str:
    """The message for a second run on the same folder."""
    return (
        f"Another run is writing to {folder}. Wait until it ends, stop it, or choose another "
        f"folder with --out."
    )


def folder_unlocked(folder: Path, error: OSError) -> str:
    """The message for a folder that cannot be locked although nobody holds it."""
    return (
        f"{folder / LOCK} cannot be locked ({error.strerror}), so nothing would keep a second run "
        f"from writing to the same journal. Choose another folder with --out, or mount this one "
        f"with locks (NFS: without nolock; Lustre: with flock)."
    )


def _command(launch: Launch) -> list[str]:
    rendezvous = ["--standalone"]
    if launch.port:
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{launch.port}",
            "--rdzv-id=equipoise",
        ]
    return [
        *agent_command(sys.executable, launch.ranks, *rendezvous),
        "--local-addr=127.0.0.1",
        f"--log-dir={launch.folder / 'logs'}",
        "--redirects=2",
        "--monitor-interval=0.1",
        *WORKER,
        str(launch.folder),
        *(["--quiet"] if launch.quiet else []),
        *([] if launch.proves else ["--no-proof"]),
    ]


def end_with_parent() -> None:
    """Runs in the agent before it starts: a killed parent ends it at once, and so its ranks.

    With a signal that they may handle, ranks would finish and save a step while the same command,
    started again, finds the folder taken.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """How ranks ended before their work was done."""

    kind: str
    """``killed``, ``failed``, ``hung`` or ``non-finite``; ``refused`` for any other error of ours,
    which would come again."""
    sentence: str
    """Who ended and of what."""
    rank: int | None = None
    """None where nobody knows."""
    step: int | None = None
    """The last step that they had finished since they were started; None before any."""
    advice: str = ""
    more: str = ""
    """A traceback, or the agent's last lines."""
    exit_code: int = FaultError.exit_code

    def error(self, reason: str = "") -> EquipoiseError:
        """What to raise where nothing follows, and why nothing does."""
        words = " ".join(filter(None, (self.sentence, reason, self.advice)))
        text = f"{words}\n{self.more}" if self.more else words
        is_fault = self.exit_code == FaultError.exit_code
        error = FaultError(text) if is_fault else EquipoiseError(text)
        error.exit_code = self.exit_code
        return error


class LocalRanks:
    """Starts ranks on this machine, once or again, while the block lasts, and passes Ctrl-C on."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.asked = 0
        """How often the user has asked to stop."""
        self._is_quiet = is_quiet
        self._starts = 0
        self._agent: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked += 1
        if self.asked == 1 and not self._is_quiet:
            sys.stderr.write(
                "\nStopping after this step and saving. Ctrl-C again to end at once.\n"
            )
        if self._agent is not None:
            self._pass_on(self._agent)

    def _pass_on(self, agent: "subprocess.Popen[bytes]") -> None:
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

    def run(self, launch: Launch) -> RanksEnd | None:
        """Start the ranks and wait for their end; None if their work was done.

        Raises:
            FaultError: logs cannot be written.
            KeyboardInterrupt: the user did not wait for the last step to be saved.
        """
        self._folder = launch.folder
        if not self._starts:
            with suppress(OSError):
                (launch.folder / "stop").unlink(missing_ok=True)
        logs = launch.folder / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            log = (logs / "agent.log").open("a+b" if self._starts else "w+b")
        except OSError as error:
            raise FaultError(
                f"The run's logs cannot be written to {logs} ({explain_refusal(error, logs)}). "
                f"Free some space or choose another folder with --out."
            ) from error
        self._starts += 1
        with log, listen(self._show) as (address, heard):
            begin = log.seek(0, os.SEEK_END)
            self._agent = subprocess.Popen(
                _command(launch),
                stderr=log,
                env=whole_environment() | {VARIABLE: address},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            if self.asked:  # since the last start, when there was nobody to pass it on to
                self._pass_on(self._agent)
            code = self._agent.wait()
            self._agent = None
            log.seek(begin)
            agent_words = log.read().decode(errors="replace")
        if self.asked > 1:
            raise KeyboardInterrupt
        if not code:
            return None
        return dataclasses.replace(_explain(launch, agent_words, heard.errors), step=heard.step)


RESUME = "Run the same command again to resume from the last checkpoint."

_KINDS = {HungError.__name__: "hung", NonFiniteError.__name__: "non-finite"}
"""Kinds of our own errors, by their classes' names; any other would come again."""

_LOST = re.compile(r"peer|Broken pipe|remote process exited|Connection reset|recvValue failed")
"""What a rank says of whom it has lost; the cause is elsewhere."""


def _explain(launch: Launch, log: str, faults: Sequence[Words]) -> RanksEnd:
    own = [event for event in faults if event["name"] == "error"]
    killed = _killed(launch, log)
    for event in own:
        message, kind = str(event["message"]), _KINDS.get(str(event["type"]), "refused")
        if killed is not None and kind == "refused" and _LOST.search(message):
            continue  # a save, for instance, that the killed rank did not finish
        sentence, mark, advice = message.partition(" Run the same command again")
        code = int(str(event["exit_code"]))
        return RanksEnd(kind, sentence, event["rank"], None, f"{mark}{advice}".strip(), "", code)
    if killed is not None:
        return killed
    # A rank whose peer died reports a broken connection; the first other error is the cause.
    for event in [*(e for e in faults if not _LOST.search(str(e["message"]))), *faults]:
        message = (str(event["message"]).strip().splitlines() or [str(event["type"])])[0]
        sentence = f"Rank {event['rank']} of {launch.ranks} failed: {event['type']}: {message}"
        trace = str(event["traceback"]).rstrip()
        return RanksEnd("failed", sentence, event["rank"], None, RESUME, trace)
    tail = "\n".join(log.strip().splitlines()[-15:])
    return RanksEnd("killed", "The ranks ended without a word.", None, None, RESUME, tail)


def _killed(launch: Launch, log: str) -> RanksEnd | None:
    """The first rank that a signal ended, other than the agent's own, by the agent's report."""
    pattern = r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)"
    for rank, number, pid in re.findall(pattern, log):
        if int(number) != signal.SIGTERM:
            name = signal.Signals(int(number)).name
            sentence = (
                f"Rank {rank} of {launch.ranks} (pid {pid}) was ended by {name}; it left no "
                f"traceback."
            )
            return RanksEnd("killed", sentence, int(rank), None, RESUME)
    return None
