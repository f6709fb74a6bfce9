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

Kept true (tests/unit/cost/memory/test_layer.py)
    What autograd really saves for a layer, byte by byte, under every setting.

Sources
    arXiv:2205.05198, section 4, for the method; its 34 s b h is of another layer.
"""

from dataclasses import dataclass

from equipoise.spec.layout import Layout
from equipoise.spec.model.heads import share_heads, share_model
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import LayerRecompute

_ROUTE_BYTES = 24
"""Kept of every choice: token, slot and place of its row (int64 each)."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer, for a token of all tensor-parallel ranks or for a whole micro-batch."""

    kept: float
    """Kept from the forward to the backward [bytes]."""
    backward: float
    """Alive at the fullest moment of the layer's own backward, what is kept included [bytes]."""


def token_bytes(
    model: ModelSpec,
    layout: Layout,
    *,
    width: int,
    sparse: bool,
    recompute: LayerRecompute,
) -> LayerBytes:
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
    extra = normed_heads if model.qk_norm else 0
    begin = stream * width + scale + model.hidden * width + heads + core
    begin += extra
    feed, routes, working = _feed(model, share, layout, width=width, sparse=sparse)
    whole = begin + stream * width + scale + feed + routes
    kept = {
        "none": whole,
        "attention": whole - core,
        "selective": stream * width + heads + core + routes,
        "full": stream * width + routes,
    }[recompute]
    # When the feed-forward's backward runs, some of attention is not there again, or no more.
    absent = {
        "none": 0,
        "attention": core,
        "selective": model.hidden * width + scale + extra,
        "full": 0,
    }[recompute]
    return LayerBytes(kept, whole - absent + working)


def _feed(
    model: ModelSpec, share: ModelSpec, layout: Layout, *, width: int, sparse: bool
) -> tuple[float, float, float]:
    """The feed-forward's bytes: kept, kept always, and worked with."""
    if not sparse:
        # The backward has a gradient of each side, makes the hidden units again, and three
        # gradients of them.
        working: float = (4 * share.ffn + 2 * model.hidden) * width
        return (model.hidden + 2 * share.ffn) * width, 0, working
    part = 1 / layout.tp
    ffn, hidden = model.expert_ffn, model.hidden
    rows = model.mean_top_k * ((1 + layout.etp) * hidden + 2 * ffn)
    shared = 2 * model.shared_ffn + (hidden if model.shared_ffn and width == 2 else 0)
    shared += hidden if model.shared_gate else 0
    # The router reads in fp32: of narrower tokens it keeps a copy, and the shared expert its own.
    router = 4 * hidden + 4 * model.choices + model.top_k * (8 + width)
    router += 4 * (model.top_k + 1) if model.norm_top_k and model.top_k > 1 else 0
    # The shared expert's backward comes before the others', and lets go of what it kept.
    working = max(model.mean_top_k * (4 * ffn + hidden) - shared, 4 * model.shared_ffn)
    return (
        part * ((rows + shared) * width + router),
        part * _ROUTE_BYTES * model.top_k,
        part * width * working,
    )
