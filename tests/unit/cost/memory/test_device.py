"""What a described program keeps: Korthikanti's counts, exactly, and what shrinks with what."""

import dataclasses

import pytest

from equipoise.cost.memory.device import hosted_bytes, kept_bytes, rank_memory, weight_bytes
from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import Precision, Stack, StepOptions
from equipoise.spec.device.by_name import find_device
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec, preset
from equipoise.spec.program.file import read_program
from equipoise.spec.run.spec import Recompute

GPT = PLANNED["gpt3-175b"]
SHARE, TOKENS = StageShare((0, 1)), 4096.0


def kept(recompute: str, tp: int, *, sequence: bool) -> float:
    """Bytes of a token over the model's width, and scores apart (arXiv:2205.05198, table 2)."""
    stack = Stack(attention="unfused", dropout=True, sequence_parallel=sequence)
    options = StepOptions(2048, 1, stack=stack)
    found = kept_bytes(
        GPT, Layout(tp=tp), options, sparse=False, recompute=recompute, doc_tokens=2048
    )
    return found / GPT.hidden


SCORES = 5 * 96 * 2048 / GPT.hidden


@pytest.mark.parametrize(
    ("recompute", "tp", "sequence", "expected"),
    [
        ("none", 1, False, 34 + SCORES),
        ("none", 8, False, 10 + 24 / 8 + SCORES / 8),
        ("none", 8, True, (34 + SCORES) / 8),
        ("attention", 8, False, 10 + 24 / 8),
        ("attention", 8, True, 34 / 8),
        ("full", 8, False, 2),
        ("full", 8, True, 2 / 8),
    ],
)
def test_table_2(recompute: str, tp: int, sequence: bool, expected: float) -> None:
    assert kept(recompute, tp, sequence=sequence) == pytest.approx(expected)


def test_a_gated_layer_with_grouped_keys() -> None:
    model = preset("llama3-8b")
    options = StepOptions(8192, 1)
    found = kept_bytes(model, Layout(), options, sparse=False, recompute="none", doc_tokens=8192)
    # 12 + 4 g / a of the width, 6 of the hidden units, and a log-sum-exp a head.
    assert found == (12 + 1) * 4096 + 6 * 14_336 + 4 * 32


def test_what_a_product_reads_is_kept_in_8_bits_where_the_program_says_so() -> None:
    model = preset("llama3-8b")
    narrow, wide = (
        kept_bytes(
            model,
            Layout(),
            StepOptions(8192, 1, precision="fp8", stack=Stack(keeps_fp8=keeps)),
            sparse=False,
            recompute="none",
            doc_tokens=8192,
        )
        for keeps in (True, False)
    )
    # Both norms' outputs and the hidden units lose a byte; attention's output has a copy of one.
    assert wide - narrow == 2 * 4096 + 14_336 - 4096


def test_gates_that_are_clamped_apart_are_kept_twice() -> None:
    model = PLANNED["gpt-oss-120b"]
    bytes_of = {
        (program, how): kept_bytes(
            model,
            Layout(dp=8, ep=8),
            StepOptions(4096, 1, stack=read_program(program).stack),
            sparse=True,
            recompute=how,
            doc_tokens=4096,
        )
        for program in ("megatron-bridge", "megatron-bridge-fused")
        for how in ("none", "moe_act")
    }
    apart, fused = (
        bytes_of[program, "none"] for program in ("megatron-bridge", "megatron-bridge-fused")
    )
    assert apart - fused == 4 * 2880 * 2 * 2  # of four rows, gate and up in 16 bits
    assert len({bytes_of[program, "moe_act"] for program, _ in bytes_of}) == 1


def test_rows_of_experts_are_kept_where_they_are_computed() -> None:
    model = preset("mixtral-8x7b")
    options = StepOptions(4096, 1)
    even, uneven = (
        kept_bytes(
            model,
            Layout(dp=8, ep=8),
            options,
            sparse=True,
            recompute="none",
            doc_tokens=4096,
            received_rows=rows,
        )
        for rows in (1.0, 2.0)
    )
    assert uneven - even == 2 * (6 * 14_336 + 4 * 4096)


def test_states_of_a_weight() -> None:
    model = dataclasses.replace(preset("llama3-8b"), layers=2)
    weights = 2 * model.count_layer(sparse=False, active=False) + 2 * 4096 * 128_256
    options = StepOptions(4096, 8)
    whole = rank_memory(model, Layout(dp=8, zero=0), options, SHARE, TOKENS)
    assert whole["parameters"] == 2 * weights
    assert whole["gradients"] == 4 * weights
    assert whole["optimizer"] == 12 * weights
    shard = rank_memory(model, Layout(dp=8, zero=1), options, SHARE, TOKENS)
    assert shard["optimizer"] == 12 * weights / 8
    assert shard["gradients"] == 4 * weights
    scattered = rank_memory(model, Layout(dp=8, zero=2), options, SHARE, TOKENS)
    assert scattered["gradients"] == 4 * weights / 8
    gathered = rank_memory(model, Layout(dp=8, zero=3), options, SHARE, TOKENS)
    assert gathered["parameters"] == scattered["parameters"]  # two layers of two, and tables
    deep = dataclasses.replace(SHARE, layers=tuple(range(8)))
    more = rank_memory(
        dataclasses.replace(model, layers=8), Layout(dp=8, zero=3), options, deep, TOKENS
    )
    assert more["parameters"] == gathered["parameters"]
    copies = rank_memory(model, Layout(dp=8, zero=1, replicas=4), options, SHARE, TOKENS)
    assert copies["optimizer"] == 4 * shard["optimizer"]


def test_a_program_may_keep_the_rest_of_a_master_or_none() -> None:
    def states(stack: Stack, precision: Precision = "bf16") -> tuple[float, float, float]:
        return weight_bytes(StepOptions(4096, 8, precision=precision, stack=stack))

    assert states(Stack(master="rest")) == (2, 4, 10)
    assert states(Stack(master="rest"), "fp8") == (2, 4, 12)
    assert states(Stack(master="none", moment_bytes=4, grad_bytes=2)) == (2, 2, 4)
    for stack in (Stack(master="rest"), Stack(master="none", moment_bytes=4, grad_bytes=2)):
        assert states(stack, "fp32") == (4, 4, 8)
    # No more leaves the device than is kept.
    moments = Stack(master="none", moment_bytes=4, offloads_master=False)
    assert hosted_bytes(StepOptions(4096, 8, offload="optimizer", stack=moments)) == 4


def test_products_gathered_one_by_one_need_less_than_layers() -> None:
    model = dataclasses.replace(GPT, hidden=20_480, ffn=81_920, heads=128, kv_heads=128)
    layout = Layout(dp=64, zero=3)
    product, layer = 20_480 * 81_920, model.count_layer(sparse=False, active=False)
    tables = model.hidden * model.vocab
    by_layer, by_product = (
        rank_memory(model, layout, StepOptions(2048, 64, stack=Stack(gathers=what)), SHARE, TOKENS)
        for what in ("layer", "product")
    )
    assert by_layer["parameters"] == 2 * (tables + 2 * layer)
    assert by_product["parameters"] == 2 * (tables + 2 * product)
    assert by_layer["communication"] == 4 * layer
    assert by_product["communication"] == 4 * (product + 5e8)
    # Small layers fit into the bucket whole, and two of them into what may stay gathered.
    small = preset("llama3-8b")
    alike = [
        rank_memory(small, layout, StepOptions(2048, 64, stack=Stack(gathers=what)), SHARE, TOKENS)
        for what in ("layer", "product")
    ]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    ("program", "model", "layout", "options", "device", "share"),
    [
        pytest.param(
            "deepspeed-2021",
            dataclasses.replace(GPT, hidden=20_480, ffn=81_920, layers=105),
            Layout(dp=640, zero=3),
            StepOptions(2048, 2560, micro_batch=4, recompute="full"),
            "a100-80",
            StageShare(tuple(range(105))),
            id="530B on 640 A100, arXiv:2104.04473, table 2",
        ),
        pytest.param(
            "megatron-bridge",
            PLANNED["gpt-oss-120b"],
            Layout(dp=16, pp=4, ep=8, zero=1),
            StepOptions(4096, 512, recompute="layernorm+moe_act"),
            "h100-sxm",
            StageShare(tuple(range(9)), has_head=False, kept_micro_batches=4),
            id="GPT-OSS-120B on 64 H100, Megatron-Bridge 25.11, first stage",
        ),
        pytest.param(
            "nemo-automodel",
            PLANNED["gpt-oss-120b"],
            Layout(dp=64, ep=64, zero=3),
            StepOptions(4096, 512, micro_batch=2),
            "h100-sxm",
            StageShare(tuple(range(36))),
            id="GPT-OSS-120B on 64 H100, NeMo AutoModel",
        ),
        pytest.param(
            "nemo-automodel",
            PLANNED["qwen3-30b-a3b"],
            Layout(dp=8, ep=8, zero=3),
            StepOptions(4096, 512, micro_batch=4, recompute="full"),
            "h100-sxm",
            StageShare(tuple(range(48))),
            id="Qwen3-30B on 8 H100, NeMo AutoModel",
        ),
    ],
)
def test_published_steps_that_ran_fit(
    program: str,
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    device: str,
    share: StageShare,
) -> None:
    options = dataclasses.replace(options, stack=read_program(program).stack)
    tokens = float(options.micro_batch * options.context_tokens)
    needs = sum(rank_memory(model, layout, options, share, tokens).values())
    assert needs <= find_device(device).usable_bytes


def test_terms_shrink_with_ranks_and_grow_with_tokens() -> None:
    model = dataclasses.replace(preset("llama3-8b"), layers=2)
    options = StepOptions(4096, 8)
    one = rank_memory(model, Layout(), options, SHARE, TOKENS)
    four = rank_memory(model, Layout(tp=4), options, SHARE, TOKENS)
    for term in ("parameters", "gradients", "optimizer", "activations", "logits"):
        assert four[term] < one[term]
    more = rank_memory(model, Layout(), options, SHARE, 8192.0)
    for term in ("activations", "logits", "working space", "allocator"):
        assert more[term] > one[term]


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("recompute", ["none", "attention", "selective", "every-2", "full"])
def test_fp32_is_twice_as_wide_as_bf16(name: str, recompute: Recompute) -> None:
    model, layout = preset(name), Layout(tp=2, dp=4, zero=1)
    narrow = StepOptions(4096, 8, recompute=recompute)
    wide = dataclasses.replace(narrow, precision="fp32")
    found = {
        each.precision: rank_memory(model, layout, each, SHARE, TOKENS)
        for each in (narrow, wide, dataclasses.replace(narrow, precision="fp8"))
    }
    assert found["fp8"] == found["bf16"]
    for term in ("activations", "working space"):
        # What is in fp32 anyhow stays: log-sum-exps, scores of experts; so do routes.
        assert 1.9 * found["bf16"][term] <= found["fp32"][term] <= 2 * found["bf16"][term]
    assert found["fp32"]["parameters"] == 2 * found["bf16"]["parameters"]
    assert found["fp32"]["gradients"] == found["bf16"]["gradients"]
    assert found["fp32"]["optimizer"] == pytest.approx(found["bf16"]["optimizer"] * 8 / 12)


def test_fp32_widens_what_was_16_bits() -> None:
    model = preset("llama3-8b")
    stack = Stack(grad_bytes=2, logit_bytes=6.0)
    narrow = StepOptions(8192, 1, stack=stack)
    wide = dataclasses.replace(narrow, precision="fp32")
    each = [
        kept_bytes(model, Layout(), one, sparse=False, recompute="none", doc_tokens=8192)
        for one in (narrow, wide)
    ]
    assert each[1] - 4 * 32 == 2 * (each[0] - 4 * 32)
    terms = [rank_memory(model, Layout(), one, SHARE, TOKENS) for one in (narrow, wide)]
    assert terms[1]["gradients"] == 2 * terms[0]["gradients"]
    # A logit in 16 bits and one in fp32 become two in fp32; two streams become twice as wide.
    assert terms[0]["logits"] == 4096 * (6 * model.vocab + 4 * model.hidden)
    assert terms[1]["logits"] == 4096 * (8 * model.vocab + 8 * model.hidden)
