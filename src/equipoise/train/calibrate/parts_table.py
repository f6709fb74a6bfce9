"""Put what ranks timed of small steps together: seconds of a layer, and of what is outside.

What it decides
    Two decoders that differ by three layers, or three a stage, give a layer; the shallower one less
    its layer gives the rest. Samples of all ranks are pooled, step by step, so that each
    figure has an interval. What a first forward takes beyond an equal later one is gathering.
    What context-parallel attention takes beyond its replayed tiles and messages is fitted to a
    call and its tiles by least squares over packs of different numbers of documents.

Kept true (tests/unit/train/calibrate/test_parts_table.py)
    Records made from known parts give those parts back.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from equipoise.balance.context.plan import plan_context
from equipoise.cost.curves.interval import median_interval
from equipoise.cost.curves.parts import document_curves
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice
from equipoise.sim.here import count_tiles, replay_core
from equipoise.spec.device.parts import (
    ContextPoint,
    DocPoint,
    Measured,
    OncePoint,
    PartPasses,
    SizePoint,
    Way,
    WayParts,
)
from equipoise.train.calibrate.parts_plan import (
    DEPTHS,
    SHORT_TOKENS,
    PartsPlan,
    StepRecord,
    WaySamples,
)

Records = Sequence[dict[tuple[int, str], StepRecord]]
"""Each rank's steps, by depth and schedule."""

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]

_ONCE = ("gather", "reduce", "optimizer")

_FEWEST_PACKS = 2
"""Packs that tell a call's cost from a tile's."""

_NOTHING = Measured(0.0, 0.0, 0.0)
_MORE_LAYERS = DEPTHS[1] - DEPTHS[0]


def document_points(samples: Sequence[WaySamples]) -> tuple[DocPoint, ...]:
    """The attention core over lengths, from every rank's samples beside any steps."""
    points = []
    for tokens in sorted(samples[0].documents):
        if not any(rank.documents.get(tokens, ((), ()))[0] for rank in samples):
            continue  # time ran out before it
        forward, backward = (
            median_interval(
                [s for rank in samples for s in rank.documents.get(tokens, ([], []))[row]]
            )
            for row in (0, 1)
        )
        points.append(DocPoint(tokens, forward, backward))
    return tuple(points)


def way_table(
    way: Way, plan: PartsPlan, samples: Sequence[WaySamples], documents: tuple[DocPoint, ...]
) -> WayParts:
    """The parts of one way, from every rank's samples."""
    kind = _Pipeline if way == "pipeline" else _Whole
    table = kind(plan, [each.steps for each in samples], documents)
    layer, first, last = table.once()
    return WayParts(way, table.sizes(), documents, layer, first, last, table.rest())


class _Whole:
    """Ranks that have every layer."""

    def __init__(self, plan: PartsPlan, records: Records, documents: tuple[DocPoint, ...]) -> None:
        self._plan, self._records = plan, records
        short = next(each for each in documents if each.tokens == SHORT_TOKENS)
        self._core_s = {"forward": short.forward_s.mid, "backward": short.backward_s.mid}

    def sizes(self) -> tuple[SizePoint, ...]:
        """A row for each timed number of tokens."""
        return tuple(self._size(tokens, at) for at, tokens in enumerate(self._plan.sizes, start=1))

    def _size(self, tokens: int, at: int) -> SizePoint:
        layers, lasts = [], []
        for name in ("forward", "backward"):
            layer, last = self._parts(partial(_span, name=name, stage=-1, at=at))
            core_s = self._core_s[name] * tokens / SHORT_TOKENS
            layers.append(_measured(layer - core_s))
            lasts.append(_measured(last))
        free = PartPasses(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
        return SizePoint(tokens, _undivided(*layers), free, _undivided(*lasts))

    def once(self) -> tuple[OncePoint, OncePoint, OncePoint]:
        """A layer, what is before, what is after."""
        again = 1 + len(self._plan.sizes) // 2
        layers, lasts = [], []
        for name in _ONCE:
            layer, last = self._parts(partial(_once, name=name, stage=-1, again=again))
            layers.append(_measured(layer))
            lasts.append(_measured(last))
        nothing = OncePoint(_NOTHING, _NOTHING, _NOTHING)
        return OncePoint(*layers), nothing, OncePoint(*lasts)

    def rest(self) -> Measured:
        """What a step takes beside its parts, on the rank that waits least."""
        left = [
            [
                np.subtract(record.step_s, _spent(record))
                for rank in self._records
                for (deep, _), record in rank.items()
                if deep == depth
            ]
            for depth in DEPTHS
        ]
        return _measured(np.concatenate([np.min(each, axis=0) for each in left]))

    def _parts(self, seconds: Callable[[StepRecord], Seconds]) -> tuple[Seconds, Seconds]:
        """Samples of a layer, and of what is outside of layers."""
        shallow, deep = (
            np.concatenate([seconds(rank[depth, "1f1b"]) for rank in self._records])
            for depth in DEPTHS
        )
        return _two(shallow, deep)


class _Pipeline(_Whole):
    """Ranks that have a stage each."""

    def _size(self, tokens: int, at: int) -> SizePoint:
        kinds = (
            ("forward", "1f1b", "forward"),
            ("backward", "1f1b", "backward"),
            ("backward-input", "zb-h1", "backward"),
            ("backward-weight", "zb-h1", ""),
        )
        columns = []
        for name, schedule, core in kinds:
            layer, ends = self._stages(schedule, partial(_span, name=name, at=at))
            core_s = self._core_s.get(core, 0.0) * tokens / SHORT_TOKENS
            columns.append((_measured(layer - core_s), *map(_measured, ends)))
        return SizePoint(tokens, *(PartPasses(*each) for each in zip(*columns, strict=True)))

    def once(self) -> tuple[OncePoint, OncePoint, OncePoint]:
        """A layer, what the first stage has, what the last."""
        again = 1 + len(self._plan.sizes) // 2
        columns = []
        for name in _ONCE:
            layer, ends = self._stages("1f1b", partial(_once, name=name, again=again))
            columns.append((_measured(layer), *map(_measured, ends)))
        points = [OncePoint(*each) for each in zip(*columns, strict=True)]
        return points[0], points[1], points[2]

    def rest(self) -> Measured:
        """What a step takes outside of its first to its last instruction."""
        left = []
        for key in self._records[0]:
            records = [rank[key] for rank in self._records]
            window = np.max([each.ended for each in records], axis=0) - np.min(
                [each.began for each in records], axis=0
            )
            after = [
                np.add(each.spans["reduce", -1, -1], each.spans["optimizer", -1, -1])
                for each in records
            ]
            left.append(
                np.min([each.step_s for each in records], axis=0) - window - np.max(after, axis=0)
            )
        return _measured(np.concatenate(left))

    def _stages(
        self, schedule: str, seconds: Callable[..., Seconds]
    ) -> tuple[Seconds, list[Seconds]]:
        """Samples of a layer of any stage, and of what is outside of layers on the ends."""
        layers, rests = [], []
        for stage, rank in enumerate(self._records):
            shallow, deep = (seconds(rank[depth, schedule], stage=stage) for depth in DEPTHS)
            layer, rest = _two(shallow, deep)
            layers.append(layer)
            rests.append(rest)
        return np.concatenate(layers), [rests[0], rests[-1]]


def _span(record: StepRecord, *, name: str, stage: int, at: int) -> Seconds:
    return np.asarray(record.spans[name, stage, at])


def _once(record: StepRecord, *, name: str, stage: int, again: int) -> Seconds:
    """What a step pays once; gathering is what the first of two equal forwards takes longer."""
    if name == "gather":
        first = _span(record, name="forward", stage=stage, at=0)
        return first - _span(record, name="forward", stage=stage, at=again)
    return _span(record, name=name, stage=-1, at=-1)


def _two(shallow: Seconds, deep: Seconds) -> tuple[Seconds, Seconds]:
    layer = (deep - shallow) / _MORE_LAYERS
    return layer, shallow - DEPTHS[0] * np.median(layer)


def _measured(samples: Seconds) -> Measured:
    """Never below nothing, which noise may make of a part that costs nothing."""
    return median_interval(np.maximum(samples, 0.0).tolist())


def _undivided(forward: Measured, backward: Measured) -> PartPasses:
    return PartPasses(forward, backward, backward, _NOTHING)


def _spent(record: StepRecord) -> Seconds:
    """Seconds of each step in what has spans of its own."""
    timed = [
        values
        for (name, _, _), values in record.spans.items()
        if name in ("forward", "backward", "reduce", "optimizer")
    ]
    return np.asarray(np.sum(timed, axis=0))


def context_points(
    plan: PartsPlan,
    ranks: int,
    samples_of: Sequence[Sequence[WaySamples]],
    documents: tuple[DocPoint, ...],
    link: LinkPrice,
) -> tuple[ContextPoint, ...]:
    """What each strategy takes beyond what a replay of it says.

    Args:
        plan: Model and packs.
        ranks: That share each pack.
        samples_of: What every rank timed of every way.
        documents: The core of whole documents.
        link: Between two ranks.
    """
    forward, backward = document_curves(documents)
    wire = Wire(plan.model.head_width, 2 if plan.precision == "bf16" else 4)
    points = []
    names = dict.fromkeys(name for way in samples_of for name, _ in way[0].context)
    for strategy in names:
        tiles, beyond = [], []
        for at, lengths in enumerate(plan.packs):
            timed = [way for way in samples_of if way[0].context.get((strategy, at), ((), ()))[0]]
            if not timed:
                continue  # time ran out before it
            schedule = plan_context(
                lengths, ranks, strategy, heads=plan.model.heads, kv_heads=plan.model.kv_heads
            ).schedule
            core = replay_core(schedule, forward, backward, link, wire).sum(axis=1)
            # A call ends with the rank that ends last.
            seconds = [
                np.concatenate(
                    [np.max([rank.context[strategy, at][row] for rank in way], 0) for way in timed]
                )
                for row in (0, 1)
            ]
            tiles.append(float(count_tiles(schedule)))
            beyond.append(np.median(seconds, axis=1) - core)
        if len(tiles) < _FEWEST_PACKS:
            continue
        fitted = [_call_and_tile(np.array(tiles), each) for each in np.array(beyond).T]
        points.append(ContextPoint(strategy, *fitted[0], *fitted[1]))
    return tuple(points)


def _call_and_tile(tiles: Seconds, seconds: Seconds) -> tuple[float, float]:
    """Least squares of ``call + tile * tiles``, neither of them below nothing."""
    table = np.stack([np.ones(len(tiles)), tiles], axis=1)
    call, tile = np.linalg.lstsq(table, seconds, rcond=None)[0].tolist()
    if tile < 0:
        return max(0.0, float(seconds.mean())), 0.0
    if call < 0:
        return 0.0, max(0.0, float(tiles @ seconds / (tiles @ tiles)))
    return call, tile
