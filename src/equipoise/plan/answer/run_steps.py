"""The steps that a run will pack, for any number of data-parallel ranks.

Why
    A run's steps are known before it begins: the stream shuffles by the run's seed, and the
    packer's answer depends on the lengths alone. So a plan prices documents that will be trained.

What it decides
    The first ``STEPS`` steps of the run are packed as they will be, and the one of median work
    stands for all. Work is FLOP, so that the same step stands for every layout. Policies that
    divide documents are not packed here: parts of a step are timed with whole ones.

Kept true (tests/unit/plan/answer/test_run_steps.py)
    Each token of a step is in one micro-batch; the packs are those of the run's own packer.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from equipoise.balance.packing.pack import make_packer
from equipoise.base.errors import SpecError
from equipoise.cost.curve import counted_curve
from equipoise.cost.work import causal_pairs, useful_flop
from equipoise.data.mixture import Mixture, open_stream
from equipoise.sim.drawn import STEPS
from equipoise.sim.step import Documents
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.spec import PackSpec, RunSpec

COMPARED: tuple[Policy, ...] = tuple(
    sorted(
        (name for name, traits in POLICIES.items() if traits.planned == "always"),
        key=lambda name: name != PackSpec().policy,
    )
)
"""Policies that a plan compares if none is given. The default comes first: it stays unless
another is better."""


class RunSteps:
    """A run's first steps."""

    def __init__(
        self,
        spec: RunSpec,
        model: ModelSpec,
        doc_tokens: npt.NDArray[np.int64],
        mixture: Mixture | None = None,
    ) -> None:
        """Cut the stream.

        Args:
            spec: Packing and seed.
            model: What a document's work is counted for.
            doc_tokens: Length of each document of the corpus, int64 [documents].
            mixture: How they are mixed, if they are of several sources.
        """
        self._spec, self._curve = spec, counted_curve(model)
        stream = open_stream(
            doc_tokens,
            seed=spec.train.seed,
            context_tokens=spec.pack.context_tokens,
            mixture=mixture,
            whole=spec.data.whole,
        )
        size = spec.pack.step_tokens
        self._pieces = [stream.step(step * size, size) for step in range(STEPS)]
        work = []
        for pieces in self._pieces:
            lengths = pieces[:, 2] - pieces[:, 1]
            work.append(useful_flop(model, size, int(causal_pairs(lengths).sum())))
        self.median = int(np.argsort(work, kind="stable")[STEPS // 2])
        """Number of the step that stands for all, from 0."""
        self._packed: dict[tuple[Policy, int, bool], list[PackedStep]] = {}

    def documents(self, policy: Policy, layout: Layout) -> Documents:
        """Micro-batches of each data-parallel rank, in the step that stands for all.

        Raises:
            LayoutError: a step has fewer documents than ranks.
        """
        return _documents(self.packed(policy, layout))

    def packed(self, policy: Policy, layout: Layout) -> PackedStep:
        """The step that stands for all.

        Raises:
            LayoutError: it has fewer documents than ranks.
        """
        return self._pack(policy, layout)[self.median]

    def most_tokens(self, policy: Policy, layout: Layout) -> int:
        """Tokens of the largest micro-batch in all these steps."""
        steps = self._pack(policy, layout)
        return max(batch.tokens for step in steps for batch in step)

    def count_batches(self, policy: Policy, dp: int) -> int:
        """Micro-batches of the rank that has most of them, in the step that stands for all."""
        return max(map(len, self.documents(policy, Layout(dp=dp))))

    def _pack(self, policy: Policy, layout: Layout) -> list[PackedStep]:
        dp, meets = layout.dp, layout.meets_each_turn
        key = policy, dp, meets
        if key not in self._packed:
            pack = dataclasses.replace(self._spec.pack, policy=policy)
            packer = make_packer(pack, dp, self._curve, meets_each_turn=meets)
            self._packed[key] = [packer.step(pieces) for pieces in self._pieces]
        return self._packed[key]


def _documents(packed: PackedStep) -> Documents:
    """Lengths of each rank's micro-batches; one token for a rank that has none."""
    return [
        [batch.doc_tokens.tolist() for batch in rank if batch.tokens] or [[1]]
        for rank in packed.ranks
    ]


def policies_of(policy: Policy, *, is_given: bool) -> tuple[Policy, ...]:
    """The policies that a plan compares.

    Raises:
        SpecError: one is given that divides documents.

    >>> policies_of("by-work", is_given=False), policies_of("in-order", is_given=True)
    (('by-work', 'by-tokens'), ('in-order',))
    """
    if not is_given:
        return COMPARED
    if POLICIES[policy].divides:
        raise SpecError(
            f'pack.policy = "{policy}" divides documents, and the parts of a step that a plan of a '
            f"run.toml prices are timed with whole ones. Leave it out, or give "
            f'"by-work", "by-tokens", "delayed", "fixed" or "in-order".'
        )
    return (policy,)
