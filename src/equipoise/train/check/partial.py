"""Cases in which only some labels, or only some weights, are learned."""

import dataclasses
from typing import Any

from equipoise.spec.model.experts import shares_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.lora import LoraSpec
from equipoise.train.check.case import STAGES, Case, divisors, make_case


def masked_cases(ranks: int, model: ModelSpec, *, is_theirs: bool = False) -> list[Case]:
    """Documents of which only some tokens have a label: a layout of every axis, whole and cut.

    Args:
        ranks: In all.
        model: Its sizes.
        is_theirs: Whether transformers builds the model, whose modules are not divided.
    """
    axes: list[dict[str, Any]] = [{"zero": 3}, {"zero": 1, "policy": "in-order"}]
    if ranks > 1:
        axes += [{"cp": ranks}, {"policy": "divided", "context_tokens": 128}]
    if ranks > 1 and not is_theirs:
        axes += [{"pp": n, "policy": "in-order", "context_tokens": 64} for n in divisors(ranks)[:1]]
        axes += [{"tp": n} for n in divisors(ranks, of=model.heads)[:1]]
        axes += [{"ep": n} for n in divisors(ranks) if shares_experts(model.experts, n)][:1]
    return [dataclasses.replace(make_case(model, ranks, **each), masks=True) for each in axes]


def trained_cases(
    ranks: int, model: ModelSpec, *, their_freeze: tuple[str, ...] = ()
) -> list[Case]:
    """Adapters, and frozen weights, on every ZeRO stage and beside every axis once.

    Args:
        ranks: In all.
        model: Its sizes.
        their_freeze: Patterns for a model that transformers builds, whose modules are not divided.
    """
    last = model.layers - 1
    lora = LoraSpec(rank=4)
    freeze = ("embed", f"layers.0-{max(0, last - 1)}.attention", "*.key")
    kinds: list[dict[str, Any]] = [{"lora": lora}, {"freeze": their_freeze or freeze}]
    shapes: list[dict[str, Any]] = [{"zero": zero} for zero in STAGES]
    shapes += [{"zero": 3, "recompute": "full"}]
    if ranks > 1:
        shapes += [{"policy": "divided", "context_tokens": 128}, {"cp": ranks, "zero": 3}]
    if not their_freeze:
        shapes += [{"recompute": "selective"}]
    if ranks > 1 and not their_freeze:
        shapes += [{"pp": ranks}, {"pp": ranks, "schedule": "zb-h1"}]
        shapes += [{"pp": ranks, "zero": 2}]
        shapes += [{"tp": ranks, "zero": zero} for zero in (1, 3) if model.heads % ranks == 0]
    return [
        dataclasses.replace(
            case := make_case(model, ranks, **shape),
            lora=kind.get("lora", case.lora),
            train=dataclasses.replace(case.train, freeze=kind.get("freeze", ())),
        )
        for shape in shapes
        for kind in kinds
    ]
