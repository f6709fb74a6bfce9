"""A config.json without what changes a model's logits and not the price of its steps.

Why
    A published model that is quantised, or whose positions are stretched, has the sizes of one that
    is trained here. Its steps can be forecast, though this decoder would compute other logits.

What it decides
    Formats of stored weights, and kinds of rotary scaling, are left out by name; all else is read
    as strictly as for training.

Kept true (tests/unit/spec/model/test_forecast_config.py)
    What is left is priced as the model without it; what else is unknown is refused.
"""

from collections.abc import Mapping
from typing import Any

from equipoise.base.shown import shown
from equipoise.spec.model.hf_config import rope_types

_FORMATS = ("quantization_config", "compression_config")
_ROPES = ("rope_scaling", "rope_parameters")


def without_arithmetic(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config.json of a model that is trained here without what no price depends on.

    Args:
        config: The parsed config.json, of one of ``hf_config.MODEL_TYPES``.

    Returns:
        What is left, and what was left out, in words.

    >>> config = {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    >>> without_arithmetic(config)
    ({'model_type': 'qwen3'}, ('rope_scaling of type "yarn"',))
    """
    left, out = dict(config), list[str]()
    for name in _FORMATS:
        if isinstance(left.get(name), dict):
            del left[name]
            out.append(name)
    known = rope_types(str(config.get("model_type")))
    for name in _ROPES:
        rope = left.get(name)
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if isinstance(kind, str) and kind not in known:
            del left[name]
            if "rope_theta" in rope:
                left["rope_theta"] = rope["rope_theta"]
            out.append(f"{name} of type {shown(kind)}")
    return left, tuple(out)
