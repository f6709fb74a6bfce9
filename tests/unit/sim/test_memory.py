"""Memory under a schedule: in flight is counted from its order, and logits are not forgotten."""

import dataclasses

import pytest

from equipoise.sim.step import price_step
from equipoise.spec.layout import Layout
from support.machines import MODEL, h100, options, stack


def activations(schedule: str, virtual: int) -> list[float]:
    """Peaks over what one micro-batch of the rank's layers takes, without all that stays."""
    layout = Layout(pp=4, dp=2)
    asked = options(step_sequences=32, schedule=schedule, virtual=virtual)
    model = dataclasses.replace(MODEL, vocab=64)
    price = price_step(model, h100(8), layout, asked)
    return (price.memory_bytes / 2**30).tolist()


def test_schedules_hold_what_their_order_says() -> None:
    held = {
        name: activations(name, virtual)
        for name, virtual in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("zb-h2", 1),
            ("interleaved", 2),
            ("zb-v", 2),
            ("v-half", 2),
        )
    }
    peak = {name: max(each) for name, each in held.items()}
    assert peak["gpipe"] > peak["zb-h2"] > peak["interleaved"] > peak["1f1b"] > peak["v-half"]
    assert held["1f1b"] == sorted(held["1f1b"], reverse=True)  # min(m, p - i)
    assert held["1f1b"][0] > 1.5 * held["1f1b"][-1]
    assert max(held["gpipe"]) < 1.1 * min(held["gpipe"])  # all m on every rank
    assert max(held["zb-v"]) < 1.2 * min(held["zb-v"])


def test_logits_count() -> None:
    layout = Layout(dp=8)
    small = dataclasses.replace(MODEL, vocab=1024)
    wide = dataclasses.replace(MODEL, vocab=131_072)
    prices = [price_step(model, h100(8), layout, options()) for model in (small, wide)]
    grew = prices[1].memory["logits"] - prices[0].memory["logits"]
    assert grew == pytest.approx(6.0 * 4096 * (131_072 - 1024))
    chunked = price_step(wide, h100(8), layout, options(stack=stack(logit_bytes=0.0)))
    assert chunked.memory["logits"] == pytest.approx(prices[0].memory["logits"], rel=0.5)


def test_the_largest_micro_batch_counts() -> None:
    layout = Layout(dp=2, pp=4)
    even = [[[4096]] * 8]
    one = [[[4096]] * 7 + [[4096, 4096]]]
    held = [
        price_step(MODEL, h100(8), layout, options(), documents=documents).memory_bytes.max()
        for documents in (even, one)
    ]
    assert held[1] > held[0]
