"""What overlapping nano-batches was worth on this machine, and where that is kept.

What it decides
    A kind of iteration is overlapped if it was measured to be faster by ``LEAST_GAIN``, and, in the
    invariant mode, to give the same bits. Everything else runs as ever, and the report says so.

Kept true (tests/unit/serve/nano/test_report.py)
    What is written reads back equal; a file of another machine or form is measured again.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from equipoise.base.durable import write_whole
from equipoise.base.read import user_path
from equipoise.serve.nano.choice import LEAST_GAIN, NanoCosts
from equipoise.spec.device.here import cpu_model

_FORM = 1


@dataclass(frozen=True, slots=True)
class NanoGain:
    """One kind of iteration."""

    kind: str
    predicted: float
    """Seconds of the whole iteration over those of the best order."""
    measured: float | None = None
    """The same by the clock; None where no order was predicted to gain."""
    is_equal: bool = True
    """Whether the results were as equal as the engine's mode promises."""

    @property
    def pays(self) -> bool:
        """Whether such iterations are overlapped."""
        return self.is_equal and self.measured is not None and self.measured >= LEAST_GAIN


@dataclass(frozen=True, slots=True)
class NanoReport:
    """All kinds, or why none was measured."""

    gains: tuple[NanoGain, ...] = ()
    reason: str = ""
    costs: NanoCosts | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Iterations that are overlapped."""
        return tuple(each.kind for each in self.gains if each.pays)

    @property
    def gain(self) -> float:
        """The largest measured gain of what is overlapped; 1 if nothing is."""
        return max((each.measured or 1.0 for each in self.gains if each.pays), default=1.0)

    @property
    def words(self) -> str:
        """What was measured, for people.

        >>> NanoReport((NanoGain("tokens", 1.1, 1.08), NanoGain("prompts", 1.0))).words
        'nano-batches gain: tokens 1.08x'
        >>> NanoReport((NanoGain("tokens", 1.1, 0.95), NanoGain("prompts", 1.0))).words
        'nano-batches: no gain (tokens 0.95x)'
        >>> NanoReport(reason="one core").words
        'nano-batches: no gain (one core)'
        """
        paying = [f"{each.kind} {each.measured:.2f}x" for each in self.gains if each.pays]
        if paying:
            return f"nano-batches gain: {', '.join(paying)}"
        tried = [
            f"{each.kind} {each.measured:.2f}x" + ("" if each.is_equal else ", other bits")
            for each in self.gains
            if each.measured is not None
        ]
        return f"nano-batches: no gain ({self.reason or ', '.join(tried) or 'none predicted'})"


@dataclass(frozen=True, slots=True)
class _NanoFile:
    form: int
    machine: str
    measured: dict[str, NanoReport]
    """By model, precision, threads and mode."""


def nano_file() -> Path:
    """Where reports are kept."""
    return user_path("~/.cache/equipoise") / "nano.json"


def read_reports(file: Path) -> dict[str, NanoReport]:
    """What was measured on this machine; nothing if the file is not there or not such a one."""
    try:
        known = TypeAdapter(_NanoFile).validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return {}
    return known.measured if (known.form, known.machine) == (_FORM, cpu_model()) else {}


def keep_report(file: Path, key: str, report: NanoReport) -> None:
    """Keep one report beside the others; where that is refused, it is measured again."""
    whole = _NanoFile(_FORM, cpu_model(), {**read_reports(file), key: report})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, TypeAdapter(_NanoFile).dump_json(whole, indent=1).decode())
    except OSError:
        return


def as_fields(report: NanoReport) -> dict[str, object]:
    """What the journal holds of a report."""
    return {
        "words": report.words,
        "kinds": list(report.kinds),
        "gains": [dataclasses.asdict(each) for each in report.gains],
    }
