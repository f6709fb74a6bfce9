"""Which cases are proven, and what is said of them."""

import argparse
import dataclasses
import json
from typing import get_args

import pytest

from equipoise.base.errors import CheckError
from equipoise.cli.check import verb
from equipoise.cli.main import main
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import Sharding, StrategyName
from equipoise.train.check import prove as check
from equipoise.train.check.case import (
    Verdict,
    all_cases,
    context_cases,
    divided_cases,
    make_case,
    played_cases,
    scaled_down,
    tensor_cases,
)

MODEL = scaled_down(preset("2m"))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_everything_is_in_some_case(ranks: int) -> None:
    plain, shared, played = (
        make(ranks, MODEL) for make in (all_cases, context_cases, played_cases)
    )
    assert {(c.layout.zero, c.pack.policy) for c in plain} == {
        (zero, policy)
        for zero in range(4)
        for policy in ("in-order", "fixed", "by-tokens", "by-work")
    }
    for policy in ("in-order", "fixed", "by-tokens", "by-work"):
        assert {c.pack.context_tokens for c in plain if c.pack.policy == policy} == {512, 256}
    assert {c.layout.zero for c in plain if c.train.recompute == "full"} == {0, 1, 2, 3}
    divisors = {n for n in range(2, ranks + 1) if ranks % n == 0}
    assert {(c.layout.cp, c.layout.zero) for c in shared} == {
        (n, z) for n in divisors for z in range(4)
    }
    assert {c.layout.cp for c in shared if c.train.recompute == "full"} == divisors
    assert (
        {c.layout.strategy for c in shared}
        == {c.layout.strategy for c in played}
        == set(get_args(StrategyName))
    )
    assert {c.layout.sharding for c in played} == set(get_args(Sharding))
    assert not {c.played for c in plain + shared} - {False}
    for cases in (plain, shared, played):
        assert len(set(cases)) == len(cases)


def test_one_rank_shares_with_nobody() -> None:
    for make in (context_cases, played_cases, divided_cases, tensor_cases):
        assert make(1, MODEL) == []


@pytest.mark.parametrize(("ranks", "heads"), [(4, 6), (8, 4), (6, 6)])
def test_every_way_to_share_weights_is_in_some_case(ranks: int, heads: int) -> None:
    cases = tensor_cases(ranks, dataclasses.replace(MODEL, heads=heads, kv_heads=1))
    assert len(set(cases)) == len(cases)
    factors = {
        (context, tensor)
        for context in range(1, ranks + 1)
        for tensor in range(2, ranks + 1)
        if ranks % (context * tensor) == 0 and heads % tensor == 0
    }
    assert {(c.layout.cp, c.layout.tp, c.layout.zero) for c in cases} == {
        (*each, zero) for each in factors for zero in range(4)
    }
    assert {(c.layout.cp, c.layout.tp) for c in cases if c.train.recompute == "full"} == factors
    assert {c.ranks for c in cases} == {ranks}
    for case in cases:
        assert case.layout.of_ranks(ranks).world == ranks
    assert str(cases[0]).endswith(f"tp = {cases[0].layout.tp})")


def test_policies_that_divide_meet_every_stage_somewhere() -> None:
    cases = [case for ranks in (2, 3, 4) for case in divided_cases(ranks, MODEL)]
    for policy in (name for name, traits in POLICIES.items() if traits.runs_together):
        mine = [case for case in cases if case.pack.policy == policy]
        assert {case.layout.zero for case in mine} == {0, 1, 2, 3}
        assert {case.pack.context_tokens for case in mine} == {256, 128}
    assert {case.train.recompute for case in cases} == {"none", "full"}


def test_a_runs_own_strategy_and_sharding_are_proven() -> None:
    cases = context_cases(4, MODEL, "ring", "by-work")
    assert {
        (c.layout.cp, c.layout.zero)
        for c in cases
        if (c.layout.strategy, c.layout.sharding) == ("ring", "by-work")
    } == {(context, zero) for context in (2, 4) for zero in range(4)}


RIGHT = Verdict(
    case=make_case(MODEL, 4, context_tokens=512, zero=2, cp=2, strategy="ring"),
    micro_batches=2,
    loss_error=1e-7,
    forward_error=2e-7,
    gradient_error=3e-7,
    worst_parameter="embed.weight",
    bytes=2048,
    messages=6,
    scheduled_bytes=2048,
    scheduled_messages=6,
    skew=1.25,
)
WRONG = dataclasses.replace(RIGHT, gradient_error=0.5, worst_parameter="norm.weight")
PLAYED = dataclasses.replace(
    RIGHT,
    case=make_case(
        MODEL,
        3,
        context_tokens=512,
        played=True,
        zero=0,
        cp=3,
        strategy="ulysses",
        sharding="contiguous",
    ),
    messages=5,
)
ALONE = dataclasses.replace(
    RIGHT,
    case=make_case(MODEL, 2, policy="in-order", recompute="full", zero=0),
    bytes=0,
    messages=0,
    scheduled_bytes=0,
    scheduled_messages=0,
)


def told(monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict], *argv: str) -> int:
    def run_cases(*_: object, over_gloo: bool = True) -> list[Verdict]:
        return [verdict for verdict in verdicts if verdict.case.played != over_gloo]

    monkeypatch.setattr(check, "run_cases", run_cases)
    return main(["check", *argv])


def test_json_has_every_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [PLAYED, RIGHT, ALONE], "--json") == 5
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["tolerance"] == 1e-5
    played, right, alone = answer["cases"]
    assert right == {
        "ranks": 4,
        "zero": 2,
        "policy": "by-work",
        "context_tokens": 512,
        "recompute": "none",
        "lora_rank": 0,
        "frozen": [],
        "cp": 2,
        "tp": 1,
        "ep": 1,
        "etp": 1,
        "pp": 1,
        "schedule": "1f1b",
        "strategy": "ring",
        "sharding": "mixed",
        "masked": False,
        "in_process": False,
        "experts": "fixed",
        "router": None,
        "micro_batches": 2,
        "loss_error": 1e-7,
        "forward_error": 2e-7,
        "gradient_error": 3e-7,
        "worst_parameter": "embed.weight",
        "bytes": 2048,
        "messages": 6,
        "skew": 1.25,
        "is_exact": True,
    }
    assert (played["in_process"], played["is_exact"]) == (True, False)
    assert (alone["strategy"], alone["sharding"], alone["bytes"]) == (None, None, 0)
    assert captured.err == (
        "1 of 3 cases equal one rank and sent other bytes than their schedules say: 2,048 in 5 "
        "messages instead of 2,048 in 6 on 3 ranks played in one process (cp = 3, ulysses, "
        "contiguous). Please report it with the output of `equipoise check --json`.\n"
    )


def test_a_wrong_case_is_named_with_its_parameter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [RIGHT, WRONG, ALONE]) == 5
    captured = capsys.readouterr()
    assert captured.err == (
        "1 of 3 cases differ from one rank by more than 1e-05; the worst is norm.weight on 4 ranks "
        "(cp = 2, ring, mixed, zero = 2): gradient 5.0e-01, logits 2.0e-07, loss 1.0e-07. "
        "Please report it with the output of `equipoise check --json`.\n"
    )
    rows = [line for line in captured.out.splitlines() if "exact" in line or "WRONG" in line]
    assert len(rows) == 3
    assert "dp=2 cp=2" in rows[0]
    assert "by-work 512" in rows[1] and "norm.weight" in rows[1] and "WRONG" in rows[1]
    assert "dp=2" in rows[2]


def test_one_sentence_where_all_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [RIGHT, ALONE]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(
        "Cases: 2 on 2, 4 gloo ranks. Model: 2 layers of width 64, fp32 on a CPU. Sample: 12 "
        "documents of 1 to 200 tokens. Not covered: bf16, CUDA devices, longer documents.\n"
    )
    assert captured.out.endswith("2 cases equal one rank to 1e-05 of each gradient's scale.\n")
    assert captured.err == ""
    assert told(monkeypatch, [RIGHT, ALONE], "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_pipelines_deepen_the_model_and_the_scope_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = dataclasses.replace(ALONE, case=make_case(MODEL, 4, pp=4))
    assert told(monkeypatch, [ALONE, piped]) == 0
    assert "Model: 2 to 4 layers of width 64, fp32" in capsys.readouterr().out


def test_which_half_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [dataclasses.replace(PLAYED, messages=6), ALONE]
    for flags, count in (([], 2), (["--in-process"], 1), (["--processes"], 1)):
        assert told(monkeypatch, verdicts, "--json", *flags) == 0
        assert len(json.loads(capsys.readouterr().out)["cases"]) == count


def test_a_number_of_ranks_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--ranks", "2", "0"]) == 2
    assert capsys.readouterr().err == "--ranks 0 is below 1. Give 1 or more ranks.\n"


def test_the_sentence_of_a_case_without_context() -> None:
    wrong = dataclasses.replace(ALONE, forward_error=float("inf"))
    with pytest.raises(CheckError) as caught:
        verb._show(argparse.Namespace(json=False, quiet=True), [wrong], preset("2m"))
    assert str(caught.value) == (
        "1 of 1 cases differ from one rank by more than 1e-05; the worst is embed.weight on 2 "
        'ranks (zero = 0, policy = "in-order"): gradient 3.0e-07, logits inf, loss 1.0e-07. '
        "Please report it with the output of `equipoise check --json`."
    )
