"""Linear layers in fewer bits, which compute on any processor what they say.

What it decides
    ``fp16`` keeps weights as fp16 and computes in fp32. ``int8`` keeps a weight as its level of
    256 with one symmetric scale for each output, and rounds inputs to 256 levels between two ends
    that were calibrated; what lies beyond an end is clipped, and counted. Ends are fixed, not
    taken from the batch: a score must not depend on what is scored beside it. Levels are whole
    numbers below 2**8, so their products add up exactly in fp32 over ``_EXACT`` inputs; longer sums
    are cut there and added in fp64. The instructions for 8 bits of older processors saturate in
    between, and would be wrong without a word.

Kept true (tests/unit/recsys/lowbit/test_layers.py, by Hypothesis)
    Outputs are those of whole-number arithmetic; a weight is off by half a level at most; bytes
    are those of the formula.

Sources
    arXiv:2105.12676, section 3: per-channel weights, calibrated activations.
"""

from typing import Literal

import torch
from torch import Tensor, nn

LayerForm = Literal["fp16", "int8"]
_LEVELS = 255
_EXACT = 512
"""Inputs whose products of 255 x 127 add up below 2**24."""


class RoundedLinear(nn.Module):
    """A linear layer in ``fp16`` or ``int8``."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    """A level of each output's weights, float32 [out]; int8."""
    ends: Tensor
    """Least and greatest input, float32 [2]; int8."""

    def __init__(self, inputs: int, outputs: int, form: LayerForm, *, has_bias: bool) -> None:
        """Weights of zeros, to be loaded."""
        super().__init__()
        self.form, self.inputs = form, inputs
        dtype = torch.float16 if form == "fp16" else torch.int8
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=dtype))
        self.register_buffer("bias", torch.zeros(outputs) if has_bias else None)
        self.is_watched = False
        """Whether clipped inputs are counted, which takes time."""
        self.clipped = self.seen = 0
        """Inputs beyond the ends, and all, since somebody last set them to 0."""
        if form == "int8":
            self.register_buffer("scale", torch.ones(outputs))
            self.register_buffer("ends", torch.tensor([0.0, 1.0]))

    @classmethod
    def of(cls, linear: nn.Linear, form: LayerForm, ends: tuple[float, float]) -> "RoundedLinear":
        """A layer's weights, rounded to nearest."""
        has_bias = linear.bias is not None
        made = cls(linear.in_features, linear.out_features, form, has_bias=has_bias)
        weight = linear.weight.detach()
        if has_bias:
            made.bias = linear.bias.detach().clone()
        if form == "fp16":
            made.weight = weight.to(torch.float16)
            return made
        top = weight.abs().amax(dim=1)
        made.scale = torch.where(top > 0, top / 127, torch.ones_like(top))
        made.weight = torch.round(weight / made.scale[:, None]).clamp(-127, 127).to(torch.int8)
        made.ends = torch.tensor(ends, dtype=torch.float32)
        return made

    def forward(self, given: Tensor) -> Tensor:
        """As ``nn.Linear``, float32 [..., out]."""
        if self.form == "fp16":
            return nn.functional.linear(given, self.weight.float(), self.bias)
        low, high = self.ends[0], self.ends[1]
        step = (high - low) / _LEVELS
        if self.is_watched:
            self.seen += given.numel()
            self.clipped += int(((given < low) | (given > high)).sum())
        levels = torch.round((given.clamp(low, high) - low) / step)
        weight = self.weight.float()
        if self.inputs <= _EXACT:
            sums = nn.functional.linear(levels, weight)
        else:
            parts = [
                nn.functional.linear(some, own).double()
                for some, own in zip(
                    levels.split(_EXACT, dim=-1), weight.split(_EXACT, dim=1), strict=True
                )
            ]
            sums = torch.stack(parts).sum(dim=0).float()
        out = (sums * step + low * weight.sum(dim=1)) * self.scale
        return out if self.bias is None else out + self.bias


def linears_of(dense: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a dense part, by name."""
    return {name: each for name, each in dense.named_modules() if isinstance(each, nn.Linear)}


def swap_module(dense: nn.Module, name: str, other: nn.Module) -> None:
    """Put another module where one of this name is."""
    parent, _, own = name.rpartition(".")
    setattr(dense.get_submodule(parent), own, other)


def rounded_of(dense: nn.Module) -> dict[str, RoundedLinear]:
    """The rounded layers of a dense part, by name."""
    return {n: each for n, each in dense.named_modules() if isinstance(each, RoundedLinear)}


def layer_bytes(inputs: int, outputs: int, form: str, *, has_bias: bool) -> int:
    """Bytes of a layer's weights, scales, ends and bias.

    >>> [layer_bytes(64, 32, form, has_bias=True) for form in ("fp32", "fp16", "int8")]
    [8320, 4224, 2312]
    """
    weight = inputs * outputs * {"fp32": 4, "fp16": 2, "int8": 1}[form]
    return weight + 4 * outputs * has_bias + (4 * outputs + 8 if form == "int8" else 0)
