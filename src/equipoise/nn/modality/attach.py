"""Encoders as modules of the decoder that reads their rows, with first weights of their own.

What it decides
    A checkpoint, an optimizer and a report know weights by names: encoders are ``encoders.image``
    and ``encoders.audio`` of the decoder, whatever its layout. They join the decoder when it has
    been divided over its ranks, so that none of its axes divides them: they have a mesh of their
    own (``parallel.modality.shard``).

Kept true (tests/multi/checkpoint/test_modality.py)
    A run that resumes on another layout has the same encoders.
"""

from collections.abc import Sequence

import torch
from torch import nn

from equipoise.base.digest import digest
from equipoise.nn.modality.encoder import ItemEncoder
from equipoise.spec.modality.encoder import ENCODERS, EncoderSpec


def make_encoders(specs: Sequence[EncoderSpec], width: int, seed: int) -> nn.ModuleDict:
    """Encoders with first weights, by the kind of item.

    Each weight is drawn from a generator of its own, named by the seed and the weight's name.

    Args:
        specs: Sizes, each of another kind, and which weights need no gradient.
        width: Hidden width of the decoder.
        seed: Seed of the weights, the same on every rank.
    """
    encoders = nn.ModuleDict({spec.kind: ItemEncoder(spec, width) for spec in specs})
    with torch.no_grad():
        for name, weight in encoders.named_parameters():
            if weight.dim() == 1:
                is_norm = "norm" in name and name.endswith("weight")
                weight.fill_(1.0 if is_norm else 0.0)
                continue
            key = digest([seed, f"{ENCODERS}.{name}"])
            generator = torch.Generator().manual_seed(int(key[:15], 16))
            weight.normal_(0.0, 0.02, generator=generator)
    for spec in specs:
        for name, weight in encoders[spec.kind].named_parameters():
            weight.requires_grad_(name not in spec.frozen)
    return encoders


def encoders_of(decoder: nn.Module) -> nn.ModuleDict | None:
    """A decoder's encoders, if it has any."""
    encoders = decoder._modules.get(ENCODERS)
    return encoders if isinstance(encoders, nn.ModuleDict) else None


def take_encoders(decoder: nn.Module) -> nn.ModuleDict | None:
    """A decoder's encoders, which it then has no more; None if it has none."""
    encoders = encoders_of(decoder)
    decoder._modules.pop(ENCODERS, None)
    return encoders
