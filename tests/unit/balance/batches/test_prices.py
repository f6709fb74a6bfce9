"""Prices: every form of one model costs the same."""

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


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(SpecError, match="llama3-8b"):
        balance.batch([1], price="lama3-8b")
