"""Models that transformers builds: any layout equals transformers' own model on one rank."""

import dataclasses
import json

from equipoise.parallel.theirs.shrink import name_frozen, shrink_config, write_config
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import (
    Case,
    Verdict,
    all_cases,
    context_cases,
    divided_cases,
    make_case,
    played_cases,
)
from equipoise.train.check.partial import masked_cases, trained_cases
from equipoise.train.check.prove import run_cases
from equipoise.train.check.variants import of_theirs
from support.hf.models import FAMILIES, engine_config

DOC_TOKENS = (73, 5, 1, 64, 140, 31, 8, 2, 40, 129)
"""Fewer tokens than ``equipoise check`` has: some longer than a window of 128, and a single one."""


def small(kind: str) -> tuple[ModelSpec, str]:
    config = shrink_config(engine_config(kind))
    return model_from_other_config(config.to_dict()), write_config(config)


def in_short(cases: list[Case], text: str) -> list[Case]:
    """The cases of a model that transformers builds, on fewer tokens."""
    return [
        dataclasses.replace(
            case,
            doc_tokens=DOC_TOKENS,
            pack=dataclasses.replace(case.pack, step_tokens=sum(DOC_TOKENS)),
        )
        for case in of_theirs(cases, text)
    ]


def of_family(at: int, kind: str) -> list[Case]:
    """Layouts whose differences lie in the model: what gathers, what is shared, what runs again.

    Of the first two and of the last two one each, so that four families in a row have all pairs.
    """
    model, text = small(kind)
    cases = [
        make_case(model, 2, zero=3, recompute="full"),
        make_case(model, 2, zero=2, policy="divided", context_tokens=128),
        make_case(model, 2, zero=3, cp=2, sharding="mixed"),
        make_case(model, 2, zero=1, cp=2, strategy="ulysses", recompute="every-2"),
    ]
    return in_short([cases[at % 2], cases[2 + at // 2 % 2]], text)


def partly_learned(at: int, kind: str) -> list[Case]:
    """Masked labels, and on every layout adapters or frozen weights, in turn."""
    model, text = small(kind)
    cases = masked_cases(2, model, is_theirs=True)
    trained = trained_cases(2, model, their_freeze=name_frozen(text))  # layouts by both kinds
    return in_short([*cases, *trained[at % 2 :: 4], *trained[3 - at % 2 :: 4]], text)


def wrong(verdicts: list[Verdict]) -> list[tuple[str, str, float, str]]:
    return [
        (
            json.loads(each.case.theirs)["model_type"],
            str(each.case),
            each.error,
            each.worst_parameter,
        )
        for each in verdicts
        if not each.is_exact
    ]


def test_every_family_equals_one_rank_over_two() -> None:
    """Two layouts of twenty architectures, each of which is another model; two over gloo."""
    first, *others = (of_family(at, kind) for at, kind in enumerate(FAMILIES))
    played = [case for cases in others for case in cases]
    verdicts = run_cases(first) + run_cases(played, over_gloo=False)
    assert wrong(verdicts) == []
    assert len(verdicts) == 2 * len(FAMILIES)
    assert max(each.micro_batches for each in verdicts) >= 2
    assert all(each.bytes > 0 for each in verdicts if each.case.layout.cp > 1)


def test_adapters_frozen_weights_and_masked_labels_equal_one_rank_over_two() -> None:
    """A plain model, one of transposed weights, and one whose layers have experts; played."""
    verdicts = run_cases(
        [
            case
            for at, kind in enumerate(("llama", "gpt2", "gpt_oss"))
            for case in partly_learned(at, kind)
        ],
        over_gloo=False,
    )
    assert wrong(verdicts) == []
    assert {each.case.lora.rank for each in verdicts} == {0, 4}
    assert any(each.case.masks for each in verdicts)
    assert any(each.case.train.freeze for each in verdicts)


def test_every_layout_of_three_ranks_equals_one_rank() -> None:
    """One of capped scores and one of sinks, in turn; ranks take turns in one process."""
    (capped, of_capped), (sunk, of_sunk) = small("gemma2"), small("gpt_oss")
    cases = [
        *in_short([*all_cases(3, capped), *divided_cases(3, capped)][0::4], of_capped),
        *in_short([*all_cases(3, sunk), *divided_cases(3, sunk)][2::4], of_sunk),
        *in_short(context_cases(3, capped)[0::2], of_capped),
        *in_short(context_cases(3, sunk)[1::2], of_sunk),
    ]
    verdicts = run_cases(cases, over_gloo=False)
    assert wrong(verdicts) == []
    assert len({(str(each.case.layout), each.case.pack.policy) for each in verdicts}) >= 28


def test_every_strategy_and_sharding_played_equals_one_rank() -> None:
    model, text = small("gpt_oss")
    verdicts = run_cases(in_short(played_cases(3, model)[::2], text), over_gloo=False)
    assert wrong(verdicts) == []
