"""The program of one rank: ``python -m equipoise.train.worker RUN``, under any torchrun."""

import argparse
import dataclasses
import os
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise
from equipoise.base.errors import (
    EquipoiseError,
    LayoutError,
)
from equipoise.comm.group import Ranks, join_from_environment
from equipoise.comm.watchdog import Watchdog
from equipoise.data.cache.store import open_store
from equipoise.fault.drill.inside import Injector
from equipoise.fault.rank import (
    FolderTakenError,
    RankWords,
    WatchedJournal,
    complain,
    hold_folder,
)
from equipoise.launch.agent import end_with_agent
from equipoise.launch.last_words import say_process
from equipoise.launch.leave import run_and_leave
from equipoise.observe.console import make_view
from equipoise.observe.fence import Fence
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile, read_resolved
from equipoise.train.health.links import LinkWatch
from equipoise.train.loop import Trainer
from equipoise.train.process import StopRequest, settle
from equipoise.train.proof import prove_layout
from equipoise.train.watch import FolderGoneError

AHEAD = ("torch._dynamo", "numpy.ma")
"""What a first step would import: torch's compiler, which optimizers load (torch 2.13), and what
NumPy's statistics load."""

_OF_A_HOST = (
    "data.path",
    "data.mix",
    "data.cache",
    "data.tokenizer",
    "eval.path",
    "model.init",
    "experts.routes",
)
"""Keys that name files: they may lie elsewhere on another host, and what is in them is compared."""


def run_facts(resolved: ResolvedFile) -> dict[str, str]:
    """What must be the same on every rank of a run, by the names that a user knows.

    Raises:
        DataError: the corpus cannot be opened.
    """
    keys: dict[str, Any] = {}
    for section, table in dataclasses.asdict(resolved.spec).items():
        if isinstance(table, dict):
            keys |= {f"{section}.{key}": value for key, value in table.items()}
    keys |= {f"model.{key}": value for key, value in dataclasses.asdict(resolved.model).items()}
    held_out = resolved.eval_corpus and open_store(Path(resolved.eval_corpus)).digest
    return {
        "equipoise": equipoise.__version__,
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "the corpus": open_store(Path(resolved.corpus)).digest,
        "the held-out documents": held_out,
        "what auto prices by": f"{resolved.context_machine} {resolved.part_machine}",
        **{key: str(value) for key, value in keys.items() if key not in _OF_A_HOST},
    }


def _train(
    folder: Path,
    resolved: ResolvedFile,
    ranks: Ranks,
    *,
    quiet: bool,
    proves: bool = True,
    watchdog: Watchdog | None = None,
    fence: Fence | None = None,
    links: LinkWatch | None = None,
) -> None:
    if ranks.world != resolved.ranks:
        data_ranks, left = divmod(ranks.world, resolved.spec.layout.sharing)
        other = "" if left else f", or --layout.dp {data_ranks}"
        raise LayoutError(
            f"torchrun started {ranks.world} ranks and the run wants {resolved.ranks}. Pass "
            f"--nproc-per-node {resolved.ranks}{other}."
        )
    stop, injector = StopRequest(), Injector.from_environment(ranks.rank)
    with ExitStack() as stack:
        journals = [
            stack.enter_context(
                WatchedJournal(each / "journal", ranks.rank, watchdog, fence, injector)
            )
            for each, _ in resolved_sides(folder, resolved)
        ]
        if ranks.device.type != "cpu":
            cache = Path(resolved.corpus).parent if proves else None
            for journal, (_, side) in zip(journals, resolved_sides(folder, resolved), strict=True):
                prove_layout(side, ranks, journal, cache)
        trainer = Trainer(folder, resolved, ranks, journals)
        trainer.links = links
        if injector is not None:
            injector.trainer = trainer
        label = " | ".join(resolved.compare or [resolved.spec.pack.policy])
        with make_view(
            label,
            rank=ranks.rank,
            steps=resolved.spec.train.steps,
            done=trainer.position.step,
            quiet=quiet,
        ) as view:
            trainer.resume(view)
            trainer.run(view, stop)


def main() -> int:
    """Run one rank; the exit code of what happened."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.train.worker")
    parser.add_argument("run", type=Path, help="folder with resolved.json")
    parser.add_argument("--quiet", action="store_true", help="no line and no bar")
    parser.add_argument(
        "--no-proof", action="store_true", help="train a layout that no check has proven here"
    )
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    folder: Path = args.run
    end_with_agent()
    say_process(rank)
    try:
        with RankWords(folder, (), rank).told():
            resolved = read_resolved(folder)
        settle(int(os.environ.get("LOCAL_RANK", rank)), pin=resolved.spec.layout.pin)
        sides = tuple(each for each, _ in resolved_sides(folder, resolved))
        words = RankWords(folder, sides, rank, (FolderTakenError, FolderGoneError))
        links = LinkWatch(sides)
        with ExitStack() as stack, words.told():
            joined = join_from_environment(
                run_facts(resolved),
                deadline_s=resolved.spec.layout.deadline_s,
                tell=words.tell,
                tell_late=words.tell_late,
                hear_links=links.hear,
            )
            ranks, watchdog = stack.enter_context(joined)
            fence = words.fence = stack.enter_context(hold_folder(folder, ranks))
            _train(
                folder,
                resolved,
                ranks,
                quiet=args.quiet,
                proves=not args.no_proof,
                watchdog=watchdog,
                fence=fence,
                links=links,
            )
    except EquipoiseError as error:
        complain(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    run_and_leave(main)
