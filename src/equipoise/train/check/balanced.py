"""Cases of balanced experts: every policy under every kind of workload, each twice.

What it decides
    A router that has just begun spreads its choices evenly, and nothing would be copied. So each
    expert's score for the choice, though not its weight, begins with a bias: 1 for the experts
    that a kind of ``balance.expert.workload`` makes popular, -1 for those that it leaves empty.
    ``W4`` is what the sample's uneven documents make of even routers. Copies are made for any row.

Kept true (tests/unit/train/check/test_case.py)
    Every policy and every kind is in some case; eplb only where ranks divide the experts, and tutel
    also where ranks share hidden units; some models have experts without weights.
"""

import dataclasses

from equipoise.balance.expert.auto import most_copies
from equipoise.balance.expert.workload import WORKLOADS
from equipoise.spec.model.experts import split_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.layout import ExpertPolicyName
from equipoise.spec.run.spec import ExpertsSpec
from equipoise.train.check.case import Case, make_case, shares_experts

_POLICIES: tuple[ExpertPolicyName, ...] = ("exact", "hecate", "eplb", "tutel", "auto")

_EXPERTS = 16
"""Experts of a model whose run has none."""


def with_experts(model: ModelSpec) -> ModelSpec:
    """The model with routers that can be biased: its own experts, or some."""
    if not model.experts:
        units = max(model.ffn // 2, 8)
        model = dataclasses.replace(model, experts=_EXPERTS, top_k=2, expert_ffn=units)
    return dataclasses.replace(model, balance="bias", balance_rate=1.0, capacity_factor=0.0)


def balanced_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every policy with every kind of workload, at ZeRO stages in turn, repeated.

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
            case = make_case(model, ranks, ep=ranks, zero=turn % 4, context_tokens=512)
            slots = most_copies(model.experts, ranks) if policy == "auto" else 1
            wish = ExpertsSpec(policy, slots=slots, least_rows=1)
            cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    idle = dataclasses.replace(
        model, identity_experts=max(2, model.experts // 2), real_top_k=0.75 * model.top_k
    )
    for turn, kind in enumerate(("W1", "W4", "W5")):
        case = make_case(idle, ranks, ep=ranks, zero=turn + 1, context_tokens=512)
        wish = ExpertsSpec(("exact", "fixed", "auto")[turn], least_rows=1)
        cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    for etp in (each for each in range(2, ranks + 1) if ranks % each == 0):
        if not shares_experts(model.experts, ranks // etp) or model.expert_ffn < etp:
            continue
        for turn, kind in enumerate(("W1", "W5")):
            case = make_case(model, ranks, ep=ranks // etp, etp=etp, zero=turn, context_tokens=512)
            # The price of weights decides the sharing: both ends, and one between.
            wish = ExpertsSpec("tutel", least_rows=(1, 1000)[turn])
            cases.append(dataclasses.replace(case, experts=wish, router=kind, repeats=True))
    return cases


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
