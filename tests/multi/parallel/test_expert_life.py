"""The life of runs with balanced experts: cut and resumed, evaluated, under other policies."""

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder
from equipoise.spec.run.spec import EvalSpec, ExpertsSpec
from equipoise.train.saving.loads import EXPERTS, loads_texts, resume_loads
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, assert_close, events

SPARSE = dataclasses.replace(MODEL, layers=2, experts=4, top_k=2, expert_ffn=24, balance_rate=0.05)
STEPS, CUT = 4, 2


def wish(policy: str) -> ExpertsSpec:
    return ExpertsSpec(policy, slots=2, least_rows=1)


KINDS: dict[str, dict] = {
    "fixed": {"ep": 2},
    "exact": {"ep": 2, "experts": wish("exact")},
    "hecate": {"ep": 2, "experts": wish("hecate"), "zero": 3, "recompute": "full"},
    "eplb": {"ep": 2, "experts": wish("eplb")},
    "tutel": {"ep": 2, "experts": wish("tutel")},
    "auto": {"ep": 2, "experts": wish("auto"), "zero": 2},
    "shared units": {"etp": 2, "experts": wish("tutel")},
}
# What a run that was cut goes on as: under another policy, and on another layout.
NEXT = {"exact": "shared units", "hecate": "fixed", "shared units": "eplb", "fixed": "auto"}


class Lives(NamedTuple):
    """A run undisturbed, cut, gone on with, and perhaps gone on with as another one."""

    whole: Ended
    cut: Ended
    rest: Ended
    moved: Ended | None


@pytest.fixture(scope="module")
def lives(
    tmp_path_factory: pytest.TempPathFactory, store: TokenStore
) -> tuple[Path, dict[str, Lives]]:
    make, root = MakeRun(store), tmp_path_factory.mktemp("life")
    # AdamW makes a whole step of a gradient that is all rounding, unless eps is above that.
    same = {"steps": STEPS, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": SPARSE}
    held = {"held": store, "evaluate": EvalSpec(path="held", every_steps=2, tokens=400)}
    runs = {name: make(**(same | held | keys)) for name, keys in KINDS.items()}
    whole = [(root / name, run, {}) for name, run in runs.items()]
    cut = [(root / f"{name} cut", run, {"stop_at": CUT}) for name, run in runs.items()]
    begun = run_ranks(2, on_ranks.train_turns, whole + cut)[0]
    for name in NEXT:
        shutil.copytree(root / f"{name} cut", root / f"{name} moved")
    rest = [(root / f"{name} cut", run, {}) for name, run in runs.items()]
    moved = [(root / f"{name} moved", runs[other], {}) for name, other in NEXT.items()]
    after = run_ranks(2, on_ranks.train_turns, rest + moved)[0]
    as_others = dict(zip(NEXT, after[len(runs) :], strict=True))
    each = zip(runs, begun[: len(runs)], begun[len(runs) :], after[: len(runs)], strict=True)
    return root, {name: Lives(*ended, as_others.get(name)) for name, *ended in each}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_cut(
    lives: tuple[Path, dict[str, Lives]], name: str
) -> None:
    root, each = lives[0], lives[1][name]
    assert each.cut.reason == "interrupted" and each.rest.reason == "done"
    assert each.cut.losses + each.rest.losses == each.whole.losses
    for weight, expected in each.whole.weights.items():
        assert np.array_equal(each.rest.weights[weight], expected), weight
    said = ("copies", "planned_skew", "chosen")
    planned = [
        [[one.get(key) for key in said] for one in events(folder, "experts")]
        for folder in (root / name, root / f"{name} cut")
    ]
    assert planned[0] == planned[1]
    # A policy that copies nothing would prove nothing.
    copies = sum(sum(one[0]) for one in planned[0][1:])
    assert copies > 0 or name in ("fixed", "shared units")


@pytest.mark.parametrize("name", KINDS)
def test_policies_train_and_evaluate_alike_and_take_each_other_s_place(
    lives: tuple[Path, dict[str, Lives]], name: str
) -> None:
    root, each = lives[0], lives[1][name]
    expected = lives[1]["fixed"].whole
    assert_close(each.whole, expected)
    if each.moved is not None:
        rest = expected.losses[-len(each.moved.losses) :]
        assert_close(each.moved, dataclasses.replace(expected, losses=rest))
    held = [
        [one["loss"] for one in events(folder, "eval")] for folder in (root / name, root / "fixed")
    ]
    assert len(held[0]) >= 3
    assert held[0] == pytest.approx(held[1], rel=EXACT)


# What else a run may ask for; each trains as it does with every expert on its own rank.
BESIDE: dict[str, dict] = {
    "capacity": {"model": dataclasses.replace(SPARSE, capacity_factor=0.75)},
    "identity": {
        "model": dataclasses.replace(SPARSE, identity_experts=2, real_top_k=1.5, balance="bias")
    },
    "bf16": {"precision": "bf16"},
    "documents together": {"policy": "divided"},
}


def test_policies_train_alike_beside_other_keys(tmp_path: Path, store: TokenStore) -> None:
    make = MakeRun(store)
    same = {"steps": 2, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": SPARSE}
    # Beside each key, two of three kinds in turn.
    pairs = (("exact", "auto"), ("auto", "shared units"), ("shared units", "exact"))
    kinds = {beside: ("fixed", *pairs[at % 3]) for at, beside in enumerate(BESIDE)}
    turns = [
        (tmp_path / f"{beside} {name}", make(**(same | KINDS[name] | BESIDE[beside])), {})
        for beside, names in kinds.items()
        for name in names
    ]
    ended = run_ranks(2, on_ranks.train_turns, turns)[0]
    for at, beside in enumerate(BESIDE):
        expected, *others = ended[3 * at : 3 * at + 3]
        for other in others:
            if beside == "bf16":
                assert other.losses == pytest.approx(expected.losses, rel=5e-3)
            else:
                assert_close(other, expected)


def test_loads_that_cannot_be_are_not_taken(tmp_path: Path) -> None:
    decoder = Decoder(SPARSE)
    assert resume_loads(tmp_path, decoder, 3) is None  # as the first versions saved
    good = [[1, 2, 3, 4], [4, 3, 2, 1]]
    (tmp_path / EXPERTS).write_text(loads_texts(good)[EXPERTS])
    assert resume_loads(tmp_path, decoder, 3) == good
    below = loads_texts([[1, 2, 3, 4], [4, -3, 2, 1]])[EXPERTS]
    for text in ("[", "[]", '{"loads": [[1, 2]]}', '{"loads": "many"}', below):
        (tmp_path / EXPERTS).write_text(text)
        with pytest.raises(CheckpointError) as caught:
            resume_loads(tmp_path, decoder, 3)
        assert str(caught.value) == f"{tmp_path} is torn: its experts.json cannot be read."
