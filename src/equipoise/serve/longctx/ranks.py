"""The ranks of an engine: processes that start, obey rank 0, die, and start again.

Why
    A rank that dies takes its part of every sequence with it. The requests whose keys it had
    cannot go on; the server can: all ranks are ended and started anew.

What it decides
    Rank 0 is this process. Whatever goes wrong between ranks, a death, a wait beyond the deadline,
    an error on one of them, ends all of them: afterwards none could know what the others have
    done. Weights are written to a file once, which all ranks map: they have them in common.

    A rank that dies while nothing is computed is missing from that moment on, whoever asks.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from equipoise.base.errors import EquipoiseError, FaultError
from equipoise.serve.engine.fused import ServedDecoder
from equipoise.serve.engine.pool import PoolSizes
from equipoise.serve.engine.request import RanksLostError
from equipoise.serve.longctx.mail import RankMail, connect
from equipoise.serve.longctx.part import RankPart
from equipoise.serve.longctx.worker import WEIGHTS, work

_RETRY_S = 5.0
"""When a client may ask again: ranks start in less."""

_DEATH_S = 0.2
"""How long a process may take to be known as dead after its connection has closed."""


@dataclass(frozen=True, slots=True)
class _Peer:
    rank: int
    process: ForkServerProcess
    pipe: Connection


class ContextRanks:
    """Rank 0's part, and the processes of the others."""

    def __init__(self, decoder: ServedDecoder, sizes: PoolSizes, *, deadline_s: float) -> None:
        """Start all ranks.

        Args:
            decoder: With its weights.
            sizes: Of every rank's pool.
            deadline_s: Longest wait of one rank for another [s].

        Raises:
            RanksLostError: a rank did not start.
            FitError: the memory is not there.
        """
        self._decoder, self._sizes, self._deadline_s = decoder, sizes, deadline_s
        self.pool = sizes.allocate(decoder)
        self._threads = torch.get_num_threads()
        self._room = tempfile.TemporaryDirectory(prefix="equipoise-serve-")
        self._peers: list[_Peer] = []
        self._part: RankPart | None = None
        self._mail: RankMail | None = None
        self._lost: RanksLostError | None = None
        """Why the ranks are gone, until they are back."""
        if sizes.ranks > 1:
            torch.save(decoder, Path(self._room.name) / WEIGHTS)
        try:
            self.part()
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Ranks, this one included."""
        return self._sizes.ranks

    @property
    def pids(self) -> list[int]:
        """Processes of ranks 1 and up."""
        return [peer.process.pid or 0 for peer in self._peers]

    def part(self) -> RankPart:
        """Rank 0's part, once all ranks are there; they are started if they are not.

        Raises:
            RanksLostError: a rank does not start.
        """
        if self._part is None:
            with self._whole("did not start"):
                self._part = self._start()
        return self._part

    @contextlib.contextmanager
    def run(self, message: bytes) -> Iterator[RankPart]:
        """Tell all ranks to do something; the block does rank 0's part.

        Raises:
            RanksLostError: they did not get through; all of them are ended.
        """
        part = self.part()
        with self._whole("was lost"):
            for peer in self._peers:
                peer.pipe.send_bytes(message)
            yield part

    @property
    def missing(self) -> RanksLostError | None:
        """Why not all ranks are there; None if they are. It may be asked from any thread."""
        if self._lost is not None:
            return self._lost
        gone = self._gone()
        return self._loss(f"Rank {gone[0]} of {self.count} was lost. Ask again.") if gone else None

    def restore(self) -> None:
        """Start the ranks again if some are missing.

        Raises:
            RanksLostError: a rank does not start.
        """
        if self._part is not None and (gone := self._gone()):
            self._end(self._loss(self._blame("was lost", FaultError(f"rank {gone[0]} has ended"))))
        self.part()

    def counts(self) -> list[dict[str, Any]]:
        """``RankPart.counts`` of each rank; between iterations."""
        with self.run(b"counts") as part:
            return [part.counts(), *(json.loads(self._hear(peer)) for peer in self._peers)]

    def close(self) -> None:
        """End all ranks, and remove their files."""
        self._end(None)
        self._room.cleanup()
        torch.set_num_threads(self._threads)

    @contextlib.contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            lost = self._loss(self._blame(what, error))
            self._end(lost)
            raise lost from error
        except BaseException:
            self._end(self._loss("The ranks were stopped. Ask again."))
            raise

    def _loss(self, words: str) -> RanksLostError:
        return RanksLostError(words, _RETRY_S)

    def _gone(self) -> list[int]:
        """Ranks whose processes have ended."""
        peers = self._peers  # another thread may end them meanwhile
        ended = wait([each.process.sentinel for each in peers], 0)
        return [each.rank for each in peers if each.process.sentinel in ended]

    def _start(self) -> RankPart:
        sizes, room = self._sizes, Path(self._room.name)
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // sizes.ranks)
        torch.set_num_threads(threads)
        ends = connect(sizes.ranks)
        mail = self._mail = RankMail(0, ends[0], deadline_s=self._deadline_s)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([x for x in sys.modules if x.startswith("equipoise.")])
        try:
            for rank in range(1, sizes.ranks):
                ours, theirs = context.Pipe()
                given = theirs, room / WEIGHTS, rank, ends[rank], sizes, threads, self._deadline_s
                process = context.Process(target=work, args=given, daemon=True)
                process.start()
                theirs.close()
                self._peers.append(_Peer(rank, process, ours))
        finally:
            for by_peer in ends[1:]:
                for end in by_peer.values():
                    end.close()  # so that it is known when a rank has ended
        for peer in self._peers:
            if words := self._hear(peer):
                raise FaultError(words.decode())
        part = RankPart(self._decoder, self.pool, mail)
        self._lost = None
        return part

    def _hear(self, peer: _Peer) -> bytes:
        if not wait([peer.pipe], self._deadline_s):
            raise FaultError(f"rank {peer.rank} said nothing for {self._deadline_s:g} s")
        return peer.pipe.recv_bytes()

    def _blame(self, what: str, error: Exception) -> str:
        """One sentence: what happened to which rank."""
        ranks = self._sizes.ranks
        for peer in self._peers:
            peer.process.join(_DEATH_S)
            code = peer.process.exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                return f"Rank {peer.rank} of {ranks} {what}: {name} ended it. Ask again."
        words = str(error) if isinstance(error, EquipoiseError) else ""
        for peer in self._peers:
            with contextlib.suppress(EOFError, OSError):
                while not words and peer.pipe.poll():
                    words = peer.pipe.recv_bytes().decode()
        why = words or f"rank 0 failed with {type(error).__name__}"
        return f"One of {ranks} ranks {what}: {why}. Ask again."

    def _end(self, lost: RanksLostError | None) -> None:
        self._part, self._lost = None, lost
        for peer in self._peers:
            peer.process.kill()  # a rank may be stopped
        for peer in self._peers:
            peer.process.join()
            peer.pipe.close()
        self._peers = []
        if self._mail is not None:
            self._mail.close()
