"""Weight gradients into the gaps of an order of forwards and input gradients.

Why
    Nobody waits for a weight gradient. Put where its rank would wait anyway it costs nothing;
    put too late it keeps its activation.

What it decides
    The order of forwards and input gradients stays. All ranks are replayed together; before
    an instruction whose message has not arrived, a rank runs as many of its oldest weight
    gradients as end before it does; before a forward for which there is no room, it runs
    weight gradients until there is.

Kept true (tests/unit/schedule/test_pipeline_strategies.py, by Hypothesis)
    What is filled passes ``check_pipeline`` with the bound that it was given.

Sources
    Weight gradients in gaps, and at the memory limit: arXiv:2401.10241, section 3.1.
"""

from collections import deque
from collections.abc import Sequence

from equipoise.base.errors import FitError
from equipoise.schedule.instruction import Ints, Op
from equipoise.schedule.pipeline import Neighbours, Order
from equipoise.schedule.pipeline_prices import PipelinePrices

F, I, W = int(Op.FORWARD), int(Op.BACKWARD_INPUT), int(Op.BACKWARD_WEIGHT)  # noqa: E741


def fill_weights(
    orders: Sequence[Order],
    prices: PipelinePrices,
    rank_of: Ints,
    paths: Ints,
    most_held: Sequence[int],
) -> list[Order]:
    """Add the weight gradients to orders of forwards and input gradients.

    Args:
        orders: Of each rank; forwards and input gradients, in an order that can run.
        prices: Of every stage and micro-batch.
        rank_of: The rank of each stage.
        paths: Stages that each micro-batch visits.
        most_held: The most that each rank may hold, in the unit of the activations.

    Raises:
        FitError: the forwards and input gradients alone hold more than that.

    Cost: O(instructions).
    """
    filler = _Filler(orders, prices, rank_of, paths, most_held)
    filler.run()
    return filler.written


class _Filler:
    """All ranks, replayed together."""

    def __init__(
        self,
        orders: Sequence[Order],
        prices: PipelinePrices,
        rank_of: Ints,
        paths: Ints,
        most_held: Sequence[int],
    ) -> None:
        self.orders, self.most_held = orders, most_held
        self.written: list[Order] = [[] for _ in orders]
        beside = Neighbours.of(paths, prices.stages)
        self.before, self.after = beside.before.tolist(), beside.after.tolist()
        self.rank_of: list[int] = rank_of.tolist()
        self.takes = prices.of_ops().tolist()
        self.hops, self.sizes = prices.hop_ns.tolist(), prices.activation.tolist()
        self.at, self.time, self.held = ([0] * len(orders) for _ in range(3))
        self.left: list[deque[tuple[int, int]]] = [deque() for _ in orders]
        # Keyed by operation, then stage and micro-batch as one number: half of the time of tuples.
        self.ends: dict[int, dict[int, int]] = {F: {}, I: {}}
        self.waiting: dict[int, dict[int, int]] = {F: {}, I: {}}
        self.count = prices.micro_batches

    def run(self) -> None:
        """Every rank to its end."""
        moving = list(range(len(self.orders)))
        while moving:
            rank = moving.pop()
            while self.at[rank] < len(self.orders[rank]):
                woken = self._step(rank)
                if woken is None:
                    break
                if woken >= 0:
                    moving.append(woken)
        for rank, left in enumerate(self.left):
            while left:
                self._weight(rank)

    def _step(self, rank: int) -> int | None:
        """Run a rank's next instruction; None if it cannot run yet.

        Returns:
            The rank that waits for it, or -1 for none.
        """
        op, stage, micro_batch = self.orders[rank][self.at[rank]]
        kind, source = F, self.before[stage][micro_batch]
        if op != F:
            kind, source = I, self.after[stage][micro_batch]
            if source < 0:
                kind, source = F, stage
        arrives = 0
        if source >= 0:
            needed = source * self.count + micro_batch
            found = self.ends[kind].get(needed)
            if found is None:
                self.waiting[kind][needed] = rank
                return None
            arrives = found
            if self.rank_of[source] != rank:
                arrives += self.hops[micro_batch]
        left, size = self.left[rank], self.sizes[stage][micro_batch]
        if op == F:
            while self.held[rank] + size > self.most_held[rank]:
                if not left:
                    raise FitError(
                        f"Rank {rank} holds {self.held[rank] + size:,} at a time, "
                        f"{self.most_held[rank]:,} are allowed. Take a strategy that holds less, "
                        f"such as v-half or auto, or raise the bound."
                    )
                self._weight(rank)
            self.held[rank] += size
        while left and self.time[rank] + self.takes[W][left[0][0]][left[0][1]] <= arrives:
            self._weight(rank)
        end = max(self.time[rank], arrives) + self.takes[op][stage][micro_batch]
        here = stage * self.count + micro_batch
        self.time[rank] = self.ends[op][here] = end
        self.written[rank].append((op, stage, micro_batch))
        if op != F:
            left.append((stage, micro_batch))
        self.at[rank] += 1
        return self.waiting[op].pop(here, -1)

    def _weight(self, rank: int) -> None:
        stage, micro_batch = self.left[rank].popleft()
        self.time[rank] += self.takes[W][stage][micro_batch]
        self.held[rank] -= self.sizes[stage][micro_batch]
        self.written[rank].append((W, stage, micro_batch))
