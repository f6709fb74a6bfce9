"""Deferred weight gradients: a backward whose weight half runs later.

Why
    The previous stage waits only for the gradient of this stage's input. The other half of the
    backward, the gradients of the weights, can wait until the rank would be idle. Calling
    autograd twice would compute the whole chain of input gradients twice.

What it decides
    The functions of ``nn.project`` multiply each weight's gradient from two tensors that their
    backward has anyway. When deferred, they keep the two tensors instead, and autograd gets
    nothing for that weight. ``defer_weights`` walks the graph of the output: each node has a
    ``WeightGradients``, so nothing is passed through layers and nothing is global. All other
    parameters (norms, biases, the embedding, a head whose loss makes its gradient) get their
    gradients at once, which is just as exact.

Kept true (tests/unit/nn/test_defer.py)
    Gradients of both halves together equal those of a whole backward, even if layers are
    recomputed or weights are shared or frozen; deferred weights have no gradient before ``finish``.

Sources
    Split backward: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.nn.declare import is_plain


@dataclass(frozen=True, slots=True, eq=False)
class DeferredProduct:
    """The gradient of a weight [out, in], not yet multiplied: ``grad.T @ x``."""

    grad_TO: Tensor
    x_TI: Tensor
    is_wide: bool = False
    """Whether ``(x.T @ grad).T`` is faster, by 5%."""

    def multiply(self) -> Tensor:
        """The gradient [out, in]."""
        if self.is_wide:
            return (self.x_TI.t() @ self.grad_TO).t()
        return self.grad_TO.t() @ self.x_TI

    def add_to(self, weight: Tensor) -> None:
        """Add it to ``weight.grad``, fused with the product if there is a gradient already."""
        if weight.grad is None or not is_plain(weight):
            weight.backward(self.multiply())
        else:
            weight.grad.addmm_(self.grad_TO.t(), self.x_TI)


@dataclass(slots=True, eq=False)
class WeightGradients:
    """Weight gradients of one function in one graph, which it keeps as ``ctx.weight_gradients``."""

    first: int
    """Index of the first weight among the function's inputs; the others follow."""
    leaves: list[Tensor | None] | None = None
    """The weights, None for each that needs no gradient; None as a whole if not deferred."""
    products: tuple[DeferredProduct, ...] = field(default=())

    def take(
        self, needs: tuple[bool, ...], *products: DeferredProduct
    ) -> tuple[Tensor | None, ...]:
        """Return what the function's backward must return for its weights.

        Args:
            needs: Whether each of the function's inputs needs a gradient: frozen weights do not.
            products: The gradient of each weight.
        """
        if self.leaves is None:
            wanted = zip(needs[self.first :], products, strict=False)
            return tuple(product.multiply() if is_needed else None for is_needed, product in wanted)
        self.products = products
        return (None,) * len(products)

    def finish(self) -> None:
        """Add the deferred gradients to the weights, and free them."""
        for weight, product in zip(self.leaves or (), self.products, strict=False):
            if weight is not None:
                product.add_to(weight)
        self.products = ()


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The weight half of one backward."""

    parts: tuple[WeightGradients, ...]

    @torch.no_grad()
    def finish(self) -> None:
        """Add every weight's gradient to its ``grad``."""
        for part in self.parts:
            part.finish()


def defer_weights(out: Tensor) -> Deferred:
    """Make the coming backward of ``out`` defer its weights' gradients.

    Args:
        out: The tensor on which ``backward`` is called next, once.

    Returns:
        The deferred half: call ``finish`` on it after that backward.

    Cost: microseconds for each node of the graph.

    >>> from equipoise.nn.project import project
    >>> x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    >>> out = project(x, weight)[0].sum()
    >>> later = defer_weights(out)
    >>> out.backward()
    >>> x.grad.sum().item(), weight.grad is None
    (24.0, True)
    >>> later.finish()
    >>> weight.grad.sum().item()
    24.0
    """
    parts: list[WeightGradients] = []
    seen: set[object] = set()
    left = [out.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inputs = [each for each, _ in node.next_functions]
        left += inputs
        gradients = getattr(node, "weight_gradients", None)
        if not isinstance(gradients, WeightGradients):
            continue
        weights = inputs[gradients.first :]
        # A computed weight has no ``grad``, so its function does both halves at once.
        if all(each is None or hasattr(each, "variable") for each in weights):
            gradients.leaves = [getattr(each, "variable", None) for each in weights]
            parts.append(gradients)
    return Deferred(tuple(parts))
