"""Kernels: measured points are met, peaks are not beaten, transfers follow the roofline."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.curves.grid import read_table
from equipoise.cost.kernel import (
    attention_s,
    attention_slowdown,
    decode_attention_s,
    gemm_s,
    stream_s,
)
from equipoise.spec.device.by_name import DEVICES, DeviceSpec, find_device

H100, H200, A100 = (find_device(name) for name in ("h100-sxm", "h200", "a100-80"))
SIZES = st.integers(16, 40_000)
LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=12)


@pytest.mark.parametrize(("device", "table"), [(H100, "h100"), (H200, "h200"), (A100, "a100")])
def test_measured_products_are_met_and_do_not_beat_the_peak(device, table: str) -> None:
    rows = [row for row in read_table(f"gemm_{table}.csv") if row["dtype"] == "bf16"]
    m, n, k = (np.array([float(row[key]) for row in rows]) for key in "mnk")
    found = gemm_s(device, m, n, k, "bf16")
    assert np.allclose(found.s, [float(row["us"]) * 1e-6 for row in rows])
    assert not found.extrapolated.any()
    assert (2 * m * n * k / found.s < device.peak_flop_per_s("bf16")).all()


@given(st.sampled_from(list(DEVICES.values())), SIZES, SIZES, SIZES)
def test_no_product_beats_its_peak(device: DeviceSpec, m: int, n: int, k: int) -> None:
    for dtype in device.dtypes:
        s = float(gemm_s(device, m, n, k, dtype).s)
        assert 2 * m * n * k / s <= device.peak_flop_per_s(dtype) * 1.1
        assert s > 1e-6


@given(SIZES, SIZES, SIZES)
def test_a_device_twice_as_good_is_never_slower(m: int, n: int, k: int) -> None:
    plain = DEVICES["mi250x"]
    double = dataclasses.replace(
        plain,
        peaks=tuple((dtype, 2 * peak) for dtype, peak in plain.peaks),
        memory_bytes_per_s=2 * plain.memory_bytes_per_s,
    )
    assert gemm_s(double, m, n, k, "bf16").s <= gemm_s(plain, m, n, k, "bf16").s


def test_fp8_is_faster_and_fp32_slower_and_the_flag_tells_which_was_measured() -> None:
    times = {
        dtype: gemm_s(H100, 8192, 8192, 8192, dtype) for dtype in ("fp8", "bf16", "fp16", "fp32")
    }
    assert times["fp8"].s < times["bf16"].s == times["fp16"].s < times["fp32"].s
    assert [bool(each.extrapolated) for each in times.values()] == [False, False, False, True]
    assert gemm_s(H100, 8192, 128_256, 4096, "bf16").extrapolated


def test_a_card_held_to_less_power_is_slower_where_it_computes() -> None:
    capped = find_device("h100-sxm-500w")
    ratio = gemm_s(capped, 8192, 8192, 8192, "bf16").s / gemm_s(H100, 8192, 8192, 8192, "bf16").s
    switched = (700 - H100.idle_power_w) / (500 - capped.idle_power_w)
    assert float(ratio) == pytest.approx(switched ** (1 / 3))
    assert float(ratio) > (700 / 500) ** (1 / 3)


@given(LENGTHS, st.sampled_from([1, 4, 16]), st.booleans())
def test_documents_add_up_and_longer_ones_take_longer(
    lengths: list[int], heads: int, backward: bool
) -> None:
    found = attention_s(A100, lengths, heads=heads, kv_heads=1, head_width=128, backward=backward)
    assert found.s.shape == (len(lengths),)
    assert found.total_s == pytest.approx(found.s.sum())
    more = attention_s(
        A100,
        [2 * length for length in lengths],
        heads=heads,
        kv_heads=1,
        head_width=128,
        backward=backward,
    )
    assert more.total_s >= 0.95 * found.total_s  # below 128 tokens measurements waver


def test_measured_attention_is_met_for_packs_of_documents_alike() -> None:
    rows = [
        row
        for row in read_table("attention_h100.csv")
        if (row["sharing"], row["head_width"]) == ("4", "128") and int(row["units"]) >= 8
    ]
    for row in rows:
        lengths = [int(row["tokens"])] * (int(row["units"]) // 8)
        found = attention_s(H100, lengths, heads=8, kv_heads=2, head_width=128)
        assert found.total_s == pytest.approx(float(row["us"]) * 1e-6)
        assert not found.extrapolated.any()


def test_equal_tokens_in_other_documents_take_another_time() -> None:
    kind = {"heads": 16, "kv_heads": 2, "head_width": 128}
    one = attention_s(H100, [32_768], **kind).total_s
    many = attention_s(H100, [512] * 64, **kind).total_s
    assert one > 8 * many


def test_the_backward_of_the_shipped_devices_is_three_forwards() -> None:
    kind = {"heads": 16, "kv_heads": 2, "head_width": 128}
    ratio = attention_s(H100, [4096], backward=True, **kind).s / attention_s(H100, [4096], **kind).s
    assert float(ratio[0]) == pytest.approx(3.0)


def test_heads_that_do_not_divide() -> None:
    message = (
        "6 query heads cannot share 4 key/value heads. Give a number of query heads that 4 divides."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        attention_s(H100, [64], heads=6, kv_heads=4, head_width=128)


def test_a_dtype_that_the_device_lacks() -> None:
    message = (
        "v100-32 does not multiply bf16. Choose a precision among fp16, fp32, or another device."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        gemm_s(DEVICES["v100-32"], 64, 64, 64, "bf16")


def test_decoding_is_bound_by_the_cache() -> None:
    kind = {"heads": 32, "kv_heads": 8, "head_width": 128}
    found = decode_attention_s(H100, [1024, 65_536], sequences=4, **kind)
    read_bytes = 4 * 8 * 65_536 * 128 * 2 * 2
    assert not found.extrapolated.any()
    assert read_bytes / found.s[1] < H100.memory_bytes_per_s
    assert found.s[1] > 10 * found.s[0]
    assert (decode_attention_s(A100, 65_536, sequences=4, **kind).s > found.s[1]).all()


def test_streams_take_their_bytes_and_a_launch() -> None:
    assert float(stream_s(H100, 0).s) == 0
    assert float(stream_s(H100, 3.35e12).s) == pytest.approx(1 / 0.8 + 3e-6)


@pytest.mark.parametrize(
    ("name", "tokens", "measured_ms"),
    [
        ("gb300", 4096, 0.864 + 3.127),
        ("gb300", 8192, 3.013 + 11.074),
        ("gb200", 4096, 0.977 + 3.383),
        ("gb200", 8192, 3.470 + 11.984),
    ],
)
def test_latent_attention_is_priced_by_its_own_widths(
    name: str, tokens: int, measured_ms: float
) -> None:
    # Both passes by cuDNN 9.22 (cudnn-frontend at 3929da2e): two sequences, 128 heads, scores of
    # 192 and values of 128.
    def priced_ms(**widths: int) -> float:
        device, lengths = find_device(name), [tokens, tokens]
        passes = [
            attention_s(device, lengths, heads=128, kv_heads=128, backward=backward, **widths)
            for backward in (False, True)
        ]
        return 1e3 * sum(each.total_s for each in passes)

    by_widths = priced_ms(head_width=128, score_width=192)
    assert measured_ms < by_widths < priced_ms(head_width=160)


def test_attention_in_mxfp8_gains_where_scores_are_wider_than_values() -> None:
    gb300 = find_device("gb300")
    assert attention_slowdown(gb300, "flash-mx", wider_scores=True) < 0.8
    assert 1.0 < attention_slowdown(gb300, "flash-mx") < 1.05
