"""Memory of one device that serves: weights, activations, and what is left for keys and values.

What it decides
    Nine tenths of the device's memory are filled. Activations are those of the largest iteration:
    in a layer, the residual with its norm, queries, keys and values with their output, and the
    feed-forward's widths; behind the last layer fp32 logits, and as much again for sampling. Both
    are never live at once.

    A layer whose window is short keeps that many tokens of each sequence that may run at once, and
    no more of longer ones. Where windows are as long as usual sequences, layers count as if they
    kept and read all.

Kept true (tests/unit/sim/serve/test_memory.py)
    Weights of all devices of a replica add up to the model's; each axis divides what it says.

Sources
    Share of memory: vLLM's default ``gpu_memory_utilization``.
"""

from dataclasses import dataclass

from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

MEMORY_SHARE = 0.9
"""The share of a device's memory that is filled."""

_LONG_TOKENS = 4096
"""Windows from which on layers count as if they kept and read all."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """One device of one stage."""

    weights_bytes: float
    activation_bytes: float
    kv_token_bytes: float
    """Keys and values of one token of a sequence, in layers that keep all."""
    window_bytes: float = 0.0
    """Keys and values in layers with a window, of the most sequences."""


def windowed_layers(model: ModelSpec, layers: int) -> float:
    """How many of these layers, of the mean kind, keep and read a window of each sequence.

    >>> from equipoise.spec.model.presets import PLANNED
    >>> windowed_layers(PLANNED["gpt-oss-120b"], 9), windowed_layers(PLANNED["llama3-8b"], 9)
    (4.5, 0.0)
    """
    if model.window is None or model.window.tokens >= _LONG_TOKENS:
        return 0.0
    return min(layers - 1, layers * model.window.share)  # what fills the pool grows with tokens


def stage_memory(
    model: ModelSpec,
    layout: Layout,
    layers: range,
    *,
    iteration_tokens: int,
    sequences: int,
    width: int,
    weight_width: int,
) -> ServingMemory:
    """What a device of a stage holds.

    Args:
        model: Sizes.
        layout: Degrees; etp as ``served_layout`` says.
        layers: The stage's layers.
        iteration_tokens: Most prompt tokens of an iteration.
        sequences: Most sequences of one.
        width: Bytes of an activation, and of an element of the cache.
        weight_width: Bytes of a weight.
    """
    tp = layout.tp
    weights = 0.0
    for layer in layers:
        is_sparse = model.is_sparse(layer)
        whole = model.count_layer(sparse=is_sparse, active=False)
        experts = model.experts * model.expert_params if is_sparse else 0
        weights += (whole - experts) / tp + experts / (layout.ep * layout.etp)
        weights += 2 * model.hidden
    is_first, is_last = layers.start == 0, layers.stop == model.layers
    tables = is_first + is_last - (is_first and is_last and model.tied)
    weights += tables * model.hidden * model.vocab / tp
    token = 2.0 * max(1.0, model.kv_heads / tp) * model.head_width * width / layout.cp
    windowed = windowed_layers(model, len(layers))
    kept = sequences * model.window.tokens if model.window is not None else 0
    return ServingMemory(
        weights * weight_width,
        _activation_bytes(model, layout, layers, iteration_tokens, sequences, width),
        token * (len(layers) - windowed),
        token * windowed * kept,
    )


def _activation_bytes(
    model: ModelSpec,
    layout: Layout,
    layers: range,
    iteration_tokens: int,
    sequences: int,
    width: int,
) -> float:
    rows = -(-(iteration_tokens + sequences) // layout.cp)
    heads, kv_heads = model.heads / layout.tp, max(1.0, model.kv_heads / layout.tp)
    attention = 2 * (heads + kv_heads) * model.head_width
    forwards = [0.0]
    for is_sparse in {model.is_sparse(layer) for layer in layers}:
        if is_sparse:
            share = model.mean_top_k / min(layout.ep, layout.tp)
            expert = 2 * model.hidden + model.products * model.expert_ffn / layout.etp
            forwards.append(share * expert + model.products * model.shared_ffn / layout.tp)
        else:
            forwards.append(model.products * model.ffn / layout.tp)
    layer_bytes = rows * width * (2 * model.hidden + max(attention, *forwards))
    logits_bytes = 0.0
    if layers.stop == model.layers:
        logits_bytes = 2.0 * 4 * -(-sequences // layout.cp) * model.vocab / layout.tp
    return max(layer_bytes, rows * width * model.hidden + logits_bytes)
