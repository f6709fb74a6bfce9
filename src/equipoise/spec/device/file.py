"""The device file that ``equipoise calibrate`` writes: what was measured on one machine.

Why
    A measurement without its machine, date and other load is a rumour. The file keeps all three
    with every point's interval, in readable JSON.

What it decides
    Its form. Seconds are medians with a 95% interval. ``form`` is a version: a file of another
    form is measured again, not guessed at.

Kept true (tests/unit/spec/device/test_file.py)
    What is written reads back equal; every fault of a file is named in one sentence.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from equipoise.base.durable import write_whole
from equipoise.base.errors import SpecError
from equipoise.base.read import read_json, reason, user_path
from equipoise.spec.device.parts import Measured, ModelParts
from equipoise.spec.device.spec import Dtype

FORM = 1

BUSY_CORES = 0.3
"""Cores of other load above which what was measured is doubtful."""


def device_folder() -> Path:
    """Where ``equipoise calibrate`` keeps its device files."""
    return user_path("~/.cache/equipoise")


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
    """Seconds of causal attention: of one head over one document, or of ``units`` of these."""

    dtype: Dtype
    tokens: int
    head_width: int
    forward_s: Measured
    backward_s: Measured
    sharing: int | None = None
    """Query heads for each key/value head; None on a core, which computes head after head."""
    units: int | None = None
    """Heads times documents of one call; None for one head on a core."""


@dataclass(frozen=True, slots=True)
class CollectivePoint:
    """Seconds of one collective; ``bytes`` is the whole tensor."""

    op: Collective
    ranks: int
    bytes: int
    s: Measured


@dataclass(frozen=True, slots=True)
class PairPoint:
    """Seconds of one message between two devices of a node, the slowest of the pairs alike."""

    block: int
    """The devices 0 to ``block`` - 1, and each further run of as many, are the smallest blocks
    that hold both devices of such a pair."""
    bytes: int
    s: Measured


@dataclass(frozen=True, slots=True)
class Stream:
    """Memory bandwidth of one core, or of one device, by STREAM's four kernels [bytes/s]."""

    copy: Measured
    scale: Measured
    add: Measured
    triad: Measured


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What is known of a machine's CUDA devices besides their kernels."""

    devices: int
    """All that were measured, at once."""
    reserved_bytes: int
    """Held on a device by its context and NCCL, beside torch's allocator."""
    host_memory_bytes: int
    """One device's share of the host's memory."""
    host_bytes_per_s: Measured
    """From pinned memory to each device, while all copy."""
    host_stream: Stream
    """Memory bandwidth of one core of the host, while all are busy."""
    host_cores: int
    """Those that were busy."""
    pairs: tuple[PairPoint, ...] = ()
    """None for a single device."""
    power_limit_w: float | None = None
    """The driver's limit of each board; None if it does not say."""


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """All measurements of one machine: of its cores, or of its CUDA devices."""

    form: int
    machine: str
    """Processor and cores; or the product that the devices are."""
    date: str
    torch: str
    seconds: float
    """Seconds that the measurement took."""
    other_load_cores: float
    """Cores that other programs kept busy meanwhile."""
    thin_points: int
    """Points with fewer than six samples, whose intervals cover less than 95%."""
    memory_bytes: int
    """This core's share of the machine's memory; or a device's own, as the driver reports it."""
    peaks: tuple[tuple[Dtype, float], ...]
    """Fastest matmul of each dtype [FLOP/s]."""
    stream: Stream
    disk_read_bytes_per_s: Measured
    disk_write_bytes_per_s: Measured
    gemm: tuple[GemmPoint, ...]
    attention: tuple[AttentionPoint, ...]
    collectives: tuple[CollectivePoint, ...]
    residuals: tuple[tuple[str, float], ...] = ()
    """Measured over predicted time of a run's terms, if a run was fitted."""
    parts: tuple[ModelParts, ...] = ()
    """Parts of the models whose run.toml was calibrated."""
    cuda: CudaFacts | None = None
    """None for cores."""
    left: tuple[str, ...] = ()
    """What a calibration had no time for yet."""


_ADAPTER = TypeAdapter(DeviceFile)


def doubts_of(known: DeviceFile, name: str) -> tuple[str, ...]:
    """What a forecast that rests on a device file must say of it, a sentence each.

    Args:
        known: What was measured.
        name: The device, as a command line has it.
    """
    doubts = []
    if known.other_load_cores > BUSY_CORES:
        doubts.append(
            f"{name} was measured while other programs kept {known.other_load_cores:.1f} cores "
            f"busy, so this forecast may be too slow by as much. Measure again on a quiet machine."
        )
    if known.left:
        doubts.append(
            f"{name} is measured in part: {', '.join(known.left)} are left, and what rests on them "
            f"is priced from other curves. The same equipoise calibrate goes on with them."
        )
    return tuple(doubts)


def read_device_file(path: Path) -> DeviceFile:
    """Read and check a device file.

    Raises:
        SpecError: it is missing, not a device file, or of another form.
    """
    again = 'Measure again: "equipoise calibrate".'
    try:
        data: Any = read_json(path)
    except FileNotFoundError:
        raise SpecError(f"No such device file: {path}. {again}") from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {reason(error)}. {again}") from None
    except ValueError:
        raise SpecError(f"{path} is not a device file: it is not JSON. {again}") from None
    form = data.get("form") if isinstance(data, dict) else None
    if form != FORM:
        raise SpecError(
            f"{path} is a device file of form {form}; this version reads {FORM}. {again}"
        )
    try:
        file = _ADAPTER.validate_python(data)
        _require_above_zero(file)
    except ValueError as error:
        raise SpecError(f"{path} is not a device file: {reason(error)}. {again}") from None
    return file


def _require_above_zero(file: DeviceFile) -> None:
    """Refuse sizes and seconds that no kernel has.

    Raises:
        ValueError: names the first.
    """
    points: dict[str, list[tuple[float, ...]]] = {
        "gemm": [(p.m, p.n, p.k, p.s.mid) for p in file.gemm],
        "attention": [
            (p.tokens, p.head_width, p.forward_s.mid, p.backward_s.mid, *_given(p.sharing, p.units))
            for p in file.attention
        ],
        "collectives": [(p.ranks, p.bytes, p.s.mid) for p in file.collectives],
        "peaks": [(rate,) for _, rate in file.peaks],
        "residuals": [(factor,) for _, factor in file.residuals],
    }
    may_lack = {"residuals"}
    if file.cuda is not None:
        facts = file.cuda
        host = facts.host_bytes_per_s.mid, facts.host_stream.triad.mid
        points["cuda"] = [(facts.devices, facts.host_memory_bytes, facts.host_cores, *host)]
        points["cuda.pairs"] = [(p.block, p.bytes, p.s.mid) for p in facts.pairs]
        if facts.devices == 1:  # nobody to send to
            may_lack |= {"collectives", "cuda.pairs"}
    for name, rows in points.items():
        if not rows and name not in may_lack:
            raise ValueError(f"{name}: there is not one point")
        for place, row in enumerate(rows):
            for value in row:
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name}.{place}: {value:g} must be above 0")


def _given(*values: int | None) -> list[int]:
    return [value for value in values if value is not None]


def write_device_file(path: Path, measured: DeviceFile) -> None:
    """Write a device file whole or not at all.

    Raises:
        SpecError: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _ADAPTER.dump_json(measured, indent=1, exclude_none=True).decode()
        write_whole(path, text)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}. Give --out a "
            f"file in a writable folder."
        ) from None
