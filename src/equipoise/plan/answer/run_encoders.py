"""What a run's encoders add to each choice: the items of the step that stands for all.

Why
    Encoders run on all ranks whatever the layout, so only its stage of ZeRO and the way of rows
    decide between layouts; but a plan that leaves them out promises a step that no run has, and
    memory that is taken.

What it decides
    Nothing: items are dealt, and their rows carried, by the functions that do it in the run, from
    the packs that the run will make.

Kept true (tests/unit/plan/answer/test_run_encoders.py)
    Bytes that the plan prices are those of the run; a choice is longer by its encoders' terms.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.plan import plan_context
from equipoise.balance.modality.step import ModalityStep, plan_step
from equipoise.base.arrays import Ints
from equipoise.cost.curves.parts import encoder_points
from equipoise.cost.modality import ELEMENT_BYTES
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_steps import RunSteps
from equipoise.plan.space.choice import Choice
from equipoise.schedule.modality.readers import embedding_places
from equipoise.schedule.pipeline.strategies import place_stages
from equipoise.sim.machine import Machine
from equipoise.sim.modality.price import EncoderPrice, price_encoders
from equipoise.sim.settle.sharding import auto_price
from equipoise.spec.device.parts import encoder_name
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class RunEncoders:
    """The encoders of a run, and the steps that it will pack."""

    encoders: tuple[EncoderSpec, ...]
    items: Items
    documents: int
    """Documents of the corpus."""
    model: ModelSpec
    machine: Machine
    steps: RunSteps

    @property
    def is_timed(self) -> bool:
        """Whether every encoder was timed on as many ranks of this machine."""
        cluster = self.machine.cluster
        timed = encoder_points(self.machine.device, cluster.devices)
        return all(encoder_name(each, self.model.hidden) in timed for each in self.encoders)

    def added_to(self, finalist: Finalist) -> Finalist:
        """A priced choice with what encoders add to its step and its memory."""
        price = self.price(finalist.choice).added_to(finalist.run.price)
        return dataclasses.replace(finalist, run=dataclasses.replace(finalist.run, price=price))

    def price(self, choice: Choice) -> EncoderPrice:
        """What they add under a choice."""
        step, residuals = self.plan(choice), choice.options.residuals
        width = self.model.hidden
        layout = choice.layout.of_encoders
        return price_encoders(
            step, self.items, self.encoders, width, self.machine, residuals, layout
        )

    def plan(self, choice: Choice) -> ModalityStep:
        """Who encodes the items of the step that stands for all, and who reads them."""
        layout, options = choice.layout, choice.options
        packed = self.steps.packed(options.policy, layout)
        first = 0
        if layout.pp > 1:
            stages = layout.pp * options.virtual
            first = int(place_stages(options.schedule, layout.pp, stages)[0])

        def embeds(data_rank: int, turn: int) -> tuple[Ints, Ints]:
            lengths = packed.ranks[data_rank][turn].doc_tokens.tolist()
            shares = self._shares(choice, lengths)
            return embedding_places(layout, data_rank, shares, stage_rank=first)

        return plan_step(
            packed,
            self.items,
            self.documents,
            embeds,
            self.encoders,
            ranks=layout.world,
            width=self.model.hidden,
            element_bytes=ELEMENT_BYTES,
        )

    def _shares(self, choice: Choice, lengths: list[int]) -> Sequence[Ints]:
        """Tokens of each context rank of a micro-batch."""
        layout, options = choice.layout, choice.options
        if layout.cp == 1:
            return [np.arange(sum(lengths))]
        plan = plan_context(
            lengths,
            layout.cp,
            options.context_strategy,
            heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            sharding=options.sharding,
            ranks_per_node=layout.cp,
            price=auto_price(self.model, self.machine, layout, options),
        )
        return plan.shares.rows
