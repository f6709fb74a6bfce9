"""Numbers that go bad, and bits that flip in memory (F8, F10)."""

import re
from collections.abc import Callable

from equipoise.fault.drill.injection import Fired, Injection
from equipoise.fault.drill.judge import BY_ITSELF, SAME_COMMAND, UNDISTURBED, Expected, strike
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import STEPS, Stage

_BIT = 21
"""Near the top of the mantissa of fp32: the number stays finite, and is wrong by a quarter."""


def nan_loss(stage: Stage, repeat: int) -> Rehearsal:
    """The output of a module becomes NaN, and so the loss."""
    return _spoil(stage, repeat, "spoil-output", "forward", _bad_loss)


def nan_gradient(stage: Stage, repeat: int) -> Rehearsal:
    """One number of a gradient becomes NaN; the loss is finite."""
    return _spoil(stage, repeat, "spoil-gradient", "wait", _bad_gradient)


def _spoil(
    stage: Stage, repeat: int, act: str, phase: str, names: Callable[[Fired], str]
) -> Rehearsal:
    draw = stage.draw(act, repeat)
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    injection = Injection(act, rank, phase, draw.randint(3, STEPS - 1))
    ways = BY_ITSELF, SAME_COMMAND
    return strike(stage, act, injection, Expected("NaN", "step", names, ways))


def _bad_loss(fired: Fired) -> str:
    layer = re.escape(fired.detail)
    return rf"The loss of step {fired.step} is not a number.*output is not finite is {layer}\."


def _bad_gradient(fired: Fired) -> str:
    weight = fired.detail.replace(".", r"\.")
    return (
        rf"The gradient norm of step {fired.step} is not a number.*gradient is not finite is "
        rf"{weight}"
    )


def flip_weight(stage: Stage, repeat: int) -> Rehearsal:
    """A bit of a weight flips on one rank and stays."""
    return _flip(stage, repeat, "flip-weight")


def flip_moment(stage: Stage, repeat: int) -> Rehearsal:
    """A bit of an optimizer's moment flips on one rank and stays."""
    return _flip(stage, repeat, "flip-moment")


def _flip(stage: Stage, repeat: int, act: str) -> Rehearsal:
    rank = (stage.ranks - 1 - repeat) % stage.ranks
    step = stage.draw(act, repeat).randint(3, 6)
    injection = Injection(act, rank, "forward", step, amount=_BIT)
    expected = Expected(
        f"bit {_BIT}", "fingerprint", _differs, (BY_ITSELF, SAME_COMMAND, UNDISTURBED)
    )
    return strike(stage, act, injection, expected)


def _differs(fired: Fired) -> str:
    weight, rank = re.escape(fired.detail), fired.rank
    own = rf"Rank {rank} holds bytes that have changed.*{weight}"
    return rf"{own}|One of ranks (\d+, )*{rank}\b.* holds bytes that differ.*{weight}"
