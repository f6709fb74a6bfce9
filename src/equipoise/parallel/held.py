"""Which part of each weight a rank of a layout holds, without any rank of it.

Why
    What a layout needs of a checkpoint can be known before its ranks are started: where a weight
    goes follows from what its module declares, the layout, and the rank's coordinates.

What it decides
    Nothing: it repeats in numbers what ``parallel.apply`` does to modules, of a run whose experts
    are neither in a file nor speculated on: those do not turn by layer. Experts are split over ep,
    etp and edp; other weights over tp, as declared, and then over dp x cp, by rows; a rank of
    a pipeline has the weights of its stages.

Kept true (tests/multi/checkpoint/test_reshape.py)
    Boxes are those of the tensors that real ranks hold, whatever the layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from equipoise.nn.declare import Placement, Split, declared
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.nn.tensor import part_of
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.schedule.block import Box
from equipoise.spec.layout import Layout
from equipoise.spec.model.experts import turn_of
from equipoise.spec.plan import Stages


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """What a rank holds of a model."""

    boxes: Mapping[str, Box]
    """Its part of each weight, by name; a part may be empty."""
    buffers: frozenset[str]
    """Names of tensors that are not trained by gradients; it holds them whole."""


def held_weights(decoder: Decoder, layout: Layout, stages: Stages | None, rank: int) -> HeldWeights:
    """What a rank of a layout holds of a decoder.

    Args:
        decoder: The whole model; may be on the meta device.
        layout: Of all ranks.
        stages: Layers and ranks of the stages, if the layout has a pipeline.
        rank: Which rank.
    """
    places = layout.coordinates(rank)
    part: nn.Module = decoder
    if stages is not None:
        held = [stage for stage, at in enumerate(stages.ranks) if at == places["pp"]]
        part = DecoderPart(decoder, stages.edges, held)
    experts = _expert_dims(part) if layout.ep * layout.etp > 1 else {}
    placements = declared(part)
    shard = _shard_of(layout, places)
    boxes: dict[str, Box] = {}
    for name, weight in part.named_parameters():
        if name in experts:
            boxes[name] = _expert_box(weight, *experts[name], layout, places)
        else:
            boxes[name] = _box(weight, placements[name], layout.tp, places["tp"], shard)
    buffers = part.state_dict().keys() - boxes.keys()
    return HeldWeights(boxes, frozenset(buffers))


def _shard_of(layout: Layout, places: Mapping[str, int]) -> tuple[int, int]:
    """The ranks that a weight's rows are shared over, and this rank's number among them."""
    copies = layout.zero_ranks if layout.zero == 0 else layout.replicas
    shards = layout.zero_ranks // copies
    grid = layout.grid("pp", "tp", "dp", "cp")
    row = grid[places["pp"], places["tp"]].reshape(-1)
    mine = grid[places["pp"], places["tp"], places["dp"], places["cp"]]
    return shards, int(np.flatnonzero(row == mine)[0]) % shards


def _box(
    weight: torch.Tensor, placement: Placement, tp: int, tp_rank: int, shard: tuple[int, int]
) -> Box:
    box = [(0, length) for length in weight.shape]
    if tp > 1 and isinstance(placement, Split) and (placement.parts or tp) % tp == 0:
        box[placement.dim] = _narrow(box[placement.dim], tp, tp_rank)
    box[0] = _narrow(box[0], *shard)
    return box


def _expert_dims(part: nn.Module) -> dict[str, tuple[int, int]]:
    """The dim of each expert weight that ranks of etp share, and its sparse layer's number."""
    dims, layers = {}, 0
    for prefix, module in part.named_modules():
        if isinstance(module, MixtureOfExperts):
            for matrix, dim in (("gate", 1), ("up", 1), ("down", 2)):
                dims[f"{prefix}.experts.{matrix}.weight"] = dim, layers
            layers += 1
    return dims


def _expert_box(
    weight: torch.Tensor, dim: int, layer: int, layout: Layout, places: Mapping[str, int]
) -> Box:
    box = [(0, length) for length in weight.shape]
    turn = turn_of(layer, experts=weight.shape[0], ranks=layout.ep)
    box[dim] = _narrow(box[dim], layout.etp, places["etp"])
    box[0] = _narrow(box[0], layout.ep, (places["ep"] - turn) % layout.ep)
    if layout.zero:
        box[0] = _narrow(box[0], layout.edp, places["edp"])
    return box


def _narrow(span: tuple[int, int], ranks: int, rank: int) -> tuple[int, int]:
    """One rank's run of a span."""
    own = part_of(span[1] - span[0], ranks=ranks, rank=rank)
    return span[0] + own.start, span[0] + own.stop
