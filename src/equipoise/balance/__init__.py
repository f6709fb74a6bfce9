"""Who computes what. Every balancer of the product shares one set of algorithms."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.balance.packing.request import pack as pack

__all__ = ["pack"]


def __getattr__(name: str) -> object:
    """``pack``, imported when it is first asked for: it loads every policy."""
    if name != "pack":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from equipoise.balance.packing.request import pack

    return pack
