"""``auto``: the sharding that ``explain`` rates fastest, whatever the lengths, ranks and links."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.price import ASSUMED, ContextPrice
from equipoise.balance.context.sharding import STRATEGIES, ContextRequest, split_context
from equipoise.cli.main import main
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.attention.score import AssumedMachine
from equipoise.spec.mask import Mask
from equipoise.spec.model.presets import preset
from equipoise.spec.workload import distribution_names, draw_lengths

LENGTHS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20_000)), max_size=10)
LINKS = st.builds(LinkPrice, st.sampled_from([0.0, 1e-6, 1e-4]), st.sampled_from([1e8, 1e10, 1e12]))
MASKS = st.sampled_from([Mask(), Mask("full"), Mask("window", 700)])
MOVES = st.sampled_from(["needed-kv", "all-gather", "ring", "pass-q", "usp", "double-ring"])


def prices_of(lengths, ranks: int, price: ContextPrice, **options) -> dict[str, int]:
    """What each sharding takes, as ``explain`` prices it, in the order of the registry."""
    request = ContextRequest(np.array(lengths, dtype=np.int64), ranks, **options)
    return {
        name: round(
            price.score(split_context(lengths, ranks, name, **options), request).price.total_ns
        )
        for name in STRATEGIES
        if name != "hierarchical" or request.ranks_per_node is not None
    }


@settings(max_examples=20)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), LINKS, LINKS, MASKS, MOVES, st.booleans())
def test_auto_is_what_explain_rates_fastest(
    lengths, nodes: int, per_node: int, near, far, mask: Mask, moves: str, in_blocks: bool
) -> None:
    machine = AssumedMachine(
        1e13, far, near, per_node, block=128 if in_blocks else 1, tile_s=5e-6 * in_blocks
    )
    price = ContextPrice(machine, moves, 4, 2, Wire(32))
    options = {"ranks_per_node": per_node, "mask": mask}
    chosen = split_context(lengths, nodes * per_node, price=price, **options)
    prices = prices_of(lengths, nodes * per_node, price, **options)
    assert chosen.strategy == min(prices, key=lambda name: prices[name])


@pytest.mark.parametrize("name", distribution_names())
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("bandwidth", [1e9, 5e10, 9e11])
def test_auto_of_drawn_packs_is_what_explain_rates_fastest(
    name: str, ranks: int, bandwidth: float
) -> None:
    lengths = draw_lengths(name, 30, seed=3)
    price = ContextPrice(AssumedMachine(4e14, LinkPrice(1e-5, bandwidth), block=128, tile_s=5e-6))
    prices = prices_of(lengths, ranks, price, ranks_per_node=ranks)
    chosen = split_context(lengths, ranks, ranks_per_node=ranks, price=price)
    assert chosen.strategy == min(prices, key=lambda name: prices[name])


def explained(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, float]:
    assert main(["explain", "attention", "--json", *flags]) == 0
    [answer] = json.loads(capsys.readouterr().out)["strategies"]
    return answer["sharding"], answer["predicted_s"]


@pytest.mark.parametrize(
    ("lengths", "ranks", "link"),
    [
        *product(["24000,320,7200,1024,224", "900,900,900,900,900,900"], ["4"], ["10:50", "100:1"]),
        ("pretrain-128k", "8", "10:50"),
        ("python-stdlib", "4", "0:900"),
    ],
)
def test_the_command_rates_auto_as_the_best_of_all(
    capsys: pytest.CaptureFixture[str], lengths: str, ranks: str, link: str
) -> None:
    flags = ("--lengths", lengths, "--ranks", ranks, "--link", link)
    rated = [explained(capsys, *flags, "--sharding", name) for name in STRATEGIES]
    chosen, seconds = explained(capsys, *flags, "--sharding", "auto")
    assert seconds == min(each for _, each in rated)
    assert (chosen, seconds) in rated


def test_where_links_hide_behind_tiles_evenness_decides_and_else_staying() -> None:
    lengths = [3000, 1000, 1000, 1000]

    def chosen(bytes_per_s: float) -> str:
        machine = AssumedMachine(1e12, LinkPrice(0.0, bytes_per_s), block=128)
        return split_context(lengths, 2, price=ContextPrice(machine)).strategy

    assert split_context(lengths, 2, chosen(1e15)).pair_skew < 1.02
    assert split_context(lengths, 2, chosen(1e3)).travel_tokens.sum() == 0


def test_of_equal_prices_the_first_of_the_registry_is_taken() -> None:
    assert split_context([], 3).strategy == next(iter(STRATEGIES))
    assert split_context([0, 70], 1).strategy == next(iter(STRATEGIES))


def test_a_short_kernel_in_whole_blocks_is_no_faster() -> None:
    lengths = [1000, 129, 65]
    request = ContextRequest(np.array(lengths), 2)
    split = split_context(lengths, 2, "contiguous")
    exact, blocks, calls = (
        ContextPrice(AssumedMachine(4e14, ASSUMED.link, **more)).total_ns(split, request)
        for more in ({}, {"block": 128}, {"block": 128, "tile_s": 1e-3})
    )
    assert exact < blocks < calls
    tiles = max(
        sum(len(each.tiles) for each in rank)
        for rank in ContextPrice().write(split, request).rounds
    )
    assert calls - blocks == pytest.approx(3.5e6 * tiles, rel=0.05)


def test_all_ranks_of_a_tensor_group_choose_by_the_same_heads() -> None:
    price = ContextPrice.on(ASSUMED, preset("llama3-8b"), strategy="ring", tensor=3, bits=16)
    assert (price.heads, price.kv_heads, price.strategy) == (12, 2, "ring")
    assert price.wire == Wire(128, 2)
