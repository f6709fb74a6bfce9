"""What a sample costs, in whatever form a trainer knows its model.

What it decides
    Sizes are priced by FLOP, read as seconds of a device that computes 1 TFLOP/s: ratios are
    exact, the unit is arbitrary. For seconds of a device, give a curve: ``cost.read_curve`` reads
    one from measured kernels, or fits one to a table of your own.

Kept true (tests/unit/balance/batches/test_prices.py)
    Every form of one model has the same price.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from equipoise.base.errors import SpecError
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve, counted_curve, require_curve
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.presets import ModelSpec, preset


@runtime_checkable
class Config(Protocol):
    """A configuration of ``transformers``."""

    def to_dict(self) -> dict[str, Any]:
        """The keys of its config.json."""


Price = LoadCurve | ModelSpec | Mapping[str, Any] | Config | str
"""A curve, a model's sizes, the keys of its config.json, its configuration, or a preset's name."""


def curve_of(price: object) -> LoadCurve:
    """The curve that a price stands for.

    Raises:
        SpecError: it is none of them, no preset has that name, or a curve's times are none.
        ModelError: the configuration lacks a size, or is of another kind of model.
    """
    if isinstance(price, LoadCurve):
        require_curve(price)
        return price
    if isinstance(price, ModelSpec):
        return counted_curve(price)
    if isinstance(price, str):
        return counted_curve(preset(price))
    if isinstance(price, Mapping):
        return counted_curve(model_from_hf_config(price))
    if isinstance(price, Config):
        return counted_curve(model_from_hf_config(price.to_dict()))
    raise SpecError(
        f"price is {shown(price)}. Give a preset's name such as llama3-8b, a ModelSpec, the dict "
        f"of a config.json, or a LoadCurve."
    )
