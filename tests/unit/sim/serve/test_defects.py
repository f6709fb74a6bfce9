"""Defects that were found in the reference simulator, one after the other: none is here.

======= ===================================================================================
1       metrics of replicas and stages overwrote each other
2       what does not fit ended the search in a crash
3       a decode's attention read the generated tokens and not the prompt
4       a preempted request resumed for the price of one token
5       MFU was that of a training step
6       FP8 attention was FP16's over 1.5
7       prompts ran whole, and no prefix was ever shared
further time to first token left the queue out; the head was free; experts were perfectly
        balanced; the device's peak was that of sparse matrices; replicas of unequal placement
        were priced alike; a stage of a pipeline waited for no other
======= ===================================================================================
"""

import dataclasses

import pytest

from equipoise.cost.serving import read_points
from equipoise.cost.step.request import Precision
from equipoise.plan.serving.request import ServingPlanRequest, plan_serving
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import ServingAnswer
from equipoise.sim.serve.curve import ServingDevice, describe_replica
from equipoise.sim.serve.request import ServingRequest, simulate_serving
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.model.presets import preset
from equipoise.spec.request_trace import TracedRequest
from equipoise.spec.words import read_layout

TRACE = tuple(TracedRequest(at * 0.01, "ab"[at % 2], 50 + at % 400, 20, 20) for at in range(64))


def serve(
    layout: str,
    *,
    model: str = "llama3-8b",
    cluster: str = "h100-sxm:8",
    trace: tuple[TracedRequest, ...] = TRACE,
    settings: BatchSettings | None = None,
    decode_layout: str | None = None,
    precision: Precision = "bf16",
) -> ServingAnswer:
    return simulate_serving(
        ServingRequest(
            trace,
            model,
            cluster,
            layout,
            precision=precision,
            settings=settings,
            decode_layout=decode_layout,
        )
    )


def replica(model: str, layout: str, cluster: str, precision: Precision = "bf16") -> ServingDevice:
    machine = Machine(find_cluster(cluster))
    return describe_replica(preset(model), machine, read_layout(layout).layout, precision)


@pytest.mark.parametrize("layout", ["dp=8", "dp=2,pp=2,tp=2", "pp=4,dp=2", "dp=2,cp=2,tp=2"])
def test_1_every_replica_has_counts_of_its_own(layout: str) -> None:
    answer = serve(layout)
    row, run = answer.as_row(), answer.run
    dp = read_layout(layout).layout.dp
    assert len(run.replicas) == len(row["busy"]) == len(row["kv_peak"]) == dp
    assert sum(row["requests_by_replica"]) == len(TRACE) == row["requests"]
    assert min(row["requests_by_replica"]) > 0
    assert sum(each.output_tokens for each in run.replicas) == row["output_tokens"] == 20 * 64
    assert row["devices"] == 8


def test_2_what_does_not_fit_is_counted_and_the_search_goes_on() -> None:
    answer = plan_serving(ServingPlanRequest(TRACE, "llama3-70b", "h100-sxm:4"))
    assert answer.unfit > 0 and answer.simulated > 0


def test_3_a_longer_prompt_makes_later_tokens_slower() -> None:
    tpot = []
    for prompt in (1000, 30_000, 60_000):
        [request] = serve("tp=8", trace=(TracedRequest(0.0, "", prompt, 100, 100),)).run.requests
        assert request.tpot_s is not None
        tpot.append(request.tpot_s)
    assert tpot[0] < tpot[1] < tpot[2]
    assert tpot[2] - tpot[1] == pytest.approx((tpot[1] - tpot[0]) * 30 / 29, rel=0.01)


def test_4_a_preempted_request_is_computed_again() -> None:
    trace = tuple(TracedRequest(0.0, "", 64, 100, 100) for _ in range(4))
    answer = serve("tp=1", cluster="h100-sxm:1", trace=trace, settings=BatchSettings(24))
    row = answer.as_row()
    again = row["computed_prompt_tokens"] - 4 * 64
    assert row["preemptions"] > 0 and again >= 64 * row["preemptions"]
    assert row["output_tokens"] == 400


def test_5_mfu_is_that_of_a_forward() -> None:
    trace = (TracedRequest(0.0, "", 8192, 1, 1),)
    row = serve("tp=1", cluster="h100-sxm:1", trace=trace).as_row()
    model, peak = preset("llama3-8b"), 989.4e12
    products = 2 * (model.matmul_params - model.hidden * model.vocab) * 8192
    pairs = 4 * model.layers * model.heads * model.head_width * 8192 * 8193 // 2
    head = 2 * model.hidden * model.vocab
    flop = products + pairs + head
    assert row["mfu"] == pytest.approx(flop / row["makespan_s"] / peak, rel=0.01)
    assert 0.4 < row["mfu"] < 0.9


def test_6_fp8_leaves_attention_and_its_cache_as_they_are() -> None:
    wide, narrow = (replica("llama3-8b", "tp=1", "h100-sxm:1", each) for each in ("bf16", "fp8"))
    assert narrow.curve.pair_s == wide.curve.pair_s
    assert narrow.curve.kv_token_s == wide.curve.kv_token_s
    assert narrow.kv_token_bytes == wide.kv_token_bytes
    assert read_points(narrow.curve.tokens, 4096) < read_points(wide.curve.tokens, 4096)


def test_7_prompts_run_in_chunks_and_prefixes_are_shared() -> None:
    trace = (TracedRequest(0.0, "", 32, 400, 400), TracedRequest(0.1, "", 60_000, 2, 2))
    gaps = max(s for s, _ in serve("tp=8", trace=trace).run.replicas[0].gaps)
    whole = serve(
        "tp=8", trace=trace, settings=BatchSettings(10_000, is_chunked=False)
    ).run.replicas[0]
    assert gaps < 0.06 < 0.5 < max(s for s, _ in whole.gaps)
    shared = tuple(TracedRequest(at, "a", 500, 2, 2, "g", 480) for at in range(5))
    assert serve("tp=8", trace=shared).as_row()["cached_tokens"] == 4 * 480


def test_time_to_first_token_has_the_queue_in_it() -> None:
    trace = tuple(TracedRequest(0.0, "", 8000, 1, 1) for _ in range(10))
    row = serve("tp=1", cluster="h100-sxm:1", trace=trace).as_row()
    assert row["ttft_s"]["p99"] > 5 * row["ttft_s"]["mean"] / 3
    assert row["ttft_s"]["p99"] == pytest.approx(row["makespan_s"], rel=0.05)


def test_the_head_takes_time_on_the_last_stage_alone() -> None:
    staged = replica("llama3-8b", "pp=4", "h100-sxm:4")
    firsts = [read_points(each.logits, 64) for each in staged.curves[:-1]]
    assert firsts == [0.0] * 3 and read_points(staged.curves[-1].logits, 64) > 1e-4
    whole = replica("llama3-8b", "tp=1", "h100-sxm:1")
    for rows in (1, 64, 4096):
        parts = sum(read_points(each.tokens, rows) for each in staged.curves)
        assert parts == pytest.approx(read_points(whole.curve.tokens, rows))


def test_few_tokens_leave_most_ranks_of_experts_idle() -> None:
    together = replica("mixtral-8x7b", "tp=8", "h100-sxm:8").curve
    apart = replica("mixtral-8x7b", "tp=8,ep=8", "h100-sxm:8").curve
    assert read_points(apart.tokens, 1) > read_points(together.tokens, 1)


def test_products_never_beat_the_dense_peak() -> None:
    curve = replica("llama3-70b", "tp=8", "h100-sxm:8").curve
    model = preset("llama3-70b")
    flop = 2 * (model.matmul_params - model.hidden * model.vocab) * 8192
    assert flop / 8 / read_points(curve.tokens, 8192) < 989.4e12


def test_a_replica_that_crosses_nodes_sets_the_pace() -> None:
    inside = replica("llama3-8b", "tp=4,dp=4", "h100-sxm:16")
    six = dataclasses.replace(preset("llama3-8b"), heads=36, kv_heads=12, head_width=128)
    machine = Machine(find_cluster("h100-sxm:24"))
    crossing = describe_replica(six, machine, read_layout("tp=6,dp=4").layout, "bf16")
    alone = describe_replica(
        six, Machine(find_cluster("h100-sxm:6")), read_layout("tp=6").layout, "bf16"
    )
    first, only = (read_points(each.curve.tokens, 1) for each in (crossing, alone))
    assert first > 1.2 * only, "ranks 6 to 11 stand in two nodes"
    assert inside.curve == replica("llama3-8b", "tp=4", "h100-sxm:4").curve


def test_context_ranks_divide_the_cache_and_pay_for_their_exchange() -> None:
    one, two = (replica("llama3-8b", layout, "h100-sxm:8") for layout in ("tp=1,dp=8", "cp=2,dp=4"))
    assert two.kv_token_bytes == one.kv_token_bytes / 2
    assert two.curve.pair_s == one.curve.pair_s / 2
    assert two.exchange is not None and two.exchange.kv_token_s > 0
    long = (TracedRequest(0.0, "", 100_000, 50, 50),)
    runs = {
        layout: serve(layout, trace=long, cluster="h100-sxm:8").run.requests[0]
        for layout in ("dp=8", "cp=8")
    }
    # A little more than 8 is from chunks, which are larger where they take less time.
    assert 5 < runs["dp=8"].ttft_s / runs["cp=8"].ttft_s < 8.1
    assert (runs["cp=8"].tpot_s or 0) > 0.5 * (runs["dp=8"].tpot_s or 0), "little for decodes"


def test_what_is_sent_between_nodes_takes_longer_than_within() -> None:
    trace = (TracedRequest(0.0, "", 8000, 3, 3),)
    near = serve("tp=4", decode_layout="tp=4", trace=trace).as_row()
    far = serve("tp=8", decode_layout="tp=8", cluster="h100-sxm:16", trace=trace).as_row()
    sent_bytes = 8000 * 2 * 32 * 8 * 128 * 2
    assert near["sent_tokens"] == far["sent_tokens"] == 8000
    assert near["sent_s"]["mean"] < far["sent_s"]["mean"]
    assert far["sent_s"]["mean"] > sent_bytes / 8 / 50e9
    assert near["devices"] == 8 and far["devices"] == 16
    assert len(far["busy"]) == 2 and far["decode"]["replicas"] == 1
