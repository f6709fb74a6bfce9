"""The cost of a document that several ranks hold together: its share of work, plus travel.

Why
    Twice the ranks halve a document's attention and linear layers, but not what travels
    between them. Where the exchange outlasts the attention that hides it, more ranks cost
    more rank-seconds, and a plan should use fewer.

What it decides
    The time that each of ``c`` ranks spends on a document of ``d`` tokens: attention of
    ``1 / c`` of its pairs at that size's kernel efficiency, linear layers of ``ceil(d / c)``
    tokens, and the exchange. Whole nanoseconds, so that every rank plans alike.

Kept true (tests/unit/balance/groups/test_cost.py)
    One rank pays exactly the curve's price; FlexSP's published formula is matched to the
    nanosecond; a hidden exchange costs only what outlasts the attention.

Sources
    Ring of keys and values: Ring Attention, arXiv:2310.01889. All-to-all: DeepSpeed-Ulysses,
    arXiv:2309.14509. FlexSP's form and constants: arXiv:2412.01523, section 3, and
    ``galvatron/flexsp_solver/solver.py`` in the branch ``flexsp`` of AFDWang/Hetu-Galvatron.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import kv_bytes_per_token
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class Exchange:
    """What ranks that share a document send each other in one forward and backward.

    For a document of ``d`` tokens each of ``c`` ranks moves::

        ring          d x (c - 1) / c  x bytes_per_token   in c - 1 rounds
        all-to-all    d / c            x bytes_per_token   in one round
    """

    kind: Literal["ring", "all-to-all"]
    bytes_per_token: float
    """Bytes per token over all layers, forward and backward [bytes]."""
    bytes_per_s: tuple[tuple[int, float], ...]
    """Pairs (ranks, bandwidth of a rank in a group of up to that size [bytes/s]), ascending;
    larger groups use the last."""
    latency_s: float = 0.0
    """Latency of one round [s]."""
    is_hidden: bool = False
    """Whether attention hides the exchange, so that only the excess is paid."""

    def __post_init__(self) -> None:
        sizes = [ranks for ranks, _ in self.bytes_per_s]
        if not sizes or sizes != sorted(set(sizes)):
            raise SpecError(
                f"The group sizes {sizes} of an exchange are not in ascending order. Give one "
                f"bandwidth for each size, smallest first."
            )

    def exchange_ns(
        self, doc_tokens: Ints, ranks: Ints
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Time of each rank's sends and receives [ns]; 0 on one rank."""
        tokens, width = np.asarray(doc_tokens, np.float64), np.asarray(ranks, np.float64)
        sizes = np.array([size for size, _ in self.bytes_per_s], dtype=np.float64)
        speed = np.array([rate for _, rate in self.bytes_per_s])
        rate = speed[np.minimum(np.searchsorted(sizes, width), len(speed) - 1)]
        if self.kind == "ring":
            moved, rounds = tokens * (width - 1) / width, width - 1
        else:
            moved, rounds = tokens / width, np.ones_like(width)
        time_s = moved * self.bytes_per_token / rate + rounds * self.latency_s
        return np.where(width > 1, time_s * 1e9, 0.0)


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Price of documents on groups of ranks."""

    curve: LoadCurve
    """Price on one rank, with the fixed price of a micro-batch."""
    exchange: Exchange | None = None
    """None if travel is free."""

    @property
    def fixed_ns(self) -> int:
        """What each rank pays for each micro-batch [ns]."""
        return round(self.curve.fixed_ns)

    def document_ns(self, doc_tokens: Ints) -> Ints:
        """Price of each document on one rank [ns]."""
        return self.curve.document_ns(doc_tokens)

    def share_ns(self, doc_tokens: Ints, ranks: Ints) -> Ints:
        """Price that each of the ranks sharing a document pays [ns], at least 1.

        Args:
            doc_tokens: Length of each document, >= 1 [tokens].
            ranks: Ranks that share it, >= 1; broadcast against ``doc_tokens``.

        >>> from equipoise.cost.curve import break_even_curve
        >>> costs = GroupCosts(break_even_curve(1000))
        >>> costs.share_ns(np.array([999, 999]), np.array([1, 3])).tolist()
        [1998000000, 666000000]
        """
        tokens, width = np.asarray(doc_tokens, np.int64), np.asarray(ranks, np.int64)
        attention = self.curve.shared_attention_ns(tokens, width)
        total = attention + self.curve.ns_per_token * -(-tokens // width)
        if self.exchange is not None:
            travel = self.exchange.exchange_ns(tokens, width)
            total = total + (
                np.maximum(travel - attention, 0.0) if self.exchange.is_hidden else travel
            )
        priced: Ints = np.maximum(np.rint(total), 1.0).astype(np.int64)
        return priced


def kv_ring(
    model: ModelSpec,
    bytes_per_s: tuple[tuple[int, float], ...],
    *,
    latency_s: float = 0.0,
    element_bytes: int = 2,
) -> Exchange:
    """The exchange of ring attention: keys and values go round, hidden behind attention.

    The forward passes them round once; the backward again, with their gradients in fp32.

    Args:
        model: The model whose layers and key/value heads count.
        bytes_per_s: Bandwidth of a rank by size of its group [bytes/s].
        latency_s: Latency of one round; the rounds of all layers are counted [s].
        element_bytes: Bytes of one activation.
    """
    once = kv_bytes_per_token(model, element_bytes)
    gradients = kv_bytes_per_token(model, 4)
    return Exchange(
        "ring",
        model.layers * (2 * once + gradients),
        bytes_per_s,
        latency_s=2 * model.layers * latency_s,
        is_hidden=True,
    )


_MIB_PER_MS = 2**20 * 1e3
"""The solver divides MiB by a bandwidth and calls the answer milliseconds [bytes/s]."""

FLEXSP_7B_A100 = GroupCosts(
    # alpha1 s^2 + alpha2 s + beta1 with alpha1 = 5.128e-6, alpha2 = 0.1839576, beta1 = 629.3563
    # [ms]. Causal pairs are (s^2 + s) / 2, so a pair costs 2 alpha1 and a token alpha1 less.
    LoadCurve(629.3563e6, 183_957.6 - 5.128, (1.0,), (2 * 5.128,), 1.0, measured=False),
    Exchange(
        "all-to-all",
        4 * 2 * 32 * 4096 * 2,
        (
            (2, 154 * _MIB_PER_MS),
            (4, 137 * _MIB_PER_MS),
            (8, 121 * _MIB_PER_MS),
            (16, 8.7 * _MIB_PER_MS),
        ),
    ),
)
"""FlexSP's published costs of GPT-7B (32 layers, width 4,096) on A100-40G, 8 per node."""


def flexsp_cap_tokens(ranks: int, *, device_gb: float = 40.0) -> int:
    """Tokens that one A100 holds in FlexSP's GPT-7B setting [tokens].

    The device's memory minus 16 bytes for each of 7e9 parameters spread over all ranks (ZeRO 3),
    at 4.71 MB of activations per token.

    >>> flexsp_cap_tokens(64)
    8315
    """
    return int((device_gb * 1024 - 7 * 16 * 1024 / ranks) / 4.71)
