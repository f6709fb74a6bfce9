"""Choices near one of a lattice."""

import numpy as np

from equipoise.cost.step.request import StepOptions
from equipoise.plan.search.heuristics import MOVES
from equipoise.plan.search.near import likeliest, near_rows
from equipoise.plan.space.columns import COLUMNS
from equipoise.plan.space.listing import list_lattice
from equipoise.spec.words import read_model

SPARSE = read_model(
    "layers=6,hidden=1024,heads=16,vocab=32000,experts=8,top_k=2,expert_ffn=2048,dense_layers=1"
)
LATTICE = list_lattice(SPARSE, 8, StepOptions(4096, 16))


def test_what_is_near_differs_in_the_columns_of_its_move() -> None:
    row = int(LATTICE.find({"tp": [2], "pp": [2], "ep": [2], "zero": [1]}, strictly=True)[0])
    one = LATTICE.keep(np.array([row]))
    moves = near_rows(LATTICE, row)
    changed = []
    for rows in moves:
        assert row not in rows
        space = LATTICE.keep(rows)
        changed.append({name for name in COLUMNS if (space[name] != one[name]).any()})
    wider = [set(move) | {"micro_batches"} for move in MOVES]
    forced = {"schedule", "virtual", "replicas", "context_strategy", "zero", "order"}
    for names in changed[:-1]:
        assert any(names - forced <= move for move in wider)
    assert {"recompute"} in changed and any("ep" in names for names in changed[:-1])


def test_the_likeliest_of_a_move_have_degrees_of_their_own() -> None:
    rows = LATTICE.find({"zero": [1], "micro_batch": [1], "recompute": [0]})
    space, guess = LATTICE.keep(rows), np.arange(len(rows), dtype=np.float64)
    chosen = likeliest([rows], rows, space, guess)
    kept = LATTICE.keep(chosen)
    degrees = {
        tuple(int(kept[name][at]) for name in ("tp", "cp", "pp", "dp", "ep")) for at in (0, 1, 2, 3)
    }
    assert len(chosen) == len(degrees) == 4 and chosen[0] == rows[0]
    one = rows[:6]
    same = [one[LATTICE.keep(one)["tp"] == LATTICE.keep(one)["tp"][0]]]
    assert len(likeliest(same, one, LATTICE.keep(one), guess[:6])) <= 4
