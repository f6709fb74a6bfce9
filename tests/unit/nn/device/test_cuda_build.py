"""A build of torch with CUDA and no device: operators of CUDA on tensors that have no data.

Shapes, dtypes and devices are those of a device. Autograd's own backward needs one; that of
attention in parts runs here by itself. Collectives go to a group that moves nothing.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from equipoise.balance.context.plan import plan_context
from equipoise.comm.drive import drive
from equipoise.comm.mail import LinkGroups, Mail
from equipoise.nn.attention import PackAttention, pack_attention
from equipoise.nn.decoder import Decoder
from equipoise.nn.device.clock import DeviceMarks
from equipoise.nn.device.send import send
from equipoise.nn.measure_kernels import (
    Patience,
    Sampler,
    gemm_samples,
    host_copy_samples,
    stream_samples,
)
from equipoise.parallel.context.backward import Backward
from equipoise.parallel.context.forward import Forward
from equipoise.parallel.context.program import compile_rank
from equipoise.spec.model.presets import ModelSpec
from support.cuda.queue import Queue

pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(
        torch.version.cuda is None or torch.cuda.is_available(),
        reason="no CUDA device is wanted, but a torch that knows of them",
    ),
]

CUDA = torch.device("cuda", 0)
LENGTHS = (130, 1, 64, 5, 200)
TOKENS = sum(LENGTHS)
DENSE = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=320, head_width=16)
SPARSE = dataclasses.replace(DENSE, experts=4, top_k=2, expert_ffn=32, balance="auxiliary")


class Unpinned(TorchFunctionMode):
    """Without a device there is no pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def without_data() -> Iterator[None]:
    with Unpinned(), FakeTensorMode():
        yield


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def decoder(model: ModelSpec, dtype: torch.dtype) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with CUDA:
            return Decoder(model)
    finally:
        torch.set_default_dtype(before)


def drawn(heads: int, tokens: int = TOKENS) -> Tensor:
    return torch.empty(tokens, heads, 16, dtype=torch.bfloat16, device=CUDA)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_forward_pass_stays_on_the_device(
    model: ModelSpec, recompute: Any, without_data: None
) -> None:
    whole = decoder(model, torch.bfloat16)
    whole.set_recompute(recompute)
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device=CUDA)
    loss = whole(tokens, LENGTHS, labels_T=tokens)
    assert (loss.device, loss.dtype, loss.shape) == (CUDA, torch.float32, ())
    logits = whole.run_layers(whole.begin(tokens), LENGTHS, whole.layers)
    assert (logits.device, logits.dtype) == (CUDA, torch.bfloat16)


def test_what_a_proof_runs_in_fp32(without_data: None) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device=CUDA)
    loss = decoder(DENSE, torch.float32)(tokens, LENGTHS, labels_T=tokens)
    assert (loss.device, loss.dtype) == (CUDA, torch.float32)


def test_a_pack_is_sent_once(without_data: None) -> None:
    pack = pack_attention(LENGTHS, CUDA)
    assert (pack.positions_T.device, pack.positions_T.shape) == (CUDA, (TOKENS,))
    assert send(torch.zeros(3), CUDA).device == CUDA


@pytest.mark.parametrize("strategy", ["needed-kv", "ring", "pass-q", "ulysses"])
def test_both_passes_over_ranks_by_calls_of_several_tiles(
    strategy: str, group: dist.ProcessGroup
) -> None:
    plan = plan_context(LENGTHS, 2, strategy, heads=4, kv_heads=2)
    for rank in range(2):
        with Unpinned(), FakeTensorMode():
            program = compile_rank.__wrapped__(plan.schedule, rank, CUDA)
            own = program.home_tokens
            assert any(each.calls for each in program.rounds)
            mail = Mail(group, None, None)
            forward = Forward(program, drawn(4, own), drawn(2, own), drawn(2, own))
            for _ in forward.steps():  # what would be posted and awaited
                pass
            output, kept = forward.output, forward.kept
            assert (output.device, output.dtype, output.shape) == (
                CUDA,
                torch.bfloat16,
                (own, 4, 16),
            )
            assert kept.lse.dtype == torch.float32  # whatever the heads are in
            backward = Backward(program, kept, torch.empty_like(output))
            for _ in backward.steps():
                pass
            shapes = [tuple(each.shape) for each in backward.gradients]
            assert shapes == [(own, 4, 16), (own, 2, 16), (own, 2, 16)]
            assert {each.dtype for each in backward.gradients} == {torch.bfloat16}
            assert {each.device for each in backward.gradients} == {CUDA}
            assert mail.ranks == 2


def test_a_decoder_over_ranks_posts_to_links_without_tags(group: dist.ProcessGroup) -> None:
    plan = plan_context(LENGTHS, 2, "ring", heads=4, kv_heads=2)
    links = LinkGroups(group, group)
    with Unpinned(), FakeTensorMode():
        program = compile_rank.__wrapped__(plan.schedule, 0, CUDA)
        own = program.home_tokens
        positions = send(torch.from_numpy(plan.shares.positions[0]), CUDA)
        mail = Mail(group, None, links)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forward = Forward(program, q, k, v)
            drive(forward.steps(), mail)
            return forward.output

        tokens = torch.zeros(own, dtype=torch.int64, device=CUDA)
        pack = PackAttention(positions, attend)
        loss = decoder(DENSE, torch.bfloat16)(tokens, pack, labels_T=tokens)
        assert (loss.device, loss.dtype) == (CUDA, torch.float32)
        assert int(mail.ledger.sent_messages.sum()) > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_samples_of_products_stay_on_the_device(dtype: str, without_data: None) -> None:
    sampler = Sampler(CUDA, lambda: DeviceMarks(Queue().event), in_a_row=2)
    drawn = sampler.drawn(torch.bfloat16, 3, 5)
    assert (drawn.device, drawn.dtype, drawn.shape) == (CUDA, torch.bfloat16, (3, 5))
    assert len(gemm_samples(sampler, (dtype, 32, 64, 48), Patience(least=2, budget_s=0.0))) == 2


def test_samples_of_memory_stay_on_the_device(without_data: None) -> None:
    sampler = Sampler(CUDA, lambda: DeviceMarks(Queue().event), in_a_row=2)
    patience = Patience(least=2, budget_s=0.0)
    assert {len(rates) for rates in stream_samples(sampler, 1 << 8, patience).values()} == {2}
    assert len(host_copy_samples(sampler, 1 << 10, patience)) == 2
