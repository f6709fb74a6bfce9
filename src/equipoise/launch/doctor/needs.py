"""What a run asks of each of its nodes, forecast before anything starts.

What it decides
    Nothing is read of the corpus, so encoders count with their weights, gradients and moments, and
    not with the images and sound that a step will have.

Kept true (tests/unit/cli/doctor/test_verb.py, tests/multi/train/test_fit.py)
    ``train`` refuses by the same figures as ``doctor``.
"""

import numpy as np

from equipoise.balance.expert.auto import most_held
from equipoise.base.errors import FitError
from equipoise.base.units import format_bytes
from equipoise.cost.memory.forecast import forecast_memory
from equipoise.cost.memory.share import StageShare, whole_model
from equipoise.cost.modality import encoder_params, held_bytes
from equipoise.launch.doctor.checks import count_group_files
from equipoise.launch.doctor.facts import MachineFacts, Needs
from equipoise.launch.forms import Nodes
from equipoise.schedule.expert.prefetch import SliceBytes
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.layout import Layout
from equipoise.spec.modality.trained import run_shares
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import RunSpec

LIBRARIES_BYTES = 300 << 20
"""Resident memory of a rank that has imported torch 2.13, before its first tensor."""


def needs_of(
    spec: RunSpec, model: ModelSpec, ranks: int, nodes: Nodes, cluster: ClusterSpec | None = None
) -> Needs:
    """What a run asks of each of its nodes.

    Args:
        spec: All keys.
        model: Sizes.
        ranks: All of them.
        nodes: What they stand on.
        cluster: Whose devices they compute on; None for the nodes themselves.
    """
    layout, shares = spec.layout.of_ranks(ranks), run_shares(spec, model)

    def trained(stage: StageShare | None) -> float:
        held = whole_model(model) if stage is None else stage
        ends = {"embeds": held.embeds, "has_head": held.has_head}
        return 1.0 if shares is None else shares.of_rank(model, held.layers, **ends)

    forecasts = [
        forecast_memory(
            model,
            layout,
            tokens=-(-spec.pack.most_tokens // layout.cp),
            precision=spec.train.precision,
            recompute=spec.train.recompute,
            stage=stage,
            trained=trained(stage),
        )
        for stage in _stages(model.layers, layout)
    ]
    fullest = max(forecasts, key=lambda each: each.total_bytes)
    encoded = [(each, np.zeros(0, dtype=np.int64)) for each in spec.encoders]
    encoders = held_bytes(encoded, model.hidden, layout.of_encoders, sent_rows=0, read_rows=0)
    # fp32 weights, and the optimizer's two moments of each that is trained.
    weights, moments = (
        sum(encoder_params(each, model.hidden, trained=only) for each in spec.encoders)
        for only in (False, True)
    )
    moments += round(model.params * trained(None))
    checkpoint_bytes = 4 * (model.params + weights) + 8 * moments
    copies = copy_bytes(spec, model, spec.experts.slots)
    filed = filed_bytes(spec, model, layout)
    on_device = cluster is not None and nodes.accelerator != "none"
    return Needs(
        ranks=nodes.ranks,
        nodes=nodes.count,
        accelerator=nodes.accelerator,
        # On the node itself also the rank's part of a checkpoint, copied while it is written.
        rank_bytes=fullest.total_bytes
        - filed
        + copies
        + encoders
        + (0 if on_device else LIBRARIES_BYTES + checkpoint_bytes // ranks),
        device_bytes=cluster.device.usable_bytes if cluster is not None and on_device else 0,
        checkpoint_bytes=checkpoint_bytes,
        kept_checkpoints=spec.checkpoint.keep,
        group_files=count_group_files(layout),
        is_pinned=spec.layout.pin,
        terms=fullest.terms
        | ({"copies": copies} if copies else {})
        | ({"experts in a file": -filed} if filed else {})
        | ({"encoders": encoders} if encoders else {}),
    )


def filed_bytes(spec: RunSpec, model: ModelSpec, layout: Layout) -> int:
    """Weights and moments of a rank's experts that lie in a file and not in memory [bytes]."""
    if not spec.experts.memory_mib:
        return 0
    ranks = layout.world // layout.pp
    sizes = SliceBytes.of_model(model, ranks=ranks, ep=layout.ep)
    every = model.sparse_layers * (sizes.slice + sizes.moments)
    return max(0, every - int(spec.experts.memory_mib * 2**20))


_COPY_TIMES = 4
"""A copy's weights as they arrive and by matrix, and its gradients by matrix and as they leave."""


def copy_bytes(spec: RunSpec, model: ModelSpec, slots: int) -> int:
    """Most memory of a rank for copies of experts, of one layer at a time [bytes]."""
    layout, policy, one = spec.layout, spec.experts.policy, _one_copy_bytes(spec, model)
    held = one * most_held(policy, experts=model.experts, ranks=layout.ep, slots=slots)
    if policy == "tutel":  # every unit too, as far as not here
        held += -(-model.experts // layout.ep) * (one - one // layout.etp)
    return held


def _one_copy_bytes(spec: RunSpec, model: ModelSpec) -> int:
    return _COPY_TIMES * (4 if spec.train.precision == "fp32" else 2) * model.expert_params


def require_slots(machine: MachineFacts, needs: Needs, spec: RunSpec, model: ModelSpec) -> None:
    """Refuse slots for copies of experts that memory does not hold, where it holds the rest.

    Raises:
        FitError: by how much, and how many fit.
    """
    held, least = (copy_bytes(spec, model, slots) for slots in (spec.experts.slots, 0))
    missing = needs.ranks * needs.rank_bytes - machine.memory_bytes
    room = needs.ranks * (held - least) - missing
    if held == least or missing <= 0 or room < 0:
        return
    fit = room // (needs.ranks * _one_copy_bytes(spec, model))
    raise FitError(
        f"experts.slots = {spec.experts.slots} needs {format_bytes(held)} for copies on each of "
        f"{needs.ranks} ranks, {format_bytes(missing)} more than is free here; {fit} "
        f"slot{'s fit' if fit != 1 else ' fits'}. Set experts.slots = {fit}."
    )


def _stages(layers: int, layout: Layout) -> list[StageShare | None]:
    """The first rank of a pipeline, with most in flight, and the last, with the head."""
    if layout.pp == 1:
        return [None]
    share = -(-layers // layout.pp)
    first = StageShare(tuple(range(share)), has_head=False, kept_micro_batches=float(layout.pp))
    last = StageShare(tuple(range(layers - share, layers)), embeds=False)
    return [first, last]
