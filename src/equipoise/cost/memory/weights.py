"""The weights that one rank holds, by the groups in which ``fully_shard`` moves them.

What it decides
    A layer is one group, its experts another one where ranks share them; both tables and the last
    norm are one. ZeRO shards each over the ranks that hold the same weights: dp x cp over the
    copies, or edp for experts.

    Under ZeRO 3 a group so small that a rank would wait for the meeting longer than for its bytes
    is treated as under ZeRO 1: gathered once a step, its gradients summed once. In a pipeline
    there is no such group: what passes between other micro-batches is freed.

Kept true (tests/unit/cost/memory/test_weights.py)
    Groups of all stages, tensor and expert ranks hold every weight of the model, norms and copied
    heads once for each rank.

Sources
    Folding of experts: arXiv:2504.14960. Small weights kept whole: DeepSpeed's
    ``stage3_param_persistence_threshold``, 100,000 numbers of each weight by default.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.spec.layout import Layout
from equipoise.spec.model.heads import share_model
from equipoise.spec.model.presets import ModelSpec

SMALL_BYTES = 1 << 20
"""Gathered bytes at which a message takes as long to begin as to pass: two gloo ranks on one
machine took at least 0.30 ms to gather 0.74 MB and 0.90 ms for 4.2 MB, hence 0.17 ms and
0.17 ms/MB (Intel Xeon, 2 cores, torch 2.13, 2026-11-21). ``latency_s x bytes_per_s`` of links that
join GPUs (``spec.cluster.link``) is of the same size, 0.25 to 1.8 MB."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that are gathered and reduced together."""

    params: int
    """Weights of this rank, gathered."""
    owned: int
    """Those that it keeps and updates."""
    are_spread: bool = False
    """Experts that ranks share."""


def held_groups(
    model: ModelSpec, layout: Layout, layers: Sequence[int], embeds: bool, has_head: bool
) -> tuple[WeightGroup, list[WeightGroup]]:
    """Groups of a rank: the tables', which may be of nothing, and those of its layers.

    Args:
        model: The whole model.
        layout: Degrees, ZeRO stage and replicas.
        layers: Numbers of the layers that the rank holds.
        embeds: It holds the embedding.
        has_head: It holds last norm and head; a tied head's copy of the embedding, too.

    >>> from equipoise.spec.model.presets import preset
    >>> tables, layers = held_groups(preset("7m"), Layout(dp=2, zero=3), range(6), True, True)
    >>> tables.params + sum(each.params for each in layers) == preset("7m").params
    True
    """
    table = model.hidden * -(-model.vocab // layout.tp)
    heads = has_head and not (model.tied and embeds)
    words = table * (embeds + heads) + (model.hidden if has_head else 0)
    groups = []
    for layer in layers:
        sparse = model.is_sparse(layer)
        dense = _layer_params(model, layout, sparse=sparse)
        experts = _expert_params(model, layout) if sparse else 0
        if layout.ep * layout.etp == 1:
            groups.append(_group(dense + experts, layout))
            continue
        groups.append(_group(dense, layout))
        if experts:
            owned = experts if layout.zero == 0 else -(-experts // layout.edp)
            groups.append(WeightGroup(experts, owned, are_spread=True))
    return _group(words, layout), groups


def is_kept_whole(
    group: WeightGroup, *, width: int, zero: int, pp: int, small_bytes: int = SMALL_BYTES
) -> bool:
    """Whether a group of weights that ZeRO 3 would gather again and again stays for the step.

    Args:
        group: Of a rank; those of experts that ranks share never stay.
        width: Of a gathered weight [bytes].
        zero: ZeRO stage.
        pp: Degree of pipeline parallelism.
        small_bytes: The most that it may have, gathered [bytes].

    >>> groups = [WeightGroup(params, params // 2) for params in (184_320, 737_280)]
    >>> [is_kept_whole(group, width=4, zero=3, pp=1) for group in groups]
    [True, False]
    """
    is_small = group.params * width <= small_bytes
    return zero == 3 and pp == 1 and is_small and not group.are_spread


@dataclass(frozen=True, slots=True)
class HeldNumbers:
    """Numbers of one rank's weights at the fullest moment of its passes."""

    owned: int
    """Weights that it keeps and updates."""
    gathered: int
    """Weights in their gathered form."""
    gradients: int


def count_held(
    ends: Sequence[WeightGroup], layers: Sequence[WeightGroup], layout: Layout, *, width: int
) -> HeldNumbers:
    """What a rank holds of groups of weights beside activations.

    Args:
        ends: What is outside of layers, gathered through all passes.
        layers: Those of each layer.
        layout: Degrees and ZeRO stage.
        width: Of a gathered weight [bytes].

    >>> ends, layers = [WeightGroup(1 << 20, 1 << 19)], [WeightGroup(1 << 22, 1 << 21)] * 8
    >>> held = [count_held(ends, layers, Layout(dp=2, zero=zero), width=4) for zero in (1, 2, 3)]
    >>> [each.gathered >> 20 for each in held], [each.gradients >> 19 for each in held]
    ([33, 33, 5], [66, 33, 33])
    """
    groups = [*ends, *layers]
    owned, params = sum(each.owned for each in groups), sum(each.params for each in groups)
    if layout.zero <= 1:
        return HeldNumbers(owned, params, params)
    small = [
        group
        for group in groups
        if is_kept_whole(group, width=width, zero=layout.zero, pp=layout.pp)
    ]
    gathered = params
    if layout.zero == 3:
        moved = [group.params for group in layers if group not in small]
        stays = [group.params for group in layers if group in small]
        gathered = sum(each.params for each in ends) + sum(stays) + max(moved, default=0)
    return HeldNumbers(owned, gathered, owned + sum(each.params - each.owned for each in small))


def _group(params: int, layout: Layout) -> WeightGroup:
    return WeightGroup(params, -(-params // layout.shards))


def _layer_params(model: ModelSpec, layout: Layout, *, sparse: bool) -> int:
    """All but the experts of one layer; router and shared expert are whole on every rank."""
    share = share_model(model, layout.tp)
    biases = model.head_width * (share.heads + 2 * share.kv_heads) if model.qkv_bias else 0
    norms = 2 * model.hidden + (2 * model.head_width if model.qk_norm else 0)
    attention = model.hidden * model.head_width * (2 * share.heads + 2 * share.kv_heads)
    if not sparse:
        return attention + biases + norms + 3 * model.hidden * share.ffn
    router = model.hidden * (model.choices + (1 if model.shared_gate else 0))
    return attention + biases + norms + router + 3 * model.hidden * model.shared_ffn


def _expert_params(model: ModelSpec, layout: Layout) -> int:
    """What the rank that has most holds."""
    units = -(-model.expert_ffn // layout.etp)
    return -(-model.experts // layout.ep) * 3 * model.hidden * units
