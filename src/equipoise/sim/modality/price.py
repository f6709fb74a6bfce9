"""What encoders add to a step: the slowest rank's items, bridge, weights on their way, updates.

Why
    A layout is chosen by seconds of a step and by what fits. Encoders run on every rank whatever
    the layout is, but their rows go to the ranks that embed them, which the layout decides.

What it decides
    The phases of ``parallel.modality``, which meet between each other, one after the other::

        gather | encode | rows cross | decoder's step | gradients cross | backward | sum | update
        weights  max      bridge                        bridge            max       weights

    Weights are gathered and gradients summed over all ranks by the layout's stage of ZeRO, group by
    group (``cost.modality.encoder_groups``); under 3 they are gathered a second time. What is
    frozen has no gradient that is summed, sent back over the bridge or updated with.

    Nothing hides any of them. Where ``equipoise calibrate RUN.toml`` timed an encoder on as many
    ranks of this machine, its times answer, with the reading of files; else the kernels do. The
    bridge is priced in its own rounds, each an exchange among all ranks at the pace of the one that
    sends or receives most.

Kept true (tests/unit/sim/modality/test_price.py)
    Terms add up to what the step takes longer; nothing is added by a step without items but sums
    and updates; bytes are those of the plan that the executor obeys.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.modality.step import ModalityStep
from equipoise.base.arrays import Floats, Ints
from equipoise.cost.curves.parts import encoder_points
from equipoise.cost.modality import (
    ELEMENT_BYTES,
    EncodePasses,
    count_gathers,
    encode_passes,
    encoder_groups,
    held_bytes,
    timed_passes,
)
from equipoise.cost.offload import ADAM_BYTES
from equipoise.cost.step.request import Residuals, StepPrice
from equipoise.schedule.modality.bridge import BridgePlan
from equipoise.sim.machine import Machine
from equipoise.spec.device.parts import encoder_name
from equipoise.spec.layout import Layout
from equipoise.spec.modality.encoder import KINDS, EncoderSpec
from equipoise.spec.modality.items import Items

ENCODERS = "encoders"
"""A term of a price's seconds and of its memory."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderPrice:
    """Seconds and bytes that encoders add to a step."""

    passes: tuple[EncodePasses, ...]
    """Seconds of each rank's items."""
    bridge_s: float
    """Rows to their readers, and gradients back."""
    weights_s: float
    """Encoders' weights and gradients between ranks."""
    update_s: float
    held_bytes: Ints
    """What each rank holds beside its decoder through the step, int64 [ranks]."""

    @property
    def encode_s(self) -> Floats:
        """Both passes of each rank's items, float64 [ranks]."""
        return np.array([each.forward_s + each.backward_s for each in self.passes])

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by term; they add up to what the step takes longer."""
        forward = max(each.forward_s for each in self.passes)
        backward = max(each.backward_s for each in self.passes)
        return {
            ENCODERS: forward + backward,
            "encoder traffic": self.bridge_s + self.weights_s,
            "optimizer": self.update_s,
        }

    @property
    def step_s(self) -> float:
        """What a step takes longer."""
        return sum(self.terms.values())

    @property
    def least_s(self) -> float:
        """The same without what the layout decides: traffic and updates."""
        return self.terms[ENCODERS]

    def added_to(self, price: StepPrice) -> StepPrice:
        """A decoder's step with its encoders, and the memory of the fullest of both."""
        terms = dict(price.terms)
        for name, seconds in self.terms.items():
            terms[name] = terms.get(name, 0.0) + seconds
        most = int(self.held_bytes.max())
        return dataclasses.replace(
            price,
            step_s=price.step_s + self.step_s,
            terms={name: value for name, value in terms.items() if value},
            memory=price.memory | {ENCODERS: float(most)},
            memory_bytes=price.memory_bytes + most,
        )


def price_encoders(
    step: ModalityStep,
    items: Items,
    encoders: Sequence[EncoderSpec],
    width: int,
    machine: Machine,
    residuals: Residuals,
    layout: Layout,
) -> EncoderPrice:
    """Price the items of a step.

    Args:
        step: Who encodes them and who reads them.
        items: Those of the corpus.
        encoders: Each of another kind.
        width: Hidden width of the decoder.
        machine: Its devices compute fp32 here, as encoders do.
        residuals: Of kernels in whole steps.
        layout: The encoders' own (``Layout.of_encoders``).
    """
    machine, ranks, sent = machine.at("fp32"), step.plan.ranks, step.plan.sent
    points, passes, held = encoder_points(machine.device, ranks), [], []

    def passes_of(spec: EncoderSpec, patches: Ints) -> EncodePasses:
        def by_kernels(each: EncoderSpec) -> EncodePasses:
            return encode_passes(each, patches, width, machine, moves=residuals.moves)

        point = points.get(encoder_name(spec, width))
        if point is None:
            return by_kernels(spec)
        timed = timed_passes(point, spec, patches, width)
        if not spec.frozen:
            return timed
        # It was timed with every weight trained: its backward is shorter as that of kernels is.
        whole_s = by_kernels(dataclasses.replace(spec, frozen=())).backward_s
        share = by_kernels(spec).backward_s / whole_s if whole_s else float(not spec.is_frozen)
        return EncodePasses(timed.forward_s, share * timed.backward_s)

    for rank in range(ranks):
        own = step.own(rank)
        kind, patches = items.kind[own], items.patches[own]
        shares = [(each, patches[kind == KINDS.index(each.kind)]) for each in encoders]
        passes.append(sum((passes_of(*each) for each in shares), EncodePasses(0.0, 0.0)))
        rows = {"sent_rows": int(sent[rank].sum()), "read_rows": int(sent[:, rank].sum())}
        held.append(held_bytes(shares, width, layout, **rows))
    groups = (group for each in encoders for group in encoder_groups(each, width, layout))
    owned = sum(group.trained.owned for group in groups)
    return EncoderPrice(
        tuple(passes),
        residuals.traffic * (way_s(step.plan, width, machine) + way_s(step.back, width, machine)),
        residuals.traffic * weights_s(encoders, width, layout, machine),
        owned * ADAM_BYTES / machine.bytes_per_s * residuals.moves,
        np.array(held, dtype=np.int64),
    )


def weights_s(
    encoders: Sequence[EncoderSpec], width: int, layout: Layout, machine: Machine
) -> float:
    """Seconds of encoders' weights that are gathered, and of gradients that are summed.

    Args:
        encoders: Each of another kind.
        width: Hidden width of the decoder.
        layout: The encoders' own (``Layout.of_encoders``).
        machine: Links between the ranks.
    """
    sharers, copies = range(layout.shards), range(0, layout.world, layout.shards)
    seconds = 0.0
    for group in (each for spec in encoders for each in encoder_groups(spec, width, layout)):
        if layout.shards > 1:
            exchange, whole = machine.collective(tuple(sharers)), group.params * ELEMENT_BYTES
            seconds += count_gathers(group, layout) * exchange("all_gather", whole)
            if group.trained.params:
                seconds += exchange("reduce_scatter", group.trained.params * ELEMENT_BYTES)
        if len(copies) > 1 and group.trained.params:
            share = group.trained.owned * ELEMENT_BYTES
            seconds += machine.collective(tuple(copies))("all_reduce", share)
    return seconds


def way_s(plan: BridgePlan, width: int, machine: Machine) -> float:
    """Seconds of rows on their way to readers, or of gradients on their way back.

    Args:
        plan: Of the rows, or of those whose gradients return.
        width: Numbers of a row.
        machine: Links between the ranks.
    """
    if plan.ranks == 1 or not plan.rounds:
        return 0.0
    away = plan.away
    busiest = int(max(away.sum(axis=0).max(), away.sum(axis=1).max()))
    # An exchange of as many bytes with every rank, its own among them.
    whole = busiest * width * ELEMENT_BYTES * plan.ranks / (plan.ranks - 1)
    exchange = machine.collective(tuple(range(plan.ranks)))
    return plan.rounds * exchange("all_to_all", whole / plan.rounds)
