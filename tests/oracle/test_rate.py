"""Learning rates beside those of transformers and torch, step by step."""

from collections.abc import Callable

import pytest
import torch
import transformers.optimization as peer
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from equipoise.optim.rate import learning_rate
from equipoise.spec.run.spec import TrainSpec

STEPS, RATIO = 40, 0.2


def rates(make: Callable[[SGD], LRScheduler], steps: int = STEPS) -> list[float]:
    """The peer's factor at each step; its step s is the one after s calls."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        factors.append(scheduler.get_last_lr()[0])
    return factors


def ours(**keys: object) -> list[float]:
    train = TrainSpec(lr=1.0, steps=STEPS, **keys)  # type: ignore[arg-type]
    return [learning_rate(train, step) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 7, STEPS - 1])
def test_rates_are_those_of_transformers(warmup: int) -> None:
    keys = {"warmup_steps": warmup}
    pairs = [
        (
            ours(**keys, schedule="linear", final_lr_ratio=0.0),
            rates(lambda o: peer.get_linear_schedule_with_warmup(o, warmup, STEPS)),
        ),
        (
            ours(**keys, schedule="cosine", final_lr_ratio=RATIO),
            rates(
                lambda o: peer.get_cosine_with_min_lr_schedule_with_warmup(
                    o, warmup, STEPS, min_lr_rate=RATIO
                )
            ),
        ),
        (
            ours(**keys, schedule="constant"),
            rates(lambda o: peer.get_constant_schedule_with_warmup(o, warmup)),
        ),
        (
            ours(**keys, schedule="inverse-sqrt"),
            rates(lambda o: peer.get_inverse_sqrt_schedule(o, warmup)),
        ),
    ]
    for mine, theirs in pairs:
        assert mine == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(("warmup", "decay"), [(0, 10), (7, 1), (7, 33)])
def test_wsd_is_that_of_transformers(warmup: int, decay: int) -> None:
    keys = {"warmup_steps": warmup, "decay_steps": decay}
    for ratio in (0.0, RATIO):
        mine = ours(**keys, schedule="wsd", final_lr_ratio=ratio)
        theirs = rates(
            lambda o, ratio=ratio: peer.get_wsd_schedule(
                o,
                warmup,
                decay,
                num_training_steps=STEPS,
                decay_type="linear",
                min_lr_ratio=ratio,
            )
        )
        # With a last ratio, the warm-up of transformers begins there instead of at zero.
        first = warmup if ratio else 0
        assert mine[first:] == pytest.approx(theirs[first:], abs=1e-12)


def test_cosine_without_warm_up_is_that_of_torch() -> None:
    mine = ours(warmup_steps=0, schedule="cosine", final_lr_ratio=RATIO)
    assert mine == pytest.approx(rates(lambda o: CosineAnnealingLR(o, STEPS, RATIO)), abs=1e-12)


def test_linear_without_warm_up_is_a_lambda_of_torch() -> None:
    mine = ours(warmup_steps=0, schedule="linear", final_lr_ratio=0.0)
    assert mine == pytest.approx(rates(lambda o: LambdaLR(o, lambda step: 1 - step / STEPS)))
