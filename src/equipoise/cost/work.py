"""Exact counts of work: query-key pairs and FLOP, in integers.

Why
    Tokens are not work: a causal query at offset ``i`` reads ``i + 1`` keys. Whoever
    balances, forecasts or reports utilisation counts the same pairs.

Convention
    *Useful* FLOP of training are ``6 x matmul weights x tokens`` plus attention at three
    forwards' worth of its exact causal pairs. What a kernel spends beyond that (flash
    attention's own recomputation, activation recomputation, masked tiles) is not useful.
"""

import numpy as np
import numpy.typing as npt

from equipoise.spec.model import ModelSpec

Ints = npt.NDArray[np.int64]


def causal_pairs(doc_tokens: Ints) -> Ints:
    """Query-key pairs of causal attention inside each document [pairs].

    >>> causal_pairs(np.array([1, 3])).tolist()
    [1, 6]
    """
    pairs: Ints = doc_tokens * (doc_tokens + 1) // 2
    return pairs


def pair_flop(model: ModelSpec) -> int:
    """Forward FLOP of one query-key pair over all heads and layers: QK and PV, 2 each."""
    return 4 * model.layers * model.heads * model.head_width


def useful_flop(model: ModelSpec, tokens: int, pairs: int) -> int:
    """Useful FLOP of one forward and backward."""
    return 6 * model.matmul_params * tokens + 3 * pair_flop(model) * pairs


def pack_flop(model: ModelSpec, doc_tokens: Ints) -> int:
    """Useful FLOP of a forward and backward over packed documents."""
    return useful_flop(model, int(doc_tokens.sum()), int(causal_pairs(doc_tokens).sum()))
