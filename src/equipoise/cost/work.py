"""Exact counts of work: query-key pairs, FLOP and bytes, in integers.

Why
    Tokens are not work: a causal query at offset ``i`` reads ``i + 1`` keys. Balancers,
    forecasts and reports all count the same pairs.

Convention
    *Useful* FLOP of training are ``6 x matmul weights x tokens`` plus three forwards of
    attention over its exact pairs; of experts only a token's own weights count. Where some layers
    have a window, pairs are the mean layer's. What kernels spend beyond that (flash attention's own
    recomputation, activation recomputation, masked tiles) is not useful.

Kept true (tests/unit/cost/test_work.py, by Hypothesis)
    Pairs of any slice under any mask equal those of the explicit mask; slices of a document add
    up to the document.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError
from equipoise.spec.mask import CAUSAL as CAUSAL
from equipoise.spec.mask import Mask as Mask
from equipoise.spec.model.presets import ModelSpec, WindowSpec


def pairs_before(at: Ints, doc_tokens: Ints, mask: Mask = CAUSAL) -> Ints:
    """Pairs of the queries ``[0, at)`` of each document [pairs].

    Args:
        at: Queries counted, 0 <= at <= doc_tokens [tokens].
        doc_tokens: Length of each document [tokens]. Under a shared prefix, the prefix and
            all its branches.
        mask: Which keys a query reads.

    Raises:
        SpecError: a document's length is not that of the prefix and its branches.
    """
    at, doc_tokens = np.asarray(at, dtype=np.int64), np.asarray(doc_tokens, dtype=np.int64)
    if mask.kind == "full":
        return at * doc_tokens
    if mask.kind == "window":
        growing = np.minimum(at, mask.window_tokens)
        return causal_pairs(growing) + (at - growing) * mask.window_tokens
    if mask.kind == "causal":
        return causal_pairs(at)
    total = mask.prefix_tokens + sum(mask.branch_tokens)
    if (doc_tokens != total).any():
        raise SpecError(
            f"A document has {int(doc_tokens[doc_tokens != total][0]):,} tokens, but its mask has "
            f"a prefix of {mask.prefix_tokens:,} and branches of {sum(mask.branch_tokens):,}. Give "
            f"every document {total:,} tokens, or each its own mask."
        )
    pairs = causal_pairs(np.minimum(at, mask.prefix_tokens))
    begin = mask.prefix_tokens
    for tokens in mask.branch_tokens:
        mine = np.clip(at - begin, 0, tokens)
        pairs = pairs + mine * mask.prefix_tokens + causal_pairs(mine)
        begin += tokens
    return pairs


def slice_pairs(starts: Ints, stops: Ints, doc_tokens: Ints, mask: Mask = CAUSAL) -> Ints:
    """Pairs of the queries ``[start, stop)`` of each document with all their keys [pairs].

    >>> slice_pairs(np.array([0, 2]), np.array([2, 4]), np.array([4, 4])).tolist()
    [3, 7]
    """
    pairs: Ints = pairs_before(stops, doc_tokens, mask) - pairs_before(starts, doc_tokens, mask)
    return pairs


def causal_pairs(doc_tokens: Ints) -> Ints:
    """Query-key pairs of causal attention inside each document [pairs].

    >>> causal_pairs(np.array([1, 3])).tolist()
    [1, 6]
    """
    pairs: Ints = doc_tokens * (doc_tokens + 1) // 2
    return pairs


def windowed_pairs(window: WindowSpec, doc_tokens: Floats) -> Floats:
    """Causal pairs inside each document that a layer with a window reads [pairs].

    >>> windowed_pairs(WindowSpec(2, 1.0), np.array([1.0, 2.0, 5.0])).tolist()
    [1.0, 3.0, 9.0]
    >>> windowed_pairs(WindowSpec(2, 1.0, is_chunk=True), np.array([1.0, 2.0, 5.0])).tolist()
    [1.0, 3.0, 7.0]
    """
    most = float(window.tokens)
    near = doc_tokens % most if window.is_chunk else np.minimum(doc_tokens, most)
    rest = doc_tokens - near
    each = (most + 1.0) / 2.0 if window.is_chunk else most
    return np.asarray(near * (near + 1.0) / 2.0 + rest * each)


def layer_pairs(model: ModelSpec, doc_tokens: Ints) -> int:
    """Causal pairs inside documents that the mean layer reads, rounded [pairs].

    >>> from equipoise.spec.model.presets import PLANNED
    >>> layer_pairs(PLANNED["llama3-8b"], np.array([1, 1000]))  # all
    500501
    >>> layer_pairs(PLANNED["gpt-oss-120b"], np.array([1, 1000]))  # 128 keys in half of the layers
    310187
    """
    whole = int(causal_pairs(doc_tokens).sum())
    if model.window is None:
        return whole
    windowed = float(windowed_pairs(model.window, doc_tokens.astype(np.float64)).sum())
    return round(whole + model.window.share * (windowed - whole))


def pair_flop(model: ModelSpec) -> int:
    """Forward FLOP of one query-key pair over all heads and layers: QK and PV, 2 each."""
    return 2 * model.layers * model.heads * (model.score_width + model.head_width)


def token_weights(model: ModelSpec, *, expert_skew: float = 1.0) -> float:
    """Weights that multiply a token, where the fullest rank decides how long experts take.

    Args:
        model: Sizes.
        expert_skew: Rows of the fullest expert rank over the mean [ratio].

    >>> from equipoise.spec.model.presets import preset
    >>> dense, sparse = preset("2m"), preset("moe-3m")
    >>> token_weights(dense, expert_skew=2.0) == dense.matmul_params
    True
    >>> more = token_weights(sparse, expert_skew=2.0) - sparse.matmul_params
    >>> more == sparse.layers * sparse.top_k * sparse.expert_params
    True
    """
    if not model.experts or expert_skew == 1.0:
        return model.matmul_params
    rows = model.sparse_layers * model.mean_top_k
    return model.matmul_params + (expert_skew - 1.0) * rows * model.expert_params


def useful_flop(model: ModelSpec, tokens: int, pairs: int) -> int:
    """Useful FLOP of one forward and backward."""
    return 6 * model.matmul_params * tokens + 3 * pair_flop(model) * pairs


def forward_flop(model: ModelSpec, start: int, tokens: int, logits: int) -> int:
    """FLOP of one forward of tokens [start, start + tokens) of a sequence, some through the head.

    >>> from equipoise.spec.model.presets import preset
    >>> spec = preset("2m")
    >>> forward_flop(spec, 0, 9, 9) * 3 == useful_flop(spec, 9, 45)
    True
    """
    head = model.hidden * model.vocab
    pairs = tokens * start + tokens * (tokens + 1) // 2
    if model.window is not None:
        ends = (layer_pairs(model, np.array([end])) for end in (start + tokens, start))
        pairs = next(ends) - next(ends)
    products = (model.matmul_params - head) * tokens + head * logits
    return 2 * products + pair_flop(model) * pairs


def kv_bytes_per_token(model: ModelSpec, element_bytes: int = 2) -> int:
    """Keys and values of one token in one layer, which context parallelism moves [bytes].

    >>> from equipoise.spec.model.presets import PLANNED
    >>> kv_bytes_per_token(PLANNED["llama3-8b"]), kv_bytes_per_token(PLANNED["deepseek-v3"])
    (4096, 81920)
    """
    return model.kv_heads * (model.score_width + model.head_width) * element_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """The exact work of a pack."""

    tokens: int
    pairs: int
    """Query-key pairs of one head in the mean layer [pairs]."""
    flop: int
    """Useful FLOP of a forward and backward."""
    bytes: int
    """Queries, keys, values and outputs of all layers, each once [bytes]: the minimum that
    attention moves between memory and cores in one forward."""


def count_work(
    doc_tokens: Ints, model: ModelSpec, *, mask: Mask = CAUSAL, element_bytes: int = 2
) -> Work:
    """Count the work of packed documents.

    Args:
        doc_tokens: Length of each document [tokens], each >= 0.
        model: The model whose layers, heads and widths count.
        mask: Which keys a query reads; other masks than the causal one are those of every layer,
            whatever window the model has.
        element_bytes: Bytes of one activation.
    """
    lengths = np.asarray(doc_tokens, dtype=np.int64)
    tokens = int(lengths.sum())
    if mask == CAUSAL:
        pairs = layer_pairs(model, lengths)
    else:
        pairs = int(pairs_before(lengths, lengths, mask).sum())
    moved = (model.heads + model.kv_heads) * (model.score_width + model.head_width) * element_bytes
    return Work(tokens, pairs, useful_flop(model, tokens, pairs), tokens * model.layers * moved)
