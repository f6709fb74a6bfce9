"""Micro-batches of a choice, for tests of the planner: whole windows, or documents drawn."""

import numpy as np

from equipoise.plan.choice import Choice


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
