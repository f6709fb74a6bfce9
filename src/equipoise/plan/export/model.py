"""A model as flags of Megatron-LM: sizes, and what decides how many weights and products it has.

What it decides
    Nothing: each field of a model has its flag. A feed-forward with a gate stands for its family:
    norms by root mean square, rotary positions, no biases; without one it is GPT's, which is what
    Megatron-LM makes by itself.

Kept true (tests/unit/plan/export/test_settings.py)
    Flags of a dense model, one with experts and one with latent attention are all read back.

Sources
    Megatron-LM with core 0.19.2: megatron/training/arguments.py,
    megatron/core/transformer/transformer_config.py.
"""

from itertools import groupby

from equipoise.base.errors import SpecError
from equipoise.spec.model.presets import ModelSpec


def megatron_model(model: ModelSpec, context_tokens: int) -> list[str]:
    """Flags of a model with windows of ``context_tokens``.

    Raises:
        SpecError: Megatron-LM has no such layer.
    """
    if model.identity_experts:
        raise SpecError(
            f"Megatron-LM has no experts without weights, and this model has "
            f"{model.identity_experts} in each sparse layer. Export a model without "
            f"identity_experts."
        )
    if model.shortcut:
        raise SpecError(
            "Megatron-LM has no experts that read what attention of their layer reads. Export a "
            "model without shortcut."
        )
    if model.window is not None or model.has_sinks:
        raise SpecError(
            "Flags of layers with a window and of attention with sinks are not known here, and "
            "without them Megatron-LM would train another model. Export a model without both."
        )
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
        f"--ffn-hidden-size {model.ffn}",
        f"--vocab-size {model.vocab}",
        f"--seq-length {context_tokens}",
        f"--max-position-embeddings {context_tokens}",
    ]
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if model.gated:
        flags += ["--swiglu", "--disable-bias-linear", "--normalization RMSNorm"]
        flags += [f"--norm-epsilon {model.norm_eps:g}", "--position-embedding-type rope"]
        flags.append(f"--rotary-base {model.rope_theta:.0f}")
    if model.rope_scaling is not None:
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {model.rope_scaling.factor:g}"]
    if model.qkv_bias:
        flags.append("--add-qkv-bias")
    if model.qk_norm:
        flags.append("--qk-layernorm")
    return flags + _attention(model) + (_experts(model) if model.experts else [])


def _attention(model: ModelSpec) -> list[str]:
    latent = model.latent
    if latent is not None:
        return [
            "--multi-latent-attention",
            *([f"--q-lora-rank {latent.query}"] if latent.query else []),
            f"--kv-lora-rank {latent.key_value}",
            f"--qk-head-dim {model.head_width}",
            f"--qk-pos-emb-head-dim {latent.rope}",
            f"--v-head-dim {model.head_width}",
        ]
    flags = []
    if model.head_width * model.heads != model.hidden:
        flags.append(f"--kv-channels {model.head_width}")
    if model.kv_heads != model.heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    return flags


def _experts(model: ModelSpec) -> list[str]:
    flags = [
        f"--num-experts {model.experts}",
        f"--moe-router-topk {model.top_k}",
        f"--moe-ffn-hidden-size {model.expert_ffn}",
    ]
    if model.sparse_layers < model.layers:
        kinds = [int(model.is_sparse(layer)) for layer in range(model.layers)]
        runs = [f"[{kind}]*{len(list(run))}" for kind, run in groupby(kinds)]
        flags.append(f'--moe-layer-freq "{"+".join(runs)}"')
    if model.shared_ffn:
        flags.append(f"--moe-shared-expert-intermediate-size {model.shared_ffn}")
    if model.shared_gate:
        flags.append("--moe-shared-expert-gate")
    if model.capacity_factor:
        flags.append(f"--moe-expert-capacity-factor {model.capacity_factor:g}")
    return flags
