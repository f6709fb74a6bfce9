"""Compare attention strategies: from one setting to the figures of each strategy."""

from dataclasses import dataclass

import numpy as np

from equipoise.balance.context.price import ContextPrice
from equipoise.balance.context.sharding import ContextRequest, split_context
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.score import AssumedMachine, AttentionScore
from equipoise.schedule.attention.strategies import STRATEGIES
from equipoise.spec.mask import Mask
from equipoise.spec.model.presets import ModelSpec

RSA = "rsa"
"""The original ring self-attention: the strategy ``ring``, tokens dealt in one run each."""

NAMES = (*STRATEGIES, RSA)
"""Every strategy that can be compared."""

_BYTES = {"bf16": (2, 4), "fp32": (4, 4), "fp64": (8, 8)}
"""Bytes of an element and of a sum, by dtype."""


@dataclass(frozen=True, slots=True)
class AttentionSetting:
    """The setting in which strategies are compared."""

    strategies: tuple[str, ...]
    """Some of ``NAMES``."""
    sharding: str
    """Who holds which tokens: a name that ``split_context`` knows."""
    doc_tokens: tuple[int, ...]
    """Length of each packed document [tokens]."""
    mask: Mask
    ranks: int
    model: ModelSpec
    """The model whose heads one layer of attention has."""
    machine: AssumedMachine
    ranks_per_node: int | None = None
    """Ranks that share a node, for two-level strategies."""
    dtype: str = "bf16"
    """Dtype of what travels: bf16, fp32 or fp64."""
    origin: str = ""
    """Where the documents come from, for display."""
    model_name: str = ""
    """Name of the model, for display."""

    @property
    def node_ranks(self) -> int:
        """Ranks of a node; unless given, the largest divisor that leaves at least as many nodes."""
        if self.ranks_per_node is not None:
            return self.ranks_per_node
        ranks = self.ranks
        return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


def compare_attention(setting: AttentionSetting) -> tuple[AttentionScore, ...]:
    """Write, count and price one layer of attention under each strategy.

    Raises:
        LayoutError: ranks, documents or heads do not match.
        SpecError: no strategy or no sharding has that name.
    """
    return tuple(_score(name, setting) for name in setting.strategies)


def _score(name: str, setting: AttentionSetting) -> AttentionScore:
    model, nodes, mask = setting.model, setting.node_ranks, setting.mask
    wire = Wire(model.head_width, *_BYTES[setting.dtype])
    moves = "ring" if name == RSA else name
    price = ContextPrice(setting.machine, moves, model.heads, model.kv_heads, wire)
    split = split_context(
        setting.doc_tokens,
        setting.ranks,
        "contiguous" if name == RSA else setting.sharding,
        ranks_per_node=nodes,
        mask=mask,
        price=price,
    )
    lengths = np.array(setting.doc_tokens, dtype=np.int64)
    request = ContextRequest(lengths, setting.ranks, ranks_per_node=nodes, mask=mask)
    return price.score(split, request, name=name)
