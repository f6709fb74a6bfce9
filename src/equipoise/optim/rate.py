"""Learning rates as pure functions of the step."""

import math

from equipoise.spec.run.spec import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Rate of step ``step`` (from 1): linear warm-up, then cosine or constant.

    >>> spec = TrainSpec(lr=1.0, steps=10, warmup_steps=2, final_lr_ratio=0.0)
    >>> [round(learning_rate(spec, step), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return train.lr * (train.final_lr_ratio + (1 - train.final_lr_ratio) * cosine)
