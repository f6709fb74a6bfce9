"""A trace on a described cluster: what is known is priced, what is not is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import EquipoiseError, FitError, SpecError
from equipoise.cost.serving import read_points
from equipoise.cost.step.request import Precision
from equipoise.schedule.batching.settings import BatchSettings, page_tokens_of
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import Objective
from equipoise.sim.serve.curve import ServingDevice, describe_replica
from equipoise.sim.serve.request import ServingRequest, simulate_serving
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.device.serving import (
    MeasuredServing,
    ServingCurve,
    serving_file,
    serving_name,
    write_serving,
)
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec, preset
from equipoise.spec.request_trace import TracedRequest
from equipoise.spec.words import read_layout, read_model

TRACE = tuple(
    TracedRequest(at * 0.05, "ab"[at % 2], 100 + 37 * at % 400, 5 + at % 30, 40) for at in range(60)
)


def described(
    model: str, layout: str = "tp=1", precision: Precision = "bf16", cluster: str = "h100-sxm:8"
) -> ServingDevice:
    sizes = read_model(model)
    machine = Machine(read_cluster(cluster))
    return describe_replica(sizes, machine, read_layout(layout).layout, precision)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama3-8b", "tp=1"), ("llama3-70b", "tp=4"), ("mixtral-8x7b", "tp=2")],
)
def test_a_curve_rises_and_neither_peak_nor_memory_is_beaten(model: str, layout: str) -> None:
    replica = described(model, layout)
    curve, sizes = replica.curve, preset(model)
    for points in (curve.tokens, curve.logits):
        assert (np.diff([s for _, s in points]) >= 0).all()
    machine = Machine(read_cluster("h100-sxm:8"))
    tp = replica.devices
    table = sizes.hidden * sizes.vocab
    flop = 2 * (sizes.matmul_params - table) * 8192
    share = flop / read_points(curve.tokens, 8192) / tp / machine.peak_flop_per_s("bf16")
    assert 0.3 < share < 1.0, "a forward's FLOP, not a training step's"
    read_bytes = 2 * (sizes.active_params - 2 * table) / tp
    assert read_points(curve.tokens, 1) > read_bytes / machine.device.memory_bytes_per_s
    assert curve.kv_token_s > 0.5 * replica.kv_token_bytes / machine.device.memory_bytes_per_s


def test_what_fits_has_a_page_for_each_batch_in_flight() -> None:
    """The largest iterations that fit leave hardly any room for keys and values."""
    model, machine = read_model("llama3-8b"), Machine(read_cluster("h100-sxm:24"))
    layout = read_layout("pp=8,cp=3").layout
    fits: ServingDevice | None = None
    low, high = 8192, 1 << 24
    while high - low > 1:
        tokens = (low + high) // 2
        limits = BatchSettings(pages=1, iteration_tokens=tokens)
        try:
            fits = describe_replica(model, machine, layout, "bf16", limits=limits)
            low = tokens
        except FitError:
            high = tokens
    assert fits is not None
    assert 1 <= fits.pages(page_tokens_of(3)) < 4


def test_fp8_products_are_faster_and_attention_is_not() -> None:
    wide, narrow = described("llama3-8b"), described("llama3-8b", precision="fp8")
    assert read_points(narrow.curve.tokens, 8192) < read_points(wide.curve.tokens, 8192)
    assert narrow.curve.pair_s == wide.curve.pair_s
    assert narrow.kv_token_bytes == wide.kv_token_bytes
    assert narrow.weights_bytes == wide.weights_bytes / 2


def test_layers_with_a_short_window_read_it_alone() -> None:
    model, machine = PLANNED["gpt-oss-120b"], Machine(read_cluster("h100-sxm:8"))
    own, all_ = (
        describe_replica(each, machine, Layout(tp=4), "bf16")
        for each in (model, dataclasses.replace(model, window=None))
    )
    assert own.curve.pair_s == all_.curve.pair_s / 2
    assert own.curve.kv_token_s == all_.curve.kv_token_s / 2
    # A window's keys of each token in half of the layers, which are no longer those of its context.
    assert own.curve.sequence_s == pytest.approx(128 * own.curve.kv_token_s)
    more_s = read_points(own.curve.tokens, 8192) - read_points(all_.curve.tokens, 8192)
    assert more_s == pytest.approx(8192 * 128 * own.curve.pair_s)
    assert own.pages(16) > 1.8 * all_.pages(16)


def test_few_tokens_meet_few_experts() -> None:
    curve = described("mixtral-8x7b", "tp=2").curve
    assert read_points(curve.tokens, 1) < 0.5 * read_points(curve.tokens, 16)


def test_the_answer_adds_up() -> None:
    answer = simulate_serving(
        ServingRequest(
            TRACE,
            "llama3-8b",
            "h100-sxm:4",
            "tp=2,dp=2",
            objectives={"": Objective(ttft_s=1.0), "b": Objective(ttft_s=1e-6)},
        )
    )
    row = json.loads(json.dumps(answer.as_row()))
    assert row["requests"] == len(TRACE) == sum(row["requests_by_replica"])
    for key in ("requests", "prompt_tokens", "output_tokens", "output_tokens_per_s"):
        parts = [each[key] for each in row["tenants"].values()]
        assert sum(parts) == pytest.approx(row[key])
    assert row["tenants"]["a"]["good_share"] == 1.0 and row["tenants"]["b"]["good_share"] == 0.0
    assert row["good_share"] == 0.5
    assert 0 < row["busy"][0] <= 1 and 0 < max(row["kv_peak"]) < 1
    assert row["devices"] == 4 and row["usd"] > 0
    assert row["gap_s"]["p50"] <= row["gap_s"]["p99"]
    device = answer.device
    low = (device.idle_power_w + device.host_power_w) * 4 * row["makespan_s"]
    high = (device.power_w + device.host_power_w) * 4 * row["makespan_s"]
    assert low < row["energy_j"] < high


def test_an_objective_that_no_request_could_meet_is_refused() -> None:
    for name, value, shown in (("ttft_s", float("nan"), "nan"), ("tpot_s", 0.0, "0")):
        with pytest.raises(SpecError) as refused:
            Objective(**{name: value})
        assert str(refused.value) == f"{name} of an objective is {shown}. Give seconds above 0."


def test_the_scheduler_s_limits_are_those_given() -> None:
    request = ServingRequest(
        TRACE, "llama3-8b", "h100-sxm:1", "tp=1", settings=BatchSettings(80, most_sequences=2)
    )
    row = simulate_serving(request).as_row()
    assert row["kv_pages"] == 80 and row["kv_peak"][0] <= 1.0


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "message"),
    [
        (
            "llama3-70b",
            "h100-sxm:1",
            "tp=1",
            "Weights of 131.4 GiB and activations of 1.6 GiB a device leave no room for keys and "
            "values in 70.8 GiB, nine tenths of h100-sxm. Give a higher tp or pp, or a larger "
            "device.",
        ),
        (
            "llama3-8b",
            "h100-sxm:2",
            "tp=2,zero=3",
            "layout: zero divides what a training step keeps and changes nothing in serving. Leave "
            "it out.",
        ),
        (
            "llama3-8b",
            "h100-sxm:2",
            "pp=2,virtual=2",
            "layout: virtual is 2, and serving has one stage on every rank of a pipeline. Leave it "
            "out.",
        ),
        (
            "layers=2,hidden=64,heads=4,vocab=100",
            "h100-sxm:4",
            "pp=4",
            "2 layers are fewer than pp = 4 stages. Give a pp of 2 or less.",
        ),
        (
            "llama3-8b",
            "h100-sxm:2",
            "tp=2,ep=2",
            "layout: ep x etp is 2 x 1, and the model has no experts. Leave both out.",
        ),
        (
            "mixtral-8x7b",
            "h100-sxm:8",
            "tp=2,dp=4,ep=8",
            "layout: ep is 8, and a replica has tp x cp = 2 x 1 ranks. Replicas that share experts "
            "wait for each other in every layer, which is not priced in serving. Give an ep that "
            "divides tp x cp.",
        ),
        (
            "layers=2,hidden=64,heads=4,vocab=100,experts=6,top_k=2",
            "h100-sxm:4",
            "tp=4,ep=4",
            "6 experts do not divide over ep = 4. Give a divisor of them.",
        ),
        (
            "deepseek-v3",
            "h100-sxm:8",
            "tp=8",
            "Latent attention is not priced in serving yet. Give a model with keys and values of "
            "their own.",
        ),
        (
            "layers=30,hidden=576,heads=9,kv_heads=3,vocab=49152",
            "h100-sxm:2",
            "tp=2",
            "9 query heads and 3 key/value heads do not divide over tp = 2. Give a divisor of "
            "both.",
        ),
        (
            "mixtral-8x7b",
            "h100-sxm:4",
            "tp=4,etp=2",
            "layout: etp is 2, and with tp = 4 and ep = 1 experts are divided by 4 in serving. "
            "Give etp=4, or leave it out.",
        ),
    ],
)
def test_what_is_not_priced_is_refused(model: str, cluster: str, layout: str, message: str) -> None:
    with pytest.raises(EquipoiseError) as refusal:
        simulate_serving(ServingRequest(TRACE, model, cluster, layout))
    assert str(refusal.value) == message


def test_this_machine_is_priced_by_its_own_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model: ModelSpec = preset("2m")
    request = ServingRequest(TRACE, model, "this-cpu:2", "tp=2", precision="fp32")
    with pytest.raises(EquipoiseError) as refusal:
        simulate_serving(request)
    assert str(refusal.value) == (
        "The serving engine was not measured on this machine for this model in fp32 on 2 cores. "
        "Serve the model once, or name a device of the table."
    )
    curve = ServingCurve(((1, 0.01), (8, 0.02)), ((1, 0.001),), 1e-9, 1e-8, 1e-5, 1e-7)
    name = serving_name(model)
    for threads, dtype in ((1, "fp32"), (2, "bf16"), (2, "fp32")):
        other = dataclasses.replace(curve, sequence_s=threads * 1e-5)
        write_serving(
            serving_file(),
            MeasuredServing(name, "2m", dtype, threads, 1, "2026-11-23", other),  # type: ignore[arg-type]
        )
    answer = simulate_serving(request)
    assert answer.replica.curve == dataclasses.replace(curve, sequence_s=2e-5)
    assert len(answer.run.requests) == len(TRACE) and answer.devices == 2
