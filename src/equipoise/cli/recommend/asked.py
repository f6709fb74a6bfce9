"""A recommender's run.toml as verbs read it: its samples and plan, and flags that say nothing."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.shown import counted

if TYPE_CHECKING:
    from equipoise.balance.tables.plan import TableAnswer
    from equipoise.cost.recommend import TableRates
    from equipoise.recsys.samples import Samples
    from equipoise.spec.recommend import RecommendSpec

_COMMON = ("run_toml", "name", "help", "json", "quiet")


@dataclass(frozen=True)
class PlacedRun:
    """A recommender's run, its samples, and where its tables lie."""

    spec: "RecommendSpec"
    base: Path
    samples: "Samples"
    answer: "TableAnswer"
    rates: "TableRates"
    """By which its tables are placed."""

    @property
    def title(self) -> str:
        """The run in a line."""
        rows = sum(self.samples.rows)
        return (
            f"{self.spec.name}: {counted(len(self.samples.keys), 'table')} of {rows:,} rows on "
            f"{counted(self.spec.layout.dp, 'rank')}, {counted(self.spec.train.batch, 'sample')} "
            "a step"
        )


def read_asked(
    args: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    known: Collection[str] = (),
) -> PlacedRun:
    """The recommender that is asked about.

    Args:
        args: What was given.
        add_arguments: The verb's own, for their defaults.
        known: Flags that the verb reads for a recommender.

    Raises:
        SpecError: a fault of run.toml, or a flag that says nothing about a recommender.
        DataError: the samples cannot be read.
        CheckpointError: the run's folder is damaged.
    """
    from equipoise.recsys.foresight.forecast import placing_rates
    from equipoise.recsys.place import plan_samples
    from equipoise.recsys.samples import read_samples
    from equipoise.spec.recommend import read_recommend

    plain = argparse.ArgumentParser()
    add_arguments(plain)
    for action in plain._actions:
        name = action.dest
        if name in (*known, *_COMMON) or not hasattr(args, name):
            continue
        if getattr(args, name) != plain.get_default(name):
            shown = action.option_strings[0] if action.option_strings else name
            raise SpecError(f'{shown}: not for a run with model.kind = "recommend". Leave it out.')
    named = [] if args.name is None else [("name", args.name)]
    spec, base = read_recommend(args.run_toml, [*args.overrides, *named])
    samples = read_samples(spec.data, base)
    folder = getattr(args, "run", None) or Path("runs") / spec.name
    rates = placing_rates(folder)
    return PlacedRun(spec, base, samples, plan_samples(spec, samples, rates), rates)
