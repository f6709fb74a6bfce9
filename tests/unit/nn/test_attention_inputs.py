"""Attention takes tensors however they lie in memory, and casts as torch's own attention does."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from equipoise.balance.context.plan import plan_context
from equipoise.base.errors import LayoutError
from equipoise.nn.attention import attend_documents
from equipoise.nn.tile import attend_tile, attend_tile_backward
from equipoise.parallel.context.attention import attend_in_one_process, context_attention

LENGTHS = [17, 0, 13, 1]
HEADS = (4, 2, 2, 4)  # queries, keys, values, gradient of the output
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@st.composite
def laid_out(draw: st.DrawFn, x_THE: Tensor) -> Tensor:
    """The same numbers: dimensions in any order in memory, steps over NaN, or repeated numbers."""
    order = draw(st.permutations(range(3)))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 3))
    sizes = [x_THE.shape[dim] * steps[dim] for dim in order]
    room = torch.full(sizes, float("nan"), dtype=x_THE.dtype)
    view = room.permute(*[order.index(dim) for dim in range(3)])
    view = view[:: steps[0], :: steps[1], :: steps[2]]
    view.copy_(x_THE)
    repeated = draw(st.sampled_from([None, None, 0, 1, 2]))
    if repeated is not None:
        view = view.narrow(repeated, 0, 1).expand(x_THE.shape)
    return view


def attend_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention, document by document."""
    outs = []
    for parts in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in parts)
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat([x for x in outs if len(x)])


def attend_over(ranks: int, strategy: str) -> Attend:
    plan = plan_context(LENGTHS, ranks, strategy, heads=4, kv_heads=2, sharding="head-tail")
    return lambda q, k, v: attend_in_one_process(q, k, v, plan)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ATTENTIONS: list[Attend] = [
    lambda q, k, v: attend_documents(q, k, v, LENGTHS),
    lambda q, k, v: context_attention(q, k, v, LENGTHS),
    attend_over(2, "needed-kv"),
    attend_over(2, "ulysses"),
    attend_over(3, "pass-q"),
]


def with_gradients(attend: Attend, qkv: list[Tensor], grad_o: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_o)]


@settings(deadline=None, max_examples=20)
@given(data=st.data(), width=st.sampled_from([1, 8, 20]))
@pytest.mark.parametrize("attend", ATTENTIONS, ids=range(len(ATTENTIONS)))
def test_any_layout_in_memory_is_read_right(
    alone: None, attend: Attend, data: st.DataObject, width: int
) -> None:
    numbers = torch.Generator().manual_seed(width)
    drawn = [
        data.draw(laid_out(torch.randn(31, h, width, dtype=torch.float64, generator=numbers)))
        for h in HEADS
    ]
    found = with_gradients(attend, drawn[:3], drawn[3])
    plain = [x.clone(memory_format=torch.contiguous_format) for x in drawn]
    wanted = with_gradients(attend_torch, plain[:3], plain[3])
    scale = max(float(x.abs().max()) for x in wanted)
    for mine, right in zip(found, wanted, strict=True):
        assert float((mine - right).abs().max()) <= 1e-12 * scale


def test_tiles_read_any_layout_too() -> None:
    room = torch.randn(6, 9, 4, 8, 3, dtype=torch.float64)
    given_tensors = list(room.unbind(-1)[0])
    plain = [x.contiguous() for x in given_tensors]
    lse = torch.randn(9, 4, dtype=torch.float64)
    for kind in ("full", "causal", "anticausal"):
        pairs = [
            (attend_tile(*some[:3], kind), attend_tile_backward(*some[:5], lse, kind))
            for some in (given_tensors, plain)
        ]
        for strided, whole in zip(*pairs, strict=True):
            assert all(map(torch.equal, strided, whole))


@pytest.mark.parametrize("attend", ATTENTIONS, ids=range(len(ATTENTIONS)))
@pytest.mark.parametrize("dtypes", [("float32", "float32", "bfloat16"), ("bfloat16",) * 3])
def test_autocast_casts_as_it_does_for_torch(
    alone: None, attend: Attend, dtypes: tuple[str, str, str]
) -> None:
    """Under autocast RoPE leaves queries and keys in fp32, and values come in bf16."""
    numbers = torch.Generator().manual_seed(0)
    *qkv, grad_o = (torch.randn(31, h, 8, generator=numbers) for h in HEADS)
    qkv = [x.to(getattr(torch, dtype)) for x, dtype in zip(qkv, dtypes, strict=True)]
    grad_o = grad_o.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(attend, qkv, grad_o)
        wanted = with_gradients(attend_torch, qkv, grad_o)
    whole = [x.bfloat16().double() for x in (*qkv, grad_o)]
    right = with_gradients(attend_torch, whole[:3], whole[3])
    for mine, theirs, exact in zip(found, wanted, right, strict=True):
        assert mine.dtype == theirs.dtype
        scale = float(exact.abs().max())
        torchs = float((theirs.double() - exact).abs().max()) / scale
        assert float((mine.double() - exact).abs().max()) / scale <= max(2 * torchs, 2**-7)


def test_autocast_leaves_float64_alone(alone: None) -> None:
    x = torch.randn(31, 2, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = [attend(x.repeat(1, 2, 1), x, x).dtype for attend in ATTENTIONS]
    assert found == [torch.float64] * len(ATTENTIONS)


def test_tensors_that_no_attention_reads_together() -> None:
    def refusal(*given_tensors: Tensor, lengths: tuple[int, ...] = (4,)) -> str:
        with pytest.raises((LayoutError, ValueError)) as caught:
            attend_documents(*given_tensors, lengths)
        return str(caught.value)

    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    assert refusal(q[0], k, k) == (
        "Queries [4, 8], keys [4, 2, 8] and values [4, 2, 8] do not match. Each must be [tokens, "
        "heads, width], keys and values of the same shape."
    )
    assert refusal(q, k[:3], k[:3]) == (
        "Queries have 4 tokens and width 8, keys have 3 tokens and width 8. Give them the same "
        "tokens and width."
    )
    assert refusal(q, k, k.bfloat16()) == (
        "Queries are torch.float32 on cpu, keys torch.float32 on cpu and values torch.bfloat16 on "
        "cpu. All three must have the same dtype and device."
    )
    assert refusal(q[:, :3], k, k) == (
        "3 query heads cannot be divided evenly among 2 key/value heads. Give each key/value head "
        "the same number of query heads."
    )
    assert refusal(q, k, k, lengths=(5, -1)) == ("A document has -1 tokens: lengths are 0 or more.")
