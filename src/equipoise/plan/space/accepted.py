"""Which runs ``equipoise train`` begins: what layout, model and packing must have in common.

Why
    A plan that train refuses is useless, and a run that cannot work should end before a token is
    made or a rank started. So both ask here.

What it decides
    Degrees make up the ranks and divide the model, each stage has a layer, experts fold and their
    policy can be obeyed, and the packer's documents are divided in at most one way. What a
    pipeline's schedule refuses, it says itself, of a step of like prices: the schedule is written
    as ranks would write it. ``require_step`` asks the packer and the schedule about the documents
    of the first step.

Kept true (tests/unit/cli/test_verbs.py, tests/unit/plan/space/test_trainable.py)
    Every choice of a plan and of a measured search is accepted.
"""

from collections.abc import Sequence

from equipoise.balance.expert.policies import require_balanced
from equipoise.balance.packing.pack import make_packer
from equipoise.balance.packing.turns import require_policy
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.data.mixture import Mixture, open_stream
from equipoise.data.stream import tell_apart
from equipoise.schedule.expert.prefetch import FP32_BYTES, SliceBytes
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.sim.stages import ranks_of_stages, units_of
from equipoise.spec.catalog import POLICIES
from equipoise.spec.model.experts import split_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import LayoutSpec, RunSpec


def require_accepted(spec: RunSpec, model: ModelSpec, ranks: int) -> None:
    """Refuse what no ranks can run.

    Args:
        spec: All keys.
        model: Sizes.
        ranks: Ranks of the run.

    Raises:
        LayoutError: names the keys that do not go together.
    """
    layout = spec.layout
    require_policy(spec.pack.policy, context=layout.cp, pipeline=layout.pp)
    layout.of_ranks(ranks).require_model(model)
    if layout.stages > model.layers:
        raise LayoutError(
            f"{model.layers} layers cannot fill the {layout.stages} stages of "
            f"layout.pp = {layout.pp} ranks with {layout.stages // layout.pp} "
            f'stages each. Lower layout.pp, or set layout.schedule = "1f1b", which has one '
            f"stage a rank."
        )
    if max(layout.ep, layout.etp) > 1:
        split_experts(model.experts, ranks=layout.ep)
    if model.experts:
        require_balanced(
            spec.experts, model.experts, ep=layout.ep, etp=layout.etp, tp=layout.tp, pp=layout.pp
        )
    if spec.experts.memory_mib and model.experts:
        capacity = int(spec.experts.memory_mib * 2**20)
        file_of_experts(spec, model, ranks).require(capacity, layers=model.sparse_layers)
    # As many micro-batches as every schedule can run, two of them slices of a document where
    # the policy makes such.
    batches = 2 * layout.pp
    first = 2 if POLICIES[spec.pack.policy].needs_pipeline else 1
    units = [(0, first), *((at, at + 1) for at in range(first, batches))]
    _require_schedule(layout, batches, units)


def file_of_experts(spec: RunSpec, model: ModelSpec, ranks: int) -> SliceBytes:
    """What a sparse layer takes on a rank where ``experts.memory_mib`` puts experts in a file.

    Raises:
        LayoutError: a rank would have no expert.
    """
    width = FP32_BYTES if spec.train.precision == "fp32" else FP32_BYTES // 2
    return SliceBytes.of_model(model, ranks=ranks, ep=spec.layout.ep, gather_bytes=width)


def require_step(
    spec: RunSpec,
    model: ModelSpec,
    ranks: int,
    doc_tokens: Ints,
    mixture: Mixture | None = None,
) -> None:
    """Refuse what no ranks can do with the first step of a corpus.

    Args:
        spec: All keys, accepted.
        model: Sizes.
        ranks: Ranks of the run.
        doc_tokens: Length of each document of the corpus, int64 [documents].
        mixture: How they are mixed, if they are of several sources.

    Raises:
        LayoutError: fewer documents than ranks want, or micro-batches than the schedule wants; a
            document that is too long.
        DataError: a length is not a positive number.
    """
    pack, layout = spec.pack, spec.layout
    stream = open_stream(
        doc_tokens,
        seed=spec.train.seed,
        context_tokens=pack.context_tokens,
        mixture=mixture,
        whole=spec.data.whole,
    )
    data_ranks = ranks // layout.sharing
    meets = layout.of_ranks(ranks).meets_each_turn
    packer = make_packer(pack, data_ranks, counted_curve(model), meets_each_turn=meets)
    pieces = stream.step(0, pack.step_tokens)
    if POLICIES[pack.policy].divides:
        pieces = tell_apart(pieces, len(doc_tokens))
    packed = packer.step(pieces)
    for turns in packed.ranks:
        _require_schedule(layout, len(turns), units_of(turns))


def _require_schedule(
    layout: LayoutSpec, micro_batches: int, units: Sequence[tuple[int, int]]
) -> None:
    """Ask the schedule whether it runs such a step."""
    if layout.pp == 1 or not micro_batches:
        return
    ranks_of_stages(layout)
    prices = make_prices(1, 1, 1, stages=layout.stages, micro_batches=micro_batches)
    try:
        write_pipeline(layout.schedule, prices, ranks=layout.pp, units=units, skip=layout.skip)
    except LayoutError as error:
        virtual = "" if layout.virtual is None else f", layout.virtual = {layout.virtual}"
        raise LayoutError(
            f'layout.schedule = "{layout.schedule}", layout.pp = {layout.pp}{virtual}: {error}'
        ) from None
