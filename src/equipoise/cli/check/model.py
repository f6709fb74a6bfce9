"""What ``equipoise check`` proves: for which scaled-down model, on which numbers of ranks."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.spec.model.presets import ModelSpec


def read_worlds(ranks: Sequence[int]) -> list[int]:
    """Numbers of ranks, each once, the fewest first.

    Raises:
        SpecError: one of them is below 1.
    """
    if min(ranks) < 1:
        raise SpecError(f"--ranks {min(ranks)} is below 1. Give 1 or more ranks.")
    return sorted(set(ranks))


def scaled_down(model: "ModelSpec") -> "ModelSpec":
    """The same model with 2 layers, a narrow width and at most 512 words."""
    narrow = 2 * model.heads * max(4, -(-64 // (2 * model.heads)))
    model = model.scaled(layers=min(2, model.layers), hidden=min(narrow, model.hidden))
    return dataclasses.replace(
        model,
        vocab=min(512, model.vocab),
        dense_layers=min(1, model.dense_layers),  # so that one of two layers has experts
        expert_every=min(2, model.expert_every),
    )
