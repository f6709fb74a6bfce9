"""A batch sampler for any PyTorch loop: the packer's micro-batches, one per iteration.

Why
    Users of another trainer want balanced packs without giving that trainer up. A ``DataLoader``
    asks a batch sampler which samples make up the next batch, and that is all a packer decides.

What it decides
    Only what the packer does: it cuts an epoch into steps, has each step packed, and yields this
    rank's part. Every rank packs the whole step by itself from the lengths, so ranks need not
    communicate.

    An epoch is cut into the fewest steps of at most ``pack.step_tokens`` whose tokens are as
    equal as possible; each token of each document is in exactly one. So the last step is not
    shorter than the others, and no step spans two epochs. What ``delayed`` still holds back is
    packed at the epoch's end.

    All ranks get the same number of micro-batches in each step, because the collectives of a loop
    (DDP's all-reduce, ZeRO-3's gathers) hang if one rank has fewer. If the packer has none for
    a rank, or an empty one, the rank gets one token without a label: its loss and its gradients
    are exactly zero. Steps without any token are skipped on all ranks.

Kept true (tests/unit/data/test_sampler.py, by Hypothesis)
    Over the ranks an epoch has every token once; ranks have the same number of batches; resuming
    from a state yields the batches that would have come; the answer depends only on the arguments.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Sampler

from equipoise.balance.packing.pack import StepPacker, make_packer, pack_step
from equipoise.balance.packing.windows import cut_at_windows
from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckpointError
from equipoise.cost.curve import LoadCurve
from equipoise.data.sampler_arguments import (
    require_runnable,
    require_seed,
    require_state,
    whole_tokens,
)
from equipoise.data.stream import DocumentStream
from equipoise.data.turn import PieceIndex, Turn
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

_KEPT = 256
"""Number of steps whose packer states are kept; a ``DataLoader`` asks for batches in advance."""


class PackedBatchSampler(Sampler[list[PieceIndex]]):
    """Yields this rank's micro-batches of an epoch, packed by ``pack``.

    Args:
        doc_tokens: Length of each document of the dataset [tokens]; each >= 1.
        pack: Policy, window, tokens of a step over all ranks, and caps. The divided policies
            are refused: their pieces read keys that a plain loop does not send.
        ranks: Data-parallel ranks, >= 1.
        rank: This rank.
        seed: Seed of the documents' order, which differs in each epoch.
        curve: Price of a document, the same on every rank: ``counted_curve`` of the model's
            sizes, or a measured one. ``in-order`` and ``by-tokens`` need none.
        meets_each_turn: The loop's ranks wait for each other in every micro-batch, as under
            ``fully_shard``, FSDP and ZeRO 2 and 3; ``by-work`` then evens out each turn.

    Raises:
        DataError: there are no documents, or a length is not a whole number of tokens.
        LayoutError: the rank is not one of the ranks, or a piece cannot fit a micro-batch.
        SpecError: no such policy, one that a plain loop cannot run, or no curve for it.

    Cost: one stream slice and one pack per step; milliseconds at 2,000 documents.

    >>> pack = PackSpec(policy="by-tokens", context_tokens=4, step_tokens=8)
    >>> sampler = PackedBatchSampler([5, 2, 4], pack, ranks=2, rank=0)
    >>> [[tuple(piece)[:3] for piece in batch] for batch in sampler]
    [[(0, 0, 4)], [(2, 0, 4)]]
    """

    def __init__(
        self,
        doc_tokens: ArrayLike,
        pack: PackSpec,
        *,
        ranks: int,
        rank: int,
        seed: int = 0,
        curve: LoadCurve | None = None,
        meets_each_turn: bool = False,
    ) -> None:
        self._doc_tokens = whole_tokens(doc_tokens)
        require_seed(seed)
        self._stream = DocumentStream(
            self._doc_tokens, seed=seed, context_tokens=pack.context_tokens
        )
        require_runnable(pack, int(self._doc_tokens.max()), ranks, rank, curve)
        self._pack, self._ranks, self._rank, self._seed = pack, ranks, rank, seed
        self._meets = meets_each_turn
        # Policies that need no price get one that they ignore.
        self._curve = curve or LoadCurve(0.0, 1.0, (1.0,), (1.0,), 1.0, measured=False)
        self.steps = -(-self._stream.epoch_tokens // pack.step_tokens)
        """Steps of an epoch, without those at its end that pack delayed documents."""
        self._start = (0, 0, 0)  # epoch, step, micro-batch
        self._start_packer: dict[str, Any] | None = None
        self._packer_states: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=_KEPT)
        self._length: tuple[tuple[int, int, int], int] | None = None

    def __iter__(self) -> Iterator[list[PieceIndex]]:
        epoch = self._start[0]
        for turns in self._steps(self._remember):
            yield from turns
        self._start, self._start_packer = (epoch + 1, 0, 0), None

    def __len__(self) -> int:
        """Batches that the next iteration yields.

        Only the packer knows how many micro-batches a step needs, so the first call packs the
        whole epoch, without reading documents.
        """
        if self._length is None or self._length[0] != self._start:
            self._length = (self._start, sum(map(len, self._steps())))
        return self._length[1]

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch.

        An iteration that runs to its end moves on by itself. For the epoch that
        ``load_state_dict`` restored this does nothing, so that a resumed loop may still call it
        at the top of each epoch.
        """
        if epoch != self._start[0]:
            self._start, self._start_packer = (epoch, 0, 0), None

    def state_dict(self, after: dict[str, Any] | None = None) -> dict[str, Any]:
        """Where to resume: plain data for a checkpoint, the same on every rank.

        Args:
            after: The last batch that the loop finished, as the collator made it. The sampler
                cannot know it: a loader with workers has already asked for more. Without it,
                the state is the start of the next iteration.
        """
        if after is None:
            position, packer = self._start, self._start_packer
        else:
            epoch, step, turn = after["epoch"], after["step"], after["micro_batch"] + 1
            position = (
                (epoch, step + 1, 0) if turn == after["micro_batches"] else (epoch, step, turn)
            )
            known = min(position[1], self.steps)
            packer = next(
                (s for e, at, s in self._packer_states if (e, at) == (epoch, known)), None
            )
        return {
            "epoch": position[0],
            "step": position[1],
            "micro_batch": position[2],
            "packer": packer,
            "seed": self._seed,
            "ranks": self._ranks,
            "documents": len(self._doc_tokens),
            "tokens": self._stream.epoch_tokens,
            "step_tokens": self._pack.step_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration where ``state_dict`` was taken.

        Raises:
            CheckpointError: the state belongs to other documents, another order, other steps, or
                was taken in the middle of a step over other ranks.
        """
        names = ("documents", "tokens", "seed", "step_tokens")
        require_state(state, self.state_dict(), names)
        if state["micro_batch"] and state["ranks"] != self._ranks:
            raise CheckpointError(
                f"The sampler's state was taken on {state['ranks']} ranks after "
                f"{state['micro_batch']} micro-batches of a step, but there are {self._ranks} now. "
                f"Resume on {state['ranks']} ranks, or from a state taken at a step's end."
            )
        self._start = (state["epoch"], state["step"], state["micro_batch"])
        self._start_packer = state["packer"]

    def _steps(
        self, remember: Callable[[int, int, StepPacker], None] = lambda *_: None
    ) -> Iterator[list[list[PieceIndex]]]:
        """This rank's micro-batches of each step, from where the next iteration begins."""
        epoch, first, skipped = self._start
        begin = min(first, self.steps)
        packer = self._packer_at(epoch, begin, self._start_packer)
        remember(epoch, begin, packer)
        for step in range(begin, self.steps):
            packed = self._packed(epoch, step, packer)
            remember(epoch, step + 1, packer)
            yield self._mine(packed, epoch, step)[skipped if step == first else 0 :]
        for step, packed in enumerate(packer.flush(), self.steps):
            if step >= first:
                yield self._mine(packed, epoch, step)[skipped if step == first else 0 :]

    def _packer_at(self, epoch: int, step: int, state: dict[str, Any] | None) -> StepPacker:
        """The packer in its state before a step."""
        packer = make_packer(self._pack, self._ranks, self._curve, meets_each_turn=self._meets)
        if state is not None:
            packer.load_state_dict(state)
        elif packer.state_dict():  # the packer has a state that was not kept
            for before in range(step):
                self._packed(epoch, before, packer)
        return packer

    def _remember(self, epoch: int, step: int, packer: StepPacker) -> None:
        self._packer_states.append((epoch, step, packer.state_dict()))

    def _packed(self, epoch: int, step: int, packer: StepPacker) -> PackedStep:
        total = self._stream.epoch_tokens
        begin, end = total * step // self.steps, total * (step + 1) // self.steps
        pieces = self._stream.step(epoch * total + begin, end - begin)
        few = pieces
        if len(few) < self._ranks and self._pack.cut == "windows":
            few = cut_at_windows(pieces, self._pack.context_tokens)
        if len(few) < self._ranks and not POLICIES[self._pack.policy].lets_wait:
            # Whole pieces cannot reach every rank; those left over get empty micro-batches.
            return pack_step(pieces, self._pack, len(few), self._curve, meets_each_turn=self._meets)
        return packer.step(pieces)

    def _mine(self, packed: PackedStep, epoch: int, step: int) -> list[list[PieceIndex]]:
        """This rank's micro-batches as indices; none if the step has no token."""
        batches = [batch.pieces for batch in packed if len(batch.pieces)]
        if not batches:
            return []
        labels = max(1, _count_labels(np.concatenate(batches), self._doc_tokens))
        filler = int(batches[0][0, 0])
        own = packed.ranks[self._rank] if self._rank < len(packed.ranks) else ()
        count = packed.micro_batches
        rows = []
        for index, batch in itertools.zip_longest(range(count), own):
            turn = Turn(epoch, step, index, count, labels)
            pieces = batch.pieces.tolist() if batch is not None else []
            rows.append(
                [
                    PieceIndex(document, start, stop, int(self._doc_tokens[document]), turn)
                    for document, start, stop in pieces or [(filler, 0, 0)]
                ]
            )
        return rows


def _count_labels(pieces: Pieces, doc_tokens: Ints) -> int:
    """Labels of some pieces: one per token, except each document's last."""
    ends = pieces[:, 2] == doc_tokens[pieces[:, 0] % len(doc_tokens)]
    return int(lengths_of(pieces).sum() - ends.sum())
