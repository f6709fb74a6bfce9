"""Prices: every form of one model costs the same."""

import dataclasses
from typing import Any

import pytest

from equipoise import balance
from equipoise.balance.batches.prices import curve_of
from equipoise.base.errors import SpecError
from equipoise.cost.curve import counted_curve
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import preset


class Configured:
    """What a configuration of transformers offers."""

    def to_dict(self) -> dict:
        return hf_config(preset("llama3-8b"))


@pytest.mark.parametrize(
    "price",
    ["llama3-8b", preset("llama3-8b"), hf_config(preset("llama3-8b")), Configured()],
)
def test_every_form_of_a_model_has_one_price(price) -> None:
    assert curve_of(price) == counted_curve(preset("llama3-8b"))


@pytest.mark.parametrize(
    "changed",
    [
        {"doc_tokens": (1.0, 2.0)},
        {"doc_tokens": (), "doc_ns": ()},
        {"doc_tokens": (0.0,)},
        {"doc_tokens": (9.0, 3.0), "doc_ns": (1.0, 1.0)},
        {"doc_ns": (float("nan"),)},
        {"fixed_ns": float("inf")},
        {"ns_per_token": -1.0},
        {"head_ns": "much"},
    ],
)
def test_curves_that_price_nothing_are_refused(changed: dict[str, Any]) -> None:
    """Packs would be even in numbers that mean nothing."""
    curve = dataclasses.replace(counted_curve(preset("2m")), **changed)
    with pytest.raises(SpecError) as caught:
        balance.batch([3, 4], ranks=2, price=curve)
    assert str(caught.value) == (
        "A load curve has rising lengths above 0 (doc_tokens), a time for each (doc_ns), and no "
        "time that is negative or not finite. fit_curve makes one from measured samples."
    )


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(SpecError, match="llama3-8b"):
        balance.batch([1], price="lama3-8b")
