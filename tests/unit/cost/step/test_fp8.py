"""Casts of a layer in FP8, and products with and without them."""

import pytest

from equipoise.cost.kernel import gemm_s
from equipoise.cost.step.fp8 import cast_bytes, is_narrow
from equipoise.cost.step.work import Product, layer_work
from equipoise.spec.device.by_name import find_device
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset

MODEL = preset("llama3-70b")
WORK = layer_work(MODEL, Layout(tp=4), 4096, sparse=False)


def test_a_cast_of_each_output_gradient_and_of_what_no_norm_wrote() -> None:
    forward, backward = cast_bytes(WORK.products, "per-tensor", MODEL.hidden)
    query = MODEL.heads * MODEL.head_width / 4
    keys = 2 * MODEL.kv_heads * MODEL.head_width / 4
    units = MODEL.ffn / 4
    assert forward == 4 * 4096 * (query + units)
    assert backward == 4 * 4096 * (query + keys + MODEL.hidden + 2 * units + MODEL.hidden)


def test_recipes_in_order() -> None:
    moved = {
        recipe: sum(cast_bytes(WORK.products, recipe, MODEL.hidden))
        for recipe in ("per-product", "per-block", "per-tensor", "mx")
    }
    assert moved["per-product"] == moved["per-block"] == 0 < moved["per-tensor"] < moved["mx"]


def test_heads_and_routers_stay_wide() -> None:
    kept = [name for name in ("head", "router", "projections", "experts", "shared expert")
            if not is_narrow(Product(name, 1, 1, 1))]  # fmt: skip
    assert kept == ["head", "router"]


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "h100-sxm-500w"])
def test_a_product_alone_is_faster_than_with_its_cast(device: str) -> None:
    sizes = (8192, 4096, 8192)
    whole, alone, block = (
        float(gemm_s(find_device(device), *sizes, "fp8", scaled=scaled).s)
        for scaled in ("per-product", "per-tensor", "per-block")
    )
    wide = float(gemm_s(find_device(device), *sizes, "bf16").s)
    assert alone < whole < block < wide


def test_how_fp8_is_scaled_says_nothing_about_wide_products() -> None:
    h100 = find_device("h100-sxm")
    times = {float(gemm_s(h100, 4096, 4096, 4096, "bf16", scaled=each).s)
             for each in ("per-product", "per-tensor", "mx")}  # fmt: skip
    assert len(times) == 1
