"""Training where ranks share each micro-batch: the same losses and weights as on one rank."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import EquipoiseError, FaultError, LayoutError
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from equipoise.spec.run.spec import LayoutSpec
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.read_run import EXACT, assert_close, events

# Heads that neither 2 nor 3 nor 4 ranks divide; biases and norms of heads beside the scores.
ODD = dataclasses.replace(MODEL, hidden=48, heads=3, kv_heads=1, qkv_bias=True, qk_norm=True)

LAYOUTS = {
    2: {
        "default": {},
        "zero 3": {"zero": 3},
        "recomputed": {"zero": 2, "recompute": "full"},
        "ulysses": {"zero": 0, "strategy": "ulysses", "sharding": "contiguous"},
        "in order": {"policy": "in-order", "sharding": "head-tail-document"},
        "narrow": {"precision": "bf16"},
    },
    3: {"ring": {"cp": 3, "strategy": "ring", "sharding": "head-tail"}},
    4: {
        "zero 1, two groups": {"dp": 2, "strategy": "token-ring"},
        "zero 3, two groups": {"dp": 2, "zero": 3, "recompute": "full", "sharding": "by-work"},
        "one group in two nodes": {"cp": 4, "strategy": "usp", "ranks_per_node": 2},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Three steps of AdamW in every layout, on the same pieces: the run, its folder."""
    root, make = tmp_path_factory.mktemp("contexts"), MakeRun(store)
    # AdamW makes a whole step of a gradient that is all rounding, unless eps is above that.
    same = {"steps": 3, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": ODD}
    found = {}
    plain = {"alone": make(dp=1, **same), "alone, narrow": make(dp=1, precision="bf16", **same)}
    for world, rows in {1: {}, **LAYOUTS}.items():
        each = {name: make(**(same | {"dp": 1, "cp": 2} | keys)) for name, keys in rows.items()}
        assert {resolved.ranks for resolved in each.values()} <= {world}
        for name, ended in run_ranks(world, on_ranks.train_each, root, each or plain)[0].items():
            found[name] = (ended, root / name)
    return found


DIVIDED = {
    2: {"divided": {"zero": 0}, "bytescale": {"zero": 3}},
    3: {"gangs": {"zero": 1}, "flexsp": {"zero": 2, "recompute": "full"}},
}


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Three steps in windows of 128 tokens, whose documents are longer: the run, its folder."""
    root, make = tmp_path_factory.mktemp("divided"), MakeRun(store)
    same = {"steps": 3, "lr": 1e-3, "eps": 1e-6, "model": ODD}
    # A micro-batch holds fewer tokens than the longest document.
    same |= {"context_tokens": 256, "max_tokens": 256, "step_tokens": 1024}
    found = {}
    for world, rows in {1: {}, **DIVIDED}.items():
        each = {
            name: make(**(same | {"dp": world, "policy": name} | keys))
            for name, keys in rows.items()
        } or {"whole": make(**(same | {"dp": 1}))}
        for name, ended in run_ranks(world, on_ranks.train_each, root, each)[0].items():
            found[name] = (ended, root / name)
    return found


@pytest.mark.parametrize("name", [name for rows in DIVIDED.values() for name in rows])
def test_ranks_that_divide_documents_train_as_one(divided, name: str) -> None:
    found, folder = divided[name]
    assert_close(found, divided["whole"][0])
    packs = events(folder, "pack")
    plain = events(divided["whole"][1], "pack")
    for pack, one in zip(packs, plain, strict=True):
        assert (pack["policy"], sum(pack["rank_flop"])) == (name, sum(one["rank_flop"]))
        assert sum(pack["rank_tokens"]) == 1024
    (memory,) = events(folder, "memory")
    assert memory["forecast_bytes"] == sum(memory["terms"].values())


@pytest.mark.parametrize("name", [name for rows in LAYOUTS.values() for name in rows])
def test_ranks_that_share_micro_batches_train_as_one(runs, name: str) -> None:
    found, _ = runs[name]
    assert len(found.losses) == 3
    assert found.losses[-1] < found.losses[0]
    if name == "narrow":
        assert found.losses == pytest.approx(runs["alone, narrow"][0].losses, rel=5e-3)
        assert found.dtypes == {"torch.float32"}
        return
    assert_close(found, runs["alone"][0])


def test_the_journal_predicts_each_rank_by_its_own_share(runs) -> None:
    _, folder = runs["zero 1, two groups"]
    packs = events(folder, "pack")
    alone = events(runs["alone"][1], "pack")
    assert len(packs) == 3
    for pack, one in zip(packs, alone, strict=True):
        for key in ("rank_tokens", "rank_flop"):
            assert len(pack[key]) == 4
            assert sum(pack[key]) == pytest.approx(sum(one[key]), rel=1e-9)
        assert len(pack["predicted_s"]) == len(pack["in_order_predicted_s"]) == 4
        assert sum(pack["predicted_s"]) == pytest.approx(sum(one["predicted_s"]), rel=1e-4)
    for rank in range(4):
        steps = events(folder, "step", rank)
        assert [e["predicted_s"] for e in steps] == [e["predicted_s"][rank] for e in packs]
        (memory,) = events(folder, "memory", rank)
        assert memory["forecast_bytes"] == sum(memory["terms"].values())
        assert memory["terms"]["activations"] > 0


# One step by hand. ------------------------------------------------------------------------------


def ends_of(store: TokenStore, count: int) -> list[tuple[int, int]]:
    return [(d, int(store.doc_tokens[d])) for d in range(count)]


def batches_of(store: TokenStore) -> dict[str, list[list[list[int]]]]:
    """Micro-batches of rows (document, start, stop), by what they have or lack."""
    ends = ends_of(store, 9)
    (first, end), (second, its_end) = ends[:2]
    return {
        # Two tokens, the second of which is the end of its document.
        "one label in the whole batch": [[[first, end - 2, end]], [[second, its_end - 1, its_end]]],
        # The first document ends with its only token in the micro-batch, others have one each.
        "fewer tokens than ranks": [[[first, 0, 1]], [[second, 0, 2]]],
        "a micro-batch of no tokens": [[[d, 0, stop] for d, stop in ends], []],
        "no label at all": [[[first, end - 1, end]], [[second, its_end - 1, its_end]]],
        "a long document beside short ones": [
            [[first, 0, end], [second, its_end - 2, its_end]],
            [[d, max(0, stop - 3), stop] for d, stop in ends[2:]],
        ],
    }


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict[int, dict]:
    """A step on each of these batches, by number of ranks: loss, norm and weights per layout."""
    four = [
        LayoutSpec(cp=4, sharding="contiguous"),
        LayoutSpec(cp=4, zero=3),
        LayoutSpec(cp=2, zero=2),
        LayoutSpec(cp=2, zero=0, strategy="ulysses"),
    ]
    arguments = (tmp_path_factory.mktemp("steps"), str(store.folder), MODEL, batches_of(store))
    return {
        world: run_ranks(world, on_ranks.steps_in_contexts, *arguments, layouts)[0]
        for world, layouts in ((1, [LayoutSpec()]), (4, four))
    }


@pytest.mark.parametrize(
    "name",
    [
        "one label in the whole batch",
        "fewer tokens than ranks",
        "a micro-batch of no tokens",
        "no label at all",
        "a long document beside short ones",
    ],
)
def test_a_step_whose_labels_or_tokens_lie_on_some_ranks_alone(by_hand, name: str) -> None:
    (plain,) = by_hand[1][name]
    for loss, norm, weights in by_hand[4][name]:
        assert loss == pytest.approx(plain[0], rel=EXACT)
        assert norm == pytest.approx(plain[1], rel=EXACT)
        for key, array in plain[2].items():
            assert np.abs(weights[key] - array).max() <= EXACT * np.abs(array).max(), key


# Stopping and going on. -------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_another_context(tmp_path: Path, make_run: MakeRun) -> None:
    keys = {"steps": 6, "lr": 1e-2, "eps": 1e-6, "every_steps": 2, "dp": 1}
    straight = run_ranks(1, on_ranks.train, tmp_path / "straight", make_run(**keys), {})[0]
    shared = make_run(cp=2, **keys)
    with pytest.raises(FaultError):
        once = tmp_path / "cut" / "checkpoint" / "step-000002"
        run_ranks(2, on_ranks.train, tmp_path / "cut", shared, {"kill_at": 3, "once": once})
    alone = run_ranks(1, on_ranks.train, tmp_path / "cut", make_run(**keys), {})[0]
    assert alone.said[0] == f"Resuming after step 2 from {tmp_path}/cut/checkpoint/step-000002."
    assert alone.losses == pytest.approx(straight.losses[2:], rel=EXACT)
    assert_close(dataclasses.replace(alone, losses=straight.losses), straight)
    more = make_run(cp=2, **(keys | {"dp": 2, "steps": 7, "zero": 3}))
    again = run_ranks(4, on_ranks.train, tmp_path / "cut", more, {})[0]
    longer = run_ranks(
        1, on_ranks.train, tmp_path / "straight", make_run(**(keys | {"steps": 7})), {}
    )[0]
    assert_close(again, longer)


# What is refused. -------------------------------------------------------------------------------


def refused(world: int, *arguments: object) -> str:
    with pytest.raises(EquipoiseError) as caught:
        run_ranks(world, *arguments)
    assert caught.type is LayoutError
    return str(caught.value)


def test_ranks_that_are_no_whole_number_of_contexts() -> None:
    assert refused(3, on_ranks.join_context, 2) == (
        "layout.cp = 2 does not divide 3 ranks. Set layout.cp to a divisor of 3."
    )


def test_neighbours_share() -> None:
    assert run_ranks(4, on_ranks.sharers_of, 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_ranks(2, on_ranks.sharers_of, 2) == [[0, 1], [0, 1]]
