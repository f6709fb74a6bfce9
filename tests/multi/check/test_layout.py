"""Layouts of several axes equal one rank, some of them twice; of all legal ones, a sample."""

import dataclasses

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import Case, Precision
from equipoise.train.check.legal import layout_cases, legal_case
from equipoise.train.check.prove import run_cases
from support.progresses import RecordedProgress
from support.ranks import layout_ranks

DENSE = ModelSpec(layers=2, hidden=32, heads=8, kv_heads=2, ffn=48, vocab=64, head_width=4)
SPARSE = dataclasses.replace(DENSE, experts=15, top_k=2, expert_ffn=24, dense_layers=1)


def case(
    layout: Layout,
    schedule: str = "1f1b",
    model: ModelSpec = SPARSE,
    precision: Precision = "fp64",
) -> Case:
    return legal_case(layout, model, precision, schedule)


DEMO = [
    case(Layout(dp=2, pp=2), model=DENSE),
    case(Layout(cp=2, tp=2, zero=2), model=DENSE),
    case(Layout(dp=2, pp=2, ep=2, zero=3), "zb-h1"),
    case(Layout(cp=2, tp=2, pp=2, ep=2, etp=2), "zb-v"),
    case(Layout(dp=2, cp=2, pp=2, ep=2, zero=2, replicas=2), "auto"),
    case(Layout(dp=2, tp=2, pp=2, ep=4, zero=3), "zb-h2"),
    case(Layout(dp=2, cp=2, tp=2, ep=8, zero=1), precision="fp32"),
    case(Layout(dp=2, cp=2, tp=2, pp=2, ep=4, etp=2, zero=3), "zb-h1"),
    # Of 8 stages, two of each rank.
    case(Layout(pp=4), "interleaved"),
]
DEMO = [dataclasses.replace(each, repeats=at % 3 == 0) for at, each in enumerate(DEMO)]


def test_layouts_of_the_demo_and_of_five_dimensions() -> None:
    progress = RecordedProgress()
    verdicts = run_cases(DEMO, progress, over_gloo=False)
    assert [each.case for each in verdicts] == sorted(DEMO, key=lambda one: one.ranks)
    for each in verdicts:
        assert each.is_exact, each
    assert progress.stages == [
        (f"{n} played ranks", count) for n, count in ((4, 4), (8, 4), (16, 1))
    ]
    assert progress.done == len(DEMO)


def test_a_sample_of_all_legal_layouts() -> None:
    cases = [each for world in (2, 3, 4) for each in layout_cases(world, [DENSE, SPARSE])]
    some = cases[::53]  # coprime to every degree: all of them in turn
    some = [dataclasses.replace(each, repeats=at % 3 == 0) for at, each in enumerate(some)]
    for each in run_cases(some, over_gloo=False):
        assert each.is_exact, each


def test_ranks_over_gloo_find_what_ranks_that_take_turns_find() -> None:
    cases = [case(Layout(dp=2, zero=3)), case(Layout(tp=2), precision="fp32")]
    real, played = run_cases(cases), run_cases(cases, over_gloo=False)
    for one, other in zip(real, played, strict=True):
        assert one.is_exact and other.is_exact
        # Gloo adds in another order.
        assert one.gradient_error == pytest.approx(other.gradient_error, abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "parameter"),
    [
        (Layout(dp=2, zero=0), "layers.0.attention.query.weight"),
        (Layout(pp=2), "layers.1.feed_forward.experts.down.weight"),
        (Layout(dp=2, ep=2), "layers.1.feed_forward.experts.up.weight"),
    ],
)
def test_a_gradient_that_is_wrong_on_one_rank_is_named(layout: Layout, parameter: str) -> None:
    (wrong,) = run_ranks(1, layout_ranks.spoil_first, case(layout), parameter)
    assert not wrong.is_exact
    assert wrong.worst_parameter == parameter
    assert 1e-5 < wrong.gradient_error < 2e-3
    assert wrong.loss_error <= 1e-10


def test_a_second_run_that_is_another_is_noticed() -> None:
    parameter = "layers.0.feed_forward.up.weight"
    (verdict,) = run_ranks(1, layout_ranks.spoil_second, case(Layout(dp=2)), parameter)
    assert verdict.error <= 1e-10
    assert not verdict.is_repeated and not verdict.is_exact
