"""A trained recommender that answers requests: what ``serve.ranking`` asks.

Kept true (tests/multi/recsys/test_ahead.py, tests/unit/serve/ranking/test_server.py)
    Scores of requests computed together are those of each alone, and of the run's evaluation, to
    the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.rank.coding import Coded, Coding
from equipoise.recsys.rank.scorer import Scorer
from equipoise.recsys.rank.stored import read_stored


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """A model, its columns and its name."""

    name: str
    coding: Coding
    scorer: Scorer
    step: int
    created: int
    """When its checkpoint was written, seconds since 1970."""
    form: str = "fp32"
    """What its weights are kept in."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What a sample has."""
        return self.coding.names

    def code(self, context: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Coded:
        """As ``Coding.code``."""
        return self.coding.code(context, candidates)

    def score(self, requests: Sequence[Coded]) -> list[list[float]]:
        """Logits of each request's candidates."""
        batch = join_batches([each.jagged for each in requests])
        logits = self.scorer.score(batch, torch.cat([each.numbers for each in requests]))
        return [part.tolist() for part in logits.split([each.samples for each in requests])]


def open_ranker(folder: Path) -> Ranker:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError, SpecError: as ``read_stored``.
    """
    stored = read_stored(folder)
    created = int(stored.written_s)
    return Ranker(stored.spec.name, stored.coding, stored.scorer, stored.step, created)


def join_batches(batches: Sequence[KeyedJagged]) -> KeyedJagged:
    """Samples of batches of the same features, one batch after the other."""
    if len(batches) == 1:
        return batches[0]
    keys = batches[0].keys
    values = [each.bags(key)[1] for key in keys for each in batches]
    return KeyedJagged(
        keys, torch.cat([each.lengths for each in batches], dim=1), torch.cat(values)
    )
