"""Ranks of which a guard is switched off."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from equipoise.comm.group import Ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.train import step
from equipoise.train.health import agree
from support.ranks.on_ranks import Ended, pack_differently, train


def plans_unseen(ranks: Ranks, folder: Path, corpus: str, model: ModelSpec) -> None:
    """A step that the last rank packed otherwise; no rank compares plans."""
    agree.require_one_plan = lambda *_: None
    pack_differently(ranks, folder, corpus, model)


def numbers_unseen(ranks: Ranks, folder: Path, resolved: ResolvedFile) -> Ended:
    """A run of which no rank asks whether a loss or a norm is a number."""
    step.np = SimpleNamespace(isfinite=np.ones_like)
    return train(ranks, folder, resolved, {})
