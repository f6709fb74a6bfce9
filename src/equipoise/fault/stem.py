"""The program of a stem: import what ranks need once, and fork the ranks of each start.

What it decides
    A stem has one thread and nothing open but the line to its launcher, so its forks hold nothing
    that a fresh process would not. An agent opens the store where its ranks meet and waits for
    their ends, which the kernel reports at once. If a signal has ended a rank, the
    others are killed: they wait for it in a collective. If a rank has ended by itself, the others
    get some seconds to leave word of what they met.

    A rank that a signal has ended stays to be read until all have ended, so that its launcher sees
    by which (``launch.ends``).

Kept true (tests/unit/launch/test_stem.py, tests/multi/launch/test_launch.py)
    A program that cannot be imported fails in each rank, with its traceback in the rank's log.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from equipoise.comm.meet import serve_store
from equipoise.launch.agent import GRACE_S, STEM, end_with_parent
from equipoise.launch.leave import leave, run_and_leave
from equipoise.launch.stem import MESSAGE_BYTES, GangOrder

_FAILED_GRACE_S = 5.0
"""Time for ranks to leave word after another has failed [s]; they wait for it in vain."""

_LOOK_S = 0.01


def main() -> NoReturn:
    """Import the program of the first argument, then fork what the launcher asks for."""
    program, door = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    call_process([sys.executable, *STEM, program])
    with suppress(Exception):  # each rank tries again, and says why it cannot
        for name in (program, *importlib.import_module(program).AHEAD):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, what all forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents here
    parent = os.getpid()
    while True:
        words, files, *_ = socket.recv_fds(door, MESSAGE_BYTES, 2)
        if not words:  # the launcher is gone
            os._exit(0)
        if os.fork():
            for file in files:
                os.close(file)
            continue
        try:
            door.close()
            log, line = files
            _be_agent(program, GangOrder(**json.loads(words)), log, line, parent)
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _be_agent(program: str, asked: GangOrder, log: int, line: int, stem: int) -> NoReturn:
    """Be the agent of one start, in a process of its own."""
    end_with_parent()
    if os.getppid() != stem:  # it has ended meanwhile
        os._exit(1)
    os.setsid()
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(asked.environment)
    call_process([sys.executable, *STEM, program, *asked.arguments])
    with socket.socket(fileno=line) as told:
        told.send(f"begun {os.getpid()}".encode())
        try:
            agent = _Agent(program, asked, told)
        except OSError as error:  # a port that is taken, a disk that is full: it would come again
            told.send(f"refused {error.errno}".encode())
            leave(1)  # and its ranks with it
        code = agent.wait()
        told.send(f"ended {code}".encode())
    leave(code)


class _Agent:
    """The ranks of one start, and their store."""

    def __init__(self, program: str, asked: GangOrder, line: socket.socket) -> None:
        self._left: dict[int, int] = {}
        """Rank of each process that was not yet read."""
        self._failed: list[tuple[int, int, int]] = []
        """Rank, exit code and process of those that have failed, in that order."""
        signal.signal(signal.SIGTERM, self._pass_on)
        Path(asked.logs).mkdir(exist_ok=True)  # without its parents: a run's folder may be gone
        logs = Path(tempfile.mkdtemp(prefix="start-", dir=asked.logs))
        with socket.create_server(("127.0.0.1", asked.port)) as listener:
            port, agent = listener.getsockname()[1], os.getpid()
            for rank in range(asked.ranks):
                (logs / str(rank)).mkdir()
                with (logs / str(rank) / "stderr.log").open("wb") as errors:
                    process = os.fork()
                    if not process:
                        try:
                            line.close()
                            listener.close()
                            os.dup2(errors.fileno(), 2)
                            _be_rank(program, asked, rank, port, agent)
                        except BaseException:
                            traceback.print_exc()
                        os._exit(1)
                self._left[process] = rank
            self._store = serve_store(listener)

    def wait(self) -> int:
        """Wait until all ranks have ended; whether any has failed, as an exit code."""
        while self._left and not self._failed:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_pid in self._left:
                self._note(ended)
        if not self._failed:
            return 0
        self._report(0)  # before others end by this agent's hand, and none can tell who was first
        is_killed = self._failed[0][1] < 0
        self._end_others(0.0 if is_killed else _FAILED_GRACE_S)
        for at in range(1, len(self._failed)):
            self._report(at)
        return 1

    def _report(self, at: int) -> None:
        rank, code, process = self._failed[at]
        sys.stderr.write(f"rank      : {rank}\n  exitcode  : {code} (pid: {process})\n")
        sys.stderr.flush()

    def _note(self, ended: os.waitid_result) -> None:
        rank, status = self._left.pop(ended.si_pid), ended.si_status
        if ended.si_code != os.CLD_EXITED:
            self._failed.append((rank, -status, ended.si_pid))
            return
        os.waitpid(ended.si_pid, 0)
        if status:
            self._failed.append((rank, status, ended.si_pid))

    def _end_others(self, grace_s: float) -> None:
        """End the ranks that are left, and wait until they are gone."""
        until = time.monotonic() + grace_s
        if grace_s:
            self._signal(signal.SIGTERM)
        is_killing = False
        while self._left:
            if not is_killing and time.monotonic() >= until:
                is_killing = True
                self._signal(signal.SIGKILL)
            for process in [*self._left]:
                wish = os.WEXITED | os.WNOWAIT | (0 if is_killing else os.WNOHANG)
                ended = os.waitid(os.P_PID, process, wish)
                if ended is not None:
                    self._note(ended)
            if self._left:
                time.sleep(_LOOK_S)

    def _signal(self, number: int) -> None:
        for process in [*self._left]:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let ranks finish their step and save; those that do not are ended."""
        del frame
        self._signal(number)
        later = threading.Timer(GRACE_S, self._signal, (signal.SIGKILL,))
        later.daemon = True
        later.start()


def _be_rank(program: str, asked: GangOrder, rank: int, port: int, agent: int) -> NoReturn:
    """Be a rank, in a process of its own."""
    end_with_parent()
    if os.getppid() != agent:  # it has ended meanwhile
        os._exit(1)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(asked.ranks),
        LOCAL_WORLD_SIZE=str(asked.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="equipoise",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun sets it
    words = [sys.executable, "-u", "-m", program, *asked.arguments]
    call_process([*words, f"RANK={rank}"])
    sys.argv = [program, *asked.arguments]
    run_and_leave(importlib.import_module(program).main)


def call_process(words: Sequence[str]) -> None:
    """Show these words as this process's command, as far as there is room for them.

    A fork has its parent's command, so nobody could tell ranks apart. The kernel shows the memory
    in which the arguments of the process lay when it began.
    """
    with suppress(OSError, ValueError, IndexError):
        _, _, after_name = Path("/proc/self/stat").read_text().rpartition(")")
        begin, end = map(int, after_name.split()[45:47])  # proc_pid_stat(5), fields 48 and 49
        text = b"".join(word.encode() + b"\0" for word in words)
        if 0 < len(text) <= end - begin:
            ctypes.memset(begin, 0, end - begin)
            ctypes.memmove(begin, text, len(text))


if __name__ == "__main__":
    main()
