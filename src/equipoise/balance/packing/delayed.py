"""Outliers wait until there is one for every micro-batch, but never longer than promised.

Why
    A document much longer than the rest makes its micro-batch the heaviest, whatever shares it.
    WLB-LLM lets such outliers wait until each micro-batch can have one. Its own queues may hold
    a document for 57 steps, or for ever.

What it decides
    Algorithm 1 of WLB-LLM, made safe: a queue releases at N documents *or* when a document
    has waited ``max_delay_steps``; a due document is packed in that step, in an extra
    micro-batch if necessary; a document of exactly the cap fits. So no delay exceeds
    ``max_delay_steps``, whatever the lengths.

    A step has a micro-batch for each window of each rank, so the step in which a document is
    packed depends on the number of ranks; that it is packed once does not.

Kept true (tests/unit/balance/packing/test_delayed.py, by Hypothesis)
    Each token comes out once, also across a ``state_dict`` with waiting documents, a change of
    ranks, and the final ``flush``; no delay is over the promise; no micro-batch is over its cap.

Sources
    WLB-LLM, arXiv:2503.17924, Algorithm 1 and Table 2.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.balance.packing.whole import require_whole
from equipoise.balance.packing.windows import deal_to_ranks
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A document that has arrived but is not packed yet."""

    piece: tuple[int, int, int]
    arrived: int
    """Step in which it arrived."""
    number: int
    """How many arrived before it; breaks ties."""

    @property
    def tokens(self) -> int:
        return self.piece[2] - self.piece[1]


class _OpenBins:
    """Micro-batches being filled; the lightest and the emptiest are found in O(log n).

    Both heaps keep outdated entries, which are dropped when they reach the top.
    """

    def __init__(self, bins: int, cap: int) -> None:
        self.held: list[list[_Waiting]] = []
        self._cap = cap
        self._filled: list[tuple[int, int]] = []
        self._by_load: list[tuple[int, int, int]] = []
        self._by_tokens: list[tuple[int, int, int]] = []
        for _ in range(bins):
            self.open()

    def open(self) -> int:
        """Add a bin and return its index."""
        self.held.append([])
        self._filled.append((0, 0))
        self._push(len(self.held) - 1)
        return len(self.held) - 1

    def _push(self, index: int) -> None:
        load, tokens = self._filled[index]
        heapq.heappush(self._by_load, (load, tokens, index))
        heapq.heappush(self._by_tokens, (tokens, index, load))

    def find(self, tokens: int) -> int | None:
        """The lightest bin if it has room, else the emptiest if that has, else None."""
        while self._filled[(top := self._by_load[0])[2]] != top[:2]:
            heapq.heappop(self._by_load)
        if top[1] + tokens <= self._cap:
            return top[2]
        while self._filled[(least := self._by_tokens[0])[1]] != (least[2], least[0]):
            heapq.heappop(self._by_tokens)
        return least[1] if least[0] + tokens <= self._cap else None

    def put(self, index: int, document: _Waiting, load: int) -> None:
        """Put a document into a bin."""
        self.held[index].append(document)
        before, tokens = self._filled[index]
        self._filled[index] = (before + load, tokens + document.tokens)
        self._push(index)


class DelayedPacker:
    """Packs step after step, and keeps the documents that wait.

    Args:
        pack: Windows, cap, queues and the longest delay.
        ranks: Data-parallel ranks.
        curve: Price of a document.
        bins: Micro-batches of a step, a multiple of ``ranks``; the step's windows unless given.
    """

    def __init__(
        self, pack: PackSpec, ranks: int, curve: LoadCurve, *, bins: int | None = None
    ) -> None:
        windows = -(-pack.step_tokens // (ranks * pack.context_tokens)) * ranks
        self._bins = bins or windows
        self._ranks, self._curve, self._pack = ranks, curve, pack
        self._limits = [pack.context_tokens >> power for power in range(pack.queues, 0, -1)]
        self._queues: list[list[_Waiting]] = [[] for _ in self._limits]
        self._remained: list[_Waiting] = []
        self._step = self._count = 0

    @property
    def waiting(self) -> int:
        """Documents that have arrived but are not packed yet."""
        return len(self._remained) + sum(map(len, self._queues))

    def step(self, pieces: Pieces) -> PackedStep:
        """Take one step's pieces, and pack what is ready.

        Args:
            pieces: int64 [n, 3] of (document, start, stop); n >= 1.

        Raises:
            LayoutError: a document is over the cap.
        """
        require_whole(pieces, self._pack, 1, "delayed")
        new: list[_Waiting] = []
        for piece in pieces.tolist():
            document = _Waiting(tuple(piece), self._step, self._count)
            self._count += 1
            queue = self._queue_of(document)
            (new if queue < 0 else self._queues[queue]).append(document)
        return self._pack_ready(new)

    def _queue_of(self, document: _Waiting) -> int:
        """The last queue whose limit the document reaches; -1 if none."""
        return int(np.searchsorted(self._limits, document.tokens, side="right")) - 1

    def flush(self) -> list[PackedStep]:
        """Pack everything that waits, at the end of an epoch."""
        steps = []
        while self.waiting:
            ready = [document for queue in self._queues for document in queue]
            self._queues = [[] for _ in self._limits]
            steps.append(self._pack_ready(ready))
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, as plain numbers."""

        def rows(waiting: list[_Waiting]) -> list[list[int]]:
            return [[*each.piece, each.arrived, each.number] for each in waiting]

        return {
            "waiting": self.waiting,
            "step": self._step,
            "count": self._count,
            "ranks": self._ranks,
            "queues": [rows(queue) for queue in self._queues],
            "remained": rows(self._remained),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, on any number of ranks.

        Raises:
            LayoutError: a waiting document is over this run's cap.
        """

        def waiting(rows: list[list[int]]) -> list[_Waiting]:
            return [_Waiting((row[0], row[1], row[2]), row[3], row[4]) for row in rows]

        rows = [row for queue in (*state["queues"], state["remained"]) for row in queue]
        longest, most = max((row[2] - row[1] for row in rows), default=0), self._pack.most_tokens
        if longest > most:
            raise LayoutError(
                f"A document of {longest:,} tokens waits in the queues of the checkpoint, and a "
                f"micro-batch of this run holds {most:,}. Set pack.max_tokens = {longest}, or "
                f"train into another folder with --out."
            )
        self._step, self._count = state["step"], state["count"]
        self._remained = waiting(state["remained"])
        self._queues = [[] for _ in self._limits]
        for document in waiting([row for rows in state["queues"] for row in rows]):
            # A run that continues with other windows has other queues.
            self._queues[max(0, self._queue_of(document))].append(document)

    def _release(self) -> list[_Waiting]:
        """What leaves the queues: everything due, and one outlier per micro-batch."""
        ready = []
        oldest = self._step - self._pack.max_delay_steps
        for index, queue in enumerate(self._queues):
            out = [each for each in queue if each.arrived <= oldest]
            kept = [each for each in queue if each.arrived > oldest]
            if len(out) + len(kept) >= self._bins:
                taken = max(0, self._bins - len(out))
                out, kept = out + kept[:taken], kept[taken:]
            self._queues[index] = kept
            ready += out
        return ready

    def _pack_ready(self, new: list[_Waiting]) -> PackedStep:
        oldest = self._step - self._pack.max_delay_steps
        new += self._release()
        if not new and not self._remained:  # a step of nothing but outliers: none can wait
            new = [document for queue in self._queues for document in queue]
            self._queues = [[] for _ in self._limits]
        new.sort(key=lambda each: (-each.tokens, each.number))
        due = [each for each in self._remained if each.arrived <= oldest]
        later = [each for each in self._remained if each.arrived > oldest]
        due.sort(key=lambda each: (-each.tokens, each.number))
        documents = due + later + new
        pieces = np.array([each.piece for each in documents], np.int64).reshape(-1, 3)
        loads = self._curve.pieces_ns(pieces)
        bins = _OpenBins(self._bins, self._pack.most_tokens)
        self._remained = []
        for each, load in zip(documents, loads.tolist(), strict=False):
            place = bins.find(each.tokens)
            if place is None and each.arrived > oldest:
                self._remained.append(each)
            else:
                bins.put(bins.open() if place is None else place, each, load)
        self._step += 1
        batches = [np.array([e.piece for e in held], np.int64).reshape(-1, 3) for held in bins.held]
        turns = -(-len(batches) // self._ranks)
        return deal_to_ranks("delayed", batches, self._ranks, self._curve, turns=turns)
