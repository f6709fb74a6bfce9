"""The dense parts that a recommender may have, and which keys of ``[model]`` each reads.

Why
    A key that a model does not read would train something else than its reader believes.

Kept true (tests/unit/spec/test_recommend.py, tests/unit/recsys/models/test_catalog.py)
    Every architecture can be built; a key that it does not read is refused.

Sources
    The modules of ``recsys.models`` name the papers.
"""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["dlrm", "dcn", "dhen", "wukong"]
DhenModule = Literal["dot", "cross", "attention", "linear", "convolution"]
Ensemble = Literal["concat", "sum", "weighted"]


@dataclass(frozen=True, slots=True)
class ArchitectureRow:
    """One dense part."""

    summary: str
    keys: tuple[str, ...]
    """Keys of ``[model]`` that it reads beside those that all read."""


ARCHITECTURES: dict[Architecture, ArchitectureRow] = {
    "dlrm": ArchitectureRow("products of all pairs of vectors, then an MLP", ()),
    "dcn": ArchitectureRow(
        "cross layers of low rank (DCN-V2), then an MLP", ("layers", "low_rank")
    ),
    "dhen": ArchitectureRow(
        "layers of several interaction modules, whose outputs form an ensemble",
        ("layers", "modules", "ensemble", "vectors", "low_rank"),
    ),
    "wukong": ArchitectureRow(
        "layers of a factorization machine and a linear compression",
        ("layers", "fm_vectors", "linear_vectors", "compressed", "hidden"),
    ),
}


def readers_of(key: str) -> tuple[Architecture, ...]:
    """Which architectures read a key of ``[model]``; none where all do.

    >>> readers_of("layers"), readers_of("width")
    (('dcn', 'dhen', 'wukong'), ())
    """
    return tuple(name for name, row in ARCHITECTURES.items() if key in row.keys)
