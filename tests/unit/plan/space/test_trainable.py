"""Choices that train runs: given keys stand, and keys give the layout back."""

import pytest

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.accepted import require_accepted
from equipoise.plan.space.trainable import list_trainable, run_keys
from equipoise.spec.run.load import read_run
from equipoise.spec.run.obey import obey
from equipoise.spec.run.resolve import ResolvedRun

BASE = StepOptions(8192, 4, precision="fp32")


def listed(run: ResolvedRun, ranks: int):
    return list_trainable(run, ranks, BASE, count_batches=lambda dp: max(1, 4 // dp))


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, {}),
        (8, {}),
        (4, {"model.experts": "4"}),
        (4, {"model.experts": "6", "experts.policy": "eplb"}),
        (4, {"layout.zero": "3"}),
        (4, {"layout.schedule": "v-half"}),
    ],
)
def test_keys_give_the_layout_back(ranks: int, keys: dict[str, str]) -> None:
    run = read_run(None, list(keys.items()))
    space = listed(run, ranks)
    assert len(space) > 30
    for row in range(0, len(space), max(1, len(space) // 200)):
        choice = space.choice(row)
        obeyed = obey(run, run_keys(choice), "").spec
        require_accepted(obeyed, run.model, ranks)
        layout = obeyed.layout.of_ranks(ranks)
        layout.require_model(run.model)
        assert layout == choice.layout
        assert obeyed.layout.stages == choice.layout.pp * choice.options.virtual
        assert obeyed.train.recompute == choice.options.recompute
        if choice.layout.cp > 1:
            assert obeyed.layout.strategy == choice.options.context_strategy
        if choice.layout.pp > 1:
            assert obeyed.layout.schedule == choice.options.schedule


def test_every_number_of_data_parallel_ranks_is_there() -> None:
    """Also those that do not divide the step's windows: a packer gives them less than one."""
    assert set(listed(read_run(None), 8)["dp"].tolist()) == {1, 2, 4, 8}
    assert set(listed(read_run(None), 3)["dp"].tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("key", "value", "column"),
    [
        ("layout.zero", 3, "zero"),
        ("layout.dp", 1, "dp"),
        ("layout.tp", 2, "tp"),
        ("train.recompute", "full", "recompute"),
    ],
)
def test_what_is_given_is_not_searched(key: str, value: int | str, column: str) -> None:
    space = listed(read_run(None, [(key, str(value))]), 2)
    found = {run_keys(space.choice(row))[key] for row in range(len(space))}
    assert found == {value}
    assert len(set(space[column].tolist())) == 1


def test_a_schedule_and_a_strategy_bind_those_who_have_one() -> None:
    keys = [("layout.schedule", "zb-v"), ("layout.strategy", "ring")]
    space = listed(read_run(None, keys), 2)
    choices = [space.choice(row) for row in range(len(space))]
    assert {each.options.schedule for each in choices if each.layout.pp > 1} == {"zb-v"}
    assert {each.options.context_strategy for each in choices if each.layout.cp > 1} == {"ring"}
    assert any(each.layout.dp == 2 for each in choices)
    patient = listed(read_run(None, [("layout.schedule", "v-half")]), 2)
    choices = [patient.choice(row) for row in range(len(patient))]
    assert {each.options.schedule for each in choices if each.layout.pp > 1} == {"v-half"}
    assert {each.layout.dp for each in choices} == {1, 2}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_zero_stage_leaves_every_degree(zero: int) -> None:
    """Also those with nothing to shard, and 2 where a step has more micro-batches than one."""
    space = listed(read_run(None, [("layout.zero", str(zero))]), 2)
    layouts = [space.choice(row).layout for row in range(len(space))]
    assert {each.zero for each in layouts} == {zero}
    shapes = {(each.dp, each.cp, each.tp, each.pp) for each in layouts}
    assert shapes == {(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)}


def test_ranks_that_have_no_document_are_left_out() -> None:
    def count(dp: int) -> int:
        if dp > 1:
            raise LayoutError("fewer documents than ranks")
        return 2

    space = list_trainable(read_run(None), 2, BASE, count_batches=count)
    assert set(space["dp"].tolist()) == {1}
    assert set(space.micro_batches.tolist()) == {2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [("layout.schedule", "gpipe")],
            'layout.schedule = "gpipe" (--layout.schedule) has no price that a plan could compare. '
            'Leave it out, or give "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", '
            '"zb-v", "dualpipe-v", "v-half", "v-min".',
        ),
        (
            [("layout.strategy", "usp")],
            'layout.strategy = "usp" (--layout.strategy) has no price that a plan could compare. '
            'Leave it out, or give "needed-kv", "all-gather", "ring", "ulysses".',
        ),
        (
            [("layout.tp", "3"), ("layout.zero", "1")],
            "No layout of 2 ranks carries 4 layers of 4 heads and steps of 32,768 tokens with "
            "layout.tp = 3 and layout.zero = 1. Change --ranks, or give fewer of these keys.",
        ),
        (
            [("layout.pp", "2"), ("layout.virtual", "7")],
            "No layout of 2 ranks carries 4 layers of 4 heads and steps of 32,768 tokens with "
            "layout.pp = 2 and layout.virtual = 7. Change --ranks, or give fewer of these "
            "keys.",
        ),
    ],
)
def test_what_nothing_carries(keys: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        listed(read_run(None, keys), 2)
    assert str(caught.value) == message
