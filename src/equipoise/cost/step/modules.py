"""Seconds that a layer takes to compute modules of it again, in front of its backward.

What it decides
    A module (``spec.recompute.MODULES``) repeats its own part of the forward: its products, what
    it moves, its casts to FP8, its kernels, and for ``moe`` the exposed travel of rows. The
    attention core is priced elsewhere (``sim.parts``).

    In FP8, an output that is dropped and computed again is cast once more for the gradient of the
    weight that reads it: 16 bits read and 8 written.

Kept true (tests/unit/cost/step/test_modules.py)
    Nothing is negative; a module that a layer does not have costs nothing; modules together take
    no more than the layer's forward.

Sources
    As ``spec.recompute``. Casts: Transformer Engine, ``save_original_input``, which
    megatron/core/transformer/moe/experts.py sets for modules in FP8.
"""

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.cost.step.fp8 import cast_bytes
from equipoise.cost.step.layer import LAUNCH_S, Rates, product_passes
from equipoise.cost.step.request import TERMS, StepOptions, element_bytes
from equipoise.cost.step.work import LayerWork, Product, layer_work
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import Module

_RECAST_BYTES = 3.0


def module_forward(
    modules: frozenset[Module],
    work: LayerWork,
    forward: Floats,
    model: ModelSpec,
    rates: Rates,
    options: StepOptions,
    *,
    sparse: bool,
) -> Floats:
    """Seconds of modules' forwards, by term, float64 [TERMS].

    Args:
        modules: What is computed again.
        work: Of the layer.
        forward: Of the layer without its core, by term, float64 [TERMS] [s].
        model: Sizes.
        rates: Of kernels.
        options: Precision, stack and residuals.
        sparse: Whether the layer has experts.
    """
    parts = np.zeros(len(TERMS))
    for module in sorted(modules):
        products, moved, dropped, kernels = _repeated(module, work, model, sparse=sparse)
        if options.precision == "fp8":
            moved += cast_bytes(products, options.stack.fp8, model.hidden)[0]
            moved += _RECAST_BYTES * dropped
        for each in products:
            term = "experts" if each.grouped else "products"
            seconds = product_passes(each, rates, options)[0]
            parts[TERMS.index(term)] += seconds * options.residuals.products
        seconds = moved / rates.bytes_per_s * options.residuals.moves
        parts[TERMS.index("element-wise")] += seconds
        parts[TERMS.index("launches")] += (kernels + len(products)) * LAUNCH_S
        if module == "moe":
            travel = TERMS.index("expert traffic")
            parts[travel] += forward[travel]
    return parts


def module_counts(
    modules: frozenset[Module], model: ModelSpec, options: StepOptions
) -> tuple[float, float]:
    """FLOP of modules' products and bytes that they move for a token, all layers together.

    No layout computes or moves less over all its ranks.

    >>> from equipoise.spec.model.presets import PLANNED
    >>> model = PLANNED["llama3-8b"]
    >>> flop, moved = module_counts(frozenset({"mlp"}), model, StepOptions(8192, 1))
    >>> flop == 2 * 3 * model.hidden * model.ffn * model.layers
    True
    >>> moved == (2 * 3 * model.ffn + 4 * model.hidden) * model.layers
    True
    """
    flop = moved = 0.0
    stack, width = options.stack, element_bytes(options.precision)
    for sparse, layers in (
        (False, model.layers - model.sparse_layers),
        (True, model.sparse_layers),
    ):
        if layers:
            work = layer_work(
                *(model, Layout(), 1.0),
                sparse=sparse,
                stack=stack,
                width=width,
            )
            for each in modules:
                products, size, _, _ = _repeated(each, work, model, sparse=sparse)
                flop += layers * sum(product.flop for product in products)
                moved += layers * size
    return flop, moved


def _repeated(
    module: Module, work: LayerWork, model: ModelSpec, *, sparse: bool
) -> tuple[list[Product], float, float, int]:
    """Products of a module, bytes that it moves, elements that it drops, and other kernels."""

    def named(*names: str) -> list[Product]:
        return [each for each in work.products if each.name in names]

    if module == "layernorm":
        norms = (model.latent is not None) + sparse
        elements = norms * _rows(work, sparse=sparse) * model.hidden
        return [], norms * work.norm_moves, elements, norms
    if module == "mla_up_proj" and model.latent is not None:
        return named("projections")[1:3], work.rotation_moves, 0.0, 2
    if module == "mlp" and not sparse:
        return named("feed-forward"), work.norm_moves + work.activation_moves, 0.0, 2
    if module == "moe_act" and sparse:
        last = named("experts")[-1]
        return [], work.activation_moves, last.rows * last.count * last.inner, 1
    if module == "shared_experts" and sparse:
        return named("shared expert"), work.shared_moves, 0.0, 1
    if module == "moe" and sparse:
        return named("router", "experts", "shared expert"), work.expert_moves, 0.0, 12
    return [], 0.0, 0.0, 0


def _rows(work: LayerWork, *, sparse: bool) -> float:
    """Tokens of the rows that a norm of this layer writes."""
    router = [each for each in work.products if each.name == "router"]
    return router[0].rows if sparse else work.products[0].rows
