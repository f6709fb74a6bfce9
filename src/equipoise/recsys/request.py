"""A recommender from a run.toml to its record: what ``equipoise train`` does for such a run.

What it decides
    Samples are read and tables planned before a rank starts, so what is wrong is said once. Ranks
    are processes on this machine under the same launcher as those of a language model: killed or
    hung, all start again from the newest whole checkpoint as ``[fault]`` says. Asked again, a run
    goes on from there, also on another number of ranks. The folder is this command's from before a
    file is written until its ranks have ended. Tables are placed by the rates of ``equipoise
    calibrate`` that were there when the run began; its folder keeps them.

Kept true (tests/multi/recsys/test_train.py, tests/multi/recsys/test_recover.py)
    A run of two ranks ends above the floor; a killed rank changes no weight.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from equipoise.balance.tables.plan import TableAnswer
from equipoise.base.disk import run_unwritten, why_unwritable, writing_run
from equipoise.base.errors import EquipoiseError
from equipoise.base.shown import counted
from equipoise.cost.recommend import TableRates
from equipoise.fault.recover import Smaller, recover_ranks
from equipoise.launch.gang import Launch
from equipoise.launch.local import claim_folder, require_free_folder
from equipoise.recsys.folder import prepare, read_trained, require_held
from equipoise.recsys.foresight.forecast import placing_rates
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.place import plan_samples
from equipoise.recsys.rank.coding import write_coding
from equipoise.recsys.same import require_same_newest
from equipoise.recsys.samples import Samples, read_samples, require_scores
from equipoise.recsys.trainer import count_epoch_steps
from equipoise.recsys.whole import newest_whole, step_of
from equipoise.spec.recommend import RecommendSpec

PROGRAM = "equipoise.recsys.worker"
"""The program of a rank, a module."""
_RECORD = {"step", "losses", "best", "spec", "tables", "traffic"}
"""What a whole record has at least."""


def run(
    spec: RecommendSpec, base: Path, *, out: Path | None = None, is_quiet: bool = True
) -> dict[str, Any]:
    """Train, or go on.

    Args:
        spec: The run.
        base: Where its relative paths begin.
        out: Its folder; ``runs/NAME`` unless given.
        is_quiet: Whether rank 0 says nothing after an epoch.

    Returns:
        The record, as ``recommend.json`` in the run's folder holds it.

    Raises:
        DataError: a file or a column is wrong.
        ModelError: the model's sizes do not go together.
        FitError: the tables fit no rank.
        SpecError: the folder cannot be written.
        CheckpointError: the folder holds another run, or checkpoints of which none is whole.
        LayoutError: another command trains in the folder, or prepares to.
    """
    folder = (out or Path("runs") / spec.name).absolute()
    if why := why_unwritable(folder):
        raise run_unwritten(folder, why)
    samples, rates = read_samples(spec.data, base), placing_rates(folder)
    answer = plan_samples(spec, samples, rates)
    require_scores(samples)
    build_model(spec.model, answer.plan.outputs, samples.numbers.shape[1], seed=spec.train.seed)
    if not is_quiet:
        sys.stdout.write(_describe(spec, samples, answer, rates))
        sys.stdout.flush()
    require_free_folder(folder)
    with writing_run(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with claim_folder(folder):
        require_held(folder, spec)
        require_same_newest(folder, spec, samples)
        with writing_run(folder):
            prepare(folder, spec, base, rates)
            write_coding(folder, samples.coding)
        if not is_trained(folder, spec.train.epochs * count_epoch_steps(spec, samples)):

            def again(dp: int) -> int:
                prepare(folder, with_ranks(spec, dp), base, rates)
                return dp

            launch = Launch(folder, spec.layout.dp, is_quiet, port=0, program=PROGRAM)
            smaller = Smaller(lambda dp: can_shrink(spec, samples, dp, rates), again)
            recover_ranks(launch, spec.fault.rules(), spec.layout.dp, (folder,), smaller)
        return read_trained(folder)


def is_trained(folder: Path, steps: int) -> bool:
    """Whether nothing is left to do: the record says so, and a whole checkpoint of then is there.

    Raises:
        CheckpointError: there are checkpoints and none is whole.
    """
    record = read_trained(folder)
    step = record.get("step")
    if not (record.keys() >= _RECORD and isinstance(step, int) and step >= steps):
        return False
    newest, _ = newest_whole(folder)
    return newest is not None and step_of(newest) >= steps


def with_ranks(spec: RecommendSpec, dp: int) -> RecommendSpec:
    """The run on another number of ranks."""
    return dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, dp=dp))


def can_shrink(
    spec: RecommendSpec, samples: Samples, dp: int, rates: TableRates | None = None
) -> bool:
    """Whether a run can go on with fewer ranks: tables fit, and no files belong to their layout."""
    if spec.tables.memory_mib:
        return False
    try:
        plan_samples(with_ranks(spec, dp), samples, rates)
    except EquipoiseError:
        return False
    return True


def _describe(spec: RecommendSpec, samples: Samples, answer: TableAnswer, rates: TableRates) -> str:
    kinds = [each.kind for each in answer.plan.placements]
    placed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if towers := len(answer.plan.towers):
        placed += f", in {counted(towers, 'tower')} on {counted(answer.plan.hosts, 'host')}"
    return (
        f"{samples.edges[3]:,} samples, {samples.edges[1]:,} of them to train; "
        f"{counted(len(samples.keys), 'table')} of {sum(samples.rows):,} rows on "
        f"{counted(spec.layout.dp, 'rank')} ({placed}), max/mean {answer.skew:.3f}, at most "
        f"{100 * answer.gap:.1f}% above the best by {rates.words}\n"
    )
