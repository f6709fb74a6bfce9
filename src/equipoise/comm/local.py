"""Run a function on real ranks of this machine: gloo processes, started in tenths of a second.

Why
    Checking a layout needs real ranks but no launcher. A fork server with torch loaded starts
    eight of them in 0.3 s, where new interpreters take 20 s. Ranks on devices are new ones all the
    same: CUDA that a server has touched does not survive a fork.

Kept true (tests/multi/comm/test_local.py)
    A rank that raises, dies or hangs is named, and no rank outlives the call.
"""

import gc
import multiprocessing
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from equipoise.base.errors import EquipoiseError, FaultError
from equipoise.comm.group import Ranks, join
from equipoise.comm.meet import serve_store

Result = TypeVar("Result")

Process = ForkServerProcess | SpawnProcess

_HOST = "127.0.0.1"

_JOINED = "joined/"
"""Keys of ranks that have connected to all: none leaves before, or the others could not."""

_SLOW_TO_LOAD = ("equipoise.", "torch.distributed.", "transformers.", "peft.", "accelerate.")
"""Packages that the fork server loads once, if this process has them: seconds for each rank."""


def _serve(
    pipe: Connection,
    port: int,
    rank: int,
    devices: tuple[torch.device, ...],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # a collection would touch, and so copy, what all forks share
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(_HOST, port, is_master=False)
        with join(store, rank, len(devices), devices[rank]) as ranks:
            store.set(f"{_JOINED}{rank}", "1")
            # Reported here, before the connection closes and the peers fail because of it.
            pipe.send_bytes(_call(function, ranks, arguments))
            with suppress(RuntimeError):  # whoever died on its way is reported, not waited for
                store.wait([f"{_JOINED}{each}" for each in range(len(devices))])
    except BaseException:  # the parent must hear of every end, whatever the cause
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
    pipe.close()


def _call(function: Callable[..., Any], ranks: Ranks, arguments: tuple[Any, ...]) -> bytes:
    """The pickled answer of a rank: its kind and its value."""
    try:
        return pickle.dumps(("done", function(ranks, *arguments)))
    except EquipoiseError as error:
        return pickle.dumps(("known", error))
    except BaseException:
        return pickle.dumps(("failed", traceback.format_exc()))


def run_ranks(
    world: int,
    function: Callable[..., Result],
    *arguments: Any,
    timeout_s: float = 600.0,
    devices: Sequence[torch.device] | None = None,
    fresh: bool = False,
) -> list[Result]:
    """Call ``function(ranks, *arguments)`` on ``world`` ranks; their results in order.

    Args:
        world: Number of processes.
        function: Importable function; the first argument is its ``Ranks``.
        arguments: Picklable arguments, the same on every rank.
        timeout_s: The longest wait for any answer [s].
        devices: What each computes on, over NCCL if that is CUDA; the CPU unless given.
        fresh: Whether each is a new interpreter, as ranks on CUDA devices must be.

    Raises:
        EquipoiseError: raised by a rank, unchanged.
        FaultError: a rank failed otherwise, died or did not answer; with its traceback.
    """
    places = tuple(devices or [torch.device("cpu")] * world)
    make_process = _process_maker(fresh=fresh)
    # Kept here to the end. A store in a file would be looked at every 10 ms, for every group.
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = serve_store(listener)
    pipes: list[Connection] = []
    processes: list[Process] = []
    for rank in range(world):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = make_process(
            target=_serve,
            args=(sender, port, rank, places, function, arguments),
            daemon=True,
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, processes, timeout_s)
    finally:
        for process in processes:
            process.kill()  # a rank may ignore SIGTERM
            process.join()
        del store


def _process_maker(*, fresh: bool) -> Callable[..., Process]:
    """Makes a rank's process: a fork of a server with torch loaded, or a new interpreter."""
    if fresh:
        return multiprocessing.get_context("spawn").Process
    context = multiprocessing.get_context("forkserver")
    # The server keeps what its first call loads: what is loaded here, and what a rank's first
    # DTensor imports.
    loaded = [name for name in sys.modules if name.startswith(_SLOW_TO_LOAD)]
    context.set_forkserver_preload([*loaded, "torch._dynamo"])
    return context.Process


def _last_word(process: Process) -> str:
    """Describe a process that closed its pipe without an answer."""
    process.join()
    code = process.exitcode or 0
    if code < 0:
        return f"The process was ended by {signal.Signals(-code).name}."
    return f"The process left with code {code} and without an answer."


def _collect(pipes: list[Connection], processes: list[Process], timeout_s: float) -> list[Any]:
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
            except EOFError:  # a death is the cause; its peers' errors are not
                faults.insert(0, (rank, _last_word(processes[rank])))
                continue
            if state == "known":
                raise value
            if state == "failed":
                faults.append((rank, value))
            results[rank] = value
    if faults:
        rank, text = faults[0]
        raise FaultError(f"Rank {rank} of {len(pipes)} failed.\n{text}")
    return results
