"""The weights of ranks: together they are the model."""

import dataclasses

import pytest

from equipoise.cost.memory.weights import SMALL_BYTES, WeightGroup, held_groups, is_kept_whole
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset

MODELS = {
    "dense": preset("7m"),
    "biases, normed heads, tied": dataclasses.replace(
        preset("7m"), qkv_bias=True, qk_norm=True, tied=True
    ),
    "experts": preset("moe-3m"),
    "shared expert": dataclasses.replace(preset("moe-3m"), shared_ffn=96, shared_gate=True),
}


def groups(model: ModelSpec, layout: Layout) -> list[WeightGroup]:
    tables, layers = held_groups(model, layout, range(model.layers), True, True)
    return [tables, *layers]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_the_model(name: str, zero: int) -> None:
    found = groups(MODELS[name], Layout(zero=zero))
    assert sum(each.params for each in found) == MODELS[name].params
    assert all(each.owned == each.params for each in found)


@pytest.mark.parametrize("name", MODELS)
def test_zero_divides_what_is_owned(name: str) -> None:
    for zero in (1, 2, 3):
        found = groups(MODELS[name], Layout(dp=2, cp=2, zero=zero))
        assert [4 * each.owned for each in found] == [each.params for each in found]
        copied = groups(MODELS[name], Layout(dp=2, cp=2, zero=zero, replicas=2))
        assert [2 * each.owned for each in copied] == [each.params for each in copied]
    whole = groups(MODELS[name], Layout(dp=2, cp=2, zero=0))
    assert [each.owned for each in whole] == [each.params for each in whole]


@pytest.mark.parametrize("name", ["dense", "biases, normed heads, tied"])
def test_tensor_ranks_divide_all_but_norms(name: str) -> None:
    model = MODELS[name]
    norms = model.layers * (2 * model.hidden + (128 if model.qk_norm else 0)) + model.hidden
    found = groups(model, Layout(tp=2))
    assert 2 * (sum(each.params for each in found) - norms) == model.params - norms


def test_expert_ranks_hold_their_experts_and_shard_them_over_edp() -> None:
    model = MODELS["experts"]
    tables, layers = held_groups(model, Layout(dp=8, ep=2, etp=2, zero=2), range(4), True, True)
    dense, experts = layers[::2], layers[1::2]
    assert [each.params for each in experts] == [model.experts * model.expert_params // 4] * 4
    assert [2 * each.owned for each in experts] == [each.params for each in experts]
    assert [8 * each.owned for each in dense] == [each.params for each in dense]
    alone, _ = held_groups(model, Layout(dp=8, zero=2), range(4), True, True)
    assert tables == alone
    whole = sum(each.params for each in dense) + 4 * sum(each.params for each in experts)
    assert whole + tables.params == model.params


def test_stages_hold_tables_where_they_use_them() -> None:
    tied = MODELS["biases, normed heads, tied"]
    table = tied.hidden * tied.vocab
    cases = {(True, False): table, (False, True): table + tied.hidden, (False, False): 0}
    for (embeds, has_head), params in cases.items():
        tables, layers = held_groups(tied, Layout(pp=2), (3,), embeds, has_head)
        assert (tables.params, len(layers)) == (params, 1)


def test_zero_3_keeps_what_is_small_and_its_own() -> None:
    def kept(params: int, *, width: int = 4, zero: int = 3, pp: int = 1, **is_) -> bool:
        return is_kept_whole(WeightGroup(params, 0, **is_), width=width, zero=zero, pp=pp)

    most = SMALL_BYTES // 4
    assert kept(most) and kept(2 * most, width=2)
    assert not any((kept(most + 1), kept(2 * most + 1, width=2)))
    assert not any(kept(1, zero=zero) for zero in (0, 1, 2))
    assert not any((kept(1, pp=2), kept(1, are_spread=True)))
    layout = Layout(dp=8, ep=2, etp=2, zero=3)
    _, layers = held_groups(MODELS["experts"], layout, range(4), True, True)
    assert [each.are_spread for each in layers] == [False, True] * 4
