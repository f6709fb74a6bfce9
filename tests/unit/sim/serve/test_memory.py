"""Memory of serving devices, and their fullest ranks of experts."""

import dataclasses
import random

import pytest

from equipoise.sim.serve.experts import fullest, fullest_over_mean
from equipoise.sim.serve.layout import split_layers
from equipoise.sim.serve.memory import ServingMemory, stage_memory
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec, WindowSpec, preset


def held(model: ModelSpec, layout: Layout) -> list[ServingMemory]:
    return [
        stage_memory(
            model,
            layout,
            layers,
            iteration_tokens=8192,
            sequences=256,
            width=2,
            weight_width=2,
        )
        for layers in split_layers(model.layers, layout.pp)
    ]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3-70b", Layout(tp=4, pp=2)),
        ("llama3-8b", Layout(pp=3)),
        ("mixtral-8x7b", Layout(tp=4, ep=2, etp=2, pp=2)),
        ("qwen2-57b-a14b", Layout(tp=2, ep=2)),
        ("smollm2-135m", Layout(tp=3)),
    ],
)
def test_weights_of_all_devices_are_the_model_s(name: str, layout: Layout) -> None:
    model = preset(name)
    stages = held(model, layout)
    total = sum(each.weights_bytes for each in stages) * layout.tp
    # Norms have a copy on every rank, and biases are not counted.
    assert total == pytest.approx(2 * model.params, rel=1e-3)


def test_layers_with_a_short_window_keep_no_more_of_a_sequence() -> None:
    model = PLANNED["gpt-oss-120b"]
    plain = dataclasses.replace(model, window=None)
    long = dataclasses.replace(model, window=WindowSpec(8192, 0.75, is_chunk=True))
    [own], [all_] = held(model, Layout(tp=4)), held(plain, Layout(tp=4))
    assert own.kv_token_bytes == all_.kv_token_bytes / 2
    # 18 layers, 2 of 8 key/value heads of 64, keys and values in 2 bytes; 256 sequences.
    assert own.window_bytes == 18 * 128 * 256 * (2 * 2 * 64 * 2)
    assert held(long, Layout(tp=4)) == held(plain, Layout(tp=4)) == [all_]
    [*single] = held(model, Layout(pp=36))  # of a stage's layers one keeps all
    assert {each.kv_token_bytes for each in single} == {2.0 * 8 * 64 * 2}


def test_each_axis_divides_what_it_says() -> None:
    model = preset("llama3-70b")
    [one] = held(model, Layout())
    [tp] = held(model, Layout(tp=8))
    [cp] = held(model, Layout(cp=2))
    pp = held(model, Layout(pp=4))
    assert tp.kv_token_bytes == one.kv_token_bytes / 8
    assert held(model, Layout(tp=16))[0].kv_token_bytes == tp.kv_token_bytes, "8 heads, copied"
    assert cp.kv_token_bytes == one.kv_token_bytes / 2
    assert cp.weights_bytes == one.weights_bytes
    assert cp.activation_bytes == pytest.approx(one.activation_bytes / 2, rel=0.01)
    assert sum(each.kv_token_bytes for each in pp) == one.kv_token_bytes
    assert pp[0].weights_bytes < 0.3 * one.weights_bytes
    sparse = preset("mixtral-8x7b")
    [whole], [shared] = held(sparse, Layout(cp=2)), held(sparse, Layout(cp=2, ep=2))
    experts = 2 * sparse.layers * sparse.experts * sparse.expert_params
    assert whole.weights_bytes - shared.weights_bytes == experts / 2


def test_the_fullest_rank_is_that_of_drawing_it_often() -> None:
    draw = random.Random(0)
    for rows, ranks in ((1, 8), (16, 8), (64, 4)):
        mean = 0.0
        for _ in range(4000):
            counts = [0] * ranks
            for _ in range(rows):
                counts[draw.randrange(ranks)] += 1
            mean += max(counts) / 4000
        # Ranks are taken to be independent, which they are not quite.
        assert fullest(rows, 1 / ranks, ranks) == pytest.approx(mean, rel=0.12)
        assert fullest_over_mean(rows, ranks, 1.0) >= 1.0


def test_many_rows_are_balanced_unless_a_router_prefers_some() -> None:
    assert fullest_over_mean(65_536, 8, 1.0) == pytest.approx(1.0, abs=0.02)
    assert fullest_over_mean(65_536, 8, 1.5) == 1.5
    assert fullest_over_mean(7, 1, 3.0) == 1.0
    assert fullest(5, 1.0, 4) == 5.0 and fullest(5, 0.0, 4) == 0.0
