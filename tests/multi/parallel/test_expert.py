"""Experts on several ranks equal experts on one: rows, losses, gradients, counts and bytes."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.schedule.expert.schedule import schedule_experts
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute
from support.ranks import expert_ranks
from support.ranks.expert_ranks import Case

MODEL = ModelSpec(
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=7,
    top_k=2,
    expert_ffn=8,
    balance_rate=0.5,
)
SHARED = dataclasses.replace(
    MODEL, shared_ffn=12, shared_gate=True, norm_top_k=False, layers=3, expert_every=2, tied=True
)
HOT = dataclasses.replace(MODEL, balance="bias", balance_rate=1.0)
TIGHT = dataclasses.replace(MODEL, capacity_factor=0.6)
BOUND = 1e-10
# Uneven documents; the last rank of four has a micro-batch of none, and one of a single token.
PACKS = (((9, 1, 14), (5,)), ((30,), (2, 2)), ((3, 4), (17,)), ((), (1,)))
COUNTS = (5, 0, 3, 1, 9, 2, 4)


def case(model: ModelSpec, world: int, ep: int, zero: int, etp: int = 1, **changes: object) -> Case:
    layout = Layout(dp=world, ep=ep, etp=etp, zero=zero)
    return Case(model, layout, PACKS[-world:], **({"states": COUNTS} | changes))


def worst(outcomes: list[expert_ranks.Outcome]) -> list[float]:
    return [max(each.loss_error, each.norm_error, *each.errors.values()) for each in outcomes]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_equals_one(world: int) -> None:
    degrees = [ep for ep in range(1, world + 1) if world % ep == 0]
    # Two ranks have every degree under every ZeRO stage, others under every second one in turn.
    cases = [
        case(MODEL, world, ep, zero)
        for at, ep in enumerate(degrees)
        for zero in range(0 if world < 3 else at % 2, 4, 1 if world < 3 else 2)
    ]
    cases += [case(SHARED, world, world, 3), case(MODEL, world, world, 1, recompute="full")]
    # All tokens choose two experts; the others, and some ranks, have none.
    cases += [case(HOT, world, world, 2, states=(0, 0, 50, 50, 0, 0, 0))]
    cases += [case(TIGHT, world, world, 1)]
    for outcomes in run_ranks(world, expert_ranks.compare, cases):
        for each, error in zip(cases, worst(outcomes), strict=True):
            assert error <= BOUND, each


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_that_share_the_weights_of_each_expert_equal_one(world: int) -> None:
    cases = [case(MODEL, world, 1, zero, etp=world) for zero in (0, 1, 3)[world - 2 :]]
    cases += [case(SHARED, world, 1, 2, etp=world, recompute="selective")]
    cases += [case(HOT, world, 1, 1, etp=world, states=(0, 0, 50, 50, 0, 0, 0))]
    if world == 4:
        cases += [case(MODEL, 4, 2, zero, etp=2) for zero in (1, 3)]
        cases += [case(MODEL, 4, 1, 0, etp=2)]
    for outcomes in run_ranks(world, expert_ranks.compare, cases):
        for each, error in zip(cases, worst(outcomes), strict=True):
            assert error <= BOUND, each


@pytest.mark.parametrize("world", [2, 3])
def test_gathering_and_summing_are_each_others_backward(world: int) -> None:
    drawn = random.Random(world)
    tables = [[drawn.choice([0, 0, 1, 5]) for _ in range(world)] for _ in range(10)]
    for errors in run_ranks(world, expert_ranks.gather_and_sum, tables):
        assert max(errors) <= 1e-13


def test_hot_experts_leave_others_without_tokens_and_gradients() -> None:
    hot = case(HOT, 3, 3, 1, states=(0, 0, 50, 50, 0, 0, 0))
    (outcome,) = run_ranks(3, expert_ranks.compare, [hot])[0]
    for loads in outcome.loads:
        assert min(loads[2:4]) > 0 == sum(loads) - sum(loads[2:4])
    up = outcome.gradients["layers.0.feed_forward.experts.up.weight"]
    assert up[2:4].any() and not up[:2].any() and not up[4:].any()


def test_the_auxiliary_loss_is_in_the_gradient() -> None:
    """The step that these cases compare would not notice a balance that does nothing."""
    pulled = case(MODEL, 2, 2, 1)
    still = dataclasses.replace(pulled, states=())
    with_loss, without = run_ranks(2, expert_ranks.compare, [pulled, still])[0]
    name = "layers.0.feed_forward.router.weight"
    change = with_loss.gradients[name] - without.gradients[name]
    assert float(change.abs().max()) > 0.01 * float(without.gradients[name].abs().max())
    assert with_loss.penalty > 0.0 == without.penalty


def test_a_second_run_is_bitwise_the_same() -> None:
    again = [case(MODEL, 2, 2, zero) for zero in (1, 1, 3, 3)]
    for outcomes in run_ranks(2, expert_ranks.compare, again):
        for one, two in (outcomes[:2], outcomes[2:]):
            assert one.loss_error == two.loss_error
            for name, grad in one.gradients.items():
                assert torch.equal(grad, two.gradients[name]), name


def test_the_bytes_sent_are_those_of_the_schedule() -> None:
    packs = (((9, 1, 14),), ((30,),), ((),))
    plain = Case(MODEL, Layout(dp=3, ep=3, zero=2), packs)
    forwards: dict[Recompute, int] = {"none": 1, "attention": 1, "selective": 2, "full": 2}
    cases = [dataclasses.replace(plain, recompute=each) for each in forwards]
    ranks = run_ranks(3, expert_ranks.compare, cases)
    for recompute, outcomes in zip(forwards, zip(*ranks, strict=True), strict=True):
        for layer in range(MODEL.layers):
            # Every layer numbers ranks from the one that has its first run.
            numbered = [outcomes[(rank + layer) % 3] for rank in range(3)]
            schedule = schedule_experts([each.loads[layer] for each in numbered])
            expected = schedule.bytes(MODEL.hidden, element_bytes=8, forwards=forwards[recompute])
            assert [each.sent[layer] for each in numbered] == expected.tolist(), recompute
            assert expected.sum() > 0


def test_each_layer_gives_its_shorter_run_of_experts_to_another_rank() -> None:
    deep = dataclasses.replace(MODEL, layers=4)
    layout = Layout(dp=4, ep=4)
    assert run_ranks(4, expert_ranks.owned, deep, layout) == [
        *([2, 1, 2, 2], [2, 2, 1, 2], [2, 2, 2, 1], [1, 2, 2, 2]),
    ]
    eight = dataclasses.replace(deep, experts=8)
    assert run_ranks(4, expert_ranks.owned, eight, layout) == [[2] * 4] * 4


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_way_there_and_back_is_the_identity(world: int) -> None:
    drawn = random.Random(world)
    tables = [np.zeros((world, 7), dtype=int).tolist()]
    for _ in range(12):
        experts = drawn.choice([world, 7, 8])
        likely = drawn.choice([0.1, 0.6, 1.0])
        tables.append(
            [
                [drawn.randint(1, 6) if drawn.random() < likely else 0 for _ in range(experts)]
                for _ in range(world)
            ]
        )
    for outcomes in run_ranks(world, expert_ranks.travel, tables):
        assert all(forward and backward for forward, backward, _ in outcomes)


def test_layouts_that_cannot_be_are_refused() -> None:
    few, narrow = (
        dataclasses.replace(MODEL, **each) for each in ({"experts": 3}, {"expert_ffn": 5})
    )
    with pytest.raises(LayoutError) as caught:
        run_ranks(4, expert_ranks.refuse, few, Layout(dp=4, ep=4))
    assert str(caught.value) == (
        "3 experts in runs of 1 leave 1 of 4 ranks without any. Set ep (layout.ep) to 3."
    )
    with pytest.raises(LayoutError) as caught:
        run_ranks(4, expert_ranks.refuse, narrow, Layout(dp=4, etp=4))
    assert str(caught.value) == (
        "Experts of 5 hidden units in runs of 2 leave the last of etp = 4 ranks without any. Lower "
        "etp."
    )
