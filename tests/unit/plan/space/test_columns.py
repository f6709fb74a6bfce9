"""The space of choices: every row legal, none twice, published layouts among them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.space.columns import COLUMNS, NAMED, SCHEDULES
from equipoise.plan.space.listing import list_space
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.words import read_model

SMALL = read_model("layers=6,hidden=96,heads=6,vocab=100")


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 24), st.sampled_from([1, 6, 12, 16]), st.data())
def test_every_row_is_a_legal_layout_and_no_row_is_there_twice(devices, sequences, data) -> None:
    try:
        space = list_space(SMALL, devices, StepOptions(4096, sequences))
    except SpecError:
        return
    table = np.stack([space[name] for name in COLUMNS])
    assert len(np.unique(table, axis=1).T) == len(space)
    for row in data.draw(st.lists(st.integers(0, len(space) - 1), max_size=20)):
        choice = space.choice(row)
        assert choice.layout.world == devices
        choice.layout.require_model(SMALL)
        batches = choice.options.count_micro_batches(choice.layout)
        assert batches == space.micro_batches[row]
        assert choice.layout.pp * choice.options.virtual <= SMALL.layers
        if choice.layout.pp == 1:
            assert choice.options.schedule == "1f1b"


@pytest.mark.parametrize(
    ("model", "devices", "options", "fixed"),
    [
        ("llama3-405b", 16_384, StepOptions(8192, 2048), {"tp": 8, "pp": 16, "cp": 1}),
        ("llama3-405b", 8192, StepOptions(131_072, 64), {"tp": 8, "pp": 16, "cp": 16}),
        ("llama3-70b", 64, StepOptions(8192, 128), {"tp": 4, "pp": 4, "cp": 2, "virtual": 5}),
        ("mixtral-8x22b", 128, StepOptions(4096, 256), {"tp": 2, "pp": 8, "ep": 8, "etp": 1}),
        ("deepseek-v3", 1024, StepOptions(4096, 8192), {"tp": 2, "pp": 8, "virtual": 4, "ep": 64}),
        ("llama3-8b", 6, StepOptions(8192, 48), {"tp": 1, "pp": 3, "dp": 2}),
    ],
)
def test_published_layouts_are_there(model, devices, options, fixed) -> None:
    space = list_space(PLANNED[model], devices, options, fixed=fixed)
    assert len(space) > 0
    for name, value in fixed.items():
        assert set(space[name].tolist()) == {value}


def test_policies_are_rows_where_they_are_asked_for() -> None:
    base = StepOptions(4096, 16, policy="in-order")
    alone = list_space(SMALL, 8, base)
    assert {alone.choice(row).options.policy for row in range(0, len(alone), 7)} == {"in-order"}
    both = list_space(SMALL, 8, base, policies=COMPARED)
    assert len(both) == 2 * len(alone)
    table = np.stack([both[name] for name in COLUMNS])
    assert len(np.unique(table, axis=1).T) == len(both)
    for policy in COMPARED:
        mine = both.keep(both["policy"] == NAMED["policy"].index(policy))
        assert {mine.choice(row).options.policy for row in range(0, len(mine), 7)} == {policy}
        assert all((mine[name] == alone[name]).all() for name in COLUMNS if name != "policy")


def test_what_is_fixed_by_name() -> None:
    fixed = {"schedule": "v-min", "recompute": "full"}
    space = list_space(SMALL, 2, StepOptions(4096, 8), fixed=fixed)
    assert set(space["schedule"].tolist()) == {SCHEDULES.index("v-min")}
    assert {space.choice(row).options.recompute for row in range(len(space))} == {"full"}
    names = {SCHEDULES[at] for at in list_space(SMALL, 2, StepOptions(4096, 8))["schedule"]}
    assert "v-min" not in names


def test_words_are_those_of_the_command_line() -> None:
    fixed = {"tp": 2, "cp": 2, "pp": 2, "schedule": "interleaved", "micro_batch": 2}
    fixed |= {
        "order": "dp-pp",
        "virtual": 3,
        "recompute": "none",
        "zero": 1,
        "context_strategy": "ring",
    }
    space = list_space(SMALL, 8, StepOptions(4096, 16), fixed=fixed)
    assert len(space) == 1
    assert space.choice(0).words() == {
        "layout": "tp=2,cp=2,pp=2,dp=1,zero=1,virtual=3",
        "micro-batch": "2",
        "recompute": "none",
        "schedule": "interleaved",
        "context-strategy": "ring",
    }


def test_nothing_left() -> None:
    with pytest.raises(SpecError) as caught:
        list_space(SMALL, 8, StepOptions(4096, 16), fixed={"tp": 5})
    assert str(caught.value) == (
        "No layout of 8 devices carries 6 layers of 6 heads and 16 sequences a step with tp = 5. "
        "Give sequences that more data-parallel ranks divide, or fix less."
    )
