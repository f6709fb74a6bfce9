"""A choice as the settings of another training program.

What it decides
    Which of the program's settings mean what a choice means. What it cannot do is refused, never
    rounded: another schedule or recomputation has another price. A search may be limited to what a
    program can do. Stages have the layers that were priced.

    ===========  ============================  ===================================================
    here         torchtitan                    Megatron-LM
    ===========  ============================  ===================================================
    order dp-pp  none of its own               tp-pp-dp mapping
    stages       modules of each part          equal ones by their number, others by a layout
    zero 0       replicate                     neither of the below
    zero 1       shard, no resharding          distributed optimizer
    zero 2       shard, no resharding          Megatron-FSDP, optim_grads
    zero 3       shard, resharding always      Megatron-FSDP, optim_grads_params
    etp          tp without ep, else 1         its own
    attention    none of its own               selective, whose core is its default
    modules      none of its own               selective, with their names
    every-N      none of its own               block, that many layers of each virtual stage
    optimizer    none alone: weights go, too   of the distributed optimizer, its moments
    activations  none of its own               of all layers but two; no stages, no recomputation
    ===========  ============================  ===================================================

Kept true (tests/unit/plan/export/test_settings.py)
    All flags are read back; what a program lacks is refused; what it can do is written.

Sources
    torchtitan 0.3.0: torchtitan/config/configs.py, distributed/activation_checkpoint.py. From
    0.3.0 on it is set by flags; TOML is gone. Megatron-LM with core 0.19.2:
    megatron/training/arguments.py, megatron/core/transformer/pipeline_parallel_layer_layout.py.
    That its optimizer frees 8 bytes of a weight in host memory: 15.3 GB of a device, as measured
    in Megatron-Bridge, docs/training/cpu-offloading.md.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.plan.export.model import megatron_model
from equipoise.plan.export.program import Lack, Program
from equipoise.plan.space.choice import Choice
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.layout import ORDERS
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import (
    KEPT_LAYERS,
    OFFLOADS,
    offloads_activations,
    offloads_optimizer,
)
from equipoise.spec.recompute import MODULES, modules_of
from equipoise.spec.words import unread_of

_TITAN: dict[str, dict[str, str]] = {
    "order": {"pp-dp": ""},
    "schedule": {
        name: traits.torchtitan
        for name, traits in SCHEDULES.items()
        if traits.torchtitan is not None
    },
    "recompute": {"none": "none", "full": "full"},
    "offload": {"none": ""},
    "context strategy": {"all-gather": ""},
    "precision": {"bf16": "bfloat16", "fp32": "float32"},
}
_MEGATRON: dict[str, dict[str, str]] = {
    "order": dict.fromkeys(ORDERS, ""),
    "schedule": {
        name: traits.megatron for name, traits in SCHEDULES.items() if traits.megatron is not None
    },
    "recompute": dict.fromkeys(("none", "attention", "every-4", "every-3", "every-2", "full"), ""),
    "offload": dict.fromkeys(OFFLOADS, ""),
    "context strategy": {"all-gather": "all_gather", "ring": "p2p", "ulysses": "a2a"},
    "precision": {"bf16": "--bf16", "fp8": "--bf16\n--fp8-format hybrid", "fp32": ""},
}

_TITAN_LACKS: tuple[Lack, ...] = (
    (
        lambda at: (at["zero"] == 0) & (at["cp"] > 1),
        "torchtitan shards parameters over context-parallel ranks, and zero=0 with cp={cp} does "
        "not. Plan with --layout zero=1.",
    ),
    (
        lambda at: (at["zero"] > 0) & (at["dp"] % at["replicas"] > 0),
        "torchtitan copies parameters over data-parallel ranks alone, and replicas={replicas} do "
        "not divide dp={dp}. Plan with --layout replicas=1.",
    ),
    (
        lambda at: (at["experts"] > 0) & (at["etp"] != np.where(at["ep"] > 1, 1, at["tp"])),
        "torchtitan shares each expert over tp where ep is 1, and over no ranks where it is more: "
        "ep={ep} with tp={tp} and etp={etp} is neither. Plan with another --layout etp.",
    ),
    (
        lambda at: at["in_rounds"] & (at["batches"] % np.maximum(1, at["batches"] // at["pp"]) > 0),
        "torchtitan interleaves equal rounds of micro-batches, and {batches} of a rank make none "
        "with pp={pp}. Plan with --step-sequences that give each rank a multiple of {pp}.",
    ),
)
_MEGATRON_LACKS: tuple[Lack, ...] = (
    (
        lambda at: at["in_rounds"] & (at["batches"] % at["pp"] > 0),
        "Megatron-LM interleaves micro-batches in rounds of pp={pp}, which does not divide a "
        "rank's {batches}. Plan with --step-sequences that give each rank a multiple of {pp}.",
    ),
    (
        lambda at: at["hosts_optimizer"] & (at["zero"] != 1),
        "Megatron-LM offloads its distributed optimizer alone, which zero={zero} does not use. "
        "Plan with --layout zero=1.",
    ),
    (
        lambda at: at["hosts_activations"] & ((at["pp"] > 1) | at["repeats"]),
        "Megatron-LM offloads activations without stages and recomputation, and this has pp={pp} "
        "and recompute {recompute}. Plan with --layout pp=1 --recompute none.",
    ),
)

_TORCHTITAN = Program("torchtitan", _TITAN, _TITAN_LACKS)
_MEGATRON_LM = Program(
    "Megatron-LM", _MEGATRON, _MEGATRON_LACKS, modules=MODULES, offloads_master=False
)


def to_torchtitan(model: ModelSpec, choice: Choice, stage_layers: Sequence[int]) -> str:
    """Flags that go behind ``--module`` and ``--config``, one a line.

    Args:
        model: Sizes.
        choice: How it is laid out.
        stage_layers: Of each stage, in the order of the model.

    Raises:
        SpecError: torchtitan has no such setting.
    """
    layout, options = choice.layout, choice.options
    names = _TORCHTITAN.require(model, choice)
    copies = layout.dp if layout.zero == 0 else layout.replicas
    # A pipeline cuts a rank's whole step into micro-batches itself.
    batch = options.step_sequences // layout.dp if layout.pp > 1 else options.micro_batch
    flags = [
        f"training.seq_len {options.context_tokens}",
        f"training.local_batch_size {batch}",
        f"training.global_batch_size {options.step_sequences}",
        f"training.mixed_precision_param {names['precision']}",
        f"parallelism.data_parallel_replicate_degree {copies}",
        f"parallelism.data_parallel_shard_degree {layout.dp // copies}",
        f"parallelism.fsdp_reshard_after_forward {'always' if layout.zero == 3 else 'never'}",
        f"parallelism.tensor_parallel_degree {layout.tp}",
        f"parallelism.context_parallel_degree {layout.cp}",
        f"parallelism.pipeline_parallel_degree {layout.pp}",
    ]
    if layout.pp > 1:
        flags += [
            f"parallelism.pipeline_parallel_schedule {names['schedule']}",
            f"parallelism.pipeline_parallel_microbatch_size {options.micro_batch}",
            f"parallelism.module_fqns_per_model_part {_titan_parts(stage_layers)}",
        ]
    if model.experts:
        flags.append(f"parallelism.expert_parallel_degree {layout.ep}")
    lines = [f"--{flag}" for flag in flags]
    return "\n".join([*lines, f"activation-checkpoint:{names['recompute']}"]) + "\n"


def to_megatron(model: ModelSpec, choice: Choice, stage_layers: Sequence[int]) -> str:
    """Flags of pretrain_gpt.py, one a line.

    Args:
        model: Sizes.
        choice: How it is laid out.
        stage_layers: Of each stage, in the order of the model.

    Raises:
        SpecError: Megatron-LM has no such setting.
    """
    layout, options = choice.layout, choice.options
    names = _MEGATRON_LM.require(model, choice)
    flags = [
        *megatron_model(model, options.context_tokens),
        f"--micro-batch-size {options.micro_batch}",
        f"--global-batch-size {options.step_sequences}",
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        *names["precision"].split("\n"),
    ]
    if len(set(stage_layers)) > 1:
        flags.append(f'--pipeline-model-parallel-layout "{_megatron_stages(stage_layers)}"')
    elif options.virtual > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {options.virtual}")
    if layout.pp > 1 and layout.dp > 1 and layout.order != ORDERS["pp-dp"]:
        flags.append("--use-tp-pp-dp-mapping")
    if layout.tp > 1 and options.stack.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.cp > 1:
        flags.append(f"--cp-comm-type {names['context strategy']}")
    if model.experts:
        flags += [
            f"--expert-model-parallel-size {layout.ep}",
            f"--expert-tensor-parallel-size {layout.etp}",
            "--moe-token-dispatcher-type alltoall",
        ]
    flags += _megatron_zero(choice) + _megatron_recompute(choice, max(stage_layers))
    flags += _megatron_offload(model, choice)
    return "\n".join(flag for flag in flags if flag) + "\n"


def _titan_parts(stage_layers: Sequence[int]) -> str:
    """Modules of each stage: commas within one, spaces between them.

    >>> _titan_parts([1, 2])
    'tok_embeddings,layers.0 layers.1,layers.2,norm,lm_head'
    """
    parts, first = [], 0
    for layers in stage_layers:
        parts.append([f"layers.{layer}" for layer in range(first, first + layers)])
        first += layers
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return " ".join(",".join(part) for part in parts)


def _megatron_stages(stage_layers: Sequence[int]) -> str:
    """Embedding E, layers t and loss L, a bar between stages.

    >>> _megatron_stages([1, 2, 2, 2, 1])
    'Et|(t*2|)*3tL'
    """
    stages = [f"t*{layers}" if layers > 1 else "t" * layers for layers in stage_layers]
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[1:-1])]
    inner = "".join(f"({stage}|)*{times}" if times > 1 else f"{stage}|" for stage, times in runs)
    return f"E{stages[0]}|{inner}{stages[-1]}L"


def _megatron_zero(choice: Choice) -> list[str]:
    layout = choice.layout
    overlap = choice.options.stack.data_overlap and layout.zero_ranks > 1
    flags = ["--overlap-grad-reduce"] * overlap
    if layout.zero == 0:
        return flags
    flags = ["--use-distributed-optimizer", *flags, *["--overlap-param-gather"] * overlap]
    if layout.zero == 1:
        return flags
    shards = {2: "optim_grads", 3: "optim_grads_params"}[layout.zero]
    flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {shards}"]
    flags.append("--ckpt-format fsdp_dtensor")
    if layout.replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {layout.replicas}")
    return flags


def _megatron_recompute(choice: Choice, stage_layers: int) -> list[str]:
    setting = choice.options.recompute
    if setting == "none":
        return []
    if setting == "attention":
        return ["--recompute-granularity selective"]
    if modules := sorted(modules_of(setting)):
        named = f"--recompute-modules {' '.join(modules)}"
        return ["--recompute-granularity selective", named]
    full = ["--recompute-granularity full"]
    if setting == "full":
        return [*full, "--recompute-method uniform", "--recompute-num-layers 1"]
    layers = -(-stage_layers // int(setting.removeprefix("every-")))
    return [*full, "--recompute-method block", f"--recompute-num-layers {layers}"]


def _megatron_offload(model: ModelSpec, choice: Choice) -> list[str]:
    setting, flags = choice.options.offload, list[str]()
    if offloads_optimizer(setting):
        flags = ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0"]
        flags.append("--use-precision-aware-optimizer")  # which its CPU optimizer is a part of
    if offloads_activations(setting):
        flags.append(f"--cpu-offloading-num-layers {max(0, model.layers - KEPT_LAYERS)}")
    return flags


EXPORTS: dict[str, tuple[Program, Callable[[ModelSpec, Choice, Sequence[int]], str]]] = {
    "torchtitan": (_TORCHTITAN, to_torchtitan),
    "megatron": (_MEGATRON_LM, to_megatron),
}
"""By program: what it can do, and the function that writes its settings for a model, a choice and
the layers of each stage."""


def program_of(name: str, model: str) -> Program:
    """The program that settings are written for.

    Args:
        name: Of ``EXPORTS``.
        model: As ``spec.words.read_model`` takes it.

    Raises:
        SpecError: settings hold the model's sizes, and a part of its arithmetic is not read.
    """
    program, _ = EXPORTS[name]
    if program is _MEGATRON_LM and (unread := unread_of(model)):
        raise SpecError(
            f"{unread[0]} is not read, and without it Megatron-LM would train another model. Plan "
            f"without export, and take the model's own flags from its authors."
        )
    return program
