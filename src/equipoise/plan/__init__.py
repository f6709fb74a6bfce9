"""Which layout: a search over everything that can be chosen, and why the answer is the answer."""

from typing import TYPE_CHECKING

from equipoise.base.load import load

if TYPE_CHECKING:
    from equipoise.plan.measured.request import measure as measure
    from equipoise.plan.request import plan as plan
    from equipoise.plan.serving.request import plan_serving as plan_serving

_HOMES = {
    "measure": "plan.measured.request",
    "plan": "plan.request",
    "plan_serving": "plan.serving.request",
}

__all__ = ["measure", "plan", "plan_serving"]


def __getattr__(name: str) -> object:
    """A function, imported when it is first asked for: all load a whole search."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load(f"{_HOMES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
