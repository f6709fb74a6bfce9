"""What has made context parallelism silently wrong elsewhere: each has its test."""

import pytest
import torch

from equipoise.balance.context.plan import ContextPlan, plan_context
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.schedule.attention.strategies import STRATEGIES
from equipoise.spec.mask import Mask
from support.dense import SHARDINGS, attend_densely, errors, one_rank, run, tensors

STRATEGY = pytest.mark.parametrize("strategy", list(STRATEGIES))
MASKS = [Mask(), Mask("full"), Mask("window", 9), Mask("prefix", 0, 2, (1, 2))]


def plan_of(lengths, ranks: int, strategy: str, masks=MASKS[0], **keys) -> ContextPlan:
    return plan_context(
        lengths,
        ranks,
        strategy,
        heads=4,
        kv_heads=2,
        mask=masks,
        ranks_per_node=2 if ranks % 2 == 0 else ranks,
        is_checked=True,
        **keys,
    )


WIDE = [
    (strategy, mask)
    for at, strategy in enumerate(STRATEGIES)
    for mask in (Mask(), (Mask("full"), Mask("window", 50))[at % 2])
]
"""Every strategy under the causal mask and another."""


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "mask"), WIDE, ids=str)
def test_sums_are_not_in_bf16_so_error_does_not_grow_with_ranks(strategy: str, mask: Mask) -> None:
    """A part of an output is rounded to bf16 by its kernel, once; all parts are added in fp32."""
    found = []
    for ranks in (1, 4, 8):
        plan = plan_of([400, 60, 7], ranks, strategy, mask, sharding="head-tail-document")
        given_tensors = tensors(plan, torch.bfloat16)
        pairs = zip(run(plan, given_tensors), one_rank(plan, given_tensors), strict=True)
        found.append([float((x.double() - y).norm() / y.norm()) for x, y in pairs])
    assert max(found[0]) <= 0.005
    for one, four, eight in zip(*found, strict=True):
        assert four <= 2**0.5 * one  # one rounding more
        assert eight <= 1.1 * four


@STRATEGY
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_no_document_sees_another(strategy: str, sharding: str) -> None:
    """Other tokens, labels or even no numbers in one: the others keep every bit."""
    lengths = [37, 11, 64, 5]
    plan = plan_of(lengths, 3, strategy, MASKS, sharding=sharding, tile=8)
    before = tensors(plan, torch.float32)
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[37:48] = False
    wanted = run(plan, before)
    for change in (1.5, float("nan")):
        after = [x.clone() for x in before]
        for x in after:
            x[37:48] += change
        for found, right in zip(run(plan, after), wanted, strict=True):
            assert torch.equal(found[others], right[others])
            assert not torch.equal(found[~others], right[~others])


@STRATEGY
def test_no_branch_sees_another_and_no_query_what_has_left_its_window(strategy: str) -> None:
    prefix = Mask("prefix", prefix_tokens=20, branch_tokens=(13, 9, 18))
    for mask, changed, kept, change in (
        (prefix, slice(33, 42), [*range(33), *range(42, 60)], float("nan")),  # the second branch
        (Mask("window", 7), slice(10, 20), [*range(10), *range(26, 60)], 1.5),
    ):
        plan = plan_of([60], 4, strategy, mask, sharding="head-tail")
        before = tensors(plan, torch.float32)
        after = [x.clone() for x in before]
        for x in after[:3]:
            x[changed] += change
        found, wanted = (attend_in_one_process(*x[:3], plan) for x in (after, before))
        assert torch.equal(found[kept], wanted[kept])
        assert not torch.isclose(found[changed], wanted[changed], rtol=0, atol=1e-6).any()


@STRATEGY
@pytest.mark.parametrize("mask", [*MASKS[:3], Mask("prefix", 0, 1, (1, 2, 0))], ids=str)
def test_more_ranks_than_tokens(strategy: str, mask: Mask) -> None:
    plan = plan_of([4], 6, strategy, mask, sharding="contiguous")
    assert min(map(len, plan.shares.rows)) == 0
    given_tensors = tensors(plan)
    assert max(errors(run(plan, given_tensors), one_rank(plan, given_tensors))) <= 1e-12


@STRATEGY
def test_each_rank_by_itself_is_right(strategy: str) -> None:
    """An error of one rank cannot hide behind the others' scale."""
    plan = plan_of([90, 31, 64, 5], 4, strategy, MASKS, sharding="mixed", tile=8)
    given_tensors = tensors(plan, torch.float32)
    found, wanted = run(plan, given_tensors), one_rank(plan, given_tensors)
    for rows in map(torch.from_numpy, plan.shares.rows):
        output, gradient = errors([x[rows] for x in found], [y[rows] for y in wanted])
        assert output <= 2e-6
        assert gradient <= 1e-5


@STRATEGY
def test_two_layers_keep_their_own_keys(strategy: str) -> None:
    """Keys received for one layer must not be another's when its backward pass comes."""
    plan = plan_of([40, 23], 4, strategy, [MASKS[2], MASKS[0]], sharding="head-tail-document")
    *inputs, grad_o = tensors(plan)

    def grads_of(attend) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        hidden = attend(*leaves)
        out = attend(hidden, *(2 * x for x in leaves[1:]))
        return list(torch.autograd.grad(out, leaves, grad_o))

    found = grads_of(lambda q, k, v: attend_in_one_process(q, k, v, plan))
    wanted = grads_of(lambda q, k, v: attend_densely(plan, q, k, v))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))
