"""Ranks whose messages have no tags, and ranks that prove their layout before they train."""

import dataclasses
from pathlib import Path

from equipoise.comm.group import Ranks
from equipoise.observe.journal import Journal
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.train.build import build_runner
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.prove import check_cases
from equipoise.train.proof import prove_layout
from support.ranks.on_ranks import build_with_wrong_gradient


def check_without_tags(ranks: Ranks, cases: list[Case]) -> list[Verdict]:
    """The cases, over links in which order alone tells messages apart."""
    return check_cases(dataclasses.replace(ranks, has_tags=False), cases)


def prove(ranks: Ranks, folder: Path, resolved: ResolvedFile, wrong: str = "") -> None:
    """The proof of a run's layout; with the gradient of one parameter wrong on rank 1."""
    build = build_with_wrong_gradient(wrong, 1, factor=2.0) if wrong else build_runner
    with Journal(folder / "journal", ranks.rank) as journal:
        prove_layout(resolved, ranks, journal, folder, build)


def train_unproven(ranks: Ranks, folder: Path, resolved: ResolvedFile) -> None:
    with Journal(folder / "journal", ranks.rank) as journal:
        prove_layout(resolved, ranks, journal, None)
