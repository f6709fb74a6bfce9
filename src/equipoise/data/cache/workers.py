"""Tokenize shards on several cores, in processes that end with their parent.

Kept true (tests/unit/data/cache/test_store.py)
    A worker's death is reported with its exit code; none outlives its parent by more than a shard.
"""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from equipoise.base.errors import DataError
from equipoise.data.cache.shard import Shard
from equipoise.data.cache.shard_tokens import tokenize_shard
from equipoise.data.chat.encode import Recipe
from equipoise.data.progress import Progress

# Starts a worker. multiprocessing's spawn would import the caller's main file again, and
# fail for a script without a main guard or one read from standard input.
_WORKER = (
    "import sys; sys.path[:] = {path!r}; "
    "from equipoise.data.cache.workers import work; work({handle})"
)


def tokenize_parallel(
    todo: list[tuple[Shard, Path]], recipe: Recipe, progress: Progress, workers: int
) -> None:
    """Deal shards to worker processes, the next one to whichever is free."""
    with ExitStack() as stack:
        crew = {}
        for _ in range(workers):
            connection, process = _hire()
            stack.callback(_dismiss, connection, process)
            crew[connection] = process
            with suppress(BrokenPipeError):  # a dead worker is noticed when its answer is read
                connection.send(recipe)
        waiting = iter(todo)
        busy: dict[Connection, Shard] = {}

        def deal(connection: Connection) -> None:
            if (task := next(waiting, None)) is not None:
                busy[connection] = task[0]
                with suppress(BrokenPipeError):
                    connection.send(task)

        for connection in crew:
            deal(connection)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)  # noqa: S101 - wait() returns what it got
                try:
                    error = ready.recv()
                    if error is not None:
                        raise error
                    progress.advance(busy.pop(ready).size_bytes)
                    deal(ready)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    raise DataError(
                        f"The worker that tokenized {busy[ready].parts[0].name} died with exit "
                        f"code {crew[ready].wait()}; -9 usually means that memory ran out. Run "
                        "again: finished shards are kept."
                    ) from None


def _hire() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    with theirs:
        code = _WORKER.format(path=sys.path, handle=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                # One core each, and no warnings of the library about threads and forks.
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
    return ours, process


def _dismiss(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


def work(handle: int) -> None:
    """Be a worker: tokenize what comes over the pipe until its other end closes.

    The pipe closes when the parent dies, in whatever way, so no worker outlives its parent by
    more than one shard.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with Connection(handle) as parent:
        try:
            encoder = parent.recv().load()
            while True:
                shard, file = parent.recv()
                try:
                    tokenize_shard(shard, encoder, file)
                except Exception as error:
                    parent.send(error)
                else:
                    parent.send(None)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
