"""Numbers in the fields of requests: Python's own, or refused by name."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from equipoise import StepRequest, simulate
from equipoise.base.errors import SpecError
from equipoise.base.fields import with_plain_numbers


@dataclass(frozen=True)
class Asked:
    steps: Any = 1
    share: Any = None


def test_numbers_become_pythons_own() -> None:
    asked = with_plain_numbers(Asked(np.int32(3), np.float32(0.5)), whole=["steps"], real=["share"])
    assert (type(asked.steps), asked.steps) == (int, 3)
    assert (type(asked.share), asked.share) == (float, 0.5)
    same = Asked(3)
    assert with_plain_numbers(same, whole=["steps"], real=["share"]) is same


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(True), "steps is true. Give a whole number."),
        (Asked(np.bool_(True)), "steps is true. Give a whole number."),
        (Asked(2.0), "steps is 2.0. Give a whole number."),
        (Asked("3"), 'steps is "3". Give a whole number.'),
        (Asked(share="x"), 'share is "x". Give a number.'),
        (Asked(share=[1]), "share is [1]. Give a number."),
    ],
)
def test_anything_else_is_refused_by_name(asked: Asked, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        with_plain_numbers(asked, whole=["steps"], real=["share"])
    assert str(caught.value) == message


STEP = StepRequest("llama3-8b", "h100-sxm:8", "dp=8", 8192, 16)


def test_a_step_takes_numpys_numbers() -> None:
    given = replace(
        STEP, context_tokens=np.int64(8192), seed=np.int64(0), mtbf_hours=np.float64(1e5)
    )
    row = json.dumps(simulate(given).as_row())
    assert row == json.dumps(simulate(replace(STEP, mtbf_hours=1e5)).as_row())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"micro_batch": True}, "micro_batch is true. Give a whole number."),
        ({"step_sequences": 16.0}, "step_sequences is 16.0. Give a whole number."),
        ({"seed": 0.5}, "seed is 0.5. Give a whole number."),
        ({"expert_skew": "2"}, 'expert_skew is "2". Give a number.'),
        ({"mtbf_hours": 9, "checkpoint_s": "9"}, 'checkpoint_s is "9". Give a number.'),
        ({"jitter": [0.1]}, "jitter is [0.1]. Give a number."),
    ],
)
def test_a_step_refuses_what_is_not_a_number(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        simulate(replace(STEP, **given))
    assert str(caught.value) == message
