"""Low-rank adapters: pairs of small matrices beside weights that stay as they are.

What it decides
    ``y = x W' + scale (x A') B'``, as in peft: A [rank, in] begins uniform within ``1 / sqrt(in)``,
    B [out, rank] with zeros. The product is never added to W while it trains, which bf16 would
    round away.

    The pair is a module of ours and not one of peft's. peft wraps a layer's ``forward``, and our
    layers read weights in functions that join several layers (``nn.project``), whose gradients
    tensor parallelism and pipelines need. The mathematics, the names on disk and the configuration
    are peft's (``nn.hf.adapter``).

    A declares the split of its weight's inputs and B that of its outputs, so ranks that share a
    weight share its adapter: each computes its part, and what is copied gets a partial sum.

Kept true (tests/oracle/test_lora.py, tests/multi/check/test_trained.py)
    Losses and adapters over several steps equal those of transformers with peft; on every layout
    they equal one rank's.

Sources
    LoRA: arXiv:2106.09685. Initial values: peft 0.21, ``tuners/lora/layer.py``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.base.digest import digest
from equipoise.nn.declare import Copied, Placement, Split, local
from equipoise.spec.run.lora import LoraSpec

ADAPTER = "adapter"
"""Name of the adapter in the module of its weight."""


class Adapter(nn.Module):
    """One pair, for a weight [out, in]."""

    def __init__(self, weight: Tensor, placement: Placement, rank: int, scale: float) -> None:
        super().__init__()
        out, inner = weight.shape
        self.placement, self.scale = placement, scale
        self.lora_A = nn.Parameter(weight.new_empty(rank, inner))
        self.lora_B = nn.Parameter(weight.new_zeros(out, rank))

    def declare(self) -> dict[str, Placement]:
        """The side that the weight's split reaches is split alike; the other is copied."""
        if isinstance(self.placement, Split) and self.placement.dim == 0:
            return {"lora_A": Copied(), "lora_B": self.placement}
        return {"lora_A": self.placement, "lora_B": Copied()}

    def forward(self, x: Tensor, rows: Callable[[Tensor], Tensor] = local) -> Tensor:
        """What is added to the layer's output for its input ``x``.

        Args:
            x: Input of the layer [T, in], or this rank's columns of it.
            rows: Takes this rank's rows of B, as of the weight.
        """
        return (x @ local(self.lora_A).t() * self.scale) @ rows(self.lora_B).t()


def adapter_of(part: nn.Module) -> Adapter | None:
    """The adapter of a layer, if it has one."""
    adapter = part._modules.get(ADAPTER)
    return adapter if isinstance(adapter, Adapter) else None


def add_adapters(decoder: nn.Module, lora: LoraSpec, seed: int) -> None:
    """Give layers their adapters, in place, and let nothing else train.

    Args:
        decoder: The whole, or some stages of a pipeline; not divided over ranks yet.
        lora: Rank, scale and layers.
        seed: Of A; its values depend on the seed and the weight's name alone.
    """
    for weight in decoder.parameters():
        weight.requires_grad_(False)
    for name, block in list(decoder.named_modules()):
        declare = getattr(block, "declare", None)
        for target in lora.layers:
            part = block._modules.get(target)
            if declare is None or not isinstance(part, nn.Linear):
                continue
            placement = declare()[f"{target}.weight"]
            adapter = Adapter(part.weight.detach(), placement, lora.rank, lora.scale)
            attach_adapter(part, adapter, f"{name}.{target}", seed)


def attach_adapter(part: nn.Module, adapter: Adapter, name: str, seed: int) -> None:
    """Make an adapter part of its layer, and draw A by the seed and the layer's name alone."""
    part.add_module(ADAPTER, adapter)
    drawn = int(digest([seed, f"{name}.lora_A"])[:15], 16)
    generator = torch.Generator().manual_seed(drawn)
    bound = adapter.lora_A.shape[1] ** -0.5
    values = torch.empty(adapter.lora_A.shape, dtype=torch.float32)
    with torch.no_grad():
        adapter.lora_A.copy_(values.uniform_(-bound, bound, generator=generator))
