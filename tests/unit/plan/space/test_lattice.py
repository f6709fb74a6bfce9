"""A lattice against the list of all its choices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.space.columns import COLUMNS, RECOMPUTES
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.listing import list_lattice, list_space
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.words import read_model

SMALL = read_model("layers=6,hidden=96,heads=6,vocab=100,experts=4,top_k=2,expert_ffn=64")


NAMES = ("tp", "pp", "zero", "virtual", "recompute")


def draw_lattice(devices: int, sequences: int) -> Lattice | None:
    try:
        return list_lattice(SMALL, devices, StepOptions(4096, sequences), policies=COMPARED)
    except SpecError:
        return None


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 24), st.sampled_from([1, 6, 12, 16]), st.data())
def test_numbers_are_those_of_the_list(devices, sequences, data) -> None:
    lattice = draw_lattice(devices, sequences)
    if lattice is None:
        return
    space = list_space(SMALL, devices, StepOptions(4096, sequences), policies=COMPARED)
    assert len(lattice) == len(space) == lattice.counts.sum()
    rows = np.array(data.draw(st.lists(st.integers(0, len(lattice) - 1), min_size=1, max_size=20)))
    some = lattice.keep(rows)
    for name in COLUMNS:
        assert (some[name] == space[name][rows]).all()
        assert (lattice[name][rows] == space[name][rows]).all()
    assert lattice.choice(int(rows[0])) == space.choice(int(rows[0]))
    cells = np.arange(len(lattice.counts))
    assert (lattice.rows_of(cells) == np.arange(len(lattice))).all()
    step = lattice.factors[-1].sizes
    firsts = lattice.rows_of(cells, step=step)
    assert len(firsts) == (lattice.counts // step).sum()
    others = [name for name in COLUMNS if name != "context_strategy"]
    table = np.stack([space[name][firsts] for name in others])
    assert len(np.unique(table, axis=1).T) == len(firsts)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 24), st.sampled_from([6, 12, 16]), st.data())
def test_what_is_looked_for_is_what_a_mask_keeps(devices, sequences, data) -> None:
    lattice = draw_lattice(devices, sequences)
    if lattice is None:
        return
    space = lattice.keep(np.arange(len(lattice)))
    allowed = {
        name: data.draw(st.lists(st.sampled_from(np.unique(space[name]).tolist()), min_size=1))
        for name in data.draw(
            st.sets(st.sampled_from(["tp", "pp", "zero", "virtual", "recompute"]))
        )
    }
    mask = np.ones(len(space), dtype=bool)
    for name, places in allowed.items():
        mask &= np.isin(space[name], places)
    assert sorted(lattice.find(allowed, strictly=True)) == np.flatnonzero(mask).tolist()
    factors = {name: places for name, places in allowed.items() if name not in lattice.cells}
    mask = np.ones(len(space), dtype=bool)
    for name, places in factors.items():
        mask &= np.isin(space[name], places)
    kept = lattice.restrict(factors)
    assert len(kept) == mask.sum()
    table = space.keep(mask)
    for name in COLUMNS:
        assert (kept.keep(np.arange(len(kept)))[name] == table[name]).all()


def test_a_setting_that_is_not_there_is_left_as_it_is() -> None:
    lattice = list_lattice(SMALL, 4, StepOptions(4096, 8), fixed={"recompute": "full"})
    rows = lattice.find({"recompute": [RECOMPUTES.index("none")], "tp": [2]})
    kept = lattice.keep(rows)
    assert len(rows) and set(kept["tp"].tolist()) == {2}
    assert set(kept["recompute"].tolist()) == {RECOMPUTES.index("full")}
    assert not len(lattice.find({"recompute": [RECOMPUTES.index("none")]}, strictly=True))


@pytest.mark.parametrize(("model", "devices"), [("deepseek-v3", 2048), ("llama3-405b", 16_384)])
def test_a_vast_lattice_is_small(model: str, devices: int) -> None:
    lattice = list_lattice(PLANNED[model], devices, StepOptions(4096, 15_360 // 15 * 16))
    held = sum(column.nbytes for column in lattice.cells.values())
    held += sum(column.nbytes for factor in lattice.factors for column in factor.values.values())
    assert len(lattice) > 500_000 and held < 4_000_000
