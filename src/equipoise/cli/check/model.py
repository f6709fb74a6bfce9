"""What ``equipoise check`` proves: for which scaled-down model, on which numbers of ranks."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.spec.model.other_config import model_from_other_config

if TYPE_CHECKING:
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.resolve import ResolvedRun


def read_theirs(resolved: "ResolvedRun", *, is_whole: bool) -> "tuple[ModelSpec, str]":
    """The model of a run whose engine is transformers: its sizes, and ``Case.theirs``.

    Args:
        resolved: The run.
        is_whole: As it is, rather than scaled down.

    Raises:
        ModelError: transformers cannot build it, or it would not be exact.
    """
    from equipoise.train.request import require_transformers

    require_transformers()
    from equipoise.parallel.theirs.build import read_theirs_config
    from equipoise.parallel.theirs.shrink import shrink_config, write_config

    folder = resolved.base / resolved.spec.model.init.removeprefix("hf:")
    config = read_theirs_config(folder)
    config = config if is_whole else shrink_config(config)
    return model_from_other_config(config.to_dict()), write_config(config)


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
