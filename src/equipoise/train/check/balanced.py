"""Cases of balanced experts: every policy under every workload and beside every axis, each twice.

What it decides
    A router that has just begun spreads its choices evenly, and nothing would be copied. So each
    expert's score for the choice, though not its weight, begins with a bias: 1 for the experts
    that a kind of ``balance.expert.workload`` makes popular, -1 for those that it leaves empty.
    ``W4`` is what the sample's uneven documents make of even routers. Copies are made for any row.

    Policies that plan from earlier loads are given some, or they would copy nothing either: those
    of the same kind, under which other experts are popular where popularity moves.

Kept true (tests/unit/train/check/test_balanced.py)
    Every policy is in some case with every kind, beside every axis, and in parts; eplb only where
    ranks divide the experts, and tutel also where ranks share hidden units; some models have
    experts without weights, beside context ranks too, frozen ones, adapters, or a shortcut.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from equipoise.balance.expert.auto import most_copies
from equipoise.balance.expert.routes import RouteTable
from equipoise.balance.expert.workload import WORKLOADS
from equipoise.base.arrays import Ints
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.model.experts import shares_experts, split_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.layout import ExpertPolicyName
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import ExpertsSpec, Recompute
from equipoise.train.check.case import Case, divisors, make_case

_POLICIES: tuple[ExpertPolicyName, ...] = ("exact", "hecate", "eplb", "tutel", "auto")

_IDLE: dict[ExpertPolicyName, str] = {
    "exact": "W1",
    "fixed": "W4",
    "auto": "W5",
    "hecate": "W6",
    "eplb": "W2",
    "tutel": "W7",
}
"""The workload of each policy beside experts without weights."""

_PARTED = ("W1", "W5")
"""The workloads whose rows travel in parts under each policy."""

_EXPERTS = 16
"""Experts of a model whose run has none."""


def with_experts(model: ModelSpec) -> ModelSpec:
    """The model with routers that can be biased: its own experts, or some."""
    if not model.experts:
        units = max(model.ffn // 2, 8)
        model = dataclasses.replace(model, experts=_EXPERTS, top_k=2, expert_ffn=units)
    return dataclasses.replace(model, balance="bias", balance_rate=1.0, capacity_factor=0.0)


def balanced_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every policy with every kind of workload, at ZeRO stages in turn, and on every axis.

    Args:
        ranks: In all; they share the experts.
        model: As ``with_experts`` returns it.
    """
    if ranks == 1 or not shares_experts(model.experts, ranks):
        return []
    cases = []
    for policy in _POLICIES:
        if policy == "eplb" and model.experts % ranks:
            continue
        for turn, kind in enumerate(WORKLOADS):
            parts = 3 if kind in _PARTED else 1
            zero = turn % 4
            case = make_case(model, ranks, ep=ranks, zero=zero, parts=parts, context_tokens=512)
            slots = most_copies(model.experts, ranks) if policy == "auto" else 1
            wish = ExpertsSpec(policy, slots=slots, least_rows=1)
            cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    idle = dataclasses.replace(
        model, identity_experts=max(2, model.experts // 2), real_top_k=0.75 * model.top_k
    )
    for turn, (policy, kind) in enumerate(_IDLE.items()):
        if policy == "eplb" and model.experts % ranks:
            continue
        context = (1, ranks, 1)[turn % 3]
        zero = (turn + 1) % 4
        case = make_case(idle, ranks, ep=ranks, cp=context, zero=zero, context_tokens=512)
        wish = ExpertsSpec(policy, least_rows=1)
        cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    for etp in (each for each in range(2, ranks + 1) if ranks % each == 0):
        if not shares_experts(model.experts, ranks // etp) or model.expert_ffn < etp:
            continue
        for turn, kind in enumerate(("W1", "W5")):
            ep, parts = ranks // etp, 2 if turn and etp < ranks else 1
            case = make_case(
                model, ranks, ep=ep, etp=etp, zero=turn, parts=parts, context_tokens=512
            )
            # The price of weights decides the sharing: both ends, and one between.
            wish = ExpertsSpec("tutel", least_rows=(1, 1000)[turn])
            cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    rest = _partly_trained(ranks, model) + _behind_shortcut(ranks, model)
    return cases + beside_axes(ranks, model) + rest + speculative_cases(ranks, model)


def beside_axes(ranks: int, model: ModelSpec) -> list[Case]:
    """Every policy on layouts of every axis, where some share experts; hot ones, and empty ones."""
    cases: list[Case] = []
    for shape in _shapes(ranks, model):
        ep, etp = shape["ep"], shape.get("etp", 1)
        for policy in _POLICIES if etp == 1 else ("tutel",):
            if policy == "eplb" and model.experts % ep:
                continue
            shape = {"zero": len(cases) % (2 if shape.get("pp", 1) > 1 else 4)} | shape
            slots = most_copies(model.experts, ep) if policy == "auto" else 1
            wish = ExpertsSpec(policy, slots=max(1, slots), least_rows=1)
            kind = ("W1", "W5")[len(cases) % 2]
            case = make_case(model, ranks, **shape)
            cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    return cases


def _shapes(ranks: int, model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Layouts where some ranks share experts, beside each other axis."""
    pipeline = {"pp": 2, "policy": "in-order", "context_tokens": 64}
    shapes: list[dict[str, Any]] = [{"cp": ranks, "ep": ranks}, {"ep": ranks, "policy": "divided"}]
    shapes += [{"tp": ranks, "ep": ranks}] if model.heads % ranks == 0 else []
    for half in divisors(ranks)[:-1]:  # as many groups as they leave
        shapes += [{"cp": half, "ep": ranks}, {"ep": half, "replicas": ranks // half, "zero": 1}]
        shapes += [
            {"ep": half, "recompute": "full"},
            {"ep": half, "etp": ranks // half, "cp": half},
        ]
        if model.heads % half == 0:
            shapes += [{"tp": half, "ep": ranks}, {"tp": half, "ep": half, "etp": ranks // half}]
        if half == ranks // 2:
            shapes += [pipeline | {"schedule": each, "ep": half} for each in _schedules()]
            shapes += [pipeline | {"cp": half, "ep": half}, pipeline | {"etp": half, "ep": 1}]
            shapes += [pipeline | {"tp": half, "ep": half}] if model.heads % half == 0 else []
    for shape in shapes:
        is_shared = shape["ep"] == 1 or shares_experts(model.experts, shape["ep"])
        if is_shared and model.expert_ffn >= shape.get("etp", 1):
            yield shape


def _schedules() -> list[str]:
    """One pipeline schedule of each kind that plans choose.

    Backwards are whole or split, a rank has one stage or several, and these run straight or in a V.
    """
    kinds: dict[tuple[bool, bool, bool], str] = {}
    for name, traits in SCHEDULES.items():
        if traits.planned == "always":
            kind = traits.splits_backward, traits.is_interleaved, traits.in_v
            kinds.setdefault(kind, name)
    return list(kinds.values())


def _partly_trained(ranks: int, model: ModelSpec) -> list[Case]:
    """Experts that stay as they are: frozen, and beside adapters of attention."""
    cases: list[Case] = []
    wishes: tuple[tuple[ExpertPolicyName, int], ...] = (("exact", 1), ("tutel", 1), ("tutel", 2))
    for policy, etp in wishes:
        if ranks % etp or not (etp == ranks or shares_experts(model.experts, ranks // etp)):
            continue
        case = make_case(model, ranks, ep=ranks // etp, etp=etp, zero=3)
        wish = ExpertsSpec(policy, slots=most_copies(model.experts, ranks // etp), least_rows=1)
        case = dataclasses.replace(case, experts=wish, router="W1", repeats=True)
        adapted = LoraSpec(rank=4, targets=("query", "key", "value", "output"))
        frozen = dataclasses.replace(case.train, freeze=("*.experts",))
        cases += [
            dataclasses.replace(case, lora=adapted),
            dataclasses.replace(case, train=frozen),
        ]
    return cases


def _behind_shortcut(ranks: int, model: ModelSpec) -> list[Case]:
    """Rows that travel beside attention: every way in which they do, and every other axis."""
    if model.shortcut:  # then all cases are such
        return []
    shared = model.shared_ffn or model.ffn
    model = dataclasses.replace(model, shortcut=True, shared_ffn=shared)
    pipeline = {"pp": 2, "policy": "in-order", "context_tokens": 64, "ep": ranks // 2}
    split = {"etp": ranks}
    shapes: list[tuple[ExpertPolicyName, dict[str, Any]]] = [
        ("fixed", {"ep": ranks, "parts": 2}),
        ("fixed", {"ep": ranks, "recompute": "full", "zero": 3}),
        ("fixed", {"ep": ranks, "recompute": "attention"}),
        ("exact", {"ep": ranks, "recompute": "selective"}),
        ("exact", {"ep": ranks, "cp": ranks}),
        ("hecate", {"ep": ranks, "policy": "divided"}),
        ("auto", {"ep": ranks}),
    ]
    shapes += [("exact", {"ep": ranks, "tp": ranks})] if model.heads % ranks == 0 else []
    if model.expert_ffn >= ranks:
        shapes += [("fixed", split | {"zero": 1}), ("tutel", split)]
    if ranks % 2 == 0 and ranks > 2:
        shapes += [("exact", pipeline), ("fixed", pipeline | {"schedule": "zb-h1"})]
    cases: list[Case] = []
    for policy, shape in shapes:
        case = make_case(model, ranks, **shape)
        slots = most_copies(model.experts, ranks) if policy == "auto" else 1
        wish = ExpertsSpec(policy, slots=slots, least_rows=1)
        kind = ("W1", "W5")[len(cases) % 2]
        cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    return cases


def speculative_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Tokens shuffled by routes that are drawn, which routers hardly ever follow.

    With every kind of workload on ranks that share all weights, and beside every axis that goes
    with it.
    """
    routed: list[tuple[str, Case]] = []
    for turn, kind in enumerate(WORKLOADS if model.heads % ranks == 0 else ()):
        again: Recompute = ("none", "full", "selective", "attention")[turn % 4]
        shape: dict[str, Any] = {"tp": ranks, "ep": ranks, "zero": (turn + turn // 4) % 4}
        routed.append((kind, make_case(model, ranks, recompute=again, **shape)))
    for half in divisors(ranks)[:-1]:  # as many groups as they leave
        if model.heads % half or not shares_experts(model.experts, half):
            continue
        shape = {"tp": half, "ep": half}
        routed += [
            ("W1", make_case(model, ranks, zero=1, cp=ranks // half, **shape)),
            ("W5", make_case(model, ranks, zero=3, policy="divided", **shape)),
            ("W3", make_case(model, ranks, zero=2, parts=2, **shape)),
        ]
    wish = ExpertsSpec("speculative")
    cases = [
        dataclasses.replace(case, experts=wish, router=kind, repeats=True) for kind, case in routed
    ]
    if cases and not model.shortcut:
        shortcut = dataclasses.replace(
            cases[0].model, shortcut=True, shared_ffn=model.shared_ffn or model.ffn
        )
        cases.append(dataclasses.replace(cases[0], model=shortcut))
    return cases


def drawn_routes(case: Case) -> RouteTable | None:
    """A table for a case that speculates, right about nothing; None for any other."""
    if case.experts.policy != "speculative":
        return None
    drawn, vocab, ranks = np.random.default_rng(0), case.model.vocab, case.layout.tp
    tokens, pairs = np.arange(0, vocab, 2), np.arange(0, vocab * vocab, 3)
    values = [drawn.integers(0, 9, (count, ranks)) for count in (1, len(tokens), len(pairs))]
    return RouteTable(vocab, "", values[0][0], tokens, values[1], pairs, values[2])


def earlier_loads(case: Case) -> Ints | None:
    """What the step before is said to have chosen, int64 [layers, X]; None without a workload."""
    model = case.model
    if not case.router:
        return None
    states = np.array(router_state(case.router, model.experts, case.ranks))
    # W6 and W7 are popularity that has moved since.
    states = np.roll(states, 2 if case.router in ("W6", "W7") else 0)
    loads = np.append(8 + 56 * (states > 0) - 8 * (states < 0), [8] * model.identity_experts)
    return np.tile(loads.astype(np.int64), (model.sparse_layers, 1))


def router_state(kind: str, experts: int, ranks: int) -> list[int]:
    """The bias of each expert's score for the choice, in units of the model's rate.

    >>> router_state("W2", 8, 4), router_state("W3", 8, 4)
    ([1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0])
    """
    shares = split_experts(experts, ranks=ranks)
    firsts = {sum(shares[:rank]) for rank in range(ranks)}
    few = max(2, experts // 4)
    hot = {
        "W1": set(range(few)),
        "W2": set(range(shares[0])),
        "W3": firsts,
        "W6": set(range(few, 2 * few)),
        "W7": {experts - 1},
    }.get(kind, set())
    empty = set(range(0, experts, 2)) if kind == "W5" else set[int]()
    return [(expert in hot) - (expert in empty) for expert in range(experts)]
