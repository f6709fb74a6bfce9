"""Encoders priced: nothing costs nothing, more never costs less, and pairs cost by each item."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.modality import (
    EncodePasses,
    EncoderTraffic,
    count_weight_traffic,
    encode_passes,
    encoder_groups,
    encoder_params,
    held_bytes,
    kept_bytes,
)
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.modality.encoder import EncoderSpec

SPEC = EncoderSpec("image", layers=4, hidden=256, heads=4, values=588, merge=(2, 2))
MACHINE = Machine(find_cluster("h100-sxm:1"))


def _whole(patches: list[int], spec: EncoderSpec = SPEC, width: int = 512) -> EncodePasses:
    return encode_passes(spec, np.array(patches, dtype=np.int64), width, MACHINE)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6), st.integers(0, 5))
def test_more_patches_never_cost_less(quarters: list[int], which: int) -> None:
    patches = [4 * each for each in quarters]
    more = list(patches)
    more[which % len(more)] += 4
    few, many = _whole(patches), _whole(more)
    assert 0 < few.forward_s <= many.forward_s * 1.001  # curves of products are not monotonic
    assert 0 < few.backward_s <= many.backward_s * 1.001
    assert few.backward_s > few.forward_s


def test_nothing_costs_nothing_and_pairs_cost_by_the_item() -> None:
    assert _whole([]) == EncodePasses(0.0, 0.0)
    assert held_bytes([], 512, Layout(), sent_rows=0, read_rows=0) == 0
    one, eight = _whole([32_768]), _whole([4096] * 8)
    assert one.forward_s > 1.5 * eight.forward_s
    assert one.backward_s > 1.5 * eight.backward_s
    assert kept_bytes(SPEC, np.array([32_768])) == kept_bytes(SPEC, np.array([4096] * 8))


def test_work_in_the_limit_is_the_counted_one() -> None:
    """Large products run at the device's pace, so their time goes with counted multiplications."""
    wide = EncoderSpec("image", layers=24, hidden=4096, heads=32, values=588, merge=(2, 2))
    patches = np.array([1024] * 16)
    flop = 2.0 * float(wide.multiplications(patches, 8192).sum())
    seconds = _whole(patches.tolist(), wide, 8192).forward_s
    peak = MACHINE.peak_flop_per_s("bf16")
    assert 0.3 < flop / seconds / peak < 1.0


def test_rows_and_states_are_held() -> None:
    patches = np.array([64], dtype=np.int64)
    whole = held_bytes([(SPEC, patches)], 512, Layout(), sent_rows=16, read_rows=10)
    without = held_bytes([(SPEC, patches)], 512, Layout(), sent_rows=0, read_rows=0)
    assert whole - without == (16 + 2 * 10) * 512 * 4
    assert without - kept_bytes(SPEC, patches) == 20 * encoder_params(SPEC, 512)


def test_states_are_held_by_the_stage_of_zero() -> None:
    params, nothing = encoder_params(SPEC, 512), np.zeros(0, dtype=np.int64)

    def held(layout: Layout) -> int:
        return held_bytes([(SPEC, nothing)], 512, layout, sent_rows=0, read_rows=0)

    eighth = params // 8
    assert 8 * eighth == params
    assert held(Layout(dp=8, zero=0)) == 20 * params
    assert held(Layout(dp=8, zero=1)) == 8 * params + 12 * eighth
    assert held(Layout(dp=8, zero=2)) == 4 * params + 16 * eighth
    assert held(Layout(dp=8, zero=2, replicas=2)) == 4 * params + 32 * eighth
    ends, *layers = encoder_groups(SPEC, 512, Layout(dp=8))
    assert sum(each.params for each in (ends, *layers)) == params
    assert held(Layout(dp=8, zero=3)) == 16 * eighth + 4 * (ends.params + layers[0].params)


def test_rows_that_ranks_do_not_divide_are_padded() -> None:
    spec = dataclasses.replace(SPEC, layers=1)
    ends, layer = encoder_groups(spec, 510, Layout(dp=4))
    assert layer.owned * 4 == layer.params
    assert ends.owned * 4 - ends.params == 2 * (
        4 * SPEC.hidden + 1
    )  # project's 510 rows and biases
    traffic = count_weight_traffic([spec], 510, Layout(dp=4))
    assert traffic == EncoderTraffic(4 * 2 * 3 * 4 * (ends.owned + layer.owned), 4 * 2 * 3 * 2)


def test_frozen_weights_are_held_and_gathered_alone() -> None:
    nothing, layout = np.zeros(0, dtype=np.int64), Layout(dp=8, zero=1)
    frozen = SPEC.with_frozen(["encoders"])
    params = encoder_params(SPEC, 512)
    assert frozen.is_frozen and encoder_params(frozen, 512, trained=True) == 0
    held = held_bytes([(frozen, nothing)], 512, layout, sent_rows=0, read_rows=0)
    # Gathered until its rows are made, which is before any gradient is kept; one group arrives.
    largest = max(each.params for each in encoder_groups(frozen, 512, layout))
    assert held == 4 * params + 4 * params // 8 + 4 * largest
    works = held_bytes([(frozen, np.array([64]))], 512, layout, sent_rows=0, read_rows=0)
    assert works - held == 4 * 12 * SPEC.hidden * 64
    most = held_bytes([(frozen, nothing)], 512, layout, sent_rows=0, read_rows=10**6)
    assert most == 4 * (params // 8 + 2 * 10**6 * 512)
    assert kept_bytes(frozen, np.array([64])) == 0
    half = SPEC.with_frozen(["encoders.image.embed", "encoders.image.layers.0-1"])
    assert half.layers_back == (False, False, True, True)
    trained = encoder_params(half, 512, trained=True)
    assert trained == sum(each.trained.params for each in encoder_groups(half, 512, layout))
    held = held_bytes([(half, nothing)], 512, layout, sent_rows=0, read_rows=0)
    owned = sum(each.trained.owned for each in encoder_groups(half, 512, layout))
    assert held == 4 * (params // 8 + 2 * owned + params + trained + largest)


def test_traffic_of_frozen_weights_is_one_gather() -> None:
    def traffic(*patterns: str, zero: int) -> EncoderTraffic:
        spec, layout = SPEC.with_frozen(patterns), Layout(dp=4, zero=zero)
        return count_weight_traffic([spec], 512, layout, small_bytes=0)

    params, every = encoder_params(SPEC, 512), 4 * 3
    for zero in (1, 2, 3):
        alone = traffic("encoders", zero=zero)
        assert alone == EncoderTraffic(3 * 4 * params, every * (1 + SPEC.layers))
    first = traffic("encoders.image.embed", "encoders.image.layers.0", zero=3)
    # The first layer is gathered in the forward alone, and has no gradient that is split.
    assert first.messages == every * (3 * (1 + SPEC.layers) - 2)
    whole = traffic(zero=3)
    layer = encoder_groups(SPEC, 512, Layout(dp=4))[1].params
    embed = SPEC.hidden * (SPEC.values + 1)
    assert whole.sent_bytes - first.sent_bytes == 3 * 4 * (2 * layer + embed)


def test_the_backward_ends_at_the_first_trained_layer() -> None:
    patches, whole = [1024] * 4, _whole([1024] * 4)
    backs = []
    for layers in range(SPEC.layers + 1):
        freeze = ["encoders.image.embed"]
        freeze += [f"encoders.image.layers.0-{layers - 1}"] * (layers > 0)
        backs.append(_whole(patches, SPEC.with_frozen(freeze)))
    assert all(each.forward_s == whole.forward_s for each in backs)
    seconds = [each.backward_s for each in backs]
    assert seconds == sorted(seconds, reverse=True) and 0 < seconds[-1] < seconds[0] / 2
    assert seconds[0] < whole.backward_s
    assert _whole(patches, SPEC.with_frozen(["encoders"])).backward_s == 0.0
