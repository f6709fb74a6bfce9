"""Import a function that a table names."""

import importlib
from typing import Any


def load(name: str) -> Any:
    """The function or class that ``"module:function"`` names below ``equipoise``.

    >>> load("base.load:load") is load
    True
    """
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"equipoise.{module}"), function)
