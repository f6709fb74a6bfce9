"""The best choices for a run, with the memory that this package's own ranks take.

What it decides
    Policies are compared last, on the best layouts of the search, with the documents of all
    data-parallel ranks; the search uses one rank's. A replayed step shows how much each pipeline
    rank keeps at a time; its bytes are ``cost.memory.forecast``'s forecast, the one that the run's
    report shows, where a described cluster has ``cost.memory.device``. A layout stands among the
    best with its faster policy, and runners-up differ in a degree if enough choices do.

Kept true (tests/unit/plan/answer/test_run_price.py)
    The first is the fastest that fits; a forecast grows with the largest micro-batch; the size
    before a wall fits.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np

from equipoise.base.units import GIB
from equipoise.cost.memory.forecast import MemoryForecast, forecast_memory
from equipoise.plan.answer.final import Finalist, degrees_of, price_finalists
from equipoise.plan.answer.run_encoders import RunEncoders
from equipoise.plan.answer.run_steps import RunSteps
from equipoise.plan.search.deadline import NEVER, Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import NAMED, Space
from equipoise.plan.space.packs import Packer
from equipoise.sim.modality.price import ENCODERS
from equipoise.sim.step import Documents, StepRun
from equipoise.spec.catalog import Policy
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.plan import Wall
from equipoise.spec.run.spec import Precision, Recompute

_PRICED = 24
"""Choices that are priced whole under each policy."""

_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)


def packer_of(steps: RunSteps, policy: Policy) -> Packer:
    """Packs for a search as the run will."""

    def pack(choice: Choice) -> Documents:
        return steps.documents(policy, choice.layout)

    return pack


def price_run(
    search: Search,
    outcome: Outcome,
    steps: RunSteps,
    *,
    policies: Sequence[Policy],
    precision: Precision,
    encoders: RunEncoders | None = None,
    count: int = 4,
    due: Deadline = NEVER,
) -> list[Finalist]:
    """The best and the next, fastest first, those that fit before those that do not.

    Args:
        search: What was searched, under one of the policies.
        outcome: The search's answer.
        steps: The run's first steps.
        policies: Policies to compare; a finalist's policy is in its options.
        precision: The run's.
        encoders: Of images and sound, if the run has any.
        count: How many, with the best.
        due: When pricing ends.
    """
    finalists: list[Finalist] = []
    for policy in policies:
        if finalists and due.is_over():
            break
        space, place = search.listed, NAMED["policy"].index(policy)
        space = Space(space.columns | {"policy": np.full(len(space), place)}, space.base)
        under = Search(search.model, search.machine, space, packer=packer_of(steps, policy))
        for each in price_finalists(under, outcome, _PRICED, due):
            tokens = steps.most_tokens(policy, each.choice.layout)
            whole = with_memory(search.model, each, tokens, precision)
            finalists.append(whole if encoders is None else encoders.added_to(whole))
    finalists.sort(key=_order)
    distinct: dict[Choice, Finalist] = {}
    for each in finalists:
        options = dataclasses.replace(each.choice.options, policy="any")
        distinct.setdefault(Choice(each.choice.layout, options), each)
    firsts: dict[tuple[int, ...], Finalist] = {}
    for each in distinct.values():
        firsts.setdefault(degrees_of(each.choice), each)
    chosen = list(firsts.values())
    chosen += [each for each in distinct.values() if each not in chosen]
    return sorted(chosen[:count], key=_order)


def _order(finalist: Finalist) -> tuple[bool, float]:
    price = finalist.run.price
    return not price.fits, price.step_s


def with_memory(
    model: ModelSpec, finalist: Finalist, tokens: int, precision: Precision
) -> Finalist:
    """A finalist with the memory that this package's own ranks take.

    Args:
        model: Sizes.
        finalist: Layout, and its replayed step.
        tokens: Tokens of the largest micro-batch.
        precision: Precision of activations.
    """
    ranks = forecast_ranks(model, finalist.choice, finalist.run, tokens, precision)
    fullest = max(ranks, key=lambda each: each.total_bytes)
    price = dataclasses.replace(
        finalist.run.price,
        memory={name: float(value) for name, value in fullest.terms.items()},
        memory_bytes=np.array([each.total_bytes for each in ranks], dtype=np.float64),
    )
    return dataclasses.replace(finalist, run=dataclasses.replace(finalist.run, price=price))


def forecast_ranks(
    model: ModelSpec, choice: Choice, run: StepRun, tokens: int, precision: Precision
) -> list[MemoryForecast]:
    """Memory of each pipeline rank.

    Args:
        model: Sizes.
        choice: Layout and recomputation.
        run: Its replayed step.
        tokens: Tokens of the largest micro-batch.
        precision: Precision of activations.
    """
    sizes = run.slowest.tokens
    # Others' keys and values of a layer's share, where context ranks bring them together.
    own = -(-tokens // choice.layout.cp)
    heads = max(1, model.kv_heads // choice.layout.tp)
    received = 2 * heads * model.head_width * (tokens - own)
    trained = choice.options.trained
    return [
        forecast_memory(
            model,
            choice.layout,
            tokens=own,
            precision=precision,
            recompute=cast(Recompute, choice.options.recompute),
            stage=share,
            received_values=received,
            micro_batches=len(sizes),
            sizes=len(set(sizes)),
            trained=1.0
            if trained is None
            else trained.of_rank(model, share.layers, embeds=share.embeds, has_head=share.has_head),
        )
        for share in run.memory.shares
    ]


def find_window_wall(
    model: ModelSpec, finalist: Finalist, tokens: int, precision: Precision
) -> tuple[Wall, ...]:
    """The first longer window that does not fit, micro-batches growing with it; empty if all fit.

    Args:
        model: Sizes.
        finalist: Layout, and its replayed step.
        tokens: Tokens of the largest micro-batch.
        precision: Precision of activations.
    """
    window, capacity = finalist.choice.options.context_tokens, finalist.run.price.capacity_bytes
    beside = finalist.run.price.memory.get(ENCODERS, 0.0)
    for factor in _FACTORS:
        grown = forecast_ranks(
            model, finalist.choice, finalist.run, int(tokens * factor), precision
        )
        needs = max(each.total_bytes for each in grown) + beside
        if needs > capacity:
            return (Wall("window", window, int(window * factor), needs / GIB, capacity / GIB),)
    return ()
