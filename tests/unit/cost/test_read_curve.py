"""Curves of devices and of tables: what was measured is met."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise import balance
from equipoise.base.errors import DataError, SpecError
from equipoise.cost.kernel import attention_s
from equipoise.cost.read_curve import device_curve, fit_curve
from equipoise.spec.device.by_name import find_device
from equipoise.spec.model.presets import PLANNED, preset
from support.device_files import A_FILE, written

TERM = st.floats(0, 1) | st.just(0.0)


@given(TERM, TERM, TERM)
def test_a_curve_meets_a_table_that_it_can_meet(fixed, per_token, per_pair) -> None:
    tokens = np.array([1, 64, 512, 4096, 30_000])
    pairs = tokens * (tokens + 1) / 2
    seconds = 1e-3 * fixed + 1e-6 * per_token * tokens + 1e-9 * per_pair * pairs
    if seconds.min() < 1e-9:
        return
    curve = fit_curve(tokens, seconds)
    predicted = 1e-9 * (curve.fixed_ns + curve.ns_per_token * tokens + curve.attention_ns(pairs))
    assert predicted == pytest.approx(seconds, rel=1e-5)
    assert min(curve.fixed_ns, curve.ns_per_token) >= 0


def test_noise_does_not_make_a_term_negative() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 20_000, 60)
    seconds = (1e-6 * tokens) * rng.uniform(0.8, 1.2, 60)
    curve = fit_curve(tokens, seconds)
    predicted = 1e-9 * (curve.fixed_ns + curve.document_ns(tokens))
    assert np.abs(predicted / (1e-6 * tokens) - 1).max() < 0.15


def test_a_device_has_the_prices_of_its_kernels() -> None:
    model = preset("llama3-8b")
    curve = device_curve("llama3-8b", "h100-sxm")
    sizes = {"heads": 32, "kv_heads": 8, "head_width": 128}
    both = [
        attention_s(find_device("h100-sxm"), [16384], **sizes, backward=backward).total_s
        for backward in (False, True)
    ]
    at = curve.attention_ns(16384 * 16385 / 2)
    assert at == pytest.approx(1e9 * model.layers * sum(both), rel=1e-6)
    # Products at 60 to 100% of the peak.
    flop_per_s = 6 * model.matmul_params / (1e-9 * curve.ns_per_token)
    assert 0.6 < flop_per_s / curve.peak_flop_per_s < 1.0
    assert curve.measured


def test_experts_are_priced_by_those_that_a_token_visits() -> None:
    sparse = device_curve("mixtral-8x7b", "h100-sxm")
    rate = 6 * preset("mixtral-8x7b").matmul_params / (1e-9 * sparse.ns_per_token)
    assert 0.5 < rate / sparse.peak_flop_per_s < 1.0


REFUSED = [
    (
        [100],
        [1.0],
        "1 lengths and 1 times make no curve. Give a time for each length, and two or more "
        "different lengths.",
    ),
    (
        [100, 0],
        [1.0, 1.0],
        "A measured length is 0. Lengths are 1 token or more, and times are seconds above 0.",
    ),
    (
        [100, 200],
        [1.0, float("nan")],
        "A measured time is nan. Lengths are 1 token or more, and times are seconds above 0.",
    ),
    (
        ["a", "b"],
        [1.0, 2.0],
        "Measured lengths and seconds must be numbers. Give one length and one time for each "
        "sample that was measured.",
    ),
]


@pytest.mark.parametrize(("lengths", "seconds", "message"), REFUSED)
def test_tables_that_no_measurement_makes_are_refused(lengths, seconds, message) -> None:
    with pytest.raises(DataError) as caught:
        fit_curve(lengths, seconds)
    assert str(caught.value) == message


def test_windows_are_refused_and_latent_attention_has_the_width_of_its_scores() -> None:
    with pytest.raises(SpecError) as caught:
        device_curve(PLANNED["gpt-oss-120b"], "h100-sxm")
    assert str(caught.value) == (
        "Some layers of the model read 128 tokens at most, and attention is measured over whole "
        "documents. Give counted_curve(model), which counts windows."
    )
    latent = PLANNED["deepseek-v3"]
    curve = device_curve(latent, "h100-sxm")
    seconds = sum(
        attention_s(
            find_device("h100-sxm"),
            [8192],
            heads=128,
            kv_heads=128,
            head_width=160,  # 192 of queries and keys, 128 of values
            backward=backward,
        ).total_s
        for backward in (False, True)
    )
    at = curve.doc_tokens.index(8192.0)
    assert curve.doc_ns[at] == pytest.approx(1e9 * latent.layers * seconds)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(SpecError, match="h100-sxm"):
        device_curve("llama3-8b", "h100-smx")


def test_a_file_of_calibrate_prices_a_model_on_its_machine(tmp_path) -> None:
    path = written(tmp_path, A_FILE)
    curve = device_curve("7m", path)
    model = preset("7m")
    assert curve.measured
    assert curve.peak_flop_per_s == 1e11
    # Products of the file's machine, at no more than its peak.
    assert 1e9 * 6 * model.matmul_params / curve.ns_per_token <= 1e11 * 1.01
    longer = curve.document_ns(np.array([500, 1000, 2000]))
    assert (np.diff(longer) > 0).all()
    answer = balance.batch([900, 100, 400, 500], 2, price=curve)
    assert answer.bound_s <= answer.step_s
