"""The layout of a served model: which are legal, how experts lie, and which ranks communicate.

What it decides
    ``dp`` replicas of pp x cp x tp devices each. Tensor parallelism divides heads and widths,
    context parallelism the tokens of every sequence with their keys and values, a pipeline the
    layers. Experts lie whole on ``ep`` ranks of a replica and are divided by what is left of tp:
    up to ep = tp every rank has all tokens and computes those of its experts; beyond that tokens
    travel between the ranks that share sequences.

    Experts shared by several replicas would make them wait for each other in every layer; that is
    refused, as are words that only training knows.

Kept true (tests/unit/sim/serve/test_request.py)
    Each refusal has one sentence; groups that differ only in where a node ends are all priced.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.link import Op
from equipoise.sim.machine import Machine
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

Collective = Callable[[Op, float], float]
"""Seconds of an operation, from the bytes of the whole tensor."""


def served_layout(model: ModelSpec, machine: Machine, layout: Layout) -> Layout:
    """The layout with its experts divided as serving divides them.

    Raises:
        LayoutError: heads, layers or experts do not divide.
        SpecError: something that serving does not have, or that is not priced.
    """
    _require_priced(model, machine)
    for word, is_given in (("zero", layout.zero > 1), ("replicas", layout.replicas > 1)):
        if is_given:
            raise SpecError(
                f"layout: {word} divides what a training step keeps and changes nothing in "
                "serving. Leave it out."
            )
    heads, kv_heads, tp = model.heads, model.kv_heads, layout.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise LayoutError(
            f"{heads} query heads and {kv_heads} key/value heads do not divide over "
            f"tp = {tp}. Give a divisor of both."
        )
    if model.layers < layout.pp:
        raise LayoutError(
            f"{model.layers} layers are fewer than pp = {layout.pp} stages. Give a pp of "
            f"{model.layers} or less."
        )
    if not model.experts:
        if layout.ep * layout.etp > 1:
            raise SpecError(
                f"layout: ep x etp is {layout.ep} x {layout.etp}, and the model has no experts. "
                "Leave both out."
            )
        return layout
    return _with_experts(model, layout)


def _require_priced(model: ModelSpec, machine: Machine) -> None:
    if model.latent is not None:
        raise SpecError(
            "Latent attention is not priced in serving yet. Give a model with keys and values of "
            "their own."
        )
    if len(machine.cluster.classes) > 1:
        raise SpecError(
            f"{machine.cluster.name} has {len(machine.cluster.classes)} classes of nodes, and "
            "serving is priced on one. Give a cluster of equal nodes."
        )


def _with_experts(model: ModelSpec, layout: Layout) -> Layout:
    tp, ep, ranks = layout.tp, layout.ep, layout.tp * layout.cp
    if ep > ranks:
        raise SpecError(
            f"layout: ep is {ep}, and a replica has tp x cp = {tp} x {layout.cp} ranks. Replicas "
            "that share experts wait for each other in every layer, which is not priced in "
            "serving. Give an ep that divides tp x cp."
        )
    if ranks % ep or (ep < tp and tp % ep) or (ep > tp and ep % tp):
        raise LayoutError(
            f"layout: ep = {ep} does not match tp x cp = {tp} x {layout.cp}. Give a divisor of tp, "
            "or tp times a divisor of cp."
        )
    if model.experts % ep:
        raise LayoutError(
            f"{model.experts} experts do not divide over ep = {ep}. Give a divisor of them."
        )
    etp = max(1, tp // ep)
    if layout.etp not in (1, etp):
        raise SpecError(
            f"layout: etp is {layout.etp}, and with tp = {tp} and ep = {ep} experts are divided by "
            f"{etp} in serving. Give etp={etp}, or leave it out."
        )
    if model.expert_ffn < etp:
        raise LayoutError(
            f"Experts of a width of {model.expert_ffn} do not divide over {etp} ranks. Give a "
            "higher ep."
        )
    return dataclasses.replace(layout, etp=etp)


def split_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage of a pipeline; the first ones get one more.

    >>> [len(each) for each in split_layers(11, 4)]
    [3, 3, 3, 2]
    """
    base, more = divmod(layers, stages)
    edges = [stage * base + min(stage, more) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def collective_of(machine: Machine, layout: Layout, axis: str, first: int) -> Collective:
    """Collectives along an axis, as slow as in the group that stands worst.

    Args:
        machine: Where the ranks stand.
        layout: All replicas.
        axis: An axis of attention, or ``ep``.
        first: Device on which rank 0 stands.
    """
    groups = layout.groups(axis) + first
    if machine.cluster.is_uniform:
        size = machine.cluster.classes[0].devices_per_node
        alike = np.column_stack([groups[:, :1] % size, groups - groups[:, :1]])
        _, kept = np.unique(alike, axis=0, return_index=True)
        groups = groups[kept]
    priced = [machine.collective(tuple(group)) for group in groups.tolist()]
    return lambda op, size_bytes: max(each(op, size_bytes) for each in priced)


def line_of(seconds: Callable[[float], float]) -> tuple[float, float]:
    """Latency, and seconds a byte, of messages up to 64 MiB."""
    large = float(1 << 26)
    first_s = seconds(1.0)
    return first_s, max(0.0, seconds(large) - first_s) / large
