"""Models that transformers builds: any layout equals transformers' own model on one rank."""

import json

import pytest

from equipoise.parallel.theirs.shrink import shrink_config, write_config
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.train.check.case import (
    Case,
    all_cases,
    context_cases,
    divided_cases,
    make_case,
    of_theirs,
    played_cases,
)
from equipoise.train.check.prove import run_cases
from support.hf.models import FAMILIES, engine_config


def cases_of(kind: str, ranks: int, *, every: bool = False) -> list[Case]:
    config = shrink_config(engine_config(kind))
    model = model_from_other_config(config.to_dict())
    cases = [
        make_case(model, ranks, zero=3, recompute="full"),
        make_case(model, ranks, zero=2, policy="divided", context_tokens=128),
        make_case(model, ranks, zero=3, cp=ranks, sharding="mixed"),
        make_case(model, ranks, zero=1, cp=ranks, strategy="ulysses", recompute="every-2"),
    ]
    if every:
        cases = [
            *all_cases(ranks, model),
            *divided_cases(ranks, model),
            *context_cases(ranks, model),
        ]
    return of_theirs(cases, write_config(config))


def test_every_family_equals_one_rank_over_two() -> None:
    """Four layouts of twenty architectures take a minute, since each is another model."""
    cases = [case for kind in FAMILIES for case in cases_of(kind, 2)]
    verdicts = run_cases(cases)
    wrong = [
        (json.loads(each.case.theirs)["model_type"], str(each.case), each.worst_parameter)
        for each in verdicts
        if not each.is_exact
    ]
    assert wrong == []
    assert len(verdicts) == 4 * len(FAMILIES)
    assert max(each.micro_batches for each in verdicts) >= 3
    assert all(each.bytes > 0 for each in verdicts if each.case.layout.cp > 1)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_every_layout_of_three_ranks_equals_one_rank(kind: str) -> None:
    verdicts = run_cases(cases_of(kind, 3, every=True))
    assert [each for each in verdicts if not each.is_exact] == []


def test_every_strategy_and_sharding_played_equals_one_rank() -> None:
    config = shrink_config(engine_config("gpt_oss"))
    model = model_from_other_config(config.to_dict())
    cases = of_theirs(played_cases(3, model), write_config(config))
    verdicts = run_cases(cases, over_gloo=False)
    assert [each for each in verdicts if not each.is_exact] == []
