"""Lower bound of the fullest stage's memory, where it is known which stage has which layers.

Why
    A bound that knows no stage's layers is half of what most choices need. Choices that it leaves
    are fast and too large, so they stand first in the frontier and are replayed for nothing.

What it relaxes (proofs: docs/predict/search.md)
    A stage to its layers and its place in the schedule. Where embedding and head weigh less than a
    layer each, each stage has ``L // S`` layers, and what is left goes to the stages between the
    ends from the last one back, then to the lighter end. With each k-th layer recomputed, none has
    more than ``ceil(L / S)``, and of any n ranks one lacks ``D // n`` layers or fewer.

    What is in flight follows from the order of forwards and input gradients, which no price
    changes; weight gradients that are put off hold more. Bytes are ``cost.memory.device``'s own:
    for layers that are alike they are linear in layers and in what is in flight.

Kept true (tests/unit/plan/bounds/test_memory.py, by Hypothesis)
    Layers are those of ``balance.stage``; what is in flight is what the schedules hold without
    weight gradients that wait; never more bytes than ``sim.step.price_step`` finds, and with whole
    backwards as many.

Sources
    As ``schedule.pipeline.orders`` and ``schedule.pipeline.zero_bubble``, whose orders these are.
"""

import dataclasses

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.load import load
from equipoise.cost.memory.device import rank_memory
from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space, group_equal, schedules_with
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.schedule.pipeline.request import PipelineRequest, PipelineStrategy
from equipoise.schedule.pipeline.schedule import single_units
from equipoise.schedule.pipeline.strategies import place_stages
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.model.presets import ModelSpec

_LESS = 1.0 - 1e-9
"""Room for sums in another order."""

_STATES = ("dp", "zero", "replicas", "recompute")
"""Columns that, beside a group's kernels, say what a rank holds of a layer."""

_BOTH = ("none", "full")
"""Settings of layers of which each k-th is recomputed."""

_KNOWN = schedules_with(lambda each: bool(each.ahead or each.order))


def even_layers(layers: int, stages: int, *, is_last_heavier: bool) -> Ints:
    """Layers of each stage where both ends weigh less than a layer, int64 [stages].

    Args:
        layers: Layers of the model, all alike; as many as stages or more.
        stages: Stages of the pipeline.
        is_last_heavier: Whether the head weighs more than the embedding.

    >>> even_layers(6, 4, is_last_heavier=True).tolist()
    [1, 2, 2, 1]
    """
    of_stage = np.full(stages, layers // stages, dtype=np.int64)
    ends = [0, stages - 1] if is_last_heavier else [stages - 1, 0]
    order = [*range(stages - 2, 0, -1), *ends]
    of_stage[order[: layers % stages]] += 1
    return of_stage


def is_even(options: StepOptions) -> bool:
    """Whether layers that are alike stay so, and are split by what they take."""
    return options.stack.split == "exact" and not options.recompute.startswith("every")


def least_in_flight(schedule: str, ranks: int, layers: Ints, tokens: Ints) -> Floats:
    """Layers times tokens that each rank holds at its fullest moment, at least, float64 [ranks].

    Args:
        schedule: One whose order depends on no price: its row has ``ahead`` or an ``order``.
        ranks: Ranks of the pipeline.
        layers: Layers of each stage, int64 [stages].
        tokens: Tokens of each micro-batch, in order, int64 [micro-batches].

    Cost: O(ranks x stages of a rank x micro-batches), in NumPy.

    >>> least_in_flight("1f1b", 2, np.array([3, 2]), np.array([10, 10, 10])).tolist()
    [60.0, 20.0]
    """
    traits = SCHEDULES[schedule]
    if traits.order is not None:
        write: PipelineStrategy = load(traits.order)
        prices = make_prices(0, 0, 0, stages=len(layers), micro_batches=len(tokens))
        units = single_units(len(tokens))
        bare = write(PipelineRequest(schedule, prices, ranks, units, None))
        most = count_in_flight(bare, layers[:, None] * tokens)
        held = most.peak if traits.order == traits.writer else most.peak_without_stash
        return held.astype(np.float64)
    virtual = len(layers) // ranks
    chunk, batch, first_round = _rounds(len(tokens), ranks, virtual)
    behind = np.arange(ranks)[::-1]
    ahead = np.full(ranks, (virtual - 1) * first_round)
    paces = traits.ahead if virtual > 1 or traits.most_stages == 1 else 1
    warm = ahead + paces * behind
    held_by = layers.reshape(virtual, ranks).T
    count = len(chunk)
    # The first moments of the steady state are enough, for heavy micro-batches come first.
    looks = min(count, 2 * virtual * first_round)
    reach = min(count, int(warm[0]) + looks + 1)
    forward = np.cumsum(held_by[:, chunk[:reach]] * tokens[batch[:reach]], axis=1)
    backward = np.cumsum(held_by[:, virtual - 1 - chunk[:looks]] * tokens[batch[:looks]], axis=1)
    moments = np.minimum(warm[:, None] + np.arange(looks), count - 1)
    held = np.take_along_axis(forward, moments, axis=1)
    held[:, 1:] -= backward[:, :-1]
    return np.asarray(held.max(axis=1), dtype=np.float64)


def _rounds(micro_batches: int, ranks: int, virtual: int) -> tuple[Ints, Ints, int]:
    """Stage of its rank and micro-batch of each forward; and the size of the first round."""
    count = max(micro_batches // ranks, 1)
    chunks, batches, first, largest = [], [], 0, -(-micro_batches // count)
    for left in range(count, 0, -1):
        stop = first + -(-(micro_batches - first) // left)
        chunks.append(np.repeat(np.arange(virtual), stop - first))
        batches.append(np.tile(np.arange(first, stop), virtual))
        first = stop
    return np.concatenate(chunks), np.concatenate(batches), largest


def stage_bound_bytes(
    model: ModelSpec,
    space: Space,
    rows: Ints,
    *,
    tokens: Ints | None,
    is_last_heavier: bool | None,
) -> Floats:
    """Lower bound of the fullest rank's memory; 0 where nothing is known, float64 [rows] [bytes].

    Args:
        model: Sizes; its layers are alike.
        space: The choices.
        rows: Choices with the same tensor, context and expert ranks and micro-batch, int64 [n].
        tokens: A rank's micro-batches, in order, int64 [micro-batches]; full ones unless given.
        is_last_heavier: As for ``even_layers``; None where an end may weigh a layer or more.

    Cost: some 0.3 ms for each way to run a pipeline, and for each way to share states.
    """
    needs = np.zeros(len(rows))
    is_known = np.isin(space["schedule"][rows], _KNOWN) & (space["offload"][rows] == 0)
    is_known &= space["pp"][rows] * space["virtual"][rows] <= model.layers
    mine = np.flatnonzero(is_known)
    if is_last_heavier is None or space.base.stack.split != "exact" or not len(mine):
        return needs
    at, known = rows[mine], dict[tuple[object, ...], Floats]()
    pipelines = [space[name][at] for name in ("schedule", "pp", "virtual")]
    for alike in group_equal([*pipelines, space.micro_batches[at]]):
        row = int(at[alike[0]])
        batches = tokens
        if batches is None:
            size = space["micro_batch"][row] * space.base.context_tokens
            batches = np.full(int(space.micro_batches[row]), size)
        ways = _PipelineNeeds(
            model, space.choice(row), batches, known, is_last_heavier=is_last_heavier
        )
        for same in group_equal([space[name][at[alike]] for name in _STATES]):
            needs[mine[alike[same]]] = ways.bytes_of(space.choice(int(at[alike[same[0]]])))
    return needs * _LESS


class _PipelineNeeds:
    """Ranks of one schedule, and what its choices need on them."""

    def __init__(
        self,
        model: ModelSpec,
        choice: Choice,
        tokens: Ints,
        known: dict[tuple[object, ...], Floats],
        *,
        is_last_heavier: bool,
    ) -> None:
        options, self._ranks, self._known = choice.options, choice.layout.pp, known
        self._model, self._tokens, self._schedule = model, tokens, options.schedule
        self._stages = self._ranks * options.virtual
        self._heavier = is_last_heavier
        self._each = -(-model.layers // self._stages)
        self._table: Floats | None = None
        self._full: tuple[Floats, Floats] | None = None

    def bytes_of(self, choice: Choice) -> float:
        """Lower bound of the fullest rank's bytes."""
        if choice.options.recompute.startswith("every"):
            return self._mixed(choice)
        if self._table is None:
            self._table = self._even()
        return float((self._bytes(choice, choice.options.recompute) @ self._table).max())

    def _bytes(self, choice: Choice, recompute: str) -> Floats:
        """``_coefficients`` of one group, whose devices and tokens are the same."""
        layout = choice.layout
        key = layout.dp, layout.zero, layout.replicas, recompute
        if key not in self._known:
            most = int(self._tokens.max())
            self._known[key] = _coefficients(self._model, choice, most, recompute)
        return self._known[key]

    def _held(self, layers: Ints) -> Floats:
        return least_in_flight(self._schedule, self._ranks, layers, self._tokens)

    def _even(self) -> Floats:
        """Per-rank multipliers of ``_coefficients``, float64 [6, ranks]."""
        pp = self._ranks
        layers = even_layers(self._model.layers, self._stages, is_last_heavier=self._heavier)
        place = place_stages(self._schedule, pp, self._stages)
        of_rank = np.bincount(place, layers, pp)
        embeds, has_head = np.zeros((2, pp))
        embeds[0] = has_head[place[-1]] = 1.0
        held = self._held(layers)
        return np.stack((np.ones(pp), of_rank - 1.0, held, embeds, has_head, embeds * has_head))

    def _mixed(self, choice: Choice) -> float:
        """Lower bound where each k-th layer is recomputed."""
        each, ranks = self._each, self._ranks
        lacking = self._stages * each - self._model.layers
        if lacking < 2:
            return 0.0
        if self._full is None:
            whole = self._held(np.full(self._stages, each))
            place = np.arange(self._stages) // ranks
            chunks = [self._held((place == at).astype(np.int64)) for at in range(place[-1] + 1)]
            self._full = whole, np.max(chunks, axis=0)
        held, most_of_chunk = self._full
        kept, again = (self._bytes(choice, how) for how in _BOTH)
        repeated = -(-each // int(choice.options.recompute.removeprefix("every-"))) / each
        of_token = (1.0 - repeated) * kept[2] + repeated * again[2]
        layers = each * self._stages // ranks
        # Of any n ranks one lacks no more than the mean.
        lacks = (lacking // np.arange(1, ranks + 1))[:, None]
        needs = kept[0] + kept[1] * (layers - 1 - lacks) + of_token * held
        needs = np.minimum.accumulate(needs - kept[2] * lacks * most_of_chunk, axis=1)
        return float(np.diagonal(needs).max())


def _coefficients(model: ModelSpec, choice: Choice, most_tokens: int, recompute: str) -> Floats:
    """Bytes of one layer, of each more, of a layer's token in flight, of embedding, head, both."""
    layout, options = choice.layout, dataclasses.replace(choice.options, recompute=recompute)

    def whole(layers: int, kept: float, *, embeds: bool, head: bool) -> float:
        share = StageShare(tuple(range(layers)), embeds, head, kept)
        return sum(rank_memory(model, layout, options, share, most_tokens / layout.cp).values())

    one = whole(1, 0.0, embeds=False, head=False)
    more = whole(2, 0.0, embeds=False, head=False) - one
    held = (whole(1, 1.0, embeds=False, head=False) - one) / most_tokens
    embeds = whole(1, 0.0, embeds=True, head=False) - one
    head = whole(1, 0.0, embeds=False, head=True) - one
    both = whole(1, 0.0, embeds=True, head=True) - one - embeds - head
    return np.array([one, more, held, embeds, head, both])
