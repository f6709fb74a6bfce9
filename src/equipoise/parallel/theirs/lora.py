"""Low-rank adapters beside the linear layers of a model that transformers builds.

What it decides
    A target is a name as in peft: ``q_proj`` is every linear layer of that name in the decoder's
    layers. Our own names stand for those of Hugging Face (``spec.run.lora.TARGETS``). Without
    targets, every linear layer of attention and of feed-forwards has an adapter; as in our own
    decoder, blocks with experts have none, shared experts and routers included.

    The adapter is the one of our own decoder (``nn.lora``), added to what its layer returns. So
    names of weights stay, and checkpoints hold both alike.

Kept true (tests/oracle/test_engine_lora.py, tests/multi/check/test_theirs.py)
    Losses and adapters over several steps equal those of transformers with peft; on every layout
    they equal one rank's. A layer whose adapter would not be used is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from equipoise.base.errors import ModelError, SpecError
from equipoise.nn.declare import Copied
from equipoise.nn.lora import ADAPTER, Adapter, adapter_of, attach_adapter
from equipoise.parallel.theirs.layers import find_layers
from equipoise.spec.run.lora import TARGETS, LoraSpec

_A, _B = f".{ADAPTER}.lora_A", f".{ADAPTER}.lora_B"


def adapted_layers(theirs: PreTrainedModel, lora: LoraSpec) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers that get an adapter, by transformers' names.

    Raises:
        SpecError: a target is the name of no linear layer, or there are no linear layers.
    """
    linear = _linear_layers(theirs)
    if not lora.targets:
        beside = _beside_experts(theirs)
        chosen = {name: part for name, part in linear.items() if id(part) not in beside}
        if not chosen:
            raise SpecError(
                f"lora.rank = {lora.rank}, but {type(theirs).__name__} has no linear layer outside "
                f"its experts. Name some in lora.targets, or remove lora.rank."
            )
        return chosen
    names = set[str]()
    for target in lora.targets:
        wanted = TARGETS.get(target, target)
        matched = {name for name in linear if f".{name}".endswith(f".{wanted}")}
        if not matched:
            known = sorted({name.rpartition(".")[2] for name in linear})
            is_ours = f" ({wanted} in Hugging Face folders)" if wanted != target else ""
            raise SpecError(
                f'lora.targets: "{target}"{is_ours} is the name of no linear layer of '
                f"{type(theirs).__name__}. Its linear layers are {', '.join(known) or 'none'}."
            )
        names |= matched
    return {name: part for name, part in linear.items() if name in names}


def _linear_layers(theirs: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    inside = {id(part) for layer in find_layers(theirs) for part in layer.modules()}
    return {
        name: part
        for name, part in theirs.named_modules()
        if id(part) in inside and type(part) in (nn.Linear, Conv1D)
    }


def _beside_experts(theirs: PreTrainedModel) -> set[int]:
    """Every part of a block of a layer that has experts: in one weight for all, or in a list."""
    return {
        id(part)
        for layer in find_layers(theirs)
        for block in layer.children()
        if any(weight.dim() == 3 for weight in block.parameters())
        or any(isinstance(each, nn.ModuleList) for each in block.modules())
        for part in block.modules()
    }


def add_their_adapters(theirs: PreTrainedModel, lora: LoraSpec, seed: int) -> dict[str, Adapter]:
    """Give layers their adapters, in place, and let nothing else train.

    Returns:
        The adapters by transformers' names of their layers.

    Raises:
        SpecError: as ``adapted_layers``.
    """
    theirs.requires_grad_(False)
    adapters = {}
    for name, part in adapted_layers(theirs, lora).items():
        weight = part.weight.detach()
        weight = weight.t() if isinstance(part, Conv1D) else weight
        adapters[name] = Adapter(weight, Copied(), lora.rank, lora.scale)
        attach_adapter(part, adapters[name], name, seed)
        part.register_forward_hook(_add_output)
    return adapters


def _add_output(part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    adapter = adapter_of(part)
    return out if adapter is None else out + adapter(args[0])


def require_used(call: Any, adapters: Mapping[str, Adapter]) -> None:
    """Refuse adapters of layers that a model does not call, but reads the weights of.

    Args:
        call: Runs the model once.
        adapters: By the names of their layers.

    Raises:
        ModelError: names such a layer.
    """
    used: set[int] = set()
    hooks = [
        adapter.register_forward_hook(lambda module, *_: used.add(id(module)))
        for adapter in adapters.values()
    ]
    try:
        with torch.no_grad():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    idle = [name for name, adapter in adapters.items() if id(adapter) not in used]
    if idle:
        raise ModelError(
            f"The model reads the weights of {idle[0]} without calling it, so that an adapter "
            f"there would not be used. Leave it out of lora.targets."
        )


def merge_their_adapters(
    theirs: PreTrainedModel, adapters: Mapping[str, Tensor], lora: LoraSpec
) -> None:
    """Add ``scale B A`` to each weight that has an adapter, in place.

    Args:
        theirs: The model, without adapters.
        adapters: A and B of each adapter, by the names of their layers.
        lora: Their scale.
    """
    for name, first in adapters.items():
        if not name.endswith(_A):
            continue
        stem = name.removesuffix(_A)
        part = theirs.get_submodule(stem)
        change = lora.scale * (adapters[stem + _B] @ first)
        with torch.no_grad():
            part.get_parameter("weight").add_(change.t() if isinstance(part, Conv1D) else change)


def peft_targets(theirs: PreTrainedModel, stems: list[str]) -> tuple[list[str], bool]:
    """How peft finds the layers of these names.

    Returns:
        The last words of the names if they stand for no other layer, else the whole names; and
        whether the layers store their weights [in, out].
    """
    linear = _linear_layers(theirs)
    words = sorted({stem.rpartition(".")[2] for stem in stems})
    others = [n for n, _ in theirs.named_modules() if n.rpartition(".")[2] in words]
    is_transposed = any(isinstance(linear[stem], Conv1D) for stem in stems)
    return (words if set(others) == set(stems) else sorted(stems)), is_transposed
