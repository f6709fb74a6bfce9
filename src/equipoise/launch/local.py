"""Start a run's ranks on this machine under torchrun's elastic agent, and report how they ended.

What it decides
    Ctrl-C reaches only this process: it writes the file ``stop`` to the run's folder, which
    rank 0 sees at its next step, so all ranks finish the step, save and exit. A second one ends
    the agent at once, and the ranks with it. When a rank dies, the agent ends the others, and the
    error is the ranks' last words (``launch.last_words``) or the agent's report, in one sentence.

Kept true (tests/multi/launch/test_launch.py)
    A killed rank is named; the next start resumes; SIGINT saves and exits 0.
"""

import ctypes
import fcntl
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import EquipoiseError, FaultError, LayoutError
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


@contextmanager
def _stopping(
    process: "subprocess.Popen[bytes]", folder: Path, quiet: bool
) -> Iterator[Callable[[], bool]]:
    """Pass the user's Ctrl-C on; yields whether to end at once."""
    asked = 0

    def ask(number: int, frame: FrameType | None) -> None:
        del number, frame
        nonlocal asked
        asked += 1
        if asked > 1:
            process.kill()
            return
        try:
            (folder / "stop").touch()
        except OSError:  # the disk is full or the folder is gone: its ranks will notice themselves
            process.terminate()
        if not quiet:
            sys.stderr.write(
                "\nStopping after this step and saving. Ctrl-C again to end at once.\n"
            )

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked > 1
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run_local(launch: Launch) -> None:
    """Start the ranks and wait for their end.

    Raises:
        EquipoiseError: with the words and the exit code of the rank that failed first.
        KeyboardInterrupt: the user did not wait for the last step to be saved.
    """
    with suppress(OSError):
        (launch.folder / "stop").unlink(missing_ok=True)
    logs = launch.folder / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        log = (logs / "agent.log").open("w+b")
    except OSError as error:
        raise FaultError(
            f"The run's logs cannot be written to {logs} ({explain_refusal(error, logs)}). Free "
            f"some space or choose another folder with --out."
        ) from error
    with log, listen() as (address, heard):
        process = subprocess.Popen(
            _command(launch),
            stderr=log,
            env=whole_environment() | {VARIABLE: address},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        with _stopping(process, launch.folder, launch.quiet) as is_cut_short:
            code = process.wait()
        log.seek(0)
        agent_words = log.read().decode(errors="replace")
    if is_cut_short():
        raise KeyboardInterrupt
    if code:
        raise _explain(launch, agent_words, heard)


def _explain(launch: Launch, log: str, faults: Sequence[Words]) -> EquipoiseError:
    for event in faults:
        if event["name"] == "error":
            known = EquipoiseError(str(event["message"]))
            known.exit_code = int(str(event["exit_code"]))
            return known
    resume = "Run the same command again to resume from the last checkpoint."
    killed = re.findall(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*-(\d+) \(pid: (\d+)\)", log)
    self_inflicted = {str(signal.SIGTERM.value)}
    for rank, number, pid in killed:
        if number not in self_inflicted:
            name = signal.Signals(int(number)).name
            return FaultError(
                f"Rank {rank} of {launch.ranks} (pid {pid}) was ended by {name}; it left no "
                f"traceback. {resume}"
            )
    # A rank whose peer died reports a broken connection; the first other error is the cause.
    for event in [*(e for e in faults if "peer" not in str(e["message"])), *faults]:
        message = str(event["message"]).strip().splitlines() or [str(event["type"])]
        return FaultError(
            f"Rank {event['rank']} of {launch.ranks} failed: {event['type']}: {message[0]} "
            f"{resume}\n{str(event['traceback']).rstrip()}"
        )
    tail = "\n".join(log.strip().splitlines()[-15:])
    return FaultError(f"The ranks ended without a word. {resume}\n{tail}")
