"""What one decoder layer keeps of a micro-batch for its backward, and what it works with there.

What it decides
    The terms are read off ``nn``: change what a layer saves and this file changes with it. ``D``
    is the model's width, ``q`` and ``k`` the widths of the query and of the key heads of a rank,
    ``F`` its hidden units. A dense layer keeps, of each token: the streams before and after
    attention (2 D), their norms' outputs (2 D), rotated queries, keys, values and attention's
    output (2 q + 2 k), gate and up (2 F), and fp32 log-sum-exps and norm scales; ``spec.recompute``
    says which of these other settings keep.

    Between blocks tensor-parallel ranks share the tokens, so streams are divided by them; norms'
    outputs are gathered on every rank and kept so.

    A sparse layer computes the tokens where they are. Instead of gate and up it keeps, for each
    of a token's K choices, the row that its expert computes and what comes back (2 D), gate and up
    (2 F), and where the row went; for the token the scores of all experts, the router's fp32 input,
    and gate and up of the shared expert. The tokens that come are taken to be as many as go.
    Ranks that share the hidden units of an expert each keep the rows of all, and their part of F.
    Where a row went is kept whatever is recomputed.

Kept true (tests/unit/cost/test_memory_layer.py)
    What autograd really saves for a layer, byte by byte, under every setting.

Sources
    arXiv:2205.05198, section 4, for the method; its 34 s b h is of another layer.
"""

from dataclasses import dataclass

from equipoise.spec.heads import share_heads, share_model
from equipoise.spec.layout import Layout
from equipoise.spec.model import ModelSpec
from equipoise.spec.recompute import LayerRecompute

_ROUTE_BYTES = 24
"""Of a choice, kept always: token, slot and place of its row (int64 each)."""

_CHOICE_BYTES = 24
"""Of a choice, kept with the router: expert (int64), its index to gather, score and weight."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Of one kind of layer, for each token of a micro-batch (of all tensor-parallel ranks)."""

    kept: float
    """Kept from the forward to the backward [bytes]."""
    whole: float
    """Kept while the layer's own backward runs: as with nothing recomputed [bytes]."""
    working: float
    """Made and dropped by the layer's backward, at most, at once [bytes]."""


def token_bytes(
    model: ModelSpec,
    layout: Layout,
    *,
    width: int,
    sparse: bool,
    recompute: LayerRecompute,
) -> TokenBytes:
    """What a layer holds of a token on one rank.

    Args:
        model: The whole model.
        layout: ``tp`` divides heads, hidden units and streams; ``etp`` the hidden units of experts.
        width: Of an activation [bytes].
        sparse: A layer with experts.
        recompute: What the layer runs again.
    """
    share = share_model(model, layout.tp)
    own = share_heads(model.heads, model.kv_heads, ranks=layout.tp, rank=0)
    query, key = (len(heads) * model.head_width for heads in (own.heads, own.kv_heads))
    stream = model.hidden / layout.tp
    scale = 4 / layout.tp  # of a norm
    core = query * width + 4 * share.heads  # output and log-sum-exps
    heads = (query + 2 * key) * width
    normed_heads = (query + key) * width + 4 * (len(own.heads) + len(own.kv_heads))
    begin = stream * width + scale + model.hidden * width + heads + core
    begin += normed_heads if model.qk_norm else 0
    feed, routes, working = _feed(model, share, layout, width=width, sparse=sparse)
    whole = begin + stream * width + scale + feed + routes
    kept = {
        "none": whole,
        "attention": whole - core,
        "selective": stream * width + heads + core + routes,
        "full": stream * width + routes,
    }[recompute]
    # Gradients of the stream, of a norm's output and of what it is made from.
    return TokenBytes(kept, whole, working + (stream + 2 * model.hidden) * width)


def _feed(
    model: ModelSpec, share: ModelSpec, layout: Layout, *, width: int, sparse: bool
) -> tuple[float, float, float]:
    """Of the feed-forward: kept, kept always, and worked with [bytes]."""
    if not sparse:
        # The backward makes the hidden units again and three gradients of them.
        return (model.hidden + 2 * share.ffn) * width, 0, 4 * share.ffn * width
    part = 1 / layout.tp
    ffn = model.expert_ffn
    rows = model.top_k * (1 + layout.etp) * model.hidden + 2 * model.top_k * ffn
    values = rows + 2 * model.shared_ffn + (2 * model.hidden if model.shared_gate else 0)
    # The router reads in fp32: of narrower tokens it keeps a copy, and the shared expert its own.
    normed = 4 * model.hidden if width == 4 else (4 + width) * model.hidden
    scores = 4 * model.experts + _CHOICE_BYTES * model.top_k
    working = (4 * model.top_k * ffn + 2 * model.top_k * model.hidden) * width
    return (
        part * (values * width + normed + scores),
        part * _ROUTE_BYTES * model.top_k,
        part * max(working, 4 * model.shared_ffn * width),
    )
