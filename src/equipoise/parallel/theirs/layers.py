"""The decoder layers of a model that transformers builds."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from equipoise.base.errors import ModelError


def find_layers(theirs: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in order.

    Raises:
        ModelError: no list of its modules is that of its layers, or two of them share a weight.
    """
    name, config = type(theirs).__name__, theirs.config.get_text_config()
    count = int(config.num_hidden_layers)
    lists = [list(each) for each in theirs.modules() if isinstance(each, nn.ModuleList)]
    fitting = [each for each in lists if len(each) == count]
    if not fitting:
        raise ModelError(
            f"{name} has no list of {count} layers, which ZeRO gathers one by one. Choose another "
            f"model."
        )
    layers = max(fitting, key=count_weights)
    inside = [{id(weight) for weight in layer.parameters()} for layer in layers]
    if sum(map(len, inside)) != len(set().union(*inside)):
        raise ModelError(
            f"The layers of {name} share weights, which ZeRO cannot gather layer by layer. Choose "
            f"another model."
        )
    return layers


def count_weights(modules: Sequence[nn.Module]) -> int:
    """How many weights some modules have; one that two of them share counts twice."""
    return sum(weight.numel() for module in modules for weight in module.parameters())
