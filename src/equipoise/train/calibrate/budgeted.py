"""Calibrate for one run within two minutes: what its forecasts need most, first.

Why
    Everything that there is to time of the demo's model takes ten minutes on two idle cores and
    half an hour on busy ones. Nobody waits for that before a plan.

What it decides
    The order: products and attention of the run's precision and heads, memory, collectives, the
    disk; then steps in the run's own way of sharing; then other ways, other heads, the other
    precision. The first half comes first, each of its tasks as shortly as its share of the time
    says; of the second, what is expected to end in time. Every task is kept when it ends, so that
    a session that is stopped goes on where it was. If time ends before the first half does, as on a
    machine that does much else, there is no device file yet, and the same command goes on.

Kept true (tests/unit/train/calibrate/test_agenda.py, tests/multi/plan/test_calibrate_budget.py)
    A session that is killed goes on; a file with everything left to time is one that prices.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest
from equipoise.base.errors import EquipoiseError
from equipoise.observe.machine import busy_core_s
from equipoise.spec.device.file import DeviceFile
from equipoise.spec.device.here import cpu_model, memory_share_bytes
from equipoise.spec.device.parts import WAYS, Way
from equipoise.spec.modality.items import Items
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.train.calibrate.agenda import Task, run_agenda
from equipoise.train.calibrate.items import time_items, time_reading
from equipoise.train.calibrate.measure import (
    MeasureProgress,
    Session,
    machine_stages,
)
from equipoise.train.calibrate.parts import time_way, ways_of
from equipoise.train.calibrate.parts_plan import DEPTHS, PartsPlan
from equipoise.train.calibrate.plan import CalibrationPlan
from equipoise.train.calibrate.ranks import Samples, Target, own_s
from equipoise.train.calibrate.session import CalibrationSession

ITEMS = "encoders"
"""The task that times what encodes images and sound."""

LIMIT_S = 105.0
"""Seconds for all tasks: two minutes less what starting and writing take."""

_FLOP_PER_S = 2e10
"""About what a core computes of a step, for the order of magnitude of a task's time."""

_ROUNDS = 2
"""Fewest rounds of a way's steps: one that warms up and one that is kept."""


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """What is timed for one run."""

    plan: CalibrationPlan
    parts: PartsPlan
    own_way: Way
    target: Target
    folder: Path
    """On the disk to measure."""
    items: Items | None = None
    """Images and sound of the run's corpus."""

    @classmethod
    def for_run(
        cls,
        run: ResolvedRun,
        parts: PartsPlan,
        target: Target,
        folder: Path,
        items: Items | None = None,
    ) -> "RunCalibration":
        """What a run's forecasts rest on.

        Args:
            run: Its precision, heads and layout come first.
            parts: Which parts of its steps.
            target: The cores that compute.
            folder: On the disk to measure.
            items: Images and sound of the run's corpus.
        """
        layout = run.spec.layout
        own: Way = WAYS[layout.zero]
        if layout.tp > 1 and layout.tp == target.ranks:
            own = "tensor"
        elif layout.pp > 1 and layout.pp == target.ranks:
            own = "pipeline"
        return cls(CalibrationPlan.for_run(run), parts, own, target, folder, items)

    @property
    def key(self) -> str:
        """What a session must agree in to be gone on with."""
        return digest(
            [
                cpu_model(),
                version("torch"),
                self.target.ranks,
                self.plan,
                self.parts,
            ]
        )

    @property
    def ways(self) -> list[Way]:
        """Ways of sharing a step: the run's own, and those next to it first."""
        allowed = ways_of(self.parts.model, self.target.ranks)
        own = WAYS.index(self.own_way)
        return sorted(allowed, key=lambda way: (abs(WAYS.index(way) - own), WAYS.index(way)))

    def tasks(self) -> list[Task]:
        """Everything, most useful first."""
        dtype, width = self._dtype, self.parts.model.head_width
        needed: list[Task] = []
        later: list[Task] = []
        other: list[Task] = []
        for stage in machine_stages(self.plan, self.folder):
            is_needed = stage.dtype in ("", dtype) and stage.head_width in (0, width)
            task = Task(stage.name, stage.weight, is_needed, partial(_counted, stage.take))
            if is_needed:
                needed.append(task)
            else:
                (later if stage.dtype == dtype else other).append(task)
        ways = []
        for at, way in enumerate(self.ways):
            context = True if at == 0 else None
            run = partial(self._time, way, context)
            ways.append(Task(f"steps by {way}", self._way_s, at == 0, run))
        beside = [] if not self.parts.groups else [Task(ITEMS, 2.0, False, self._time_items)]
        return [*needed, *ways[:1], *beside, *ways[1:], *later, *other]

    @property
    def _dtype(self) -> str:
        return "bf16" if self.parts.precision == "bf16" else "fp32"

    @property
    def _way_s(self) -> float:
        """Seconds of the least that is timed of a way, about."""
        model, plan = self.parts.model, self.parts
        tokens = sum(plan.sizes) + plan.sizes[len(plan.sizes) // 2]
        layers = sum(DEPTHS) * model.layer_matmul_params
        head = len(DEPTHS) * model.hidden * model.vocab
        return 1.0 + _ROUNDS * 6.0 * tokens * (layers + head) / _FLOP_PER_S

    def _time_items(self, limit_s: float) -> Any:
        def take(limit_s: float) -> tuple[Samples, float]:
            samples = {} if self.items is None else time_reading(self.parts, self.items)
            for rank in self.target.run(time_items, self.parts, limit_s):
                for place, values in rank.items():
                    samples.setdefault(place, []).extend(values)
            return samples, 0.0

        return _counted(take, limit_s)

    def _time(self, way: Way, with_context: bool | None, limit_s: float) -> Any:
        return self.target.run(time_way, self.parts, way, limit_s, with_context)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Samples of a stage, with what they took."""

    samples: Samples
    seconds: float
    others_s: float
    """Core seconds of other programs meanwhile."""


def _counted(stage: Callable[[float], tuple[Samples, float]], limit_s: float) -> _Sampled:
    began, busy_s, mine_s = time.perf_counter(), busy_core_s(), own_s()
    samples, spent_s = stage(limit_s)
    others_s = busy_core_s() - busy_s - (own_s() - mine_s) - spent_s
    return _Sampled(samples, time.perf_counter() - began, max(0.0, others_s))


def calibrate_run(
    tasks: Sequence[Task],
    session: CalibrationSession,
    progress: MeasureProgress,
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:
    """Run what a session has not done yet, as far as the time goes, and keep it.

    Args:
        tasks: Of ``RunCalibration``.
        session: Is added to, and written after every task.
        progress: Shows every task.
        limit_s: Seconds for all of them.
        clock: Seconds, from any moment on.

    Returns:
        Names of the tasks that are left.
    """

    def keep(task: Task, measured: Any) -> None:
        if isinstance(measured, _Sampled):
            for place, values in measured.samples.items():
                session.taken.setdefault(place, []).extend(values)
            session.seconds += measured.seconds
            session.others_s += measured.others_s
        else:
            session.ways[task.name.rpartition(" ")[2]] = measured
        session.done.append(task.name)
        session.write()
        progress.advance()

    progress.start("measure", len(tasks) - len(set(session.done)))
    left = run_agenda(tasks, session.done, keep, limit_s=limit_s, clock=clock)
    progress.finish()
    return left


def require_needed(tasks: Sequence[Task], left: Collection[str], other_cores: float) -> None:
    """Refuse to go on to a device file while something that one needs is left.

    Args:
        tasks: Of ``RunCalibration``.
        left: Names of those that are left.
        other_cores: Cores that other programs kept busy meanwhile.

    Raises:
        EquipoiseError: says how much is measured, and that the same command goes on.
    """
    needed = [task.name for task in tasks if task.is_needed]
    done = sum(name not in left for name in needed)
    if done < len(needed):
        raise EquipoiseError(
            f"Time ended after {done} of {len(needed)} measurements that a forecast needs, while "
            f"other programs kept {other_cores:.1f} cores busy. They are kept, and the same "
            f"command goes on with the others."
        )


def device_file_of(
    session: CalibrationSession, plan: CalibrationPlan, left: tuple[str, ...]
) -> DeviceFile:
    """The device file of what a session has measured, without parts.

    Args:
        session: With every task that is needed.
        plan: Its sizes.
        left: Names of the tasks that are left.
    """
    taken = Session(plan, session.taken, session.seconds, session.other_cores, left)
    return taken.file(cpu_model(), memory_share_bytes())
