"""Which layouts ``equipoise check --layout all-legal`` proves, and what it says of them."""

import dataclasses
import json

import pytest

from equipoise.cli.check import all_legal as verb
from equipoise.cli.main import main
from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.layout_space import legal_layouts
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.train.check import prove
from equipoise.train.check.case import Verdict
from equipoise.train.check.legal import layout_cases, legal_case

DENSE = ModelSpec(layers=2, hidden=32, heads=8, kv_heads=2, ffn=48, vocab=64, head_width=4)
SPARSE = dataclasses.replace(DENSE, experts=15, top_k=2, expert_ffn=24, dense_layers=1)


def degrees(layout: Layout) -> Layout:
    return dataclasses.replace(layout, zero=0, replicas=1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_legal_layout_is_a_case(ranks: int) -> None:
    cases = layout_cases(ranks, [DENSE, SPARSE])
    assert len(cases) == len(set(cases))
    for model in (DENSE, SPARSE):
        mine = [case for case in cases if bool(case.model.experts) == bool(model.experts)]
        deep = dataclasses.replace(model, layers=8)
        layouts = {case: case.layout.of_ranks(ranks) for case in mine}
        wide = {layouts[case] for case in mine if case.precision == "fp64"}
        assert wide == set(legal_layouts(ranks, deep))
        narrow = [layouts[case] for case in mine if case.precision == "fp32"]
        assert {degrees(each) for each in narrow} == {degrees(each) for each in layouts.values()}
        assert len(narrow) == len({degrees(each) for each in narrow})
        assert {each.zero for each in narrow} == {0, 1, 2, 3}
    for case in cases:
        assert case.model.layers == max(2, case.layout.stages)


def test_every_strategy_of_pipelines_has_its_turn() -> None:
    names = {case.layout.schedule for case in layout_cases(8, [SPARSE]) if case.layout.pp > 1}
    assert names == set(SCHEDULES) - {*LOSSY, "dualpipe-v"}


def test_a_model_is_checked_with_and_without_experts() -> None:
    dense, sparse = verb.both_kinds(DENSE)
    assert (dense.experts, sparse.experts, sparse.dense_layers) == (0, 15, 1)
    dense, sparse = verb.both_kinds(dataclasses.replace(preset("moe-3m"), capacity_factor=1.5))
    assert (dense.experts, sparse.experts, sparse.capacity_factor) == (0, 8, 0.0)


CASE = legal_case(Layout(dp=2, pp=2, ep=2, zero=3, replicas=2), SPARSE, "fp64", "zb-h1")
RIGHT = Verdict(
    case=CASE,
    micro_batches=1,
    loss_error=1e-16,
    forward_error=3e-16,
    gradient_error=2e-16,
    worst_parameter="norm.weight",
    bytes=128,
    messages=2,
    scheduled_bytes=128,
    scheduled_messages=2,
    skew=1.0,
)
WRONG = dataclasses.replace(
    RIGHT,
    case=legal_case(Layout(dp=4), DENSE, "fp32", "1f1b"),
    loss_error=1e-7,
    gradient_error=0.5,
    worst_parameter="embed.weight",
)
OTHER = dataclasses.replace(RIGHT, is_repeated=False)


def told(monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict], *flags: str) -> int:
    monkeypatch.setattr(prove, "run_cases", lambda *_, **__: verdicts)
    return main(["check", "--layout", "all-legal", "--ranks", "2", *flags])


def test_a_wrong_layout_is_named_with_its_parameter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [RIGHT, WRONG, OTHER]) == 5
    captured = capsys.readouterr()
    assert captured.err == (
        "2 of 3 layouts differ from one rank; the worst is embed.weight on 4 ranks (dense, dp = 4, "
        "zero = 1, fp32): gradient 5.0e-01, loss 1.0e-07. Please report it with the output of "
        "`equipoise check --layout all-legal --json`.\n"
    )
    rows = [line for line in captured.out.splitlines() if "exact" in line or "WRONG" in line]
    assert ["WRONG" in row for row in rows] == [False, True, True]
    assert "2 x 1 x 1 x 2" in rows[0]
    assert "embed.weight" in rows[2] and "zero 1, replicas 1" in rows[2]


def test_a_layout_that_is_another_on_a_second_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [RIGHT, OTHER], "--quiet") == 5
    assert capsys.readouterr().err == (
        "1 of 2 layouts differ from themselves on a second run; the first is 4 ranks (experts, "
        "dp = 2, pp = 2, ep = 2, replicas = 2, zero = 3, fp64, zb-h1). Please report it with the "
        "output of `equipoise check --layout all-legal --json`.\n"
    )


def test_a_layout_that_sends_other_bytes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = dataclasses.replace(RIGHT, bytes=129)
    assert told(monkeypatch, [RIGHT, loud], "--quiet") == 5
    assert capsys.readouterr().err == (
        "1 of 2 layouts equal one rank and sent other bytes than their schedules say: 129 in 2 "
        "messages instead of 128 in 2 on 4 ranks (experts, dp = 2, pp = 2, ep = 2, replicas = 2, "
        "zero = 3, fp64, zb-h1). Please report it with the output of "
        "`equipoise check --layout all-legal --json`.\n"
    )


def test_one_sentence_or_json_where_all_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, [RIGHT]) == 0
    assert capsys.readouterr().out.endswith(
        "94 runs of 22 layouts of a dense model and 58 of one with experts equal one rank, twice, "
        "bit for bit.\n"
    )
    assert told(monkeypatch, [RIGHT], "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["layouts"]
    assert row == {
        "ranks": 4,
        "dp": 2,
        "cp": 1,
        "tp": 1,
        "pp": 2,
        "ep": 2,
        "etp": 1,
        "zero": 3,
        "replicas": 2,
        "experts": 15,
        "precision": "fp64",
        "schedule": "zb-h1",
        "loss_error": 1e-16,
        "forward_error": 3e-16,
        "gradient_error": 2e-16,
        "worst_parameter": "norm.weight",
        "bytes": 128,
        "messages": 2,
        "is_repeated": True,
        "is_exact": True,
    }


def test_in_process_says_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--layout", "all-legal", "--in-process"]) == 2
    assert capsys.readouterr().err == (
        "--in-process plays strategies of attention, and --layout all-legal plays ranks as it is. "
        "Leave --in-process out.\n"
    )
