"""Seconds of a serving engine's iterations, measured here or added up for a device.

Why
    Serving has its own costs: weights are read for a handful of rows, and every sequence reads its
    keys and values. The scheduler, the simulator and the planner price iterations by this one
    curve, wherever it comes from.

What it decides
    An iteration's seconds are a curve over its new tokens, another one over rows that pass through
    the head, and terms linear in pairs, rows of keys and values, sequences, and calls of attention:
    every chunk of a prompt is one, all single tokens together are another one. The file in the
    cache holds a curve for each model, precision and number of threads that was measured.

Kept true (tests/unit/spec/device/test_serving.py)
    What is written reads back equal; a file of another machine or form is refused.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from equipoise.base.digest import digest
from equipoise.base.durable import write_whole
from equipoise.base.errors import SpecError
from equipoise.base.read import read_json, reason, user_path
from equipoise.spec.device.here import cpu_model
from equipoise.spec.device.spec import Dtype
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.model.sizes import timed_sizes

FORM = 1

Points = tuple[tuple[int, float], ...]
"""(rows, seconds), ascending in both."""


@dataclass(frozen=True, slots=True)
class ServingCurve:
    """What an iteration's seconds are made of."""

    tokens: Points
    """Everything but attention and the head, by new tokens of the iteration."""
    logits: Points
    """Head and sampling, by rows; nothing for no rows."""
    pair_s: float
    """One query with one key, over all layers and heads [s]."""
    kv_token_s: float
    """Reading one token's keys and values, in all layers [s]."""
    sequence_s: float
    """One sequence more in an iteration [s]."""
    swap_token_s: float
    """Moving one token's keys and values to host memory or back [s]."""
    chunk_kv_token_s: float = 0.0
    """Laying out one token's keys and values for a chunk of a prompt, in all layers [s]."""
    call_s: float = 0.0
    """One call of attention more in every layer: for a chunk beside other sequences [s]."""


@dataclass(frozen=True, slots=True)
class MeasuredServing:
    """The curve of one model's engine on this machine."""

    model: str
    """Name of the model, by ``serving_name``."""
    title: str
    """Its widths, for people."""
    dtype: Dtype
    threads: int
    ranks: int
    """Ranks that share a sequence's tokens; 1 for one process."""
    date: str
    curve: ServingCurve


@dataclass(frozen=True, slots=True)
class _ServingFile:
    form: int
    machine: str
    measured: tuple[MeasuredServing, ...]


def serving_file() -> Path:
    """Where the engine's curves are kept."""
    return user_path("~/.cache/equipoise") / "serving.json"


def serving_name(model: ModelSpec) -> str:
    """A name for a model's sizes, whatever its rotary frequencies.

    >>> from equipoise.spec.model.presets import preset
    >>> serving_name(preset("2m")) == serving_name(preset("7m"))
    False
    """
    return digest(timed_sizes(dataclasses.replace(model, rope_theta=1.0, rope_scaling=None)))


def read_serving(file: Path) -> tuple[MeasuredServing, ...]:
    """The curves that were measured on this machine; none if there is no file.

    Raises:
        SpecError: the file is not one, or of another machine or form.
    """
    if not file.exists():
        return ()
    try:
        data = read_json(file)
        if isinstance(data, dict) and data.get("form") != FORM:
            raise SpecError(
                f"{file} has form {data.get('form')}, and this version reads {FORM}. Remove it; "
                "the engine measures again."
            )
        known = TypeAdapter(_ServingFile).validate_python(data)
    except (OSError, ValueError, ValidationError) as error:
        raise SpecError(
            f"{file} holds no curves of a serving engine: {reason(error)}. Remove it; the engine "
            "measures again."
        ) from None
    if known.machine != cpu_model():
        raise SpecError(
            f'{file} was measured on "{known.machine}" but this is "{cpu_model()}". Remove it; '
            "the engine measures again."
        )
    return known.measured


def write_serving(file: Path, measured: MeasuredServing) -> None:
    """Keep a curve, in place of an earlier one of the same model, precision and threads.

    Raises:
        SpecError: as ``read_serving``.
    """
    others = [each for each in read_serving(file) if _key(each) != _key(measured)]
    whole = _ServingFile(FORM, cpu_model(), (*others, measured))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, TypeAdapter(_ServingFile).dump_json(whole, indent=1).decode())


def _key(measured: MeasuredServing) -> tuple[str, Dtype, int, int]:
    return measured.model, measured.dtype, measured.threads, measured.ranks
