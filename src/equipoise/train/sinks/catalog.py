"""Every sink by its key in ``[journal]``, and all that a run wants behind one interface.

What it decides
    A sink never ends a run. What the disk refuses is dropped and counted, and the sink is opened
    anew at the next step; a sink that fails otherwise is given up. Either way there is one notice.

Kept true (tests/unit/train/test_sinks.py)
    A step's figures are in every sink that works, whatever the others do.
"""

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import SpecError
from equipoise.base.shown import shorten
from equipoise.spec.run.keys import keys, toml
from equipoise.spec.run.spec import JournalSpec, RunSpec
from equipoise.train.sinks.mlflow import open_mlflow
from equipoise.train.sinks.sink import Sink, SinkRun
from equipoise.train.sinks.tensorboard import open_tensorboard
from equipoise.train.sinks.wandb import open_wandb


@dataclass(frozen=True, slots=True)
class SinkRow:
    """One sink: its own name, the package that it needs, and how it is opened."""

    label: str
    package: str
    open: Callable[[SinkRun], Sink]


SINKS: Mapping[str, SinkRow] = MappingProxyType(
    {
        "tensorboard": SinkRow("TensorBoard", "tensorboard", open_tensorboard),
        "wandb": SinkRow("W&B", "wandb", open_wandb),
        "mlflow": SinkRow("MLflow", "mlflow", open_mlflow),
    }
)
"""By the name of the key, of the extra, and of the folder in the run's folder."""


def wanted_sinks(journal: JournalSpec) -> list[str]:
    """The sinks that a run asks for.

    Raises:
        SpecError: the package of one is not installed.
    """
    wanted = [name for name in SINKS if getattr(journal, name)]
    for name in wanted:
        row = SINKS[name]
        if not _is_installed(row.package):
            raise SpecError(
                f"journal.{name} is true and {row.label} is not installed. "
                f"Run `pip install 'equipoise[{name}]'`, or set it to false."
            )
    return wanted


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it stands in sys.modules as None
        return False


def open_sinks(folder: Path, spec: RunSpec, *, is_first: bool) -> "Sinks":
    """The sinks that a run asks for, on its first rank; none on the others.

    Raises:
        SpecError: as ``wanted_sinks``.
    """
    values = {name: attrgetter(name)(spec) for name in keys()}
    config = {name: toml(v) if isinstance(v, tuple) else v for name, v in values.items()}
    names = wanted_sinks(spec.journal) if is_first else ()
    return Sinks(SinkRun(folder, spec.name, config), names)


class Sinks:
    """The sinks of a run; none of them can end it.

    Args:
        run: What they show.
        names: Keys of ``rows``.
        rows: The sinks that there are.
    """

    def __init__(
        self, run: SinkRun, names: Sequence[str], rows: Mapping[str, SinkRow] = SINKS
    ) -> None:
        self._guarded = [_Guarded(run, name, rows[name]) for name in names]

    def write(self, step: int, figures: Mapping[str, float], section: str = "train") -> None:
        """Give every sink the figures of a step, each named ``section/name``."""
        named = {f"{section}/{name}": float(value) for name, value in figures.items()}
        for each in self._guarded:
            each.write(step, named)

    def take_notices(self) -> list[str]:
        """Sentences for the reader since the last call."""
        return [notice for each in self._guarded for notice in each.take_notices()]

    def close(self) -> None:
        """Write out what is pending."""
        for each in self._guarded:
            each.close()


class _Guarded:
    """A sink whose errors become notices."""

    def __init__(self, run: SinkRun, name: str, row: SinkRow) -> None:
        self._run, self._row = run, row
        self._folder = run.folder / name
        self._sink: Sink | None = None
        self._is_given_up = False
        self._lost_steps = 0
        self._notices: list[str] = []

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self._is_given_up:
            return
        try:
            if self._sink is None:
                if not self._run.folder.is_dir():  # a sink would make it
                    raise FileNotFoundError(errno.ENOENT, f"{self._run.folder} has vanished")
                self._sink = self._row.open(self._run)
            self._sink.write(step, figures)
        except OSError as error:
            self._drop()
            self._lost_steps += 1
            if self._lost_steps == 1:
                self._notices.append(
                    f"{self._row.label}'s files in {self._folder} cannot be written "
                    f"({explain_refusal(error, self._folder)}). The run goes on without them."
                )
        except Exception as error:
            self._is_given_up = True
            self._drop()
            said = shorten(f"{type(error).__name__}: {error}".splitlines()[0], 200)
            self._notices.append(f"{self._row.label} failed ({said}). The run goes on without it.")
        else:
            if self._lost_steps:
                self._notices.append(
                    f"{self._row.label}'s files in {self._folder} can be written again; "
                    f"{self._lost_steps:,} steps are missing."
                )
            self._lost_steps = 0

    def take_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        self._drop()
        self._is_given_up = True

    def _drop(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(Exception):
                sink.close()
