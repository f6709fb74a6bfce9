"""Training where ranks share layers: the same losses and weights as on one rank."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, assert_close, events

MODEL = dataclasses.replace(MODEL, layers=4, tied=True)
SAME = {"steps": 3, "cut": "windows", "lr": 1e-3, "eps": 1e-3, "model": MODEL, "dp": 1}

LAYOUTS = {
    2: {
        "1f1b": {"pp": 2},
        "narrow": {"pp": 2, "precision": "bf16", "stages": "zb-h1"},
        "interleaved, recomputed": {
            "pp": 2,
            "stages": "interleaved",
            "recompute": "full",
            "policy": "in-order",
        },
        "zb-v, zero 0": {"pp": 2, "stages": "zb-v", "zero": 0},
        "divided in time": {"pp": 2, "policy": "divided-in-time", "stages": "auto"},
    },
    4: {
        "data": {"dp": 2, "pp": 2},
        "zero 3": {"dp": 2, "pp": 2, "zero": 3, "stages": "zb-v"},
        "context": {"cp": 2, "pp": 2, "stages": "zb-h1"},
        "tensor": {"tp": 2, "pp": 2},
        "four stages": {"pp": 4, "stages": "gpipe"},
    },
}


SPARSE = dataclasses.replace(
    MODEL, experts=4, top_k=2, expert_ffn=24, dense_layers=1, balance="auxiliary"
)
WITH_EXPERTS = {
    4: {"experts": {"dp": 2, "pp": 2, "ep": 2}},
    8: {
        "five axes": {
            "cp": 2,
            "tp": 2,
            "pp": 2,
            "ep": 2,
            "etp": 2,
            "stages": "interleaved",
        }
    },
}


def joined(ended: list[Ended]) -> Ended:
    """Weights of all stages, under what rank 0 tells."""
    every = {name: value for each in ended for name, value in each.weights.items()}
    return dataclasses.replace(ended[0], weights=every)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Three steps of AdamW in every layout, on the same pieces: the run, its folder."""
    root, make = tmp_path_factory.mktemp("stages"), MakeRun(store)
    alone = {"alone": {}, "alone, narrow": {"precision": "bf16"}}
    found = {}
    for world, rows in {1: alone, **LAYOUTS}.items():
        each = {name: make(**(SAME | keys)) for name, keys in rows.items()}
        assert {resolved.ranks for resolved in each.values()} == {world}
        ended = run_ranks(world, on_ranks.train_each, root, each)
        for name in rows:
            found[name] = joined([rank[name] for rank in ended]), root / name
    return found


@pytest.mark.parametrize("name", [name for rows in LAYOUTS.values() for name in rows])
def test_ranks_that_share_layers_train_as_one(runs, name: str) -> None:
    found, folder = runs[name]
    if name == "narrow":
        assert found.losses == pytest.approx(runs["alone, narrow"][0].losses, rel=5e-3)
        assert found.dtypes == {"torch.float32"}
        return
    assert_close(found, runs["alone"][0])
    plain = events(runs["alone"][1], "pack")
    for pack, one in zip(events(folder, "pack"), plain, strict=True):
        assert sum(pack["rank_tokens"]) == sum(one["rank_tokens"])
        assert sum(pack["rank_flop"]) == pytest.approx(sum(one["rank_flop"]), rel=1e-9)
        assert max(pack["predicted_s"]) < sum(one["predicted_s"])


def test_stages_of_a_plan_train_as_one(runs, tmp_path: Path, store: TokenStore) -> None:
    make = MakeRun(store)
    planned = {
        "one and three": ({"pp": 2}, (0, 1, 4), (0, 1)),
        "three and one": ({"pp": 2, "zero": 3}, (0, 3, 4), (0, 1)),
        "in a v": ({"pp": 2, "stages": "zb-v"}, (0, 1, 2, 3, 4), (0, 1, 1, 0)),
    }
    each = {
        name: dataclasses.replace(make(**(SAME | keys)), stage_edges=edges)
        for name, (keys, edges, _) in planned.items()
    }
    ended = run_ranks(2, on_ranks.train_each, tmp_path, each)
    for name, (_, edges, ranks) in planned.items():
        assert_close(joined([rank[name] for rank in ended]), runs["alone"][0])
        (start,) = events(tmp_path / name, "start")
        assert start["stages"] == {"edges": list(edges), "ranks": list(ranks)}
    held = [
        {int(key.split(".")[1]) for key in rank["one and three"].weights if "layers." in key}
        for rank in ended
    ]
    assert held == [{0}, {1, 2, 3}]


def test_ranks_that_share_experts_too_train_as_one(tmp_path: Path, store: TokenStore) -> None:
    make = MakeRun(store)
    same = SAME | {"model": SPARSE, "steps": 2}
    alone = run_ranks(1, on_ranks.train_each, tmp_path, {"alone": make(**same)})[0]["alone"]
    told = events(tmp_path / "alone", "experts")
    for world, rows in WITH_EXPERTS.items():
        each = {name: make(**(same | keys)) for name, keys in rows.items()}
        assert {resolved.ranks for resolved in each.values()} == {world}
        ended = run_ranks(world, on_ranks.train_each, tmp_path, each)
        for name in rows:
            assert_close(joined([rank[name] for rank in ended]), alone)
            for found, one in zip(events(tmp_path / name, "experts"), told, strict=True):
                assert found["loads"] == one["loads"]
                assert found["balance_loss"] == pytest.approx(one["balance_loss"], rel=EXACT)


def test_micro_batches_that_skip_stages_train_another_model(
    runs, tmp_path: Path, store: TokenStore
) -> None:
    keys = {"pp": 4, "stages": "skip-partial", "policy": "in-order", "steps": 6}
    make = MakeRun(store)
    whole, lossy = (make(**(SAME | keys | {"skip": skip})) for skip in (0.0, 0.5))
    ended = run_ranks(4, on_ranks.train_each, tmp_path, {"whole": whole, "lossy": lossy})[0]
    assert ended["whole"].losses[:3] == pytest.approx(runs["alone"][0].losses, rel=EXACT)
    assert ended["lossy"].losses[0] != pytest.approx(ended["whole"].losses[0], rel=EXACT)
    assert ended["lossy"].losses[-1] < ended["lossy"].losses[0]
    # Of 4 stages each micro-batch leaves out one of the two in the middle.
    forwards = [len(events(tmp_path / "lossy", "forward", rank)) for rank in range(4)]
    assert forwards[1] + forwards[2] == forwards[0] == forwards[3]


def test_what_was_predicted_stands_beside_what_was_measured(runs) -> None:
    folder = runs["data"][1]
    for rank in range(4):
        forward, backward = (events(folder, name, rank) for name in ("forward", "backward"))
        assert len(forward) == len(backward) > 0
        for span in (*forward, *backward):
            assert span["predicted_s"] > 0 <= span["predicted_begin_s"]
        assert {span["stage"] for span in forward} == {rank // 1 % 2}
        for step in events(folder, "step", rank):
            ran, met = (
                sum(
                    x["duration_s"]
                    for x in events(folder, "", rank)
                    if x["name"] in names and x.get("step") == step["step"]
                )
                for names in (("forward", "backward"), ("wait",))
            )
            assert met <= step["wait_s"] <= step["step_s"] - ran
    for pack in events(folder, "pack"):
        assert pack["longest_s"] >= max(pack["predicted_s"])


def test_a_checkpoint_goes_on_in_another_layout(runs, tmp_path: Path, store: TokenStore) -> None:
    make = MakeRun(store)
    for world, steps, keys in (
        (4, 1, {"dp": 2, "pp": 2}),
        (1, 2, {}),
        (2, 3, {"pp": 2, "stages": "zb-v"}),
    ):
        run = make(**(SAME | keys | {"steps": steps, "every_steps": 1}))
        ended = joined(run_ranks(world, on_ranks.train, tmp_path, run, {}))
    expected = runs["alone"][0]
    assert_close(ended, dataclasses.replace(expected, losses=expected.losses[-1:]))


REFUSED = {
    "layers": (
        ["--layout.pp=5", "--layout.dp=1"],
        "4 layers are fewer than pp = 5 stages. Set pp to 4 or less.",
    ),
    "stages": (
        ["--layout.pp=4", "--layout.dp=1", "--layout.schedule=zb-v"],
        "4 layers cannot fill the 8 stages of layout.pp = 4 ranks with 2 stages each. Lower "
        'layout.pp, or set layout.schedule = "1f1b", which has one stage a rank.',
    ),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_share_is_refused_before_one_starts(
    flags: list[str], message: str, refused: Callable[[list[str]], str]
) -> None:
    assert message in refused(flags)
