"""Name the layer where a number first goes bad, once a step has found that one did.

Why
    A loss that is not a number says which documents were read, not where in the model it arose: a
    weight that was spoiled, an activation that overflowed, a gradient.

What it decides
    A forward pass over the same micro-batches, which changes nothing, shows the first layer whose
    output is bad. Where no output is, gradients are bad from a layer on down to the first, since
    they flow from the last layer to the first: the last of them is named. Nothing is computed for
    this while all numbers are good.

Kept true (tests/unit/fault/test_blame.py, tests/multi/train/test_train.py)
    A spoiled weight, activation or gradient is named by its layer, and no weight changes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NAMED_DOCUMENTS = 8
"""Most documents that a message names."""


def first_bad_layer(module: nn.Module, run: Callable[[], object]) -> str:
    """The first layer whose output is not finite while ``run`` calls the module; "" if none is."""
    names: list[str] = []

    def look(name: str, layer: nn.Module, arguments: Any, output: Any) -> None:
        del layer, arguments
        if not names and any(_is_bad(each) for each in _tensors(output)):
            names.append(name)

    layers = [(name, layer) for name, layer in module.named_modules() if name]
    hooks = [layer.register_forward_hook(partial(look, name)) for name, layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""


def last_bad_gradient(module: nn.Module) -> str:
    """The last weight whose gradient is not finite on this rank; "" if none is."""
    named = module.named_parameters()
    names = [name for name, weight in named if weight.grad is not None and _is_bad(weight.grad)]
    return max(names, key=depth, default="")


def depth(name: str) -> float:
    """How far from the input a layer is, by its name: embeddings, layers by number, the rest.

    >>> sorted(["norm", "layers.10.ffn", "layers.2", "embed.weight"], key=depth)
    ['embed.weight', 'layers.2', 'layers.10.ffn', 'norm']
    """
    number = re.search(r"\d+", name)
    if number is not None:
        return int(number[0])
    return -1.0 if "embed" in name else float("inf")


def tell_documents(documents: Sequence[int], name: Callable[[int], str]) -> tuple[str, str]:
    """Where a number went bad, by documents of the micro-batches whose loss is bad; and the fix."""
    if not documents:
        return ", though the loss of every micro-batch is", "Lower train.lr."
    named = [f"{each} ({name(each)})" for each in documents[:_NAMED_DOCUMENTS]]
    more = len(documents) - len(named)
    where = f"; documents of the micro-batches where it is: {', '.join(named)}"
    where += f" and {more} more" if more else ""
    return where, "Lower train.lr, or look at those documents."


def tell_layer(first: Iterable[str], last: Iterable[str]) -> str:
    """A sentence on where a bad number begins, from the names that all ranks found; may be "".

    >>> tell_layer(["", "layers.3.ffn", "layers.4"], [])
    'The first layer whose output is not finite is layers.3.ffn. '
    >>> tell_layer([""], ["layers.0.ffn.up.weight", ""])
    'The last weight whose gradient is not finite is layers.0.ffn.up.weight. '
    """
    outputs, gradients = [*filter(None, first)], [*filter(None, last)]
    if outputs:
        return f"The first layer whose output is not finite is {min(outputs, key=depth)}. "
    if gradients:
        return f"The last weight whose gradient is not finite is {max(gradients, key=depth)}. "
    return ""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)


def _is_bad(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.is_floating_point() and not bool(torch.isfinite(local).all())
