"""Which parts of a training step are timed, and the records of that.

What it decides
    Sizes: micro-batches of two documents of 64 tokens, of sixteen, and of as many tokens as the
    run's largest pack; documents from 16 tokens to the run's longest; and how deep decoders are.

Kept true (tests/unit/train/calibrate/test_parts_table.py)
    The run's sizes are covered, however small.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.base.grid import Grid
from equipoise.spec.modality.encoder import KINDS, EncoderSpec, ItemKind
from equipoise.spec.modality.items import Items
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.spec import Precision

DEPTHS = (1, 4)
"""Layers of the decoders, of each stage of a pipeline."""

SHORT_TOKENS = 64
"""Length of each document of a timed step."""


_GROUP_ITEMS = (1, 4, 24)
"""Items of a group."""


@dataclass(frozen=True, slots=True)
class ItemGroup:
    """Items of one kind that a rank encodes in one call."""

    kind: ItemKind
    items: tuple[int, ...]
    """Their numbers in the corpus."""
    grids: tuple[Grid, ...]
    """Rows and columns of each one's patches."""

    @property
    def patches(self) -> Ints:
        """Patches of each, int64 [items]."""
        return np.array([rows * columns for rows, columns in self.grids], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """What is timed."""

    model: ModelSpec
    precision: Precision
    most_tokens: int
    """Tokens of the largest micro-batch."""
    context_tokens: int
    """Tokens of the longest document."""
    steps: int = 6
    """After one that warms up."""
    encoders: tuple[EncoderSpec, ...] = ()
    """What encodes images and sound beside the model."""
    groups: tuple[ItemGroup, ...] = ()
    """Items that are encoded together."""

    @classmethod
    def for_run(cls, run: ResolvedRun, items: Items | None = None) -> "PartsPlan":
        """What is timed of a run's steps: its model, at its precision, up to its largest pack.

        Args:
            run: The run.
            items: Those of its corpus, if it encodes any.

        >>> from equipoise.spec.run.load import read_run
        >>> PartsPlan.for_run(read_run(None, [("pack.context_tokens", "1024")])).sizes
        (128, 1024, 1280)

        Raises:
            SpecError: the run multiplies in a precision that no curve has.
        """
        spec = run.spec
        if spec.train.precision == "fp8":
            raise SpecError(
                'train.precision = "fp8" has no curves on cores: equipoise calibrate times fp32 '
                "and bf16. Set one of them, or calibrate without a run.toml."
            )
        return cls(
            run.model,
            spec.train.precision,
            spec.pack.most_tokens,
            spec.pack.context_tokens,
            # Timed with every weight trained; a price leaves out what is frozen.
            encoders=tuple(dataclasses.replace(each, frozen=()) for each in spec.encoders),
            groups=() if items is None else choose_groups(items, spec.encoders),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of micro-batches, whole documents each."""
        most = -(-self.most_tokens // SHORT_TOKENS) * SHORT_TOKENS
        sizes = {SHORT_TOKENS * 2, SHORT_TOKENS * 16, most}
        return tuple(sorted(size for size in sizes if size <= most))

    @property
    def doc_tokens(self) -> tuple[int, ...]:
        """Lengths of documents."""
        ladder = {16 * 4**power for power in range(12)} | {self.context_tokens}
        inside = {each for each in ladder if each <= self.context_tokens}
        return tuple(sorted(inside | {SHORT_TOKENS}))

    @property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of documents whose attention over context ranks is timed."""
        whole, most = self.context_tokens, self.sizes[-1]
        return tuple((max(1, whole // parts),) * min(parts, most) for parts in (1, 2, 4, 16))


def choose_groups(items: Items, encoders: Sequence[EncoderSpec]) -> tuple[ItemGroup, ...]:
    """Groups of a corpus's items: one, some and many of each kind.

    They are the smallest, the largest, and as far apart as can be.

    Args:
        items: Those of the corpus.
        encoders: Each of another kind.
    """
    groups: list[ItemGroup] = []
    for encoder in encoders:
        (of_kind,) = np.nonzero(items.kind == KINDS.index(encoder.kind))
        ascending = of_kind[np.argsort(items.patches[of_kind], kind="stable")]
        for count in _GROUP_ITEMS:
            if len(ascending) < count:
                continue
            spread = np.linspace(0, len(ascending) - 1, count).astype(np.int64)
            for chosen in (ascending[:count], ascending[spread], ascending[-count:]):
                numbers = tuple(chosen.tolist())
                if all(each.items != numbers for each in groups):
                    grids = tuple((a, b) for a, b in items.grid[chosen].tolist())
                    groups.append(ItemGroup(encoder.kind, numbers, grids))
    return tuple(groups)


@dataclass(slots=True)
class StepRecord:
    """Steps of one decoder on one rank: seconds by step."""

    step_s: list[float] = field(default_factory=list)
    spans: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    """By name, stage and micro-batch; -1 if a span has none."""
    began: list[float] = field(default_factory=list)
    """First instruction of a pipeline, on the machine's clock."""
    ended: list[float] = field(default_factory=list)


Both = tuple[list[float], list[float]]
"""Seconds of forwards and of backwards, by sample."""


@dataclass(slots=True)
class WaySamples:
    """What one rank timed of one way of sharing a step."""

    steps: dict[tuple[int, str], StepRecord]
    """By depth and schedule."""
    documents: dict[int, Both] = field(default_factory=dict)
    """The attention core of one document, by its tokens."""
    context: dict[tuple[str, int], Both] = field(default_factory=dict)
    """Attention over all ranks, by strategy and pack."""
