"""Real ranks on this machine for a function: processes over gloo, started in tenths of a second.

Why
    Checking a layout wants real ranks and no launcher. A fork server that has torch loaded
    starts eight of them in 0.3 s, where fresh interpreters take 20 s.
"""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from equipoise.base.errors import EquipoiseError, FaultError
from equipoise.comm.group import join

Result = TypeVar("Result")


def _serve(
    pipe: Connection,
    folder: str,
    rank: int,
    world: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        with join(store, rank, world, torch.device("cpu")) as ranks:
            answer = pickle.dumps(("done", function(ranks, *arguments)))
    except EquipoiseError as error:
        answer = pickle.dumps(("known", error))
    except BaseException:  # the parent must hear of every end, whatever it was
        answer = pickle.dumps(("failed", traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()


def run_ranks(
    world: int, function: Callable[..., Result], *arguments: Any, timeout_s: float = 600.0
) -> list[Result]:
    """Call ``function(ranks, *arguments)`` on ``world`` gloo ranks; their results in order.

    Args:
        world: Number of processes.
        function: Importable function; the first argument is its ``Ranks``.
        arguments: Picklable arguments, the same on every rank.
        timeout_s: The longest wait for any answer [s].

    Raises:
        EquipoiseError: what a rank raised of that kind, as it was.
        FaultError: a rank failed otherwise, died or did not answer; with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["equipoise.comm.local"])
    with tempfile.TemporaryDirectory(prefix="equipoise-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(sender, folder, rank, world, function, arguments),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()  # a rank may have its own mind about SIGTERM
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    faults: list[tuple[int, str]] = []
    while waiting:
        ready = wait(list(waiting), timeout_s if not faults else 2.0)
        if not ready and faults:
            break
        if not ready:
            raise FaultError(
                f"Ranks {sorted(waiting.values())} gave no answer within {timeout_s:.0f} s."
            )
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                state, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr] # noqa: S301
            except EOFError:
                state, value = "failed", "The process died without a word."
            if state == "known":
                raise value
            if state == "failed":
                faults.append((rank, value))
            results[rank] = value
    if faults:
        rank, text = faults[0]
        raise FaultError(f"Rank {rank} of {len(pipes)} failed.\n{text}")
    return results
