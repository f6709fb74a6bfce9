"""Faults of several kinds at random moments: goodput beside its forecast (F20).

What it decides
    Ranks are killed or stopped for good, at moments of a Poisson process, while the run goes on by
    itself. What a fault costs is measured before: a kill and a hang are rehearsed once each,
    unless this drill has done so, and ``sim.faults`` forecasts the share of the time that goes
    into steps that are kept.

    Every step must have been trained once in the end, on the documents that it is due: a step that
    was computed again packed the same pieces and had the same loss, bit for bit.
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.units import format_seconds
from equipoise.fault.drill.attempt import Attempt
from equipoise.fault.drill.facts import events, processes
from equipoise.fault.drill.kill import kill
from equipoise.fault.drill.late import DEADLINE_S, hang
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import STEPS, Stage
from equipoise.sim.faults import FaultOptions, best_interval, expected_goodput

_MEAN_S = 60.0
"""Mean time between faults, in a soak of at least five times that."""

_LEAST_FAULTS = 5
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal that a rank got."""

    kind: str
    rank: int
    t: float
    """By the clock on the wall [s]."""


def soak(stage: Stage, repeat: int) -> Rehearsal:
    """Kill and stop ranks at random moments for the minutes that were asked for."""
    draw = stage.draw("poisson", repeat)
    minutes = stage.minutes
    mean_s = min(_MEAN_S, 60 * minutes / _LEAST_FAULTS)
    before = stage.rehearsed
    rehearsed = before.get("kill") or kill(stage, 0), before.get("hang") or hang(stage, 0)
    away_s = [(each.detected_s or 0.0) + (each.resumed_s or 0.0) for each in rehearsed]
    if not all(each.resumed_s for each in rehearsed):
        return Rehearsal("", said="A single kill and a single hang must be survived first.")
    away_s[1] += DEADLINE_S - (rehearsed[1].detected_s or 0.0)
    options = FaultOptions(
        mean_s * stage.ranks, _saving_s(stage.reference), statistics.mean(away_s)
    )
    step_s = _step_s(stage.reference)
    every = max(2, best_interval(step_s, stage.ranks, options))
    folder = stage.folder("poisson")
    more = (
        f"--train.steps={max(STEPS, 2 + int(2 * 60 * minutes / step_s))}",
        f"--checkpoint.every_steps={every}",
        f"--eval.every_steps={every}",
        f"--layout.deadline_s={DEADLINE_S}",
        "--fault.restarts=10000",
    )
    with stage.start(folder, *more) as attempt:
        attempt.wait_until(lambda: events(folder, "step"))
        struck = [*_strikes(attempt, folder, draw, mean_s, until=time.monotonic() + 60 * minutes)]
        attempt.process.terminate()
        code = attempt.end()
    if not events(folder, "step"):
        return Rehearsal("", said=attempt.last_words)
    away = dict(zip(("killed", "hung"), away_s, strict=True))
    return _judge(stage, folder, attempt, code, struck, options, every, away)


def _strikes(
    attempt: Attempt, folder: Path, draw: random.Random, mean_s: float, *, until: float
) -> Iterator[Strike]:
    """Strike ranks at random moments until a time; waits for ranks where none is alive.

    Ranks that start are killed, not stopped: whoever waits for them cannot tell that from slowness.
    So are ranks beside a stopped one, because somebody must be left to notice it.
    """
    at = time.monotonic()
    while (at := at + draw.expovariate(1 / mean_s)) < until:
        kind, number = draw.choice(("killed", "hung")), draw.random()
        while time.monotonic() < at and attempt.process.poll() is None:
            time.sleep(_LOOK_S)
        attempt.wait_until(lambda: processes(folder))
        alive = processes(folder)
        if attempt.process.poll() is not None or not alive:
            return
        rank = sorted(alive)[int(number * len(alive))]
        if not _is_running(folder) or any(map(_is_stopped, alive.values())):
            kind = "killed"
        try:
            os.kill(alive[rank], signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        except ProcessLookupError:  # it was just ended, beside one that was struck before
            continue
        yield Strike(kind, rank, time.time())
    while time.monotonic() < until and attempt.process.poll() is None:
        time.sleep(_LOOK_S)


def _judge(
    stage: Stage,
    folder: Path,
    attempt: Attempt,
    code: int,
    struck: list[Strike],
    options: FaultOptions,
    every: int,
    away_s: Mapping[str, float],
) -> Rehearsal:
    steps = events(folder, "step")
    kept = max(each["step"] for each in steps)
    step_s = statistics.fmean(each["step_s"] for each in steps)
    wall_s = steps[-1]["t"] - steps[0]["t"] + step_s
    planned = FaultOptions(
        options.device_mtbf_s, options.checkpoint_s, options.restart_s, checkpoint_steps=every
    )
    goodput, mean = kept * step_s / wall_s, expected_goodput(step_s, stage.ranks, planned)
    moments = [(each.t - steps[0]["t"] + step_s, away_s[each.kind]) for each in struck]
    kept_forecast = forecast_steps(moments, step_s, every, options.checkpoint_s, wall_s)
    forecast = kept_forecast * step_s / wall_s
    decided = [
        (each["t"], each["fault"], each["fault_rank"]) for each in events(folder, "recovery")
    ]
    return Rehearsal(
        injected=f"{len(struck)} faults in {format_seconds(wall_s)}" if struck else "",
        detected_by="launcher, watchdog" if decided else "",
        is_named=are_named(struck, decided),
        lost_tokens=(len(steps) - kept) * stage.step_tokens,
        is_equal=is_exact(folder, kept),
        goes_on="by itself" if code == 0 else "",
        said=attempt.last_words,
        note=(
            f"Goodput {goodput:.1%} measured, {forecast:.1%} forecast for these moments "
            f"({mean:.1%} in the mean of such runs): {kept:,} steps of "
            f"{format_seconds(step_s)} kept in {format_seconds(wall_s)} with {len(struck)} faults, "
            f"saved every {every}; a fault costs {format_seconds(options.restart_s)} and the steps "
            f"since the last checkpoint. State equal: the ledger of steps and documents."
        ),
    )


def forecast_steps(
    moments: Sequence[tuple[float, float]],
    step_s: float,
    every: int,
    saving_s: float,
    wall_s: float,
) -> float:
    """Steps that are kept in a time with known faults.

    Args:
        moments: When each fault comes, from the begin of the first step on, and for how long
            nothing is computed then [s]; in order.
        step_s: One step.
        every: Steps between checkpoints.
        saving_s: What a checkpoint costs.
        wall_s: Until the run is stopped and saves.

    >>> forecast_steps([(10.0, 5.0), (12.0, 6.0)], 1.0, 4, 0.0, 30.0)  # 8 steps, and 12 from 18 on
    20.0
    """
    kept = since = 0.0
    segment_s = every * step_s + saving_s
    for at_s, away_s in moments:
        if at_s > since:
            kept += every * ((at_s - since) // segment_s)
        since = at_s + away_s
    whole, rest_s = divmod(max(0.0, wall_s - since), segment_s)
    return kept + whole * every + min(every, rest_s / step_s)


def are_named(struck: Sequence[Strike], decided: Sequence[tuple[float, str, int | None]]) -> bool:
    """Whether every decision names a fault since the one before it, and follows on each.

    Args:
        struck: What was done, in order.
        decided: When, on which kind of fault, by which rank; in order.
    """
    left = [*struck]
    for t, kind, rank in decided:
        since = [each for each in left if each.t <= t]
        if (kind, rank) not in [(each.kind, each.rank) for each in since]:
            return False
        left = left[len(since) :]
    return not left


def is_exact(folder: Path, kept: int) -> bool:
    """Whether each step was trained on what it is due, and alike however often."""
    packs = {(each["step"], each["digest"]) for each in events(folder, "pack")}
    steps = {(each["step"], each["tokens_seen"], each["loss"]) for each in events(folder, "step")}
    due = set(range(1, kept + 1))
    packed = [step for step, _ in packs if step <= kept]
    trained = [step for step, _, _ in steps]
    tokens = {seen / step for step, seen, _ in steps}
    return (
        len(packed) == len(trained) == kept and {*packed} == {*trained} == due and len(tokens) == 1
    )


def _is_running(folder: Path) -> bool:
    """Whether the newest ranks have done a step."""
    *_, last = events(folder, "start", "recovery", "step")
    return bool(last["name"] == "step")


def _is_stopped(process: int) -> bool:
    """Whether a process waits for a signal to go on."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _step_s(folder: Path) -> float:
    return float(statistics.median(each["step_s"] for each in events(folder, "step")))


def _saving_s(folder: Path) -> float:
    """What a save costs on the slowest rank [s]."""
    costs_s = [each["blocked_s"] + each["core_s"] for each in events(folder, "saved")]
    return max(costs_s, default=0.0)
