"""What overlapping nano-batches could gain on described devices."""

import pytest

from equipoise.cli.simulate.nano import draw_lanes
from equipoise.schedule.nano.check import check_nano
from equipoise.schedule.nano.graph import Link, Way, chain_graph
from equipoise.schedule.nano.search import search_order
from equipoise.sim.machine import Machine
from equipoise.sim.serve.nano import LANES, forecast_nano, price_nano
from equipoise.sim.serve.request import ServingRequest, simulate_serving
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.request_trace import TracedRequest
from equipoise.spec.serving import IterationWork
from equipoise.spec.words import read_layout, read_model

TRACE = [TracedRequest(0.1 * at, "chat", 500, 100, 200) for at in range(40)]


@pytest.mark.parametrize(
    ("model", "cluster", "layout"),
    [
        ("llama3-8b", "h100-sxm:1", "tp=1"),
        ("llama3-8b", "h100-sxm:2", "tp=2"),
        ("llama3-70b", "a100-80:8", "tp=8"),
        ("mixtral-8x7b", "h100-sxm:4", "tp=4"),
    ],
)
@pytest.mark.parametrize(
    "work",
    [
        IterationWork(1024, 1024 * 300, 512 * 1500, 512, 512),
        IterationWork(64, 0, 64 * 4000, 64, 64),
        IterationWork(2048, 2048 * 1024, 0, 1, 1),
    ],
)
def test_a_gain_is_at_most_what_the_busiest_lane_leaves(
    model: str, cluster: str, layout: str, work: IterationWork
) -> None:
    machine = Machine(read_cluster(cluster))
    forecast = price_nano(read_model(model), machine, read_layout(layout).layout, "bf16", work)
    graph = forecast.graph
    check_nano(graph, forecast.schedule)
    busy_s = dict.fromkeys(LANES, 0.0)
    for each in graph.operations:
        busy_s[each.resource] += each.ways[0].seconds
    layers = sum(each.name == "qkv" and not each.batch for each in graph.operations)
    assert 1.0 <= forecast.gain <= forecast.whole_s * layers / max(busy_s.values()) + 1e-9
    assert 0 < forecast.optimal_s < forecast.overlapped_s
    assert (busy_s["network"] > 0) == (layout != "tp=1")


def test_of_a_served_trace() -> None:
    request = ServingRequest(TRACE, "llama3-8b", "h100-sxm:2", "tp=2")
    answer = simulate_serving(request)
    forecast = forecast_nano(request, answer)
    assert forecast is not None
    iterations = sum(each.iterations for each in answer.run.replicas)
    tokens = sum(each.prompt_tokens + each.output_tokens for each in answer.run.replicas)
    assert forecast.work.tokens == -(-tokens // iterations)
    row = forecast.as_row()
    assert row["published_gain"] == 1.91
    assert row["most_gain"] == row["layer_s"] / row["overlapped_layer_s"]
    assert forecast.words == "Nano-batches: no gain in the mean iteration (27 tokens)."
    busy = price_nano(
        read_model("llama3-8b"),
        Machine(read_cluster("h100-sxm:2")),
        read_layout("tp=2").layout,
        "bf16",
        IterationWork(2048, 1024 * 300, 1024 * 1500, 1024, 1024),
    )
    row = busy.as_row()
    assert busy.words == (
        f"Nano-batches: a layer of the mean iteration (2,048 tokens) could be {busy.gain:.2f}x as "
        "fast if operations overlapped and lost nothing beside each other: "
        f"{row['overlapped_optimum_share']:.0%} of the optimum instead of "
        f"{row['optimum_share']:.0%}. NanoFlow published 1.91x over the best other engine."
    )


def test_a_picture_has_a_line_for_each_resource() -> None:
    product = Link("product", "compute", (Way((0,), 3.0),))
    attention = Link("attention", "memory", (Way((1,), 2.0),))
    graph = chain_graph([[product, attention], [product, attention]], lanes=2)
    assert draw_lanes(graph, search_order(graph), columns=16) == [
        "compute  PPPPPPpppppp....",
        "memory   ......AAAA..aaaa",
    ]
