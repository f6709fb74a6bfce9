"""Weight gradients that are put off: a backward whose weights' half comes later, or at once.

Why
    The stage before waits for the gradient of a stage's input and for nothing else. The other
    half of the backward, the gradients of the weights, can wait for a moment in which the rank
    would be idle. Asking autograd twice computes the whole chain of input gradients twice.

What it decides
    A function of ``nn.project`` multiplies each weight's gradient from two tensors that its
    backward has anyway. Told beforehand, it keeps the two instead, and autograd gets nothing
    for that weight. Functions are told through the graph of the output: each node has a
    ``WeightGradients``, so nothing is handed through layers, and nothing is global. Whatever
    else has parameters (norms, biases, the embedding, a head whose loss makes its gradient) has
    its gradients at once, which is exact, too.

Kept true (tests/unit/nn/test_defer.py)
    Gradients of both halves together equal those of a whole backward, also where layers are
    recomputed, weights are shared or need no gradient; no weight has one before its half.

Sources
    Split backward: Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The gradient of a weight [out, in], not yet multiplied: ``grad.T @ x``."""

    grad_TO: Tensor
    x_TI: Tensor
    is_wide: bool = False
    """Whether it comes out faster the other way around, ``(x.T @ grad).T``, by 5%."""

    def multiply(self) -> Tensor:
        """The gradient [out, in]."""
        if self.is_wide:
            return (self.x_TI.t() @ self.grad_TO).t()
        return self.grad_TO.t() @ self.x_TI

    def add_to(self, weight: Tensor) -> None:
        """Add it to ``weight.grad``; where there is one, in the same pass as it is multiplied."""
        if weight.grad is None or isinstance(weight, DTensor):
            weight.backward(self.multiply())
        else:
            weight.grad.addmm_(self.grad_TO.t(), self.x_TI)


@dataclass(slots=True, eq=False)
class WeightGradients:
    """Those of one function in one graph; the function keeps it as ``ctx.weight_gradients``."""

    first: int
    """Place of the first weight among the function's inputs; the others follow."""
    leaves: list[Tensor | None] | None = None
    """The weights, None for one that needs no gradient; None if they are not put off."""
    products: tuple[Product, ...] = field(default=())

    def take(self, *products: Product) -> tuple[Tensor | None, ...]:
        """What the function's backward returns for its weights."""
        if self.leaves is None:
            return tuple(product.multiply() for product in products)
        self.products = products
        return (None,) * len(products)

    def finish(self) -> None:
        """Add to the weights what was put off, and let go of it."""
        for weight, product in zip(self.leaves or (), self.products, strict=False):
            if weight is not None:
                product.add_to(weight)
        self.products = ()


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The weights' half of one backward."""

    parts: tuple[WeightGradients, ...]

    @torch.no_grad()
    def finish(self) -> None:
        """Add every weight's gradient to its ``grad``."""
        for part in self.parts:
            part.finish()


def defer_weights(out: Tensor) -> Deferred:
    """Make the coming backward of ``out`` put off its weights' gradients.

    Args:
        out: What ``backward`` is called on next, once.

    Returns:
        Their half: ``finish`` it after that backward.

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
        # A weight that is itself computed has no ``grad``: its function keeps both halves.
        if all(each is None or hasattr(each, "variable") for each in weights):
            gradients.leaves = [getattr(each, "variable", None) for each in weights]
            parts.append(gradients)
    return Deferred(tuple(parts))
