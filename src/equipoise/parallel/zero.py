"""Data parallelism with ZeRO 0 to 3, through ``fully_shard``.

What it decides
    ====  ==========================  ================================  =================
    zero  parameters                  gradients                         optimizer states
    ====  ==========================  ================================  =================
    0     whole                       summed once a step                whole
    1     whole during the step       summed and split once a step      split
    2     whole during the step       split after each micro-batch      split
    3     gathered layer by layer     split after each micro-batch      split
    ====  ==========================  ================================  =================

    Under 0 and 1 micro-batches are free of collectives, so ranks may differ in their number;
    the sum is triggered by one micro-batch of no tokens at the end, which also parts
    computing from communicating in the timeline. Under 2 and 3 every rank must run the same
    number, which every ``PackedStep`` has.

    Gradients are summed, never averaged: the loss of each rank is already divided by the
    global count of labels.

Kept true (tests/multi/test_check.py, tests/multi/test_train.py)
    Loss and every gradient equal one rank's, at every stage, tied and untied, also when a
    rank's micro-batch is empty.

Sources
    ZeRO: arXiv:1910.02054. torch's ``fully_shard``; gloo has no PREMUL_SUM, hence the forced
    sum reduction.
"""

import torch
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from equipoise.base.axes import REPLICATE_AXIS, SHARD_AXIS
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder
from equipoise.parallel.expert import spread_experts
from equipoise.parallel.tensor import split_weights


class ShardedDecoder:
    """A decoder on its data-parallel mesh, and the switches of its collectives."""

    def __init__(
        self,
        decoder: Decoder,
        ranks: Ranks,
        *,
        zero: int,
        precision: str,
        mesh: Mesh | None = None,
    ) -> None:
        self.decoder = decoder
        self.mesh = mesh
        self._device = ranks.device
        self.zero = zero
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        weights, data_axes = ranks.data_mesh(zero) if mesh is None else mesh.weights, None
        if mesh is not None:
            spread_experts(decoder, mesh, policy=policy)
        if mesh is not None and mesh.layout.tp > 1:
            split_weights(decoder, mesh)
            copied = REPLICATE_AXIS if REPLICATE_AXIS in (weights.mesh_dim_names or ()) else None
            data_axes = DataParallelMeshDims(shard=SHARD_AXIS, replicate=copied)
        for module in (*decoder.layers, decoder):
            fully_shard(
                module,
                mesh=weights,
                reshard_after_forward=zero == 3,
                mp_policy=policy,
                dp_mesh_dims=data_axes,
            )
        self._parts = [part for part in decoder.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    @property
    def sums_at_end(self) -> bool:
        """Gradients meet once, after all micro-batches."""
        return self.zero <= 1

    def prepare_micro_batch(self, *, last: bool) -> None:
        """Set what the next backward does with gradients and gathered parameters."""
        sync = last if self.sums_at_end else True
        for part in self._parts:
            part.set_requires_gradient_sync(sync, recurse=False)
            part.set_reshard_after_backward(last or self.zero == 3, recurse=False)

    def sum_gradients(self) -> None:
        """Run one micro-batch of no tokens, whose backward sums what the others left."""
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        self.prepare_micro_batch(last=True)
        self.decoder(empty, (), labels_T=empty).backward()
