"""Exported settings, read whole; what a program lacks is refused."""

import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step import StepOptions
from equipoise.plan.choice import Choice
from equipoise.plan.export import to_megatron, to_torchtitan
from equipoise.spec.layout import Layout
from equipoise.spec.model import PLANNED


def test_torchtitan() -> None:
    options = StepOptions(
        8192, 128, schedule="interleaved", virtual=5, recompute="full", context_strategy="ring"
    )
    layout = Layout(tp=4, cp=2, pp=4, dp=2, order=("pp", "dp", "cp", "tp"))
    assert to_torchtitan(PLANNED["llama3-70b"], Choice(layout, options)) == (
        "[training]\n"
        "seq_len = 8192\n"
        "local_batch_size = 64\n"
        "global_batch_size = 128\n"
        "\n"
        "[parallelism]\n"
        "data_parallel_replicate_degree = 1\n"
        "data_parallel_shard_degree = 2\n"
        'fsdp_reshard_after_forward = "never"\n'
        "tensor_parallel_degree = 4\n"
        "context_parallel_degree = 2\n"
        'context_parallel_rotate_method = "alltoall"\n'
        "pipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_microbatch_size = 1\n"
        "pipeline_parallel_layers_per_stage = 4\n"
        "\n"
        "[activation_checkpoint]\n"
        'mode = "full"\n'
    )


def test_torchtitan_of_experts() -> None:
    options = StepOptions(4096, 64, micro_batch=2, recompute="every-2", precision="fp8")
    layout = Layout(dp=8, ep=8, zero=3, replicas=2)
    assert to_torchtitan(PLANNED["mixtral-8x7b"], Choice(layout, options)) == (
        "[training]\n"
        "seq_len = 4096\n"
        "local_batch_size = 2\n"
        "global_batch_size = 64\n"
        "\n"
        "[parallelism]\n"
        "data_parallel_replicate_degree = 2\n"
        "data_parallel_shard_degree = 4\n"
        'fsdp_reshard_after_forward = "always"\n'
        "tensor_parallel_degree = 1\n"
        "context_parallel_degree = 1\n"
        "pipeline_parallel_degree = 1\n"
        "expert_parallel_degree = 8\n"
        "expert_tensor_parallel_degree = 1\n"
        "\n"
        "[activation_checkpoint]\n"
        'mode = "selective"\n'
        'selective_ac_option = "2"\n'
        "\n"
        "[model]\n"
        'converters = ["float8"]\n'
    )


def test_megatron() -> None:
    options = StepOptions(
        8192, 256, schedule="interleaved", virtual=7, recompute="every-3", context_strategy="ring"
    )
    layout = Layout(tp=8, cp=2, pp=6, dp=4)
    assert to_megatron(PLANNED["llama3-405b"], Choice(layout, options)) == (
        "--num-layers 126\n"
        "--hidden-size 16384\n"
        "--num-attention-heads 128\n"
        "--ffn-hidden-size 53248\n"
        "--seq-length 8192\n"
        "--micro-batch-size 1\n"
        "--global-batch-size 256\n"
        "--tensor-model-parallel-size 8\n"
        "--pipeline-model-parallel-size 6\n"
        "--context-parallel-size 2\n"
        "--bf16\n"
        "--group-query-attention\n"
        "--num-query-groups 8\n"
        "--swiglu\n"
        "--num-virtual-stages-per-pipeline-rank 7\n"
        "--use-tp-pp-dp-mapping\n"
        "--sequence-parallel\n"
        "--cp-comm-type p2p\n"
        "--use-distributed-optimizer\n"
        "--recompute-granularity full\n"
        "--recompute-method block\n"
        "--recompute-num-layers 1\n"
    )


def test_megatron_of_experts() -> None:
    options = StepOptions(4096, 64, recompute="attention", precision="fp8")
    layout = Layout(dp=8, ep=4, etp=1, zero=3, replicas=2)
    assert to_megatron(PLANNED["mixtral-8x7b"], Choice(layout, options)) == (
        "--num-layers 32\n"
        "--hidden-size 4096\n"
        "--num-attention-heads 32\n"
        "--ffn-hidden-size 14336\n"
        "--seq-length 4096\n"
        "--micro-batch-size 1\n"
        "--global-batch-size 64\n"
        "--tensor-model-parallel-size 1\n"
        "--pipeline-model-parallel-size 1\n"
        "--context-parallel-size 1\n"
        "--bf16\n"
        "--group-query-attention\n"
        "--num-query-groups 8\n"
        "--swiglu\n"
        "--num-experts 8\n"
        "--moe-router-topk 2\n"
        "--moe-ffn-hidden-size 14336\n"
        "--expert-model-parallel-size 4\n"
        "--expert-tensor-parallel-size 1\n"
        "--use-megatron-fsdp\n"
        "--data-parallel-sharding-strategy optim_grads_params\n"
        "--num-distributed-optimizer-instances 2\n"
        "--recompute-granularity selective\n"
        "--fp8-format hybrid\n"
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
            to_megatron,
            {"recompute": "selective", "context_strategy": "ring"},
            'Megatron-LM has no recompute "selective". Plan with one of none, attention, full: '
            "--recompute NAME.",
        ),
        (
            to_megatron,
            {"context_strategy": "needed-kv"},
            'Megatron-LM has no context strategy "needed-kv". Plan with one of all-gather, ring, '
            "ulysses: --context-strategy NAME.",
        ),
    ],
)
def test_what_a_program_lacks(export, options, message) -> None:
    layout = Layout(dp=2, cp=2, pp=2, order=("pp", "dp", "cp", "tp"))
    choice = Choice(layout, StepOptions(8192, 16, **options))
    with pytest.raises(SpecError) as caught:
        export(PLANNED["llama3-8b"], choice)
    assert str(caught.value) == message


def test_an_order_that_torchtitan_lacks() -> None:
    with pytest.raises(SpecError) as caught:
        to_torchtitan(PLANNED["llama3-8b"], Choice(Layout(dp=2, pp=2), StepOptions(8192, 16)))
    assert str(caught.value) == (
        'torchtitan has no order "dp-pp". Plan with one of pp-dp: --order NAME.'
    )
