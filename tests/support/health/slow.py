"""Runs on ranks of which one is slow in one part of its steps."""

import time
from pathlib import Path
from typing import Any

from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.train import step as steps
from support.ranks.on_ranks import train
from support.read_run import events

PAUSE_S = 0.2
"""Longer than everything else in a step of these runs, on a busy machine as well."""


def slow_down(ranks: Ranks, folder: Path, runs: dict[str, tuple[ResolvedFile, str]]) -> None:
    """Runs whose last rank sleeps: in its forward, or where it reads data."""
    forward, make_batch = Decoder.forward, steps.make_batch

    def pause() -> None:
        if ranks.rank == ranks.world - 1:
            time.sleep(PAUSE_S)

    def slow_forward(self: Decoder, *args: Any, **named: Any) -> Any:
        pause()
        return forward(self, *args, **named)

    def slow_batch(*args: Any) -> Any:
        pause()
        return make_batch(*args)

    for name, (resolved, part) in runs.items():
        if part == "compute":
            Decoder.forward = slow_forward  # type: ignore[method-assign]
        if part == "data":
            steps.make_batch = slow_batch
        try:
            train(ranks, folder / name, resolved, {})
        finally:
            Decoder.forward = forward  # type: ignore[method-assign]
            steps.make_batch = make_batch


def verdicts(folder: Path) -> list[tuple[int, str, str]]:
    """Slow ranks that a run has named: rank, part, cause."""
    return [(each["slow_rank"], each["part"], each["cause"]) for each in events(folder, "slow")]
