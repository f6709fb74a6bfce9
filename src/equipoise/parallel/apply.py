"""Every axis of a layout, applied to a decoder in one order.

What it decides
    The order. Each row takes the decoder as the row above leaves it:

    ====  ===========  ==========================================  ==============================
    row   axis         what becomes of the decoder                 by
    ====  ===========  ==========================================  ==============================
    0     pp           the stages of this rank (the caller cuts)   ``pipeline.part.DecoderPart``
    1     ep, etp      its own experts stay; rows travel           ``expert.exchange``
                       by schedules, and copies of experts;        ``expert.obey``
                       weights perhaps in a file                   ``expert.tiers``
    2     tp           its share of every other weight stays       ``tensor.shard``
                       its tokens are those of its experts         ``expert.speculative``
    3     (recompute)  what each layer makes again in a backward   ``set_recompute``
    4     dp, cp       ZeRO shards what is left                    ``zero.shard``
    ====  ===========  ==========================================  ==============================

    Experts come first: they lie on axes of their own, and tensor parallelism passes over what is
    placed already. ZeRO comes last and flattens whatever the rank still has. Context parallelism
    changes no weight: attention over its ranks arrives with each micro-batch.

Kept true (tests/multi/check/test_layout.py, tests/multi/parallel/test_pipeline_experts.py)
    Loss and every gradient of any axes together equal one rank's.
"""

from pathlib import Path

from equipoise.balance.expert.policies import SPECULATIVE
from equipoise.balance.expert.routes import RouteTable
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.cost.memory.weights import SMALL_BYTES
from equipoise.nn.decoder import Decoder
from equipoise.nn.packed import PackedModel
from equipoise.nn.project import FP8
from equipoise.numerics.fp8 import require_fp8
from equipoise.parallel.expert.exchange import spread_experts
from equipoise.parallel.expert.obey import balance_experts, make_tiers
from equipoise.parallel.expert.speculative import place_by_routes
from equipoise.parallel.overlap.parts import Parts
from equipoise.parallel.tensor.shard import split_weights
from equipoise.parallel.zero.shard import ShardedDecoder, mixed_precision
from equipoise.spec.run.spec import ExpertsSpec, Recompute


def apply_axes(
    decoder: PackedModel,
    ranks: Ranks,
    *,
    zero: int,
    precision: str,
    mesh: Mesh | None = None,
    recompute: Recompute = "none",
    small_bytes: int = SMALL_BYTES,
    experts: ExpertsSpec | None = None,
    parts: Parts = 1,
    routes: RouteTable | None = None,
    folder: Path | None = None,
) -> ShardedDecoder:
    """Divide a decoder over the ranks of a layout; every rank calls it.

    Args:
        decoder: Whole, or some stages of a pipeline; with the same weights on every rank.
        ranks: All of them.
        zero: ZeRO stage.
        precision: ``fp32``, or ``bf16`` with fp32 master weights and sums; ``fp8`` is ``bf16`` with
            float8 products in dense layers.
        mesh: Groups of the layout; without one all ranks share the data alone.
        recompute: What layers make again in the backward.
        small_bytes: Groups of weights up to this size, gathered, stay whole for the step under
            ZeRO 3; 0 gathers every group each time [bytes].
        experts: Which ranks compute which experts' rows; each its own unless given.
        parts: In how many rows of tensor-parallel feed-forwards, and of experts, travel; or by
            what to choose.
        routes: Where tokens lie whose experts are speculated on.
        folder: For experts that have no memory; a temporary one unless given.

    Raises:
        LayoutError: the model does not divide over tp, ep or etp, or not as ``experts`` says; or it
            or the layout has no float8 products.
    """
    if precision == "fp8":
        _multiply_fp8(decoder, ranks, mesh)
    tiers = None
    if mesh is not None:
        policy, wish = mixed_precision(precision), experts or ExpertsSpec()
        tiers = make_tiers(decoder, mesh, wish, policy=policy, folder=folder)
        if isinstance(decoder, Decoder):  # no other has experts on several ranks
            turns = wish.policy != SPECULATIVE  # a table knows one rank for a token
            spread_experts(decoder, mesh, policy=policy, tiers=tiers, turns=turns)
        balance_experts(decoder, wish, parts=parts)
        if mesh.layout.tp > 1 and isinstance(decoder, Decoder):  # ZeRO refuses any other
            split_weights(decoder, mesh, parts=parts)
            if routes is not None:
                place_by_routes(decoder, mesh, routes)
    decoder.set_recompute(recompute)
    sharded = ShardedDecoder(
        decoder, ranks, zero=zero, precision=precision, mesh=mesh, small_bytes=small_bytes
    )
    sharded.tiers = tiers
    return sharded


def _multiply_fp8(decoder: PackedModel, ranks: Ranks, mesh: Mesh | None) -> None:
    """Give the dense layers float8 products.

    Raises:
        LayoutError: the layout or the model has none that are proven, or this device has none.
    """
    divided = {} if mesh is None else {"tp": mesh.layout.tp, "pp": mesh.layout.pp}
    for axis, count in divided.items():
        if count > 1:
            raise LayoutError(f"float8 products are not proven with {axis} = {count}. Use bf16.")
    if not isinstance(decoder, Decoder) or decoder.model.experts:
        raise LayoutError("float8 products are proven in dense decoders of this package. Use bf16.")
    require_fp8(ranks.device)
    decoder.set_products(FP8)
