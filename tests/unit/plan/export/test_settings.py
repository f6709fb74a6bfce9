"""Exported settings, read whole; what a program lacks is refused, and kept out of a search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.export.model import megatron_model
from equipoise.plan.export.settings import EXPORTS, to_megatron, to_torchtitan
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_lattice
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED

_PP_DP = ("pp", "dp", "cp", "tp")
LLAMA_FAMILY = (
    "--untie-embeddings-and-output-weights\n"
    "--swiglu\n"
    "--disable-bias-linear\n"
    "--normalization RMSNorm\n"
    "--norm-epsilon 1e-05\n"
    "--position-embedding-type rope\n"
)


def test_torchtitan() -> None:
    options = StepOptions(
        8192,
        128,
        schedule="interleaved",
        virtual=2,
        recompute="full",
        context_strategy="all-gather",
    )
    layout = Layout(tp=4, cp=2, pp=2, dp=2, order=_PP_DP)
    model = PLANNED["llama3-8b"].scaled(layers=6)
    assert to_torchtitan(model, Choice(layout, options), [1, 2, 2, 1]) == (
        "--training.seq_len 8192\n"
        "--training.local_batch_size 64\n"
        "--training.global_batch_size 128\n"
        "--training.mixed_precision_param bfloat16\n"
        "--parallelism.data_parallel_replicate_degree 1\n"
        "--parallelism.data_parallel_shard_degree 2\n"
        "--parallelism.fsdp_reshard_after_forward never\n"
        "--parallelism.tensor_parallel_degree 4\n"
        "--parallelism.context_parallel_degree 2\n"
        "--parallelism.pipeline_parallel_degree 2\n"
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B\n"
        "--parallelism.pipeline_parallel_microbatch_size 1\n"
        "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2 "
        "layers.3,layers.4 layers.5,norm,lm_head\n"
        "activation-checkpoint:full\n"
    )


def test_torchtitan_of_experts() -> None:
    options = StepOptions(4096, 64, micro_batch=2, precision="fp32")
    layout = Layout(dp=8, ep=8, zero=3, replicas=2)
    assert to_torchtitan(PLANNED["mixtral-8x7b"], Choice(layout, options), [32]) == (
        "--training.seq_len 4096\n"
        "--training.local_batch_size 2\n"
        "--training.global_batch_size 64\n"
        "--training.mixed_precision_param float32\n"
        "--parallelism.data_parallel_replicate_degree 2\n"
        "--parallelism.data_parallel_shard_degree 4\n"
        "--parallelism.fsdp_reshard_after_forward always\n"
        "--parallelism.tensor_parallel_degree 1\n"
        "--parallelism.context_parallel_degree 1\n"
        "--parallelism.pipeline_parallel_degree 1\n"
        "--parallelism.expert_parallel_degree 8\n"
        "activation-checkpoint:none\n"
    )


def test_megatron() -> None:
    options = StepOptions(
        8192, 192, schedule="interleaved", virtual=3, recompute="every-3", context_strategy="ring"
    )
    layout = Layout(tp=8, cp=2, pp=6, dp=4)
    stages = [6, *[7] * 13, 8, 8, 8, 5]
    assert to_megatron(PLANNED["llama3.1-405b"], Choice(layout, options), stages) == (
        "--num-layers 126\n"
        "--hidden-size 16384\n"
        "--num-attention-heads 128\n"
        "--ffn-hidden-size 53248\n"
        "--vocab-size 128256\n"
        "--seq-length 8192\n"
        "--max-position-embeddings 8192\n"
        f"{LLAMA_FAMILY}"
        "--rotary-base 500000\n"
        "--use-rope-scaling\n"
        "--rope-scaling-factor 8\n"
        "--group-query-attention\n"
        "--num-query-groups 8\n"
        "--micro-batch-size 1\n"
        "--global-batch-size 192\n"
        "--tensor-model-parallel-size 8\n"
        "--pipeline-model-parallel-size 6\n"
        "--context-parallel-size 2\n"
        "--bf16\n"
        '--pipeline-model-parallel-layout "Et*6|(t*7|)*13(t*8|)*3t*5L"\n'
        "--use-tp-pp-dp-mapping\n"
        "--sequence-parallel\n"
        "--cp-comm-type p2p\n"
        "--use-distributed-optimizer\n"
        "--overlap-grad-reduce\n"
        "--overlap-param-gather\n"
        "--recompute-granularity full\n"
        "--recompute-method block\n"
        "--recompute-num-layers 3\n"
    )


def test_megatron_of_experts() -> None:
    options = StepOptions(4096, 64, recompute="attention", precision="fp8")
    layout = Layout(dp=8, ep=4, etp=1, zero=3, replicas=2)
    assert to_megatron(PLANNED["mixtral-8x7b"], Choice(layout, options), [32]) == (
        "--num-layers 32\n"
        "--hidden-size 4096\n"
        "--num-attention-heads 32\n"
        "--ffn-hidden-size 14336\n"
        "--vocab-size 32000\n"
        "--seq-length 4096\n"
        "--max-position-embeddings 4096\n"
        f"{LLAMA_FAMILY}"
        "--rotary-base 1000000\n"
        "--group-query-attention\n"
        "--num-query-groups 8\n"
        "--num-experts 8\n"
        "--moe-router-topk 2\n"
        "--moe-ffn-hidden-size 14336\n"
        "--micro-batch-size 1\n"
        "--global-batch-size 64\n"
        "--tensor-model-parallel-size 1\n"
        "--pipeline-model-parallel-size 1\n"
        "--context-parallel-size 1\n"
        "--bf16\n"
        "--fp8-format hybrid\n"
        "--expert-model-parallel-size 4\n"
        "--expert-tensor-parallel-size 1\n"
        "--moe-token-dispatcher-type alltoall\n"
        "--use-distributed-optimizer\n"
        "--overlap-grad-reduce\n"
        "--overlap-param-gather\n"
        "--use-megatron-fsdp\n"
        "--data-parallel-sharding-strategy optim_grads_params\n"
        "--ckpt-format fsdp_dtensor\n"
        "--num-distributed-optimizer-instances 2\n"
        "--recompute-granularity selective\n"
    )


def test_megatron_names_the_modules() -> None:
    choice = Choice(Layout(dp=8, ep=8), StepOptions(4096, 64, recompute="mla_up_proj+mlp"))
    lines = to_megatron(PLANNED["deepseek-v3"], choice, [61]).splitlines()
    assert lines[-2:] == [
        "--recompute-granularity selective",
        "--recompute-modules mla_up_proj mlp",
    ]
    with pytest.raises(SpecError) as refused:
        to_torchtitan(PLANNED["deepseek-v3"], choice, [61])
    assert str(refused.value) == (
        'torchtitan has no recompute "mla_up_proj+mlp". Plan with one of none, full: --recompute '
        "NAME."
    )


def test_models_for_megatron() -> None:
    assert megatron_model(PLANNED["gpt3-175b"], 2048) == [
        "--num-layers 96",
        "--hidden-size 12288",
        "--num-attention-heads 96",
        "--ffn-hidden-size 49152",
        "--vocab-size 51200",
        "--seq-length 2048",
        "--max-position-embeddings 2048",
    ]
    assert megatron_model(PLANNED["deepseek-v3"], 4096)[14:] == [
        "--multi-latent-attention",
        "--q-lora-rank 1536",
        "--kv-lora-rank 512",
        "--qk-head-dim 128",
        "--qk-pos-emb-head-dim 64",
        "--v-head-dim 128",
        "--num-experts 256",
        "--moe-router-topk 8",
        "--moe-ffn-hidden-size 2048",
        '--moe-layer-freq "[0]*3+[1]*58"',
        "--moe-shared-expert-intermediate-size 2048",
    ]
    assert megatron_model(PLANNED["qwen3-8b"], 4096)[14:15] == ["--qk-layernorm"]


def _expand(layout: str) -> list[str]:
    """A layout of Megatron-LM's, unrolled by its own two rules."""
    import re

    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout.split("|")


@given(st.lists(st.integers(0, 12), min_size=2, max_size=24).filter(lambda each: sum(each) > 0))
def test_every_stage_keeps_its_layers(stages: list[int]) -> None:
    from equipoise.plan.export.settings import _megatron_stages, _titan_parts

    said = _expand(_megatron_stages(stages))
    assert [stage.count("t") for stage in said] == stages
    assert "".join(said).strip("t") == "E" + "t" * sum(stages) + "L"
    parts = [part.split(",") for part in _titan_parts(stages).split(" ")]
    layers = [[name for name in part if name.startswith("layers.")] for part in parts]
    assert [len(part) for part in layers] == stages
    assert [name for part in layers for name in part] == [
        f"layers.{layer}" for layer in range(sum(stages))
    ]


def test_windows_and_sinks_have_no_flags() -> None:
    with pytest.raises(SpecError) as refused:
        megatron_model(PLANNED["gpt-oss-120b"], 4096)
    assert str(refused.value) == (
        "Flags of layers with a window and of attention with sinks are not known here, and without "
        "them Megatron-LM would train another model. Export a model without both."
    )


@pytest.mark.parametrize(
    ("export", "options", "message"),
    [
        (
            to_torchtitan,
            {"schedule": "zb-h1"},
            'torchtitan has no schedule "zb-h1". Plan with one of 1f1b, interleaved, '
            "interleaved-zb, zb-v, dualpipe-v: --schedule NAME.",
        ),
        (
            to_torchtitan,
            {"precision": "fp8"},
            'torchtitan has no precision "fp8". Plan with one of bf16, fp32: --precision NAME.',
        ),
        (
            to_torchtitan,
            {"schedule": "interleaved", "virtual": 2, "context_strategy": "all-gather"},
            "torchtitan interleaves equal rounds of micro-batches, and 9 of a rank make none with "
            "pp=2. Plan with --step-sequences that give each rank a multiple of 2.",
        ),
        (
            to_torchtitan,
            {"offload": "optimizer"},
            'torchtitan has no offload "optimizer". Plan with one of none: --offload NAME.',
        ),
        (
            to_megatron,
            {"offload": "activations", "context_strategy": "ring"},
            "Megatron-LM offloads activations without stages and recomputation, and this has pp=2 "
            "and recompute none. Plan with --layout pp=1 --recompute none.",
        ),
        (
            to_megatron,
            {"recompute": "selective", "context_strategy": "ring"},
            'Megatron-LM has no recompute "selective". Plan with one of none, attention, every-4, '
            "every-3, every-2, full: --recompute NAME.",
        ),
        (
            to_megatron,
            {"context_strategy": "needed-kv"},
            'Megatron-LM has no context strategy "needed-kv". Plan with one of all-gather, ring, '
            "ulysses: --context-strategy NAME.",
        ),
        (
            to_megatron,
            {"schedule": "interleaved", "virtual": 2, "context_strategy": "ring"},
            "Megatron-LM interleaves micro-batches in rounds of pp=2, which does not divide a "
            "rank's 9. Plan with --step-sequences that give each rank a multiple of 2.",
        ),
    ],
)
def test_what_a_program_lacks(export, options, message) -> None:
    layout = Layout(dp=2, cp=2, pp=2, order=_PP_DP)
    choice = Choice(layout, StepOptions(8192, 18, **options))
    with pytest.raises(SpecError) as caught:
        export(PLANNED["llama3-8b"], choice, [16, 16])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            "llama3-8b",
            Layout(dp=2, pp=2),
            'torchtitan has no order "dp-pp". Plan with one of pp-dp: --order NAME.',
        ),
        (
            "llama3-8b",
            Layout(dp=2, cp=2, zero=0),
            "torchtitan shards parameters over context-parallel ranks, and zero=0 with cp=2 does "
            "not. Plan with --layout zero=1.",
        ),
        (
            "llama3-8b",
            Layout(dp=2, cp=2, zero=3, replicas=4),
            "torchtitan copies parameters over data-parallel ranks alone, and replicas=4 do not "
            "divide dp=2. Plan with --layout replicas=1.",
        ),
        (
            "mixtral-8x7b",
            Layout(dp=2, tp=2, ep=2, etp=2),
            "torchtitan shares each expert over tp where ep is 1, and over no ranks where it is "
            "more: ep=2 with tp=2 and etp=2 is neither. Plan with another --layout etp.",
        ),
    ],
)
def test_what_torchtitan_does_not_carry(model: str, layout: Layout, message: str) -> None:
    choice = Choice(layout, StepOptions(8192, 16, context_strategy="all-gather"))
    with pytest.raises(SpecError) as caught:
        to_torchtitan(PLANNED[model], choice, [32])
    assert str(caught.value) == message


@pytest.mark.parametrize("name", sorted(EXPORTS))
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_a_search_is_kept_to_what_is_not_refused(name: str, model: str) -> None:
    program, write = EXPORTS[name]
    spec = PLANNED[model]
    space = list_lattice(spec, 8, StepOptions(8192, 24))
    kept = program.keep(spec, space)
    assert 0 < len(kept) < len(space)
    rows = np.random.default_rng(0).permutation(len(space))[:400]
    said = {str(kept.choice(row).words()) for row in range(len(kept))}
    for row in rows.tolist():
        choice = space.choice(row)
        stages = [1] * (choice.layout.pp * choice.options.virtual)
        try:
            write(spec, choice, stages)
        except SpecError:
            assert str(choice.words()) not in said
        else:
            assert str(choice.words()) in said


def test_a_search_of_which_a_program_can_do_nothing() -> None:
    model = PLANNED["llama3-8b"]
    space = list_lattice(model, 8, StepOptions(8192, 16), fixed={"recompute": "attention"})
    with pytest.raises(SpecError) as caught:
        EXPORTS["torchtitan"][0].keep(model, space)
    assert str(caught.value) == (
        f"torchtitan can do none of {len(space):,} choices. It has order pp-dp; schedule 1f1b, "
        "interleaved, interleaved-zb, zb-v, dualpipe-v; recompute none, full; offload none; "
        "context strategy all-gather; precision bf16, fp32. Fix less of the layout, or one of "
        "these."
    )
