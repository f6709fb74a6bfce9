"""Build one rank from a run's keys: the ranks it shares with, its layers, and what runs its steps.

Kept true (tests/multi/train/test_train.py and beside it a file for each axis)
    Trained weights equal those of one rank, whatever the layout.
"""

from pathlib import Path

from equipoise.balance.expert.routes import RouteTable, read_table
from equipoise.balance.packing.pack import StepPacker, make_packer
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.cost.curve import LoadCurve
from equipoise.cost.memory.weights import SMALL_BYTES
from equipoise.data.cache.store import TokenStore
from equipoise.data.mixture import Stream
from equipoise.fault.fingerprint import HeldState
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.read import load_hf
from equipoise.nn.modality.attach import make_encoders, take_encoders
from equipoise.nn.packed import PackedModel
from equipoise.observe.journal import EventSink
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.modality.shard import ShardedEncoders
from equipoise.parallel.overlap.parts import Parts
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.sim.settle.sharding import run_price
from equipoise.sim.stages import StagePlanner
from equipoise.spec.catalog import POLICIES
from equipoise.spec.modality.encoder import ENCODERS
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import LayoutSpec, RunSpec
from equipoise.train.context import ContextGroup
from equipoise.train.curves import Measured
from equipoise.train.health.own import OwnClock
from equipoise.train.health.state import StateWatch
from equipoise.train.modality.runner import ModalityRunner
from equipoise.train.pipeline import PipelineRunner, cut_part, initial_part
from equipoise.train.step import StepRunner
from equipoise.train.together import Partners
from equipoise.train.trained import choose_trained


def _parts(resolved: ResolvedFile) -> Parts:
    """In how many parts rows travel; one where ``auto`` has nothing to choose."""
    parts = resolved.spec.layout.parts
    return parts if parts != "auto" else resolved.part_machine or 1


def join_sharing(
    resolved: ResolvedFile, ranks: Ranks, curve: LoadCurve, stream: Stream
) -> ContextGroup | Partners:
    """The ranks with which this one shares micro-batches, or documents of them.

    Args:
        resolved: The run.
        ranks: All of them; each calls this.
        curve: Price of a document.
        stream: The run's, whose first step says what documents are like.

    Raises:
        LayoutError: the layout cannot run on these ranks, or this model.
    """
    spec = resolved.spec
    price = run_price(resolved.context_machine, spec, resolved.model)
    planner, stages = ContextPlanner(resolved.model, spec.layout, price), None
    if POLICIES[spec.pack.policy].runs_together:
        return Partners.join(ranks, planner)
    if spec.layout.pp > 1:
        first = stream.step(0, spec.pack.step_tokens)
        stages = StagePlanner.make(
            planner, curve, spec.train.recompute, first, resolved.stage_edges
        )
    return ContextGroup.join(ranks, planner, stages)


def build_packer(spec: RunSpec, ranks: int, curve: LoadCurve) -> StepPacker:
    """What packs the steps of a run on this number of ranks; every rank calls it.

    A later step may have fewer documents than the first, which ``require_step`` has seen: it must
    not end the run.
    """
    meets = spec.layout.of_ranks(ranks).meets_each_turn
    data_ranks = ranks // spec.layout.sharing
    return make_packer(spec.pack, data_ranks, curve, meets_each_turn=meets, idles=True)


def build_runner(
    resolved: ResolvedFile,
    ranks: Ranks,
    store: TokenStore,
    journal: EventSink,
    sharing: ContextGroup | Partners,
    *,
    whole: PackedModel | None = None,
    small_bytes: int = SMALL_BYTES,
    routes: RouteTable | None = None,
    folder: Path | None = None,
) -> StepRunner:
    """This rank's layers with their first weights, an optimizer, and what runs steps of them.

    Args:
        resolved: The run.
        ranks: All of them; each calls this.
        store: Tokens of the corpus.
        journal: This rank's.
        sharing: Those that it shares with.
        whole: The whole model with its weights, in any dtype; those that need a gradient are
            trained. The run's own unless given.
        small_bytes: As for ``parallel.apply.apply_axes`` [bytes].
        routes: Likewise; the run's own unless given.
        folder: Likewise; a temporary one unless given.
    """
    train, layout = resolved.spec.train, resolved.spec.layout
    stages, specs = _stages(sharing), resolved.spec.encoders
    encoders = None if whole is None else take_encoders(whole)
    if encoders is None and specs:
        encoders = make_encoders(specs, resolved.model.hidden, train.seed)
    if stages is not None:
        model: PackedModel = _first_part(resolved, stages, whole)
    else:
        model = first_model(resolved) if whole is None else whole
    if whole is None:
        choose_trained(model, resolved.spec, resolved.model)
    if routes is None and resolved.routes:
        routes = read_table(Path(resolved.routes))
    sharded = apply_axes(
        model.to(ranks.device),
        ranks,
        zero=layout.zero,
        precision=train.precision,
        mesh=_mesh(resolved, ranks, sharing),
        recompute=train.recompute,
        small_bytes=small_bytes,
        experts=resolved.spec.experts,
        parts=_parts(resolved),
        routes=routes,
        folder=folder,
    )
    modality, pipeline = None, None
    if encoders is not None:
        if not isinstance(sharing, ContextGroup):
            raise LayoutError(
                f'pack.policy = "{resolved.spec.pack.policy}" divides documents over ranks, which '
                f"is not proven with images or sound. Use by-work."
            )
        beside = ShardedEncoders(
            encoders.to(ranks.device),
            ranks,
            layout.of_ranks(ranks.world).of_encoders,
            small_bytes=small_bytes,
        )
        sharded.attach(ENCODERS, encoders)
        modality = ModalityRunner.of(beside, store, ranks, sharing, journal)
    if stages is not None:
        pipeline = PipelineRunner.join(
            sharded, *stages, store, ranks, journal, precision=train.precision
        )
    optimizer = make_adamw(sharded.decoder, train, sharded.tiers)
    tiers, meters = sharded.tiers, [sharded.meter, sharing.ledger.meter]
    meters += [] if tiers is None else [tiers.ledger.meter]
    meters += [] if pipeline is None else [pipeline.pipeline.ledger.meter]
    own = OwnClock(
        meters,
        is_metered=_is_metered(layout, ranks.device.type),
        has_processor=ranks.device.type == "cpu",
    )
    state = StateWatch(
        HeldState(
            sharded.decoder, optimizer, ranks.rank, beside=None if tiers is None else tiers.weights
        ),
        ranks,
        journal,
        every_steps=resolved.spec.fault.fingerprint_steps,
    )
    return StepRunner(
        sharded, optimizer, store, ranks, journal, sharing, pipeline, state, own, modality
    )


def _is_metered(layout: LayoutSpec, device: str) -> bool:
    """Whether every wait for another rank within a micro-batch is measured."""
    if device != "cpu":
        return layout.zero <= 1 and layout.sharing == 1 and layout.ep * layout.etp == 1
    return layout.tp * layout.ep * layout.etp == 1


def _stages(sharing: ContextGroup | Partners) -> tuple[ContextGroup, StagePlanner] | None:
    """The stages of a pipeline, and the ranks that have them."""
    if isinstance(sharing, ContextGroup) and sharing.stages is not None:
        return sharing, sharing.stages
    return None


def measured_model(resolved: ResolvedFile) -> Measured:
    """What a run's price curve is measured on, by its engine."""
    if resolved.spec.model.engine != "transformers":
        return None
    from equipoise.parallel.theirs.measure import TheirMeasured

    return TheirMeasured.read(Path(resolved.init_folder), resolved.model)


def first_model(resolved: ResolvedFile) -> PackedModel:
    """The whole model of a run, by its engine, with its first weights on the CPU.

    Raises:
        ModelError: the folder's model cannot be built, or would not be exact.
    """
    spec, folder = resolved.spec, resolved.init_folder
    if spec.model.engine == "transformers":
        # It takes seconds to import, and is an extra.
        from equipoise.parallel.theirs.build import build_theirs

        return build_theirs(
            Path(folder),
            resolved.model,
            seed=spec.train.seed,
            context_tokens=spec.pack.context_tokens,
        )
    whole = Decoder(resolved.model)
    if folder:
        load_hf(whole, Path(folder))
    else:
        initialize(whole, spec.train.seed)
    return whole


def _first_part(
    resolved: ResolvedFile, stages: tuple[ContextGroup, StagePlanner], whole: PackedModel | None
) -> Decoder:
    """The stages of this rank, with their weights."""
    if whole is None and not resolved.init_folder:
        return initial_part(*stages, resolved.spec.train.seed)
    whole = whole or first_model(resolved)
    if not isinstance(whole, Decoder):
        raise LayoutError(
            f"layout.pp = {resolved.spec.layout.pp} cuts a decoder into stages, and modules of "
            f"transformers cannot be cut. Set layout.pp = 1."
        )
    return cut_part(whole, *stages)


def _mesh(resolved: ResolvedFile, ranks: Ranks, sharing: ContextGroup | Partners) -> Mesh | None:
    """The groups of the layout, where weights are not sharded over all ranks alike."""
    if sharing.mesh is not None:
        return sharing.mesh
    layout = resolved.spec.layout
    is_whole = not resolved.spec.experts.memory_mib
    if max(layout.ep, layout.etp, layout.replicas) == 1 and is_whole:
        return None
    return Mesh.join(ranks, layout.of_ranks(ranks.world))
