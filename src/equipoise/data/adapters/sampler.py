"""A distributed batch sampler whose ranks take equally long: whole samples, even micro-batches.

Why
    ``DistributedSampler`` gives every rank equally many samples, whatever their lengths. A
    ``DataLoader`` takes any batch sampler, so evening out the work needs nothing else.

What it decides
    How an epoch is cut into steps of nearly equal numbers of samples; ``balance.batch`` does the
    rest. Every rank plans each step by itself from the lengths.

    ``PackedBatchSampler`` is for documents that may be cut at windows; this one is for samples
    that must stay whole, such as prompts with their answers, and for any collator.

Kept true (tests/unit/data/adapters/test_sampler.py, by Hypothesis)
    Over the ranks an epoch has every sample once; ranks have the same number of micro-batches in
    each step, none empty; resuming yields what would have come.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from equipoise.balance.batches.prices import Price, curve_of
from equipoise.balance.batches.request import batch
from equipoise.base.errors import DataError, LayoutError
from equipoise.data.sampler_arguments import (
    require_numbers,
    require_seed,
    require_state,
    whole_tokens,
)
from equipoise.data.stream import epoch_order


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields this rank's micro-batches of an epoch, as lists of samples.

    Args:
        lengths: Tokens of each sample, each >= 1.
        step_samples: Most samples of an optimizer step over all ranks. An epoch is cut into the
            fewest steps, whose numbers of samples differ by at most one.
        price: What a sample costs, as in ``balance.batch``.
        max_tokens: Most tokens of a micro-batch; no limit unless given.
        micro_batches: Micro-batches of each rank in every step, for trainers that count them
            (gradient accumulation); as few as ``max_tokens`` allows unless given.
        multiple_of: Number that divides each rank's micro-batches in a step.
        ranks: Data-parallel ranks; those of ``torch.distributed`` unless given, or 1.
        rank: This rank, likewise.
        seed: Seed of the order, which differs in each epoch.
        shuffles: Whether samples are shuffled.
        meets_each_turn: As in ``balance.batch``: whether ranks wait for each other in every
            micro-batch.

    Raises:
        DataError: there are no samples, or a length is not a whole number of tokens.
        LayoutError: a step has fewer samples than micro-batches, or a sample does not fit one.
        SpecError: another argument is not a whole number.

    >>> sampler = BalancedBatchSampler(
    ...     [900, 10, 10, 10, 10, 10], 6, price="7m", ranks=2, rank=1, shuffles=False
    ... )
    >>> list(sampler)
    [[1, 2, 3, 4, 5]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        step_samples: int,
        *,
        price: Price,
        max_tokens: int | None = None,
        micro_batches: int | None = None,
        multiple_of: int = 1,
        ranks: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffles: bool = True,
        meets_each_turn: bool = True,
    ) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self._lengths = whole_tokens(lengths)
        self._curve = curve_of(price)
        require_seed(seed)
        counts = {"step_samples": step_samples, "ranks": ranks, "micro_batches": micro_batches}
        counts |= {"max_tokens": max_tokens, "multiple_of": multiple_of}
        require_numbers(**counts, rank=rank)
        for name, count in counts.items():
            if count is not None and count < 1:
                raise LayoutError(f"{name} is {count}. Give 1 or more.")
        self._ranks = ranks or (dist.get_world_size() if is_joined else 1)
        self._rank = rank if rank is not None else (dist.get_rank() if is_joined else 0)
        self._cap, self._count, self._meets = max_tokens, micro_batches, meets_each_turn
        self._seed, self._shuffles, self._multiple = seed, shuffles, multiple_of
        samples = len(self._lengths)
        if not samples or self._lengths.min() < 1:
            raise DataError(
                f"There are {samples:,} samples, and each needs 1 token or more. Leave empty ones "
                f"out."
            )
        if not 0 <= self._rank < self._ranks:
            raise LayoutError(
                f"Rank {self._rank} is not one of {self._ranks} ranks. Give ranks from 0 to "
                f"{self._ranks - 1}."
            )
        self.steps = -(-samples // step_samples)
        """Optimizer steps of an epoch."""
        fewest, needed = samples // self.steps, self._ranks * (micro_batches or 1)
        if fewest < needed:
            raise LayoutError(
                f"A step of {fewest:,} samples cannot fill {micro_batches or 1} micro-batches on "
                f"each of {self._ranks} ranks: the epoch has {samples:,} samples in {self.steps:,} "
                f"steps. Give step_samples={needed} or more, or fewer micro-batches."
            )
        if max_tokens is not None and self._lengths.max() > max_tokens:
            at = int(self._lengths.argmax())
            raise LayoutError(
                f"Sample {at:,} has {int(self._lengths[at]):,} tokens, but a micro-batch holds "
                f"{max_tokens:,}. Give max_tokens={int(self._lengths[at])}, or shorten the sample."
            )
        self._start = (0, 0)  # epoch, micro-batches that were already trained on
        self._length: tuple[tuple[int, int], int] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        epoch, skipped = self._start
        for step in range(self.steps):
            mine = self.plan(step, epoch)[self._rank]
            yield from mine[skipped:]
            skipped = max(0, skipped - len(mine))
        self._start = (epoch + 1, 0)

    def __len__(self) -> int:
        """Micro-batches that the next iteration yields."""
        if self._count is not None:
            return self.steps * self._count - self._start[1]
        if self._length is None or self._length[0] != self._start:
            whole = sum(len(self.plan(step, self._start[0])[0]) for step in range(self.steps))
            self._length = (self._start, whole - self._start[1])
        return self._length[1]

    def plan(self, step: int, epoch: int = 0) -> list[list[list[int]]]:
        """Samples of every rank's micro-batches in one step: ``plan(...)[rank][micro_batch]``.

        Raises:
            LayoutError: the step needs more micro-batches than ``micro_batches``.
        """
        samples = len(self._lengths)
        order = np.arange(samples)
        if self._shuffles:
            order = epoch_order(samples, self._seed, epoch)
        mine = order[samples * step // self.steps : samples * (step + 1) // self.steps]
        answer = batch(
            self._lengths[mine],
            self._ranks,
            price=self._curve,
            max_tokens=self._cap,
            min_micro_batches=self._count or 1,
            multiple_of=self._multiple,
            meets_each_turn=self._meets,
        ).micro_batches
        if self._count is not None and len(answer[0]) > self._count:
            raise LayoutError(
                f"Step {step:,} of epoch {epoch} has {int(self._lengths[mine].sum()):,} tokens and "
                f"needs {len(answer[0])} micro-batches on each rank, but there are {self._count}. "
                f"Give a larger max_tokens, more micro-batches or fewer samples in a step."
            )
        given = mine.tolist()
        return [[[given[at] for at in each] for each in rank] for rank in answer]

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch; nothing if it stands there."""
        if epoch != self._start[0]:
            self._start = (epoch, 0)

    def state_dict(self, micro_batches: int = 0) -> dict[str, Any]:
        """Where to resume, the same on every rank.

        Args:
            micro_batches: Micro-batches of this iteration that the loop has trained on.
        """
        epoch, before = self._start
        return {
            "epoch": epoch,
            "micro_batches": before + micro_batches,
            "samples": len(self._lengths),
            "steps": self.steps,
            "seed": self._seed,
            "ranks": self._ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration where ``state_dict`` was taken.

        Raises:
            CheckpointError: the state belongs to other samples, steps, ranks or another order.
        """
        require_state(state, self.state_dict(), ("samples", "steps", "seed", "ranks"))
        self._start = (state["epoch"], state["micro_batches"])
