"""Divided as little as pays: the price of what travels, and lists on which cuts used to explode."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.divided import _divide
from equipoise.balance.packing.divided_price import (
    TRAVEL_SHARE,
    cell_rows,
    missing_tokens,
    price_ns,
    travel_ns_of,
)
from equipoise.balance.packing.divided_wrap import Wrap
from equipoise.balance.packing.pack import pack_step, rank_seconds, skew
from equipoise.cost.curve import break_even_curve, counted_curve
from equipoise.spec.model.presets import preset
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(50)
LLAMA = counted_curve(preset("llama3-8b"))


def whole(lengths) -> Pieces:
    return np.array([[index, 0, int(tokens)] for index, tokens in enumerate(lengths)])


def cuts(packed: PackedStep, pieces: Pieces) -> int:
    return len(cell_rows(packed)[1]) - len(pieces)


def travels(packed: PackedStep) -> int:
    cell_of, rows = cell_rows(packed)
    return int(missing_tokens(cell_of, rows, len(packed.ranks) * packed.micro_batches)[0].sum())


@pytest.mark.parametrize("policy", ["divided", "gangs"])
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    ranks=st.integers(1, 6),
    context=st.integers(60, 400),
    travel=st.sampled_from((None, 0.0, 1e4, 1e7)),
    meets=st.booleans(),
)
def test_no_candidate_is_cheaper(policy: str, lengths, ranks, context, travel, meets) -> None:
    lengths = [min(tokens, context) for tokens in lengths]
    pieces = whole(lengths)
    pack = PackSpec(policy=policy, context_tokens=context)
    told = {"meets_each_turn": meets, "travel_ns": travel}
    packed = pack_step(pieces, pack, ranks, CURVE, **told)
    again = pack_step(pieces.copy(), pack, ranks, CURVE, **told)
    assert packed.digest == again.digest
    assert packed.policy == policy
    assert max(batch.tokens for batch in packed) <= pack.most_tokens

    def price(other: PackedStep) -> int:
        each_ns = travel_ns_of(CURVE, travel)
        return price_ns(other, CURVE, travel_ns=each_ns, meets_each_turn=meets)

    others = []
    if len(lengths) >= ranks:
        by_work = dataclasses.replace(pack, policy="by-work")
        others.append(pack_step(pieces, by_work, ranks, CURVE, meets_each_turn=meets))
    if ranks > 1:
        turns = -(-sum(lengths) // (ranks * context))
        wrap = Wrap(pieces, ranks, turns, pack.most_tokens, CURVE)
        others += [wrap.cut(policy, even) for even in (1.0, 1.01)]
    if policy == "divided":
        others.append(_divide("divided", pieces, pack, ranks, CURVE, in_time=False))
    assert all(price(packed) <= price(each) for each in others if each is not None)


def made_lists() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "windows": draw.integers(30_000, 32_769, 67),
        "one length": np.full(105, 20_000),
        "three to a rank": np.full(175, 12_000),
        "lognormal 16k": np.clip(draw.lognormal(np.log(16_000), 0.4, 125).astype(int), 1, 32_768),
        "lognormal 8k": np.clip(draw.lognormal(np.log(8_000), 0.8, 205).astype(int), 1, 32_768),
        "chat": np.clip(draw.lognormal(np.log(700), 1.0, 1700).astype(int), 1, 32_768),
        "windows and chat": np.concatenate(
            (np.full(40, 32_768), draw.integers(50, 2000, 500), np.full(9, 25_000))
        ),
    }


@pytest.mark.parametrize("policy", ["divided", "gangs"])
@pytest.mark.parametrize("name", made_lists())
def test_documents_alike_are_cut_once_a_rank_at_most(policy: str, name: str) -> None:
    ranks, lengths = 64, made_lists()[name]
    pieces = whole(lengths)
    pack = PackSpec(policy=policy, context_tokens=32_768, step_tokens=int(lengths.sum()))
    packed = pack_step(pieces, pack, ranks, LLAMA)
    turns = -(-int(lengths.sum()) // (ranks * 32_768))
    assert cuts(packed, pieces) <= turns * (ranks - 1)
    assert travels(packed) <= turns * ranks * 32_768
    assert skew(rank_seconds(packed, LLAMA)) <= 1.05
    # What travels is worth it.
    by_work = pack_step(pieces, dataclasses.replace(pack, policy="by-work"), ranks, LLAMA)
    prices = [
        price_ns(each, LLAMA, travel_ns=TRAVEL_SHARE * LLAMA.ns_per_token, meets_each_turn=False)
        for each in (packed, by_work)
    ]
    assert prices[0] <= prices[1]


def test_dear_travel_keeps_documents_whole() -> None:
    pieces = whole([20_000] * 105)
    pack = PackSpec(policy="divided", context_tokens=32_768)
    by_price = [
        pack_step(pieces, pack, 64, LLAMA, travel_ns=share * LLAMA.ns_per_token)
        for share in (0.0, TRAVEL_SHARE, 10.0)
    ]
    assert [cuts(packed, pieces) > 0 for packed in by_price] == [True, True, False]
    assert by_price[1].digest == pack_step(pieces, pack, 64, LLAMA).digest


def test_a_document_of_many_ranks_is_still_shared() -> None:
    pieces = whole([131_072, *[1000] * 30])
    pack = PackSpec(policy="divided", context_tokens=131_072, max_tokens=131_072)
    packed = pack_step(pieces, pack, 8, LLAMA)
    assert skew(rank_seconds(packed, LLAMA)) <= 1.02
    assert cuts(packed, pieces) <= 16
