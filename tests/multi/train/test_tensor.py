"""Training where ranks share weights: the same losses and weights as on one rank."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.read_run import assert_close, events

# 2 key/value heads, which 3 ranks do not divide; 3 ranks divide neither words nor hidden units.
MODEL = dataclasses.replace(
    MODEL, hidden=48, heads=6, kv_heads=2, head_width=8, ffn=50, qkv_bias=True, qk_norm=True
)
SAME = {"steps": 3, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": MODEL}

LAYOUTS = {
    2: {
        "zero 1": {"tp": 2},
        "zero 3, recomputed": {"tp": 2, "zero": 3, "recompute": "full"},
        "narrow": {"tp": 2, "precision": "bf16"},
    },
    3: {"copied heads": {"tp": 3, "zero": 0, "policy": "in-order"}},
    4: {
        "data": {"dp": 2, "tp": 2, "zero": 2},
        "context": {"cp": 2, "tp": 2},
        "hybrid": {"dp": 4, "zero": 3, "replicas": 2},
        "divided": {"dp": 2, "tp": 2, "zero": 2, "policy": "divided"},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Three steps of AdamW in every layout, on the same pieces: the run, its folder."""
    root, make = tmp_path_factory.mktemp("tensors"), MakeRun(store)
    alone = {"alone": {}, "alone, narrow": {"precision": "bf16"}}
    found = {}
    for world, rows in {1: alone, **LAYOUTS}.items():
        each = {name: make(**(SAME | {"dp": 1} | keys)) for name, keys in rows.items()}
        assert {resolved.ranks for resolved in each.values()} == {world}
        for name, ended in run_ranks(world, on_ranks.train_each, root, each)[0].items():
            found[name] = (ended, root / name)
    return found


@pytest.mark.parametrize("name", [name for rows in LAYOUTS.values() for name in rows])
def test_ranks_that_share_weights_train_as_one(runs, name: str) -> None:
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
        assert sum(pack["predicted_s"]) == pytest.approx(sum(one["predicted_s"]), rel=1e-4)


def test_a_share_of_the_weights_is_forecast(runs) -> None:
    (whole,) = events(runs["alone"][1], "memory")
    (half,) = events(runs["zero 1"][1], "memory")
    for term in ("parameters", "gradients", "optimizer", "activations"):
        assert half["terms"][term] < 0.75 * whole["terms"][term]


def test_a_checkpoint_goes_on_in_another_layout(runs, tmp_path: Path, store: TokenStore) -> None:
    make = MakeRun(store)
    for world, steps, keys in (
        (4, 1, {"dp": 2, "tp": 2, "zero": 3}),
        (3, 2, {"dp": 1, "tp": 3, "zero": 1}),
        (2, 3, {"dp": 1, "tp": 2}),
    ):
        run = make(**(SAME | keys | {"steps": steps, "every_steps": 1}))
        ended = run_ranks(world, on_ranks.train, tmp_path, run, {})[0]
    expected = runs["alone"][0]
    assert_close(ended, dataclasses.replace(expected, losses=expected.losses[-1:]))


REFUSED = {
    "replicas": (
        ["--layout.dp=4", "--layout.replicas=3"],
        "replicas = 3 does not divide the 4 ranks that ZeRO shards over, dp x cp = 4 x 1. Give one "
        "of 1, 2, 4.",
    ),
    "heads": (
        ["--layout.tp=3", "--layout.dp=1"],
        "4 heads do not divide over 3 tensor-parallel ranks. Set tp (layout.tp) to one of 1, "
        "2, 4, or share tokens, which needs no division of heads: cp (layout.cp) = 3 "
        "with needed-kv.",
    ),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_share_is_refused_before_one_starts(
    flags: list[str], message: str, refused: Callable[[list[str]], str]
) -> None:
    assert message in refused(flags)


def test_cores_that_do_not_divide_are_refused() -> None:
    from equipoise.spec.run.spec import LayoutSpec

    assert LayoutSpec(cp=2, tp=2).count_ranks(cores=8) == 8
    assert LayoutSpec(dp=3, cp=2, tp=2).count_ranks(cores=1) == 12
    with pytest.raises(LayoutError) as refused:
        LayoutSpec(cp=2, tp=3).count_ranks(cores=4)
    assert str(refused.value) == (
        "layout.cp x layout.tp = 2 x 3 does not divide the 4 ranks of layout.dp = "
        '"cores", one for each core of this machine. Set layout.dp = 1 for 6 ranks in all.'
    )
