"""Numbers in the fields of requests: Python's own, or refused by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from equipoise import (
    PlanRequest,
    ServingRequest,
    StepRequest,
    counted_curve,
    plan,
    preset,
    simulate,
    simulate_serving,
)
from equipoise.balance.context.sharding import split_context
from equipoise.base.errors import EquipoiseError, SpecError
from equipoise.base.fields import plain_fields
from equipoise.spec.request_trace import TracedRequest


@dataclass(frozen=True)
class Asked:
    steps: int = 1
    share: float | None = None
    name: str | Path | None = None
    way: Literal["near", "far"] = "near"
    table: Mapping[str, int] = field(default_factory=dict)
    lengths: str | Sequence[int] | None = None


def test_numbers_become_pythons_own() -> None:
    given: dict[str, Any] = {"steps": np.int32(3), "share": np.float32(0.5), "lengths": 5}
    asked = plain_fields(Asked(**given))
    assert (type(asked.steps), asked.steps) == (int, 3)
    assert (type(asked.share), asked.share) == (float, 0.5)
    same = Asked(3, share=1, name="x", table={"a": 1})
    assert plain_fields(same) is same


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": True}, "steps is true. Give a whole number."),
        ({"steps": np.bool_(True)}, "steps is true. Give a whole number."),
        ({"steps": 2.0}, "steps is 2.0. Give a whole number."),
        ({"steps": None}, "steps is null. Give a whole number."),
        ({"steps": "3"}, 'steps is "3". Give a whole number.'),
        ({"share": "x"}, 'share is "x". Give a number.'),
        ({"share": False}, "share is false. Give a number."),
        ({"name": 3}, "name is 3. Give text, or a Path."),
        ({"way": None}, "way is null. Give text."),
        ({"table": [1]}, "table is [1]. Give a dict."),
    ],
)
def test_anything_else_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        plain_fields(Asked(**given))
    assert str(caught.value) == message


STEP = StepRequest("llama3-8b", "h100-sxm:8", "dp=8", 8192, 16)


def test_a_step_takes_numpys_numbers() -> None:
    numbers: dict[str, Any] = {"context_tokens": np.int64(8192), "seed": np.int64(0)}
    given = replace(STEP, **numbers, mtbf_hours=np.float64(1e5))
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
        ({"recompute": None}, "recompute is null. Give text."),
        ({"layers": 12}, "layers is 12. Give text."),
        ({"faults": 0}, "faults is 0. Give text."),
        ({"cluster": {}}, "cluster is (a table). Give text, or a ClusterSpec."),
    ],
)
def test_a_step_refuses_what_is_not_a_number(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        simulate(replace(STEP, **given))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": None}, "seconds is null. Give a number."),
        ({"model": 3}, "model is 3. Give text."),
        ({"micro_batch": True}, "micro_batch is true. Give a whole number."),
        ({"out": "folder"}, 'out is "folder". Give a Path.'),
    ],
)
def test_a_plan_refuses_what_its_fields_do_not_hold(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan.plan(replace(PlanRequest("llama3-8b", "h100-sxm:8", 8192, 64), **given))
    assert str(caught.value) == message


ONE = TracedRequest(0.0, "", 100, 10, 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": None}, "layout is null. Give text, or a Layout."),
        ({"settings": 5}, "settings is 5. Give a BatchSettings."),
        ({"expert_skew": "2"}, 'expert_skew is "2". Give a number.'),
        ({"requests": 5}, "There are no requests. Give at least one."),
        ({"requests": [5]}, "A request is 5. Give a TracedRequest."),
        (
            {"requests": [replace(ONE, prompt_tokens=True)]},
            "A request has prompt_tokens = True. Give a whole number of 1 to 2,147,483,647.",
        ),
        (
            {"requests": [TracedRequest("0", "", 100, 10, 10)]},  # type: ignore[arg-type]
            'A request arrives at "0" s. Give a time of 0 to 10,000,000,000.',
        ),
    ],
)
def test_serving_refuses_what_its_fields_do_not_hold(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        simulate_serving(replace(ServingRequest([ONE], "llama3-8b", "h100-sxm:1", "tp=1"), **given))
    assert str(caught.value) == message


def test_a_counted_curve_and_a_split_refuse_what_they_cannot_count() -> None:
    for call, message in (
        (
            lambda: counted_curve("llama3-8b"),  # type: ignore[arg-type]
            'model is "llama3-8b". Give a ModelSpec, such as preset("llama3-8b").',
        ),
        (
            lambda: counted_curve(preset("2m"), flop_per_s=0),
            "flop_per_s is 0. Give a number above 0.",
        ),
        (
            lambda: split_context([100, 50], 1.5),  # type: ignore[arg-type]
            "ranks is 1.5. Give a whole number from 1 to 2,147,483,647.",
        ),
    ):
        with pytest.raises(EquipoiseError) as caught:
            call()
        assert str(caught.value) == message
