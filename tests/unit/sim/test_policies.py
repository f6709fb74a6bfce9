"""Packing policies compared on equal content: the same work, true bounds, and what each costs."""

import dataclasses
import json
from typing import Any

import pytest

from equipoise.base.errors import EquipoiseError
from equipoise.cli.main import main
from equipoise.cost.step.request import StepOptions
from equipoise.sim.policies.compare import PolicyComparison, compare_policies
from equipoise.sim.policies.setting import CompareOptions, PolicySetting, fitting
from equipoise.sim.request import StepRequest
from equipoise.spec.layout import Layout

WLB = StepRequest(
    "llama2-7b",
    "h100-sxm:64",
    "tp=8,cp=2,pp=4,virtual=2",
    131_072,
    4,
    lengths="pretrain-128k",
)
AGAIN = ["attention", "every-4", "every-3", "every-2", "selective", "full"]
POLICIES = ["in-order", "by-tokens", "by-work", "delayed", "divided-in-time", "divided", "gangs"]


@pytest.fixture(scope="module")
def wlb() -> PolicyComparison:
    return compare_policies(WLB, POLICIES, steps=6)


def test_every_policy_trains_the_same_work(wlb: PolicyComparison) -> None:
    assert [row.policy for row in wlb.rows] == ["plain", *POLICIES]
    assert {row.tokens for row in wlb.rows} == {6 * 4 * 131_072}
    assert len({row.useful_flop for row in wlb.rows}) == 1


def test_no_policy_is_faster_than_its_bound(wlb: PolicyComparison) -> None:
    for row in wlb.rows:
        assert row.bound_s <= row.seconds, row.policy
        assert row.gain <= row.most_gain
    # A document that stays whole goes through every layer on its two ranks alone.
    assert wlb.row("by-work").bound_s >= wlb.row("gangs").bound_s
    assert wlb.row("by-work").bound_s == pytest.approx(wlb.row("by-tokens").bound_s)


def test_dividing_gains_the_goal_without_delay_and_waiting_does_not(wlb: PolicyComparison) -> None:
    assert wlb.row("plain").gain == 1.0
    assert 1.0 < wlb.row("in-order").gain < wlb.row("by-work").gain
    for policy in ("divided", "gangs"):
        row = wlb.row(policy)
        assert row.gain >= 1.4 and row.fits and row.has_same_steps
        assert row.layout == "tp=8,dp=8,zero=1"
        assert (row.delay_mean_steps, row.delay_most_steps, row.extra_steps) == (0.0, 0, 0)
    delayed = wlb.row("delayed")
    assert not delayed.has_same_steps and delayed.extra_steps >= 1
    assert 0 < delayed.delay_mean_steps < delayed.delay_most_steps


def test_slices_in_time_shrink_the_bubble(wlb: PolicyComparison) -> None:
    row = wlb.row("divided-in-time")
    assert row.layout == "tp=8,pp=4,dp=2,zero=1"
    assert row.slice_tokens in (131_072 // each for each in (2, 4, 8))
    shares = [each.terms["pipeline bubble"] / each.seconds for each in (row, wlb.row("by-work"))]
    assert shares[0] < shares[1]


def test_what_does_not_fit_gets_the_first_change_that_does() -> None:
    request = StepRequest(
        "llama2-70b", "h100-sxm:128", "tp=8,cp=4,pp=4", 65_536, 4, lengths="pretrain-128k"
    )
    row = compare_policies(request, ["divided"], steps=1).row("divided")
    assert (row.change, row.layout, row.fits) == ("zero=2", "tp=8,dp=16,zero=2", True)


def test_smaller_micro_batches_are_tried_before_anything_is_computed_again() -> None:
    sizes = "layers=60,hidden=7168,heads=56,ffn=19200,vocab=32000"
    layout = "tp=8,cp=2,pp=4,virtual=3"
    request = StepRequest(sizes, "h100-sxm:64", layout, 65_536, 4, lengths="pretrain-128k")
    row = compare_policies(request, ["gangs"], steps=4).row("gangs")
    assert row.fits and "recompute" not in row.change
    assert row.slice_tokens is not None and row.slice_tokens < 40_960
    assert row.gain >= 1.4


def test_more_zero_is_tried_with_less_recomputation() -> None:
    layout = Layout(tp=8, dp=8, zero=1)
    rows = fitting(PolicySetting("gangs", layout, StepOptions(65_536, 4), None))
    assert [[each.change for each in row] for row in rows[:2]] == [
        ["zero=2", "zero=3"],
        [f"--recompute {how}" for how in AGAIN],
    ]
    assert [each.change for each in rows[2]] == [f"zero=2 --recompute {how}" for how in AGAIN]
    assert {each.layout.zero for each in rows[3]} == {3}
    fixed = PolicySetting("gangs", layout, StepOptions(65_536, 4, recompute="full"), None)
    assert [[each.change for each in row] for row in fitting(fixed)] == [["zero=2", "zero=3"]]


def test_whole_documents_and_a_cap_of_each_rank() -> None:
    lengths = [9000, 700, 5000, 300, 2500, 16_000, 1200, 800]
    request = StepRequest("llama2-7b", "h100-sxm:16", "cp=4,dp=4", 16_384, 16, lengths=lengths)
    how = CompareOptions("documents", 4096)
    answer = compare_policies(request, ["bytescale", "gangs"], steps=1, how=how)
    assert len({row.useful_flop for row in answer.rows}) == 1
    assert [row.slice_tokens for row in answer.rows] == [16_384, 4096, 4096]


@pytest.mark.parametrize(
    ("policies", "changes", "message"),
    [
        (["by-wrok"], {}, 'policy: "by-wrok" is not one of'),
        (
            ["fixed"],
            {},
            "policy fixed cuts documents elsewhere than at windows, so it trains other pieces and "
            "cannot be compared on equal content. Leave it out.",
        ),
        (["gangs", "gangs"], {}, "policy gangs is named twice. Name each policy once."),
        (
            ["divided-in-time"],
            {"layout": "tp=8,cp=8"},
            "policy divided-in-time puts slices of a document into consecutive micro-batches of a "
            "pipeline, and the layout has pp = 1. Give a layout with pp of 2 or more, or leave it "
            "out.",
        ),
        (
            ["gangs"],
            {"lengths": None},
            "Several policies need lengths, the documents that they pack. Give lengths, or one "
            "policy or none.",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    policies: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EquipoiseError) as refusal:
        compare_policies(dataclasses.replace(WLB, **changes), policies, steps=1)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("steps", "how", "message"),
    [
        (0, CompareOptions(), "steps is 0. Give a whole number of 1 to 1,024."),
        (1, CompareOptions(max_tokens=1), "max_tokens is 1. Give 2 or more."),
        (
            1,
            CompareOptions("documents"),
            "policy in-order cuts documents at every window's edge, and cut = documents keeps them "
            "whole. Give cut = windows, or leave it out.",
        ),
    ],
)
def test_numbers_of_a_comparison_are_refused(steps: int, how: CompareOptions, message: str) -> None:
    with pytest.raises(EquipoiseError) as refusal:
        compare_policies(WLB, ["in-order"], steps=steps, how=how)
    assert str(refusal.value) == message


COMMAND = [
    "simulate",
    "--model=llama2-7b",
    "--cluster=h100-sxm:64",
    "--layout=tp=8,cp=2,pp=4",
    "--context-tokens=131072",
    "--step-sequences=4",
]


def test_the_command_line_prints_the_same_rows(capsys) -> None:
    more = ["--lengths=pretrain-128k", "--policy=by-work, gangs", "--steps=1"]
    assert main([*COMMAND, *more, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in row["rows"]] == ["plain", "by-work", "gangs"]
    assert main([*COMMAND, *more]) == 0
    said = " ".join(capsys.readouterr().out.split())
    gain = row["rows"][2]["gain"]
    assert f"{gain:.2f} times as fast as plain packing" in said
    assert "Every policy trains the same" in said and "gangs" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--steps=3"],
            "--steps 3 is read where several policies are compared. Name them with commas, as "
            "--policy by-work,delayed, or leave --steps out.\n",
        ),
        (
            ["--lengths=prolong", "--policy=gangs,by-work", "--jitter=0.1"],
            "--jitter reads one step of one policy, and --policy gangs,by-work names several. Name "
            "one, or leave --jitter out.\n",
        ),
    ],
)
def test_flags_that_do_not_go_with_the_policies(more: list[str], message: str, capsys) -> None:
    assert main([*COMMAND, *more]) == 2
    assert capsys.readouterr().err == message
