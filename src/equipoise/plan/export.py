"""A choice as the settings of another training program.

What it decides
    Which of their settings say what a choice says. What a program cannot do is refused, never
    rounded: a plan whose schedule or recomputation is another one has another price.

    ===========  ============================  ===================================================
    here         torchtitan                    Megatron-LM
    ===========  ============================  ===================================================
    order dp-pp  none of its own               tp-pp-dp mapping
    zero 0       replicate                     neither of the below
    zero 1       shard, no resharding          distributed optimizer
    zero 2       shard, no resharding          Megatron-FSDP, optim_grads
    zero 3       shard, resharding always      Megatron-FSDP, optim_grads_params
    attention    none of its own               selective, whose core is its default
    every-N      selective, option N (of 2)    block, so many layers of each virtual stage
    ===========  ============================  ===================================================

Kept true (tests/unit/plan/test_export.py)
    Both are read whole; what a program lacks is refused.

Sources
    torchtitan: torchtitan/config/job_config.py. Megatron-LM: megatron/training/arguments.py.
"""

from collections.abc import Callable

from equipoise.base.errors import SpecError
from equipoise.plan.choice import ORDERS, Choice
from equipoise.spec.model import ModelSpec

_TITAN_SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_TITAN_RECOMPUTES = {"none": "none", "every-2": "selective", "full": "full"}
_TITAN_ROTATES = {"all-gather": "allgather", "ring": "alltoall"}
_MEGATRON_CONTEXT = {"all-gather": "all_gather", "ring": "p2p", "ulysses": "a2a"}


def to_torchtitan(model: ModelSpec, choice: Choice) -> str:
    """A TOML file's tables on parallelism, batches and activations.

    Raises:
        SpecError: torchtitan has no such schedule, recomputation or context strategy.
    """
    layout, options = choice.layout, choice.options
    if layout.pp > 1 and layout.dp > 1:
        order = next(name for name, axes in ORDERS.items() if axes == layout.order)
        _find("torchtitan", "order", order, {"pp-dp": ""})
    schedule = _find("torchtitan", "schedule", options.schedule, _TITAN_SCHEDULES)
    mode = _find("torchtitan", "recompute", options.recompute, _TITAN_RECOMPUTES)
    copies = layout.dp if layout.zero == 0 else min(layout.replicas, layout.dp)
    reshard = "always" if layout.zero == 3 else "never"
    lines = [
        "[training]",
        f"seq_len = {options.context_tokens}",
        f"local_batch_size = {_local_batch(choice)}",
        f"global_batch_size = {options.step_sequences}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {copies}",
        f"data_parallel_shard_degree = {layout.dp // copies}",
        f'fsdp_reshard_after_forward = "{reshard}"',
        f"tensor_parallel_degree = {layout.tp}",
        f"context_parallel_degree = {layout.cp}",
    ]
    if layout.cp > 1:
        rotate = _find("torchtitan", "context strategy", options.context_strategy, _TITAN_ROTATES)
        lines.append(f'context_parallel_rotate_method = "{rotate}"')
    lines.append(f"pipeline_parallel_degree = {layout.pp}")
    if layout.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {options.micro_batch}",
            f"pipeline_parallel_layers_per_stage = {_stage_layers(model, choice)}",
        ]
    if model.experts:
        lines += [
            f"expert_parallel_degree = {layout.ep}",
            f"expert_tensor_parallel_degree = {layout.etp}",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append('selective_ac_option = "2"')
    if options.precision == "fp8":
        lines += ["", "[model]", 'converters = ["float8"]']
    return "\n".join(lines) + "\n"


def to_megatron(model: ModelSpec, choice: Choice) -> str:
    """Flags of pretrain_gpt.py, one a line.

    Raises:
        SpecError: Megatron-LM has no such schedule, recomputation or context strategy.
    """
    layout, options = choice.layout, choice.options
    _find("Megatron-LM", "schedule", options.schedule, {"1f1b": "", "interleaved": ""})
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
        f"--ffn-hidden-size {model.ffn}",
        f"--seq-length {options.context_tokens}",
        f"--micro-batch-size {options.micro_batch}",
        f"--global-batch-size {options.step_sequences}",
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        "--bf16",
    ]
    if model.kv_heads != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.gated:
        flags.append("--swiglu")
    if options.virtual > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {options.virtual}")
    if layout.pp > 1 and layout.dp > 1 and layout.order != ORDERS["pp-dp"]:
        flags.append("--use-tp-pp-dp-mapping")
    if layout.tp > 1 and options.stack.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.cp > 1:
        kind = _find("Megatron-LM", "context strategy", options.context_strategy, _MEGATRON_CONTEXT)
        flags.append(f"--cp-comm-type {kind}")
    if model.experts:
        flags += [
            f"--num-experts {model.experts}",
            f"--moe-router-topk {model.top_k}",
            f"--moe-ffn-hidden-size {model.expert_ffn}",
            f"--expert-model-parallel-size {layout.ep}",
            f"--expert-tensor-parallel-size {layout.etp}",
        ]
    flags += _megatron_zero(choice) + _megatron_recompute(model, choice)
    if options.precision == "fp8":
        flags.append("--fp8-format hybrid")
    return "\n".join(flags) + "\n"


def _megatron_zero(choice: Choice) -> list[str]:
    zero = choice.layout.zero
    if zero < 2:
        return ["--use-distributed-optimizer"] * zero
    shards = {2: "optim_grads", 3: "optim_grads_params"}[zero]
    flags = ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {shards}"]
    if choice.layout.replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {choice.layout.replicas}")
    return flags


def _megatron_recompute(model: ModelSpec, choice: Choice) -> list[str]:
    setting = choice.options.recompute
    if setting == "none":
        return []
    if setting == "attention":
        return ["--recompute-granularity selective"]
    full = ["--recompute-granularity full"]
    if setting == "full":
        return [*full, "--recompute-method uniform", "--recompute-num-layers 1"]
    if setting == "selective":
        raise SpecError(_refusal("Megatron-LM", "recompute", setting, "none, attention, full"))
    layers = -(-_stage_layers(model, choice) // int(setting.removeprefix("every-")))
    return [*full, "--recompute-method block", f"--recompute-num-layers {layers}"]


def _stage_layers(model: ModelSpec, choice: Choice) -> int:
    return -(-model.layers // (choice.layout.pp * choice.options.virtual))


def _local_batch(choice: Choice) -> int:
    """Windows of a rank at a time: of a pipeline, the whole step's."""
    options, layout = choice.options, choice.layout
    return options.step_sequences // layout.dp if layout.pp > 1 else options.micro_batch


def _find(program: str, what: str, name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise SpecError(_refusal(program, what, name, ", ".join(known)))
    return known[name]


def _refusal(program: str, what: str, name: str, known: str) -> str:
    flag = what.replace(" ", "-")
    return f'{program} has no {what} "{name}". Plan with one of {known}: --{flag} NAME.'


EXPORTS: dict[str, Callable[[ModelSpec, Choice], str]] = {
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
}
"""By the name of the program."""
