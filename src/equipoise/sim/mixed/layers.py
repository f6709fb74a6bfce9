"""Price a step whose layers are not all laid out alike.

Why
    One degree for all layers is a compromise: the first stage of a pipeline holds most and wants
    recomputation, the last one does not; a few layers that recompute may be all that a batch
    lacks. Where each layer has its own strategy, what its neighbours hand over must be moved.

What it decides
    A *strategy* is a layer's tensor, context and data degrees, its ZeRO stage and what it makes
    again, on the ranks of its stage. All layers share one micro-batch of the stage, whose
    sequences are divided over each layer's own data-parallel ranks. Stages hand over, and tables
    are held, as the *base* says, which is one strategy for all::

        base     tp=2 dp=4    |  layers  tp=2 dp=4   tp=2 dp=4   tp=4 dp=2  |  tp=2 dp=4 ...
        rank 0 holds           |  tokens  0-511       0-511       0-511      |

    With sequence parallelism rank r of a stage holds the r-th run of the micro-batch's tokens
    whatever tp and dp are, so between such layers nothing moves. Context ranks hold their
    sequences in other pieces: what changes its context degree passes an all-to-all between the
    ranks that have the same sequences, forward and backward.

Kept true (tests/unit/sim/mixed/test_layers.py)
    Layers that are all like the base price as ``sim.step`` does, in seconds and bytes.

Sources
    Strategies by layer, transformed between: Galvatron, arXiv:2211.13878, section 3.
"""

import dataclasses
import math
from dataclasses import dataclass

from equipoise.base.errors import LayoutError
from equipoise.cost.step.request import StepOptions
from equipoise.sim.machine import Machine
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """How one layer runs on the ranks of its stage."""

    layout: Layout
    """Its degrees; stages, experts and the order of ranks are the base's."""
    recompute: str = "none"
    context_strategy: str = "needed-kv"

    def options(self, layout: Layout, options: StepOptions) -> StepOptions:
        """Options of a step in which every layer is like this one."""
        return dataclasses.replace(
            options,
            micro_batch=options.micro_batch * layout.dp // self.layout.dp,
            recompute=self.recompute,
            context_strategy=self.context_strategy,
        )


def redistribute_s(
    machine: Machine, before: Layout, after: Layout, tokens: float, hidden: int
) -> float:
    """Move one micro-batch's activations from one layer's ranks to the next layer's [s].

    Args:
        machine: Links.
        before: Of the layer that made them.
        after: Of the layer that reads them, on the same ranks.
        tokens: That each rank holds, of all its stage's [tokens].
        hidden: The model's width.
    """
    if (before.tp, before.cp) == (after.tp, after.cp) or before.cp == after.cp == 1:
        return 0.0
    beside = math.lcm(before.tp * before.cp, after.tp * after.cp)
    ranks = before.groups("dp", "cp", "tp")[0][:beside]
    return machine.collective(tuple(ranks.tolist()))("all_to_all", tokens * hidden * 2)


def require_strategy(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    strategy: LayerStrategy,
    *,
    has_documents: bool,
) -> None:
    """Refuse a layer that does not go together with the base.

    Args:
        model: Sizes.
        layout: The base's.
        options: The base's.
        strategy: The layer's.
        has_documents: Whether micro-batches are packed for the base's data degree.

    Raises:
        LayoutError: names the layer's degrees.
    """
    own = strategy.layout
    own.require_model(model)
    degrees = f"tp={own.tp},cp={own.cp},dp={own.dp}"
    same = ("pp", "ep", "etp", "order", "expert_order")
    if own.stage_ranks != layout.stage_ranks or any(
        getattr(own, name) != getattr(layout, name) for name in same
    ):
        raise LayoutError(
            f"A layer of {degrees} on {own.stage_ranks} ranks cannot follow one of tp={layout.tp},"
            f"cp={layout.cp},dp={layout.dp} on {layout.stage_ranks}: layers share the ranks of "
            f"their stage, experts and order. Give degrees whose product is {layout.stage_ranks}."
        )
    if layout.pp > 1 and layout.order[0] == "dp" and own.dp != layout.dp:
        raise LayoutError(
            f"A layer of {degrees} has dp={own.dp} beside dp={layout.dp}, and where dp is the "
            f"outermost axis another dp is another stage's ranks. Plan with --order pp-dp."
        )
    if own.dp != layout.dp and has_documents:
        raise LayoutError(
            f"A layer of {degrees} has dp={own.dp} beside dp={layout.dp}, and documents are packed "
            f"for dp={layout.dp}. Give every layer that dp."
        )
    if options.micro_batch * layout.dp % own.dp:
        raise LayoutError(
            f"A layer of {degrees} cannot divide the {options.micro_batch * layout.dp} sequences "
            f"of a micro-batch over {own.dp} data-parallel ranks. Give a dp that divides them."
        )
    if not options.stack.sequence_parallel:
        raise LayoutError(
            f"A layer of {degrees} is priced with sequence parallelism alone, and the stack has "
            f"none. Give a stack with sequence_parallel."
        )
