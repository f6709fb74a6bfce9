"""What routers choose, by the number of ranks that share experts: drawn, or of a run's own routers.

Why
    One number for the skew of experts says that 8 ranks and 64 are alike. The more ranks share a
    layer's experts, the fuller is the fullest: a plan that takes experts as balanced, and balances
    them later, chooses too many ranks.

What it decides
    Every number of ranks gets the skew that the loads have there, on average, as owners alone
    would compute them and under a policy with its slots, and what the policy's copies move. Drawn
    loads are those of ``balance.expert.workload``; a run's are the last steps of its journal, dealt
    to ranks evenly. Policies that plan by earlier loads get those of the step before.

Kept true (tests/unit/sim/settle/test_experts.py)
    More ranks are never fuller on average under W1; a policy is never fuller than owners alone.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from equipoise.balance.expert.auto import can_serve, most_held
from equipoise.balance.expert.bound import break_even_rows
from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.trace import deal_loads
from equipoise.balance.expert.workload import WORKLOADS, workload
from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cost.step.request import ExpertForecast, StepOptions, element_bytes
from equipoise.observe.experts import expert_loads
from equipoise.observe.journal_lines import read_journals
from equipoise.sim.machine import Machine
from equipoise.spec.model.experts import shares_experts
from equipoise.spec.model.presets import ModelSpec

FORECAST_POLICIES = ("fixed", "exact", "hecate", "eplb")
"""Policies that a forecast knows; ``tutel`` chooses by the ranks that share hidden units."""

_SEEDS, _STEP, _RECORDED = 3, 3, 4
"""Draws, the step that is drawn, and the last steps of a run that are read."""

_PRODUCT_ROWS, _LARGE_BYTES = 4096, float(1 << 28)
"""A product and a message at their full rates, by which a copy is worth its bytes or not."""


class AskedLoads(Protocol):
    """What a request says of experts."""

    @property
    def expert_skew(self) -> float:
        """One skew for every number of ranks."""

    @property
    def expert_loads(self) -> str | None:
        """What routers choose."""

    @property
    def expert_policy(self) -> str:
        """What balances them."""

    @property
    def expert_slots(self) -> int:
        """Most copies on a rank."""


def require_loads(asked: AskedLoads, *, experts: int) -> None:
    """Refuse a forecast of routers that would change nothing, or that nobody knows.

    Raises:
        SpecError: names the setting, and what it needs.
    """
    if asked.expert_skew != 1 and not experts:
        raise SpecError(
            f"expert_skew = {asked.expert_skew:g} needs a model with experts, and this one has "
            f"none. Leave expert_skew out."
        )
    if asked.expert_loads is None:
        for name, plain in (("expert_policy", "fixed"), ("expert_slots", 1)):
            if (value := getattr(asked, name)) != plain:
                raise SpecError(
                    f"{name} = {value} needs expert_loads, what routers choose. Give both or "
                    f"neither."
                )
        return
    if not experts:
        raise SpecError(
            f"expert_loads = {asked.expert_loads} needs a model with experts, and this one has "
            f"none. Leave expert_loads out."
        )
    if asked.expert_skew != 1:
        raise SpecError(
            f"expert_skew = {asked.expert_skew:g} and expert_loads = {asked.expert_loads} both say "
            f"how uneven experts are. Give one of them."
        )
    if asked.expert_policy not in FORECAST_POLICIES:
        raise SpecError(
            f"expert_policy is {asked.expert_policy}, and not one of "
            f"{', '.join(FORECAST_POLICIES)}. Nearest: "
            f"{nearest(asked.expert_policy, FORECAST_POLICIES)}."
        )
    if asked.expert_slots < 1:
        raise SpecError(f"expert_slots is {asked.expert_slots}. Give a whole number above 0.")


def with_loads(
    options: StepOptions, asked: AskedLoads, model: ModelSpec, machine: Machine
) -> StepOptions:
    """The options with a forecast of what routers choose, where one is asked for.

    Raises:
        SpecError: as ``forecast_experts``.
    """
    if asked.expert_loads is None:
        return options
    world = machine.cluster.devices
    forecast = forecast_experts(
        asked.expert_loads,
        model,
        world,
        policy=asked.expert_policy,
        slots=asked.expert_slots,
        least_rows=partial(_least_rows, options, model, machine),
        rows_per_rank=round(options.context_tokens * options.micro_batch * model.mean_top_k),
    )
    return dataclasses.replace(options, experts=forecast)


def _least_rows(options: StepOptions, model: ModelSpec, machine: Machine, ranks: int) -> int:
    """Rows below which a copy costs more than it saves, over the link of this many ranks."""
    if ranks == 1:
        return 1
    machine, precision = machine.at(options.precision), options.precision
    units, rows = model.expert_ffn, _PRODUCT_ROWS
    product_s = machine.product_s(rows, units, model.hidden, fp8=False)
    link_s = machine.collective(tuple(range(ranks)))("all_to_all", _LARGE_BYTES)
    return round(
        break_even_rows(
            2.0 * rows * units * model.hidden / product_s,
            _LARGE_BYTES / link_s,
            weight_bytes=int(element_bytes(precision)),
            gradient_bytes=int(options.stack.grad_bytes),
        )
    )


def forecast_experts(
    loads: str,
    model: ModelSpec,
    world: int,
    *,
    policy: str = "fixed",
    slots: int = 1,
    least_rows: Callable[[int], int] = lambda _: 1,
    rows_per_rank: int,
) -> ExpertForecast:
    """Skews and copies for every number of ranks that divides the world.

    Args:
        loads: A kind of workload, ``W0`` to ``W7``, or the folder of a run.
        model: Its experts.
        world: All ranks.
        policy: One of ``FORECAST_POLICIES``.
        slots: Most copies on a rank.
        least_rows: Fewest rows that a copy is made for, by the number of ranks.
        rows_per_rank: Rows that a rank routes in a micro-batch.

    Raises:
        SpecError: no such workload or run, or one of another number of experts.
    """
    shares = [
        each
        for each in range(1, min(world, model.experts) + 1)
        if world % each == 0 and shares_experts(model.experts, each)
    ]
    recorded = None if loads in WORKLOADS else _recorded(loads, model)
    owner, planned, copied = [], [], []
    for ranks in shares:
        alone, balanced, moved, least = [], [], [], least_rows(ranks)
        for rows, seen in _rows(loads, recorded, model, ranks, rows_per_rank):
            request = ExpertRequest(rows, slots=slots, least_rows=least, seen=seen)
            fixed = plan_experts("fixed", request)
            schedule = plan_experts(policy, request) if can_serve(policy, request) else fixed
            alone.append(fixed.skew)
            balanced.append(schedule.skew)
            sent = schedule.copied
            moved.append(max(int(sent.sum(axis=0).max()), int(sent.sum(axis=1).max())))
        owner.append((ranks, float(np.mean(alone))))
        planned.append((ranks, float(np.mean(balanced))))
        copied.append((ranks, float(np.mean(moved))))
    held = (most_held(policy, experts=model.experts, ranks=n, slots=slots) for n in shares)
    kept = tuple(zip(shares, map(float, held), strict=True))
    return ExpertForecast(tuple(owner), tuple(planned), tuple(copied), kept)


def _rows(
    loads: str, recorded: list[Ints] | None, model: ModelSpec, ranks: int, rows_per_rank: int
) -> Iterator[tuple[Ints, Ints]]:
    """Rows of each rank for each expert, and the loads of the step before."""
    if recorded is None:
        for seed in range(_SEEDS):
            drawn, before = (
                workload(
                    loads,
                    seed,
                    step,
                    ranks=ranks,
                    experts=model.experts,
                    rows_per_rank=rows_per_rank,
                )
                for step in (_STEP, _STEP - 1)
            )
            yield drawn, before.sum(axis=0)
        return
    for before, now in pairwise(recorded):
        for layer, table in enumerate(now):
            # The same shares of as many rows as these ranks route.
            scaled = table * (ranks * rows_per_rank) // max(1, int(table.sum()))
            yield deal_loads(scaled, ranks), before[layer]


def _recorded(folder: str, model: ModelSpec) -> list[Ints]:
    """Loads of the last steps of a run, int64 [layers, X] each."""
    if not Path(folder).is_dir():
        raise SpecError(
            f"expert_loads is {folder}, which is neither a run's folder nor one of "
            f"{', '.join(WORKLOADS)}."
        )
    journals = read_journals(Path(folder))
    tables = list(expert_loads(journals[0].experts).values()) if 0 in journals else []
    if len(tables) < 2:
        raise SpecError(
            f"{folder} has {len(tables)} steps with loads of experts. A forecast needs 2: train a "
            f"model with experts for longer."
        )
    experts = tables[-1].shape[1]
    if experts != model.choices:
        raise SpecError(
            f"{folder} has routers of {experts} experts, and the model has {model.choices}. Give "
            f"a run with as many."
        )
    # Those without weights come last, and compute nothing.
    return [each[:, : model.experts] for each in tables[-_RECORDED:]]
