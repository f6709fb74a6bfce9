"""Learning rates as pure functions of the step, a row for each schedule.

What it decides
    A schedule is a factor of the peak rate at every step after the warm-up, which all of them
    share: linear from zero. No schedule keeps a state, so a run that resumes with more steps, or
    another schedule, has the rates of a run that had them from its start.

Kept true (tests/unit/optim/test_rate.py)
    The rates are those of ``transformers`` at the same step; no rate exceeds the peak.

Sources
    transformers 5, ``optimization.py``: get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup, get_wsd_schedule, get_inverse_sqrt_schedule.
    Warm-up, stable, decay: MiniCPM, arXiv:2404.06395, section 4.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from equipoise.spec.run.spec import RateSchedule, TrainSpec

_TIMESCALE = 10_000
"""Steps over which ``inverse-sqrt`` falls where there is no warm-up, as in transformers."""


def learning_rate(train: TrainSpec, step: int) -> float:
    """Rate of step ``step`` (from 1): linear warm-up, then ``train.schedule``.

    >>> spec = TrainSpec(lr=1.0, steps=10, warmup_steps=2, final_lr_ratio=0.0)
    >>> [round(learning_rate(spec, step), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    return train.lr * RATES[train.schedule](train, step)


def _done(train: TrainSpec, step: int) -> float:
    """Share of the steps after the warm-up that are done, at most 1."""
    after = max(1, train.steps - train.warmup_steps)
    return min(1.0, (step - train.warmup_steps) / after)


def _fall(train: TrainSpec, height: float) -> float:
    """From 1 (height 1) to the last ratio (height 0)."""
    return train.final_lr_ratio + (1 - train.final_lr_ratio) * height


def _cosine(train: TrainSpec, step: int) -> float:
    return _fall(train, (1 + math.cos(math.pi * _done(train, step))) / 2)


def _linear(train: TrainSpec, step: int) -> float:
    return _fall(train, 1 - _done(train, step))


def _wsd(train: TrainSpec, step: int) -> float:
    left = max(0, train.steps - step)
    return _fall(train, min(1.0, left / max(1, train.falling_steps)))


def _constant(train: TrainSpec, step: int) -> float:
    del train, step
    return 1.0


def _inverse_sqrt(train: TrainSpec, step: int) -> float:
    timescale = train.warmup_steps or _TIMESCALE
    return math.sqrt(timescale / (step - train.warmup_steps + timescale))


RATES: Mapping[RateSchedule, Callable[[TrainSpec, int], float]] = MappingProxyType(
    {
        "cosine": _cosine,
        "linear": _linear,
        "wsd": _wsd,
        "constant": _constant,
        "inverse-sqrt": _inverse_sqrt,
    }
)
"""Factor of the peak rate at a step after the warm-up, by the name in ``train.schedule``."""
