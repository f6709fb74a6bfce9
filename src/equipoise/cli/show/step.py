"""Sentences about a priced step that several verbs print."""

from collections.abc import Mapping
from typing import Any


def host_sentence(row: Mapping[str, Any]) -> str:
    """What a device's share of its host holds; nothing where nothing is offloaded."""
    if not row["host_memory_gib_max"]:
        return ""
    return (
        f" and {row['host_memory_gib_max']:.1f} GiB in its host's memory of "
        f"{row['host_capacity_gib']:.1f}"
    )


def source_lines(sources: Mapping[str, str]) -> list[str]:
    """Names of one source on one line.

    >>> source_lines({"peaks": "a datasheet", "price": "a list", "power_w": "a datasheet"})
    ['Sources', '  peaks, power w: a datasheet', '  price: a list']
    """
    of_source: dict[str, list[str]] = {}
    for name, source in sources.items():
        of_source.setdefault(source, []).append(name.replace("_", " "))
    return ["Sources", *(f"  {', '.join(names)}: {each}" for each, names in of_source.items())]
