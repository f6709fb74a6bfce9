"""A model with sliding windows, as the model without them that it is on shorter texts.

Why
    A layer with a window of n tokens reads the last n. On a text of at most n tokens that is all
    of it, so a decoder without windows computes the same logits there.

Kept true (tests/unit/spec/model/test_windows.py, tests/oracle/serving/test_serving_engine.py)
    The config without windows has every other key as it was; within the window, answers are those
    of transformers with it.
"""

from collections.abc import Mapping
from typing import Any

from equipoise.spec.model.hf_keys import READ, known_keys

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def without_windows(config: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
    """A config.json without its windows, and the longest text on which that changes nothing.

    Args:
        config: With sizes as transformers names them.

    Returns:
        The config, and tokens; None if the model has no window, or layers of other kinds.

    Raises:
        ModelError: a key is unknown, or has a value that this decoder does not compute.
    """
    kind = config.get("model_type")
    if kind not in READ:
        return None
    said = known_keys(kind, config)
    window, types = said["sliding_window"], said["layer_types"]
    is_used = said["use_sliding_window"] is True or not str(kind).startswith("qwen")
    is_size = type(window) is int and window > 0
    are_known = types is None or (isinstance(types, list) and set(types) <= _LAYER_TYPES)
    if not (is_used and is_size and are_known):
        return None
    off = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    return {**config, **off}, window
