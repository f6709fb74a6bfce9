"""Micro-batches of a choice, for tests of the planner: whole windows, or documents drawn."""

import dataclasses
from typing import cast

import numpy as np

from equipoise.balance.packing.pack import pack_step
from equipoise.cost.curve import counted_curve
from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.packs import Packer
from equipoise.sim.divided import DividedStep
from equipoise.sim.step import Documents
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import PackSpec


def batches_of(choice: Choice, seed: int | None) -> list[list[int]]:
    options = choice.options
    count = options.count_micro_batches(choice.layout)
    if seed is None:
        return [[options.context_tokens] * options.micro_batch] * count
    draw = np.random.default_rng(seed)
    whole = options.context_tokens * options.micro_batch
    return [
        [max(64, int(part)) for part in draw.dirichlet(np.ones(draw.integers(1, 6))) * whole]
        for _ in range(count)
    ]


def packer_of(model: ModelSpec, base: StepOptions, seed: int) -> Packer:
    """Packs one step of drawn documents by the policy of each choice."""
    draw, whole = np.random.default_rng(seed), base.context_tokens * base.step_sequences
    some = np.exp(draw.normal(6.5, 1.0, whole // 64)).astype(np.int64) + 64
    some = np.minimum(some, base.context_tokens)
    stops = np.minimum(np.cumsum(some), whole)
    lengths = np.diff(stops, prepend=0)
    lengths = lengths[lengths > 0]
    pieces = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths], axis=1)
    plain = PackSpec(context_tokens=base.context_tokens, step_tokens=whole)
    curve = counted_curve(model)

    def pack(choice: Choice) -> Documents | DividedStep:
        options = choice.options
        spec = dataclasses.replace(
            plain,
            policy=cast(Policy, options.policy),
            context_tokens=options.context_tokens * options.micro_batch,
        )
        packed = pack_step(pieces, spec, choice.layout.dp, curve)
        if POLICIES[options.policy].divides:
            return DividedStep.of(packed)
        return [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]

    return pack
