"""Who computes what. Every balancer of the product shares one set of algorithms."""

from typing import TYPE_CHECKING

from equipoise.base.load import load

if TYPE_CHECKING:
    from equipoise.balance.batches.answer import Batches as Batches
    from equipoise.balance.batches.request import batch as batch
    from equipoise.balance.batches.units import Shared as Shared
    from equipoise.balance.packing.request import pack as pack
    from equipoise.cost.read_curve import device_curve as device_curve
    from equipoise.cost.read_curve import fit_curve as fit_curve

_HOMES = {
    "Batches": "balance.batches.answer",
    "Shared": "balance.batches.units",
    "batch": "balance.batches.request",
    "device_curve": "cost.read_curve",
    "fit_curve": "cost.read_curve",
    "pack": "balance.packing.request",
}

__all__ = ["Batches", "Shared", "batch", "device_curve", "fit_curve", "pack"]


def __getattr__(name: str) -> object:
    """A public name, imported when it is first asked for: some load every policy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load(f"{_HOMES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
