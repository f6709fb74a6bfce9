"""Balanced experts equal one rank: loss, gradients, a step of SGD, bits and bytes."""

import dataclasses

import pytest
import torch

from equipoise.balance.expert.workload import WORKLOADS
from equipoise.base.errors import LayoutError
from equipoise.comm.local import run_ranks
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import ExpertsSpec
from support.ranks import balanced_ranks
from support.ranks.balanced_ranks import BalancedCase

MODEL = ModelSpec(
    layers=1,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=8,
    top_k=2,
    expert_ffn=8,
    balance_rate=0.5,
)
POLICIES = ("exact", "hecate", "eplb")


def case(policy: str, world: int, kind: str, **changes: object) -> BalancedCase:
    wish = ExpertsSpec(policy, slots=1, least_rows=1)
    return dataclasses.replace(
        BalancedCase(MODEL, Layout(dp=world, ep=world, zero=1), wish, kind), **changes
    )


@pytest.mark.parametrize("world", [2, 4])
def test_every_policy_equals_one_rank_on_every_workload(world: int) -> None:
    # The exact policy has every workload on two ranks; the others have every second one each.
    kinds = list(WORKLOADS) if world == 2 else ["W1", "W5"]
    cases = [case("exact", world, kind) for kind in kinds]
    cases += [case("hecate", world, kind) for kind in kinds[1::2]]
    cases += [case("eplb", world, kind) for kind in kinds[::2]]
    cases += [case("fixed", world, "W1")]
    cases += [case(policy, world, "W1", dtype=torch.float32) for policy in POLICIES[: 5 - world]]
    layouts = [Layout(dp=world, ep=world, zero=zero) for zero in (0, 3)[: 3 - world // 2]]
    cases += [case("exact", world, "W2", layout=each, recompute="full") for each in layouts]
    cases += [case("exact", world, "W1", layout=Layout(dp=world, ep=2, zero=3))]
    seven = dataclasses.replace(MODEL, experts=7, layers=2)
    cases += [case("exact", world, "W1", model=seven), case("hecate", world, "W6", model=seven)]
    ranks = run_ranks(world, balanced_ranks.prove, cases)
    for outcomes in ranks:
        for each, outcome in zip(cases, outcomes, strict=True):
            bound = 1e-10 if each.dtype == torch.float64 else 1e-5
            assert outcome.loss_error <= bound, each
            assert outcome.gradient_error <= bound, each
            assert outcome.weight_error <= bound, each
    # The cases would notice a policy that does nothing.
    for at, each in enumerate(cases):
        outcome = ranks[0][at]
        if each.wish.policy == "exact" and each.kind in ("W1", "W2"):
            assert outcome.copies > 0
            assert outcome.after < outcome.before, each
    _bytes_are_those_of_the_schedule(world, ranks[:world], cases)


def _bytes_are_those_of_the_schedule(
    world: int, ranks: list[list[balanced_ranks.BalancedOutcome]], cases: list[BalancedCase]
) -> None:
    checked = 0
    for at, each in enumerate(cases):
        outcomes = [outcomes[at] for outcomes in ranks]
        is_plain = each.recompute == "none" and each.layout.ep == world and each.model is MODEL
        if each.wish.policy == "fixed" or not is_plain:
            continue
        # ZeRO 1 sums gradients in a pass without rows, which has a schedule of its own.
        schedule, *empty = outcomes[0].schedules
        assert not any(other.rows.any() for other in empty)
        element = each.dtype.itemsize
        expert = 3 * MODEL.hidden * MODEL.expert_ffn
        expected = schedule.bytes(MODEL.hidden, element_bytes=element)
        expected += schedule.copy_bytes(expert, element_bytes=element)
        # Counts of all experts, and a digest, to each of the others.
        expected += 8 * (MODEL.experts + 1) * len(empty)
        for rank in range(world):
            expected[rank, rank] = 0
        assert [outcome.sent[0] for outcome in outcomes] == expected.tolist(), each
        checked += 1
    assert checked >= len(POLICIES)


def test_a_second_run_has_the_same_bits() -> None:
    again = [case(policy, 2, "W1") for policy in POLICIES for _ in range(2)]
    (outcomes, _) = run_ranks(2, balanced_ranks.prove, again)
    for one, two in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert all(map(torch.equal, one.weights, two.weights))
        assert one.sent == two.sent


def test_ranks_that_plan_otherwise_are_named_before_rows_move() -> None:
    one = case("exact", 2, "W2")
    for message, moved in run_ranks(2, balanced_ranks.disagree, one):
        assert message == (
            "Rank 1 planned experts otherwise than rank 0, from the same counts of 96 rows. "
            "Nothing was sent by it. Give every machine the same version of equipoise and of NumPy."
        )
        assert moved == 0


def test_what_cannot_be_is_refused() -> None:
    split = case("exact", 2, "W1", layout=Layout(dp=2, etp=2, zero=1))
    with pytest.raises(LayoutError) as caught:
        run_ranks(2, balanced_ranks.refuse, split)
    assert str(caught.value) == (
        'experts.policy = "exact" copies whole experts, but etp = 2 ranks share the hidden units '
        'of each. Set layout.etp = 1, or experts.policy to "fixed" or "tutel".'
    )
    seven = case("eplb", 2, "W1", model=dataclasses.replace(MODEL, experts=7))
    with pytest.raises(LayoutError, match="2 ranks do not divide 7 experts"):
        run_ranks(2, balanced_ranks.refuse, seven)
