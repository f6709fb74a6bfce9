"""Count what one rank of a layout computes and moves for one micro-batch, by part.

Why
    Seconds depend on sizes: a product of 4,096 rows runs at another rate than one of 128, the
    weight gradient has tokens as the inner dim, and tensor and context parallelism divide
    different things. So parts are kept apart until they are priced.

What it decides
    The parts of a layer: products (projections, feed-forward, experts), the attention core by
    document, and *moves*, the bytes that norms, rotations, activations and residuals carry
    between memory and cores. Widths divided by tensor parallelism are this rank's share.

    FLOP are counted by two conventions, kept apart by name:

    =========== ==================================================================
    useful      forward and backward once, each causal pair once: ``cost.work``
    published   as Megatron-LM counts: every pair of a text, masked ones too; of a layer with a
                window, as many keys as it has for every query
    =========== ==================================================================

Kept true (tests/unit/cost/step/test_work.py)
    Over all ranks of any layout, products add up to those of ``useful_flop``.

Sources
    Products of a sharded layer: Megatron-LM, arXiv:1909.08053, section 3. Experts folded over
    the ranks of a stage: arXiv:2504.14960. Published FLOP: arXiv:2104.04473, appendix.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.work import pair_flop
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.program.stack import Stack

_OWN = Stack()


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` matrix products of one size: ``[rows, inner] x [inner, columns]``."""

    name: str
    rows: float
    """Tokens [rows]."""
    columns: int
    inner: int
    count: int = 1
    grouped: bool = False
    """Whether one kernel runs all of them, as for experts."""

    @property
    def flop(self) -> float:
        """FLOP of one forward."""
        return 2.0 * self.rows * self.weights

    @property
    def weights(self) -> float:
        """Weights of all."""
        return float(self.count) * self.columns * self.inner


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer's forward on one rank, for one micro-batch."""

    products: tuple[Product, ...]
    heads: int
    """Query heads of this rank."""
    kv_heads: float
    """Key/value heads of this rank; below 1 if ranks hold copies."""
    score_width: int
    head_width: int
    moved_bytes: float
    """Bytes moved by norms, rotations, activations and residuals, each one kernel that reads its
    inputs and writes its output."""
    kernels: int
    """Kernel launches of one forward, with products and attention."""
    routed_rows: float
    """Rows that this rank sends to experts and gets back; 0 in a dense layer."""
    weights: float
    """Weights of this rank."""
    norm_moves: float
    """The part of ``moved_bytes`` that one norm moves."""
    rotation_moves: float
    """Likewise, of rotated queries and keys."""
    activation_moves: float
    """Likewise, of the activation in a dense feed-forward, or in the experts."""
    shared_moves: float
    """Likewise, of the activation in the shared expert."""
    expert_moves: float
    """Likewise, of all between the second norm of a sparse layer and its residual."""


def layer_work(
    model: ModelSpec,
    layout: Layout,
    tokens: float,
    *,
    sparse: bool,
    stack: Stack = _OWN,
    expert_skew: float = 1.0,
    width: int = 2,
) -> LayerWork:
    """Count one layer's forward on one rank.

    Args:
        model: Sizes.
        layout: Degrees; only tp, cp, ep and etp matter.
        tokens: Tokens of the micro-batch on this rank's context share.
        sparse: Whether the layer has experts.
        stack: What is fused, divided over tensor-parallel ranks and copied.
        expert_skew: Rows of the fullest expert rank over the mean [ratio]; 1 is balanced.
        width: Bytes of an activation.
    """
    tp, hidden = layout.tp, model.hidden
    heads = -(-model.heads // tp)
    kv_heads = max(model.kv_heads / tp, 1.0)
    query = heads * model.score_width
    value = heads * model.head_width
    products = list(_attention_products(model, tokens, tp, kv_heads))
    beside = tokens / (tp if stack.sequence_parallel else 1)
    # Two norms; and two residuals, two reads and one write each.
    wider = width / 2
    of_norm = beside * hidden * stack.norm_bytes * wider
    normed, rotated, shared = 2 * of_norm, 0.0, 0.0
    moved = beside * hidden * width * 2 * 3
    if model.gated:  # older models have learned positions
        each = stack.rotation_bytes
        if model.has_sinks:
            each = max(each, stack.scaled_rotation_bytes)
        rotated = tokens * each * wider * (query + kv_heads * model.head_width)
    if stack.repeats_keys:
        moved += tokens * width * 2 * (heads + kv_heads) * model.head_width
    kernels = 2 + 2 + 2 + 1
    routed, around = 0.0, moved
    if not sparse:
        ffn = model.ffn / tp
        products += _ffn_products(model, "feed-forward", tokens, model.ffn, tp)
        active = tokens * width * ffn * model.products
        moved += active
    else:
        routed = (beside if stack.sequence_parallel else tokens / tp) * model.mean_top_k
        mean = routed * layout.etp * layout.ep / model.experts  # rows of one local expert
        local = max(1, model.experts // layout.ep)
        rows = mean * expert_skew
        ffn = -(-model.expert_ffn // layout.etp)
        up = ffn * (model.products - 1)
        products += [
            Product("router", routed / model.mean_top_k, model.choices, hidden),
            Product("experts", rows, up, hidden, local, grouped=True),
            Product("experts", rows, hidden, ffn, local, grouped=True),
        ]
        # Rows are sorted and unsorted, scaled and added, with the activation in between.
        active = rows * local * width * ffn * model.products
        moved += active + rows * local * width * 4 * hidden
        moved += routed * hidden * width * 3 + 4.0 * routed / model.mean_top_k * model.choices * 4
        kernels += 12
        if model.has_sinks and stack.bias_row_bytes:  # an add and a product an expert
            gates = rows * local * ffn * stack.bias_gate_bytes * wider
            active, moved = active + gates, moved + gates
            moved += rows * local * hidden * stack.bias_row_bytes * wider
            kernels += 5 + 2 * local
        if model.shared_ffn:
            products += _ffn_products(model, "shared expert", tokens, model.shared_ffn, tp)
            shared = tokens * width * model.shared_ffn / tp * model.products
            moved += shared
    kernels += sum(1 if each.grouped else each.count for each in products) + 1
    # Eager: a gated activation is two kernels, and biases, dropout and casts are passes of their
    # own.
    passes = 1.0 if stack.fused else 1.5
    if not stack.fused:
        kernels *= 2
    return LayerWork(
        tuple(products),
        heads,
        kv_heads,
        model.score_width,
        value // heads,
        passes * moved + normed + rotated,
        kernels,
        routed,
        sum(each.weights for each in products),
        norm_moves=of_norm,
        rotation_moves=rotated,
        activation_moves=passes * active,
        shared_moves=passes * shared,
        expert_moves=passes * (moved - around) if sparse else 0.0,
    )


def _attention_products(
    model: ModelSpec, tokens: float, tp: int, kv_heads: float
) -> tuple[Product, ...]:
    heads, hidden = -(-model.heads // tp), model.hidden
    out = Product("projections", tokens, hidden, heads * model.head_width)
    if model.latent is None:
        columns = int((heads + 2 * kv_heads) * model.head_width)
        return Product("projections", tokens, columns, hidden), out
    latent = model.latent
    down = latent.query + latent.key_value + latent.rope
    return (
        Product("projections", tokens, down, hidden),
        Product("projections", tokens, heads * model.score_width, latent.query or hidden),
        Product("projections", tokens, 2 * heads * model.head_width, latent.key_value),
        out,
    )


def _ffn_products(model: ModelSpec, name: str, tokens: float, width: int, tp: int) -> list[Product]:
    share = -(-width // tp)
    up = share * (model.products - 1)
    return [
        Product(name, tokens, up, model.hidden),
        Product(name, tokens, model.hidden, share),
    ]


def head_work(model: ModelSpec, layout: Layout, tokens: float) -> Product:
    """The head's product on one rank."""
    return Product("head", tokens, -(-model.vocab // layout.tp), model.hidden)


def published_flop(model: ModelSpec, doc_tokens: Ints) -> float:
    """Forward and backward FLOP as Megatron-LM and NVIDIA's recipes count them.

    Every pair of a document counts, masked ones included, but in layers with a window those beyond
    it; recomputation does not.

    Args:
        model: Sizes.
        doc_tokens: Length of each document, or of each full window [tokens].

    >>> from equipoise.spec.model.presets import preset
    >>> round(published_flop(preset("llama3-405b"), np.array([8192])) / 1e16, 2)
    2.15
    """
    lengths = np.asarray(doc_tokens, dtype=np.float64)
    pairs = float((lengths**2).sum())
    if model.window is not None:
        windowed = float((lengths * np.minimum(lengths, model.window.tokens)).sum())
        pairs += model.window.share * (windowed - pairs)
    return 6.0 * model.matmul_params * float(lengths.sum()) + 3.0 * pair_flop(model) * pairs
