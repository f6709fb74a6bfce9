"""A rank other than 0: a process that does what rank 0 says until its pipe closes."""

import contextlib
import json
import os
import signal
import socket
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from equipoise.base.errors import EquipoiseError
from equipoise.serve.engine.jit import lock_without_name
from equipoise.serve.engine.pool import PoolSizes
from equipoise.serve.longctx.calibrate import measure
from equipoise.serve.longctx.mail import RankMail
from equipoise.serve.longctx.message import read_work
from equipoise.serve.longctx.part import RankPart

WEIGHTS = "decoder.pt"


def work(
    pipe: Connection,
    weights: Path,
    rank: int,
    ends: dict[int, socket.socket],
    sizes: PoolSizes,
    threads: int,
    deadline_s: float,
) -> None:
    """Serve as a rank.

    Args:
        pipe: Messages from rank 0, and answers; when it closes, the rank ends.
        weights: The whole decoder, shared between ranks by its file's pages.
        rank: This one, 1 or more.
        ends: Of its connections to the others, by rank.
        sizes: Of the pool.
        threads: That compute.
        deadline_s: Longest wait for another rank [s].
    """
    # Ctrl-C and SIGTERM drain the server, which ends its ranks: they must not get what its whole
    # group is sent, by a terminal, ``timeout`` or a supervisor.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock_without_name()  # ranks are killed, by whoever or by rank 0
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            decoder = torch.load(weights, mmap=True, weights_only=False)  # written by rank 0
            pool = sizes.allocate(decoder)
            pipe.send_bytes(b"")
            mail = RankMail(rank, ends, deadline_s=deadline_s)
            part = RankPart(decoder, pool, mail)
            while True:
                _obey(pipe, part)
        except EOFError:
            raise
        except EquipoiseError as error:
            pipe.send_bytes(str(error).encode())
        except Exception as error:
            traceback.print_exc()
            pipe.send_bytes(f"rank {rank} failed with {type(error).__name__}".encode())


def _obey(pipe: Connection, part: RankPart) -> None:
    message = pipe.recv_bytes()
    if message == b"measure":
        measure(part)
    elif message == b"counts":
        pipe.send_bytes(json.dumps(part.counts()).encode())
    else:
        part.run(read_work(message))
