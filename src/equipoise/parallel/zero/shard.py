"""Data parallelism with ZeRO 0 to 3, through ``fully_shard``: the last axis that is applied.

What it decides
    ====  ==========================  ================================  =================
    zero  parameters                  gradients                         optimizer states
    ====  ==========================  ================================  =================
    0     whole                       summed once a step                whole
    1     whole during the step       summed and split once a step      split
    2     whole during the step       split after each micro-batch      split
    3     gathered layer by layer     split after each micro-batch      split
    ====  ==========================  ================================  =================

    Under 3 the forward leaves gathered what its backward begins with: the last layer, and the
    tables. Groups of weights so small that meeting takes longer than their bytes
    (``cost.memory.weights.is_kept_whole``) are treated as under 1.

    Under 0 and 1 micro-batches are free of collectives, so ranks may differ in their number;
    the sum is triggered by one micro-batch of no tokens at the end, which also parts
    computing from communicating in the timeline. Under 2 and 3 every rank must run the same
    number, which every ``PackedStep`` has.

    Gradients are summed, never averaged: the loss of each rank is already divided by the
    global count of labels.

Kept true (tests/multi/check/test_check.py, tests/multi/train/test_train.py,
tests/multi/parallel/test_zero.py)
    Loss and every gradient equal one rank's, at every stage, tied and untied, also when a
    rank's micro-batch is empty.

Sources
    ZeRO: arXiv:1910.02054. torch's ``fully_shard``; gloo has no PREMUL_SUM, hence the forced
    sum reduction.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from equipoise.base.axes import REPLICATE_AXIS, SHARD_AXIS
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.comm.meter import WaitMeter
from equipoise.cost.memory.weights import SMALL_BYTES, WeightGroup, is_kept_whole
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.nn.packed import PackedModel
from equipoise.parallel.expert.tiers import ExpertTiers
from equipoise.parallel.zero.exchange import ExchangeGather, ExchangeReduce, NotePart
from equipoise.spec.layout import Layout


class ShardedParts:
    """Parts of a model that are gathered and reduced each by itself, and their switches."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        zero: int,
        policy: MixedPrecisionPolicy,
        small_bytes: int,
        meter: WaitMeter | None = None,
        note: NotePart = lambda *_: None,
    ) -> None:
        """Begin with none.

        Args:
            ranks: All of them.
            zero: ZeRO stage.
            policy: In which dtypes weights are gathered and gradients summed.
            small_bytes: The most that a group of weights has, gathered, which ZeRO 3 keeps for the
                step.
            meter: Of what this rank waits in gathers and sums of weights, on a CPU.
            note: Counts what it sends in them, on a CPU.
        """
        self.zero, self.small_bytes = zero, small_bytes
        self.meter = meter or WaitMeter()
        """What this rank waits in gathers and sums of weights, on a CPU."""
        self._device, self._policy, self._note = ranks.device, policy, note
        self._small: set[nn.Module | FSDPModule] = set()
        self._parts: list[FSDPModule] = []

    @property
    def sums_at_end(self) -> bool:
        """Gradients meet once, after all micro-batches."""
        return self.zero <= 1

    def prepare_micro_batch(self, *, last: bool) -> None:
        """Set what the next backward does with gradients and gathered parameters."""
        for part in self._parts:
            at_end = self.sums_at_end or part in self._small
            part.set_requires_gradient_sync(last or not at_end, recurse=False)
            frees = self.zero == 3 and part not in self._small
            part.set_reshard_after_backward(last or frees, recurse=False)

    def free_gathered(self) -> None:
        """Keep only this rank's shards, after forwards that no backward followed."""
        for part in self._parts:
            part.reshard()

    def _shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        stays: bool = False,
        pp: int = 1,
        data_axes: DataParallelMeshDims | None = None,
        elsewhere: Collection[nn.Parameter] = (),
    ) -> None:
        """Shard what no part of the module has been given before.

        Args:
            module: Gathered and reduced by itself.
            mesh: Of the ranks that hold these weights alike.
            stays: Whether its backward begins with what its forward has just ended with.
            pp: Degree of pipeline parallelism.
            data_axes: Which axes of the mesh ZeRO may use; all unless given.
            elsewhere: Weights that others hold.
        """
        own = WeightGroup(_count_own(module, elsewhere), 0)
        width = 4 if self._policy.param_dtype is None else self._policy.param_dtype.itemsize
        if is_kept_whole(own, width=width, zero=self.zero, pp=pp, small_bytes=self.small_bytes):
            self._small.add(module)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.zero == 3 and not stays and module not in self._small,
            mp_policy=self._policy,
            dp_mesh_dims=data_axes,
            ignored_params=set(elsewhere),
        )

    def _switch(self, root: nn.Module) -> None:
        """Take over the collectives of a module's parts: sums instead of means, counted waits."""
        parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if self._device.type == "cpu":
                part.set_custom_all_gather(ExchangeGather(self.meter, self._note))
                part.set_custom_reduce_scatter(ExchangeReduce(self.meter, self._note))
        self._parts += parts


class ShardedDecoder(ShardedParts):
    """A decoder on its data-parallel mesh, and the switches of its collectives."""

    def __init__(
        self,
        decoder: PackedModel,
        ranks: Ranks,
        *,
        zero: int,
        precision: str,
        mesh: Mesh | None = None,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """Shard the decoder's weights over the ranks that hold them alike.

        Args:
            decoder: As ``parallel.apply`` leaves it: whole, or some stages of a pipeline; experts
                and tensors divided already.
            ranks: All of them; each calls this.
            zero: ZeRO stage.
            precision: ``fp32``; ``bf16`` or ``fp8`` with fp32 master weights and sums.
            mesh: Groups of the layout; without one all ranks share the data alone.
            small_bytes: The most that a group of weights has, gathered, which ZeRO 3 keeps for the
                step; 0 has every group gathered each time.

        Raises:
            LayoutError: the mesh has ranks that share weights or experts, and these are whole.
        """
        if mesh is not None:
            _require_divided(decoder, mesh.layout)
        policy = mixed_precision(precision)
        super().__init__(ranks, zero=zero, policy=policy, small_bytes=small_bytes)
        self.decoder = decoder
        self.trains = any(weight.requires_grad for weight in decoder.parameters())
        """Whether anything of the decoder is trained, and not only of what is attached to it."""
        self.mesh = mesh
        self.tiers: ExpertTiers | None = None
        """Experts that have no memory, if there are any."""
        weights, data_axes = ranks.data_mesh(zero) if mesh is None else mesh.weights, None
        if mesh is not None and mesh.layout.tp > 1:
            copied = REPLICATE_AXIS if REPLICATE_AXIS in (weights.mesh_dim_names or ()) else None
            data_axes = DataParallelMeshDims(shard=SHARD_AXIS, replicate=copied)
        pp = 1 if mesh is None else mesh.layout.pp
        elsewhere = _elsewhere(decoder)
        for module in (*decoder.stack, decoder):
            self._shard(
                module,
                weights,
                stays=_turns_back(decoder, module, pp),
                pp=pp,
                data_axes=data_axes,
                elsewhere=elsewhere,
            )
        self._switch(decoder)

    def attach(self, name: str, module: nn.Module) -> None:
        """Add a module that runs, and is sharded, by itself; before anything has run.

        Its weights are then among the decoder's to optimizers and checkpoints. ``fully_shard``
        finds the parts of a model when that first runs, so the decoder's are found here: this
        module's among them would be freed and reduced in the decoder's backwards.
        """
        if isinstance(self.decoder, FSDPModule):
            self.decoder._get_fsdp_state()._lazy_init()
        self.decoder.add_module(name, module)

    def loading(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """A block in which all weights and moments are in memory, to be filled."""
        return nullcontext() if self.tiers is None else self.tiers.loading(optimizer)

    def sum_gradients(self) -> None:
        """Run one micro-batch of no tokens, whose backward sums what the others left."""
        if not self.trains:
            self.free_gathered()
            return
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        self.prepare_micro_batch(last=True)
        self.decoder(empty, (), labels_T=empty).backward()


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """In which dtypes weights are gathered and gradients summed.

    Args:
        precision: ``fp32``; ``bf16`` or ``fp8``, which gather in bf16 and sum in fp32.
    """
    if precision in ("bf16", "fp8"):
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _require_divided(decoder: PackedModel, layout: Layout) -> None:
    is_split = isinstance(decoder, Decoder) and decoder.tensor.ranks > 1
    whole = {} if is_split else {"tp": layout.tp}
    layers = [each for each in decoder.modules() if isinstance(each, MixtureOfExperts)]
    if any(layer.exchange is None for layer in layers):
        whole |= {"ep": layout.ep, "etp": layout.etp}
    degrees = [f"{axis} = {ranks}" for axis, ranks in whole.items() if ranks > 1]
    if degrees:
        raise LayoutError(
            f"The layout has {', '.join(degrees)}, and the decoder is whole. Divide it with "
            f"parallel.apply.apply_axes, which applies ZeRO last."
        )


def _elsewhere(decoder: nn.Module) -> set[nn.Parameter]:
    """Weights of experts that lie in a file (``expert.tiers``)."""
    layers = [each for each in decoder.modules() if isinstance(each, MixtureOfExperts)]
    held = [each.experts for each in layers if each.experts.elsewhere is not None]
    return {weight for experts in held for weight in experts.parameters()}


def _count_own(module: nn.Module, elsewhere: Collection[nn.Parameter]) -> int:
    """Weights of this rank that no part of the module has been given before."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    given = {weight for part in parts for weight in part.parameters()} | set(elsewhere)
    own = [weight for weight in module.parameters() if weight not in given]
    return sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in own)


def _turns_back(decoder: PackedModel, module: nn.Module, pp: int) -> bool:
    """Whether a backward begins with what its forward has just ended with.

    The tables, which the forward gathers first and its loss reads last, and the last layer. In a
    pipeline other micro-batches come between.
    """
    return pp == 1 and (module is decoder or module is decoder.stack[-1])
