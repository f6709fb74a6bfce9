"""Cases with images and sound: encoders on all ranks beside a decoder in every layout.

What it decides
    Every ZeRO stage, which shards encoders over all ranks, beside every other axis that may share
    the decoder; copies of shards; windows that cut items; axes together. Policies that divide
    documents over ranks are refused and have none. Then the same encoders beside a decoder with
    experts, which ranks share: as they lie, balanced by copies, and cut by hidden units, beside
    every axis. At last what recipes freeze at first: the decoder, under whole encoders or under
    their last products alone; all encoders; one of them and the first layers of the decoder.

Kept true (tests/multi/check/test_modality.py)
    Every axis is beside encoders at every stage, and beside encoders and experts.
"""

import dataclasses
from functools import partial
from typing import Any

from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.experts import shares_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.layout import ExpertPolicyName
from equipoise.spec.run.spec import ExpertsSpec
from equipoise.train.check.balanced import with_experts
from equipoise.train.check.case import STAGES, Case, divisors, make_case

VISION = VisionSpec(layers=2, hidden=16, heads=2, patch=2)
AUDIO = AudioSpec(layers=1, hidden=8, heads=1)
"""Small encoders, which have every part of large ones."""


def modal_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Encoders beside a decoder on this many real ranks; beside one with experts, too."""
    make = partial(_make, model, ranks)
    cases = [
        *(make(zero=zero) for zero in STAGES),
        make(policy="in-order", context_tokens=64, zero=2, recompute="full"),
    ]
    for degree in divisors(ranks):
        cases += [make(cp=degree, zero=zero) for zero in (0, 1, 2)]
        cases += [make(cp=degree, policy="in-order", context_tokens=96, zero=3)]
        if model.heads % degree == 0:
            cases += [make(tp=degree, zero=zero) for zero in (0, 1, 2)]
            cases += [make(tp=degree, zero=3, recompute="full")]
        piped = partial(make, pp=degree, policy="in-order", context_tokens=64)
        cases += [*(piped(zero=zero) for zero in STAGES), piped(schedule="zb-v")]
    if ranks == 4:
        pipelined = partial(make, pp=2, policy="in-order", context_tokens=64)
        cases += [make(cp=2, tp=2), pipelined(cp=2, schedule="zb-h1"), pipelined(tp=2)]
        cases += [make(zero=zero, replicas=2) for zero in (2, 3)]
    cases = [dataclasses.replace(case, repeats=at == 0) for at, case in enumerate(cases)]
    return cases + _beside_experts(ranks, with_experts(model)) + _frozen(ranks, model)


DECODER = ("embed", "layers", "norm")
PROJECTORS = ("encoders.*.embed", "encoders.*.layers", "encoders.*.norm")
"""What stays as it is where only the last products of encoders are trained."""


def _frozen(ranks: int, model: ModelSpec) -> list[Case]:
    """A part of decoder and encoders is trained, beside every axis."""
    decoder = DECODER if model.tied else (*DECODER, "head")
    some = "encoders.image", "embed", "layers.0"
    short = {"policy": "in-order", "context_tokens": 64}  # some micro-batches have text alone
    piped = {"pp": ranks} | short
    shapes: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        ((*decoder, *PROJECTORS), {"zero": 3} | short),
        (decoder, {"zero": 1}),
        (("encoders",), {"zero": 2}),
        (some, {"zero": 0}),
    ]
    if ranks > 1:
        shapes += [(decoder, {"cp": ranks, "zero": 3, "recompute": "full"})]
        shapes += [((*some, "encoders.audio"), {"cp": ranks, "zero": 1})]
        shapes += [((*decoder, *PROJECTORS), piped), (("encoders",), piped | {"schedule": "zb-v"})]
        shapes += [(some, piped | {"zero": 2})]
    if ranks > 1 and model.heads % ranks == 0:
        shapes += [((*decoder, *PROJECTORS), {"tp": ranks}), (some, {"tp": ranks, "zero": 3})]
    if ranks == 4:
        shapes += [((*decoder, *PROJECTORS), {"zero": 3, "replicas": 2})]
    cases = [(freeze, _make(model, ranks, **shape)) for freeze, shape in shapes]
    sparse = with_experts(model)
    if ranks > 1 and shares_experts(sparse.experts, ranks):
        beside = _beside_experts(ranks, sparse)
        cases += [(decoder, beside[0]), (("encoders",), beside[1])]
    return [
        dataclasses.replace(case, train=dataclasses.replace(case.train, freeze=freeze))
        for freeze, case in cases
    ]


def _beside_experts(ranks: int, model: ModelSpec) -> list[Case]:
    """Encoders beside experts that ranks share; the first step runs twice."""
    if ranks == 1 or not shares_experts(model.experts, ranks):
        return []
    shapes: list[tuple[ExpertPolicyName, dict[str, Any]]] = [
        ("exact", {"ep": ranks}),
        ("fixed", {"ep": ranks, "cp": ranks, "zero": 3, "recompute": "full"}),
    ]
    shapes += [("exact", {"ep": ranks, "tp": ranks})] if model.heads % ranks == 0 else []
    shapes += [("tutel", {"etp": ranks, "zero": 2})] if model.expert_ffn >= ranks else []
    if ranks % 2 == 0 and ranks > 2:
        piped = {"pp": 2, "ep": ranks // 2, "policy": "in-order", "context_tokens": 64}
        shapes += [("exact", piped)]
    return [
        dataclasses.replace(
            _make(model, ranks, **shape),
            experts=ExpertsSpec(policy, least_rows=1),
            router=("W1", "W5")[at % 2],
            repeats=at == 0,
        )
        for at, (policy, shape) in enumerate(shapes)
    ]


def _make(model: ModelSpec, ranks: int, **keys: Any) -> Case:
    return dataclasses.replace(make_case(model, ranks, **keys), vision=VISION, audio=AUDIO)
