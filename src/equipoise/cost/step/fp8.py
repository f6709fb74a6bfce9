"""What a layer moves to multiply in FP8: casts of what products read.

Why
    A product in FP8 takes half as long, but someone has to scale its inputs, cast them, and write
    them once more transposed for the weight gradient, and that is paid in bytes. A curve that was
    measured with the cast inside counts it twice where a program shares casts between products.

What it decides
    Bytes by recipe, for products of a layer; the head, the router and attention stay in 16 bits.

    =========== ==================================== ===========================================
    recipe      forward                              backward
    =========== ==================================== ===========================================
    per-product nothing: the curve's own             nothing: the curve's own
    per-tensor  4 B an element that no norm wrote    4 B an element of each gradient of an output
    per-block   nothing: the curve's own             nothing: the curve's own
    mx          4 B an element of each input         4 B an element of each gradient of an output
    =========== ==================================== ===========================================

    4 B: 16 bits read, 8 written as they are and 8 transposed. A norm that writes 8 bits twice moves
    what it moved in 16. Weights are cast once a step, which is not worth a term.

Kept true (tests/unit/cost/step/test_fp8.py)
    Nothing but in FP8; per-tensor never moves more than mx.

Sources
    Transformer Engine 2.x, pytorch/module/linear.py and layernorm_linear.py: casts with their
    transposes, fused into norms, weights kept between micro-batches. MX on Blackwell: its recipe
    MXFP8BlockScaling, row- and column-wise copies.
"""

from collections.abc import Iterable

from equipoise.cost.step.work import Product
from equipoise.spec.program.stack import Fp8

_CAST_BYTES = 4.0
_WIDE = ("head", "router")


def is_narrow(product: Product) -> bool:
    """Whether a product runs in FP8 at all: the head and the router do not."""
    return product.name not in _WIDE


def cast_bytes(products: Iterable[Product], recipe: Fp8, hidden: int) -> tuple[float, float]:
    """Bytes of a layer's casts in its forward and in its backward.

    Args:
        products: Of the layer.
        recipe: How they are scaled.
        hidden: Width of the residual, which norms write.

    >>> down = Product("feed-forward", 8.0, 128, 512)
    >>> cast_bytes([down], "per-tensor", 128), cast_bytes([down], "per-product", 128)
    ((16384.0, 4096.0), (0.0, 0.0))
    """
    forward = backward = 0.0
    if recipe in ("per-product", "per-block"):
        return forward, backward
    for each in products:
        if not is_narrow(each):
            continue
        rows = each.rows * each.count
        # What writes the residual reads what no norm wrote.
        if recipe == "mx" or each.columns == hidden:
            forward += _CAST_BYTES * rows * each.inner
        backward += _CAST_BYTES * rows * each.columns
    return forward, backward
