"""Training with experts: the same losses, weights and loads on every layout, and after a resume."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.dash.findings import findings
from equipoise.dash.summary import summarize
from equipoise.data.cache.store import TokenStore
from equipoise.observe.reader import read_run
from equipoise.spec.layout import Layout
from equipoise.spec.run.spec import ExpertsSpec
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, events

SPARSE = dataclasses.replace(
    MODEL, layers=2, experts=5, top_k=2, expert_ffn=24, shared_ffn=16, balance_rate=0.05
)
BIASED = dataclasses.replace(SPARSE, balance="bias", balance_rate=0.01, shared_ffn=0)
IDLE = dataclasses.replace(BIASED, identity_experts=2, real_top_k=1.5, balance_rate=0.05)
# Experts where nothing else is shared, where tokens of a document are, and where documents are.
LAYOUTS = {
    1: {"one rank": {"dp": 1}, "some without weights": {"dp": 1, "model": IDLE}},
    2: {
        "data": {"dp": 2},
        "experts, zero 1": {"dp": 2, "ep": 2},
        "experts, zero 3": {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"},
        "experts and context": {"dp": 1, "cp": 2, "ep": 2},
        "documents together": {"dp": 2, "ep": 2, "policy": "divided"},
        "copies": {"dp": 2, "ep": 2, "experts": ExpertsSpec("exact", least_rows=1)},
        "context, some without weights": {"dp": 1, "cp": 2, "zero": 2, "model": IDLE},
        "narrow": {"dp": 2, "ep": 2, "precision": "bf16"},
    },
    4: {
        "in two parts": {"dp": 4, "ep": 2, "etp": 2, "zero": 2},
        "copies by earlier steps": {
            "dp": 4,
            "ep": 2,
            "zero": 3,
            "recompute": "full",
            "experts": ExpertsSpec("hecate", slots=2, least_rows=1),
        },
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Three steps of AdamW in every layout, on the same pieces: how each ended, and its folder."""
    root, make = tmp_path_factory.mktemp("experts"), MakeRun(store)
    # AdamW makes a whole step of a gradient that is all rounding, unless eps is above that.
    same = {"steps": 3, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": SPARSE}
    found = {}
    for world, layouts in LAYOUTS.items():
        these = {name: make(**(same | keys)) for name, keys in layouts.items()}
        for name, ended in run_ranks(world, on_ranks.train_each, root, these)[0].items():
            found[name] = (ended, root / name)
    return found


def worst(found: Ended, expected: Ended) -> float:
    return max(
        np.abs(found.weights[name] - weights).max() / np.abs(weights).max()
        for name, weights in expected.weights.items()
    )


@pytest.mark.parametrize(
    "name", [name for layouts in LAYOUTS.values() for name in layouts if name != "narrow"]
)
def test_every_layout_trains_as_one_rank_does(runs: dict, name: str) -> None:
    ended, folder = runs[name]
    is_idle = "without weights" in name
    expected, alone = runs["some without weights" if is_idle else "one rank"]
    assert ended.losses == pytest.approx(expected.losses, rel=EXACT)
    assert worst(ended, expected) <= EXACT
    for one, other in zip(events(folder, "experts"), events(alone, "experts"), strict=True):
        assert one["loads"] == other["loads"]
        # Each of the step's 1024 tokens is counted once, whoever shares it.
        means = one.get("real_experts", [SPARSE.top_k] * len(one["loads"]))
        assert [sum(layer) for layer in one["loads"]] == pytest.approx([1024 * m for m in means])
        assert means == other.get("real_experts", means)
        assert one["expert_skew"] == other["expert_skew"]
        assert one["balance_loss"] == pytest.approx(other["balance_loss"], rel=EXACT)


def test_bf16_is_near_fp32(runs: dict) -> None:
    assert runs["narrow"][0].losses == pytest.approx(runs["one rank"][0].losses, rel=0.02)


def test_loads_are_of_all_tokens_and_the_loss_begins_with_the_second_step(runs: dict) -> None:
    folder = runs["experts, zero 1"][1]
    steps, loads = events(folder, "step"), events(folder, "experts")
    assert [each["step"] for each in loads] == [1, 2, 3]
    for step, each in zip(steps, loads, strict=True):
        assert [sum(layer) for layer in each["loads"]] == [2 * step["tokens"]] * 2
        assert np.shape(each["loads"]) == (2, 5)
        halves = [max(sum(layer[:3]), sum(layer[3:])) for layer in each["loads"]]
        mean = step["tokens"]
        assert each["rank_skew"] == [half / mean for half in halves]
    assert [each["balance_loss"] > 0 for each in loads] == [False, True, True]


@pytest.mark.parametrize("model", [SPARSE, BIASED], ids=["auxiliary", "bias"])
def test_a_resumed_run_goes_on_bitwise_with_its_counts(
    tmp_path: Path, make_run: MakeRun, model: object
) -> None:
    resolved = make_run(model=model, ep=2, steps=5)
    turns = [("whole", {}), ("cut", {"stop_at": 2}), ("cut", {})]
    runs = [(tmp_path / name, resolved, script) for name, script in turns]
    whole, cut, rest = run_ranks(2, on_ranks.train_turns, runs)[0]
    assert cut.reason == "interrupted"
    assert rest.losses == whole.losses[3:]  # asked after step 2, known to all in step 3
    for name, weights in whole.weights.items():
        assert np.array_equal(rest.weights[name], weights), name
    loads = [each["loads"] for each in events(tmp_path / "whole", "experts")]
    assert [each["loads"] for each in events(tmp_path / "cut", "experts")] == loads


def test_a_run_goes_on_with_its_experts_elsewhere(tmp_path: Path, make_run: MakeRun) -> None:
    shared, alone = (make_run(model=SPARSE, ep=n, steps=5, eps=1e-6) for n in (2, 1))
    folder = tmp_path / "moved"
    turns = [
        (folder, shared, {"stop_at": 2}),
        (folder, alone, {}),
        (tmp_path / "stayed", alone, {}),
    ]
    _, moved, stayed = run_ranks(2, on_ranks.train_turns, turns)[0]
    assert moved.losses == pytest.approx(stayed.losses[3:], rel=EXACT)
    assert worst(moved, stayed) <= EXACT


@pytest.mark.parametrize("name", ["copies", "copies by earlier steps"])
def test_the_journal_says_what_copies_made_of_the_loads(runs: dict, name: str) -> None:
    folder = runs[name][1]
    for each in events(folder, "experts"):
        assert len(each["owner_skew"]) == len(each["planned_skew"]) == SPARSE.layers
        for before, after in zip(each["owner_skew"], each["planned_skew"], strict=True):
            assert 1.0 <= after < before
        assert min(each["copies"]) > 0
        # Weights there twice, or again where a forward is recomputed, and gradients back.
        trips = 4 if name == "copies by earlier steps" else 3
        expert_bytes = 3 * SPARSE.hidden * SPARSE.expert_ffn * 4
        assert each["copied_bytes"] == [trips * copies * expert_bytes for copies in each["copies"]]
    assert all(not each["copies"] for each in events(runs["experts, zero 1"][1], "experts"))
    report = findings([read_run(folder)], [summarize(read_run(folder), name)])["work"]
    assert "The fullest rank computes experts' rows of 1." in report
    assert "if each expert stayed on its own rank." in report


def test_ranks_that_share_units_and_pack_differently_are_stopped_before_they_wait(
    tmp_path: Path, store: TokenStore
) -> None:
    layout = Layout(dp=2, etp=2, zero=1)
    with pytest.raises(LayoutError) as caught:
        run_ranks(2, on_ranks.pack_differently, tmp_path, str(store.folder), SPARSE, layout)
    said = str(caught.value)
    assert said.startswith("Rank 1 packed step 7 otherwise than rank 0: data-parallel rank 0 has ")
    assert said.endswith(
        " Nothing was sent or changed by it. Give every machine the same version of equipoise and "
        "of NumPy."
    )
