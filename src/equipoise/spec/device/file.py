"""The device file that ``equipoise calibrate`` writes: what was measured on one machine.

Why
    A measurement without its machine, its day and what else was running is a rumour. The file
    keeps all three beside every point's interval, in plain JSON that people can read.

What it decides
    Its form. Seconds are medians with a 95% interval. ``form`` counts: a file of another form
    is measured anew, not guessed at.

Kept true (tests/unit/spec/device/test_file.py)
    What is written reads back equal; every fault of a file is named in one sentence.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from equipoise.base.errors import SpecError
from equipoise.base.read import read_json
from equipoise.spec.device.parts import Measured, ModelParts
from equipoise.spec.device.spec import Dtype

FORM = 1

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """Seconds of ``(m, k) @ (k, n)``."""

    dtype: Dtype
    m: int
    n: int
    k: int
    s: Measured


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """Seconds of causal attention of one head over one document."""

    dtype: Dtype
    tokens: int
    head_width: int
    forward_s: Measured
    backward_s: Measured


@dataclass(frozen=True, slots=True)
class CollectivePoint:
    """Seconds of one collective; ``bytes`` is the whole tensor."""

    op: Collective
    ranks: int
    bytes: int
    s: Measured


@dataclass(frozen=True, slots=True)
class Stream:
    """Memory bandwidth of one core by STREAM's four kernels [bytes/s]."""

    copy: Measured
    scale: Measured
    add: Measured
    triad: Measured


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """All that was measured."""

    form: int
    machine: str
    date: str
    torch: str
    seconds: float
    """That measuring took."""
    other_load_cores: float
    """Cores that others kept busy meanwhile."""
    thin_points: int
    """Points of fewer than six samples, whose intervals hold less than 95%."""
    memory_bytes: int
    """This core's share."""
    peaks: tuple[tuple[Dtype, float], ...]
    """Best matmul of each dtype [FLOP/s]."""
    stream: Stream
    disk_read_bytes_per_s: Measured
    disk_write_bytes_per_s: Measured
    gemm: tuple[GemmPoint, ...]
    attention: tuple[AttentionPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    residuals: tuple[tuple[str, float], ...] = ()
    """Measured over predicted, of a run's terms, where a run was fitted."""
    parts: tuple[ModelParts, ...] = ()
    """Of the models whose run.toml was calibrated."""


_ADAPTER = TypeAdapter(DeviceFile)


def read_device_file(path: Path) -> DeviceFile:
    """Read and check a device file.

    Raises:
        SpecError: it is missing, no device file, or of another form.
    """
    again = 'Measure anew: "equipoise calibrate".'
    try:
        data: Any = read_json(path)
    except FileNotFoundError:
        raise SpecError(f"There is no device file {path}. {again}") from None
    except (OSError, ValueError):
        raise SpecError(f"{path} is no device file: it is not JSON. {again}") from None
    form = data.get("form") if isinstance(data, dict) else None
    if form != FORM:
        raise SpecError(
            f"{path} is a device file of form {form}; this version reads {FORM}. {again}"
        )
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SpecError(
            f"{path} is no device file: {place}: {first['msg'].lower()}. {again}"
        ) from None


def write_device_file(path: Path, found: DeviceFile) -> None:
    """Write a device file whole, or not at all.

    Raises:
        SpecError: the folder or the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(_ADAPTER.dump_json(found, indent=1))
        partial.replace(path)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}. Give --out a "
            f"file in a folder that may be written."
        ) from None
