"""``equipoise check`` of pipelines: every strategy, with every other axis, and its bytes."""

import dataclasses

import pytest

from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import Case, Verdict, pipeline_cases
from equipoise.train.check.prove import run_cases

MODEL = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=101, head_width=8)


def verdicts_of(ranks: int, cases: list[Case]) -> list[Verdict]:
    """Two real ranks. More than two take turns here, and run over gloo in ``multi/parallel``."""
    return run_cases(cases, over_gloo=ranks == 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_is_exact(ranks: int) -> None:
    cases = pipeline_cases(ranks, MODEL)
    if ranks == 4:  # of two stages, those with other axes: two ranks have had the strategies
        layouts = [(case, case.layout) for case in cases]
        beside = [c for c, at in layouts if at.pp == 2 and (at.cp * at.tp > 1 or not at.zero)]
        # Of four stages, every second strategy: four ranks have others in parallel/test_pipeline.
        cases = beside + [c for c, at in layouts if at.pp == 4][::2]
    for verdict in verdicts_of(ranks, cases):
        assert verdict.is_exact, verdict
        assert verdict.bytes > 0


def test_tied_tables_are_summed_and_counted() -> None:
    tied = dataclasses.replace(MODEL, tied=True)
    first, *others = pipeline_cases(4, tied)
    layouts = [dataclasses.replace(first.layout, zero=zero) for zero in (0, 1)]
    cases = [dataclasses.replace(first, layout=layout) for layout in layouts]
    cases[1:1] = [c for c in others if c.layout.schedule == "zb-v"][:1]
    for verdict in verdicts_of(4, cases):
        assert verdict.is_exact, verdict


def test_experts_are_computed_where_their_stage_is() -> None:
    """In fp64, and not shared: each stage has those of its layers whole."""
    sparse = dataclasses.replace(MODEL, experts=5, top_k=2, expert_ffn=24, dense_layers=1)
    cases = [c for c in pipeline_cases(2, sparse) if c.layout.schedule in ("1f1b", "zb-h1", "zb-v")]
    for verdict in verdicts_of(2, cases):
        assert verdict.is_exact, verdict
        assert verdict.error <= 1e-10, verdict


def test_every_strategy_that_is_not_lossy_is_checked() -> None:
    names = {case.layout.schedule for case in pipeline_cases(2, MODEL)}
    assert names == set(SCHEDULES) - set(LOSSY)
    assert {case.layout.pp for case in pipeline_cases(8, MODEL)} == {2, 4, 8}
    assert not pipeline_cases(1, MODEL)
    assert str(pipeline_cases(2, MODEL)[0]) == (
        '2 ranks (zero = 1, policy = "in-order", pp = 2, gpipe)'
    )
