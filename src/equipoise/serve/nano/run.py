"""Run an iteration as nano-batches in a found order.

Why
    What a schedule is worth is known only when the engine runs it.

What it decides
    An iteration whose kind was measured to gain, and that is predicted to, is cut and overlapped.
    All others run as ever, as do all while fewer threads compute than were measured. A layer that
    is left over runs after the order, one nano-batch after the other.

Kept true (tests/unit/serve/nano/test_run.py)
    Hidden states are those of the iteration as a whole; in the invariant mode, to the bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.forward import ChunkPass, PagedDecoder
from equipoise.serve.nano.choice import LEAST_GAIN, NanoChoice, NanoOrder, kind_of
from equipoise.serve.nano.lanes import Lanes


class NanoBatches:
    """Cuts iterations in two where that pays."""

    def __init__(
        self, paged: PagedDecoder, choice: NanoChoice, lanes: Lanes, kinds: Sequence[str] = ()
    ) -> None:
        """Take what was measured.

        Args:
            paged: Computes the nano-batches.
            choice: Its costs.
            lanes: Where they run.
            kinds: Iterations that were measured to gain.
        """
        self._paged, self.choice, self._lanes = paged, choice, lanes
        self.kinds = frozenset(kinds)
        self.iterations = 0
        """Iterations that were overlapped."""

    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> Tensor | None:
        """Hidden states of an iteration [t, D]; None if it does not gain."""
        if kind_of(chunks) not in self.kinds or torch.get_num_threads() != self._lanes.threads:
            return None
        order = self.choice.choose(chunks)
        if order is None or order.gain < LEAST_GAIN:
            return None
        self.iterations += 1
        return run_order(self._paged, self._lanes, order, chunks, tokens, layers=self._paged.layers)

    def close(self) -> None:
        """End the second lane."""
        self._lanes.close()


@torch.no_grad()
def run_order(
    paged: PagedDecoder,
    lanes: Lanes,
    order: NanoOrder,
    chunks: Sequence[ServeChunk],
    tokens: Sequence[int],
    *,
    layers: int,
) -> Tensor:
    """Hidden states of an iteration after its first layers [t, D].

    Args:
        paged: Computes the nano-batches.
        lanes: Where they run.
        order: Of these chunks, and of at most as many layers.
        chunks: As for ``PagedDecoder.run``.
        tokens: Likewise.
        layers: At least one.
    """
    starts = [0, *accumulate(each.tokens for each in chunks)]
    rows = [[row for at in part for row in range(*starts[at : at + 2])] for part in order.parts]
    passes = [
        ChunkPass(paged, [chunks[at] for at in part], [tokens[row] for row in each])
        for part, each in zip(order.parts, rows, strict=True)
    ]
    for one in passes:
        one.begin(0)
    lanes.run(order.graph, order.schedule.steps, _calls(order, passes, layers))
    for one in passes:
        for number in range(order.layers, layers):
            one.attend(number)
            _dense(one, number, layers)
    x_tD = passes[0].x_tD.new_empty(len(tokens), passes[0].x_tD.shape[1])
    for each, one in zip(rows, passes, strict=True):
        x_tD[torch.tensor(each)] = one.x_tD
    return x_tD


def _dense(one: ChunkPass, number: int, layers: int) -> None:
    """All between two attentions."""
    one.end(number)
    if number + 1 < layers:
        one.begin(number + 1)


def _calls(order: NanoOrder, passes: Sequence[ChunkPass], layers: int) -> list[Callable[[], None]]:
    """What each operation of an order does."""
    calls, numbers = list[Callable[[], None]](), [0] * len(passes)
    for operation in order.graph.operations:
        one, number = passes[operation.batch], numbers[operation.batch]
        if operation.name == "attend":
            calls.append(partial(one.attend, number))
        else:
            calls.append(partial(_dense, one, number, layers))
            numbers[operation.batch] += 1
    return calls
