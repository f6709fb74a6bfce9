"""Experts that lie in a file equal one rank: loss, gradients, a step of SGD, bytes and memory."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from equipoise.schedule.expert.prefetch import Ahead
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import EvalSpec, ExpertsSpec
from support.experts import tier_ranks
from support.experts.tier_ranks import TURNS, TierCase
from support.make_run import MODEL as RUN_MODEL
from support.make_run import MakeRun
from support.read_run import EXACT, assert_close, events

MODEL = ModelSpec(
    layers=5,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=7,
    top_k=2,
    expert_ffn=16,
    balance_rate=0.5,
    dense_layers=1,
)
EXPERT = 3 * 16 * 16


def least_mib(world: int, ep: int, dtype: torch.dtype) -> float:
    """The least that works: two layers with moments, or gathered."""
    peers = world // ep
    longest = math.ceil(math.ceil(MODEL.experts / ep) / peers)
    part = longest * EXPERT * dtype.itemsize
    return 2 * part * max(3, 1 + peers * (peers > 1)) / 2**20


def case(world: int, ep: int, **changes: object) -> TierCase:
    dtype = changes.get("dtype", torch.float64)
    mib = least_mib(world, ep, dtype)
    made = TierCase(MODEL, Layout(dp=world, ep=ep, zero=3), mib)
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("world", [2, 4])
def test_experts_in_a_file_equal_one_rank(world: int) -> None:
    cases = [case(world, 2, dtype=torch.float32, recompute="full", idle=1)]
    if world == 2:
        cases += [case(2, 1, steps=2), case(2, 1, steps=2, ahead=Ahead(0, 0))]
    else:
        cases += [case(4, 1, memory_mib=0.3)]
    ranks = run_ranks(world, tier_ranks.prove, cases)
    for outcomes in ranks:
        for each, outcome in zip(cases, outcomes, strict=True):
            bound = 1e-10 if each.dtype == torch.float64 else 1e-5
            assert outcome.loss_error <= bound, each
            assert outcome.gradient_error <= bound, each
            assert outcome.weight_error <= bound, each
            counts, sizes = outcome.counts, outcome.sizes
            assert counts.peak_bytes <= outcome.capacity
            # Bytes of the file and of the wire are those of the schedules, and these have a law.
            assert counts.read_bytes == counts.planned_read_bytes > 0
            assert counts.gathered_bytes == counts.planned_gathered_bytes
            assert outcome.sent == counts.gathered_bytes + counts.reduced_bytes
            layers, peers = MODEL.layers - MODEL.dense_layers, world // each.layout.ep
            assert counts.reduced_bytes == TURNS * layers * (peers - 1) * sizes.slice
            blocks = [-(-size // outcome.block_bytes) for size in (sizes.slice, sizes.moments)]
            assert counts.written_bytes == layers * sum(blocks) * outcome.block_bytes
            assert outcome.capacity < outcome.all_bytes or each.memory_mib == 0.3
            if each.memory_mib < 0.3 and each.ahead is None and each.recompute == "none":
                # All layers there and back; the two at each turn are still there.
                gathers = TURNS * 2 * layers - 2 * (2 * TURNS - 1)
                assert counts.gathered_bytes == gathers * sizes.slice
    for _, *(ahead, *demanded) in ranks if world == 2 else ():
        # Fetched on demand, or ahead: the same bits.
        assert ahead.losses == demanded[0].losses
        assert all(map(torch.equal, ahead.weights, demanded[0].weights))


def test_one_rank_reads_and_gathers_nothing() -> None:
    (outcome,) = run_ranks(1, tier_ranks.prove, [case(1, 1)])[0]
    assert max(outcome.loss_error, outcome.gradient_error, outcome.weight_error) <= 1e-10
    assert outcome.sent == outcome.counts.gathered_bytes == 0 < outcome.counts.read_bytes


def test_what_cannot_be_is_refused() -> None:
    little = case(2, 1, memory_mib=0.1)
    with pytest.raises(LayoutError) as caught:
        run_ranks(2, tier_ranks.refuse, little)
    assert str(caught.value) == (
        "experts.memory_mib = 0.1 does not hold two of 4 sparse layers: one takes 72.0 KiB of a "
        "rank with its moments, and 72.0 KiB gathered. Set it to 0.15 or more, or to 0 for no "
        "limit."
    )
    whole = case(2, 1, layout=Layout(dp=2, zero=1))
    with pytest.raises(LayoutError) as caught:
        run_ranks(2, tier_ranks.refuse, whole)
    assert str(caught.value) == (
        "experts.memory_mib = 0.140625 is proven on CPU ranks with zero = 3, pp = etp = replicas = "
        "1; these are cpu ranks with zero = 1, pp = 1, etp = 1, replicas = 1. Set "
        "experts.memory_mib = 0."
    )


def test_a_damaged_file_is_named() -> None:
    one = case(1, 1)
    assert run_ranks(1, tier_ranks.damage, one, "damaged")[0] == (
        "CheckpointError: FOLDER/blocks, where weights that have no memory lie, is damaged. Start "
        "the run again: it goes on from its newest checkpoint."
    )
    assert run_ranks(1, tier_ranks.damage, one, "refused")[0] == (
        "CheckpointError: FOLDER/blocks could not be written (File too large). Make room there; "
        "the same command goes on from the last checkpoint."
    )


def test_runs_go_on_from_checkpoints_in_any_form(tmp_path: Path, store: TokenStore) -> None:
    model = dataclasses.replace(RUN_MODEL, layers=3, experts=4, top_k=2, expert_ffn=24)
    same = {"steps": 3, "cut": "windows", "lr": 1e-3, "eps": 1e-6, "model": model, "zero": 3}
    held = {"held": store, "evaluate": EvalSpec(path="held", every_steps=3, tokens=200)}
    make = MakeRun(store)
    filed = make(**(same | held), experts=ExpertsSpec(memory_mib=0.11), every_steps=1)
    plain = make(**(same | held), ep=2)
    turns = [(tmp_path / "plain", plain, {}), (tmp_path / "filed", filed, {})]
    # Parts of three layers are written at the start, and in each update: the second one tears.
    turns += [(tmp_path / "torn", filed, {"torn_at": 6 + 6 + 3}), (tmp_path / "torn", filed, {})]
    turns += [(tmp_path / "moved", filed, {"stop_at": 1}), (tmp_path / "moved", plain, {})]
    turns += [(tmp_path / "back", plain, {"stop_at": 1}), (tmp_path / "back", filed, {})]
    both = run_ranks(2, tier_ranks.train_turns, turns)
    for expected, whole, torn, rest, _, moved, _, back in both:
        assert torn == "The machine has failed."
        assert_close(whole, expected)
        for name, weight in whole.weights.items():
            assert np.array_equal(rest.weights[name], weight), name
        for other in (moved, back):
            losses = expected.losses[-len(other.losses) :]
            assert_close(other, dataclasses.replace(expected, losses=losses))
    for one in events(tmp_path / "filed", "experts"):
        assert one["file"]["read_bytes"] == one["file"]["planned_read_bytes"] > 0
        assert one["file"]["gathered_bytes"] == one["file"]["planned_gathered_bytes"] > 0
        assert one["file"]["peak_bytes"] <= 0.11 * 2**20
    assert not any("file" in one for one in events(tmp_path / "plain", "experts"))
    losses = [
        [one["loss"] for one in events(tmp_path / name, "eval")] for name in ("plain", "filed")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)
