"""Every weight of a decoder by its name, and which of them a run trains.

Why
    Plans and forecasts name weights as ``train.freeze`` does, on machines that have no torch.

Kept true (tests/unit/spec/model/test_weights.py)
    Names and shapes are those of the decoder that trains, of every kind of model that does.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.spec.model.match import match_any
from equipoise.spec.model.sizes import ModelSpec


def decoder_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a decoder, layer by layer.

    >>> from equipoise.spec.model.presets import preset
    >>> shapes = decoder_shapes(preset("2m"))
    >>> shapes["embed.weight"] == (preset("2m").vocab, preset("2m").hidden)
    True
    >>> sum(map(math.prod, shapes.values())) == preset("2m").params
    True
    """
    hidden = model.hidden
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab, hidden)}
    for layer in range(model.layers):
        blocks = {"attention": _attention(model), "feed_forward": _feed(model, layer)}
        for block, weights in blocks.items():
            shapes[f"layers.{layer}.{block}_norm.weight"] = (hidden,)
            shapes |= {f"layers.{layer}.{block}.{name}": each for name, each in weights.items()}
    shapes["norm.weight"] = (hidden,)
    return shapes if model.tied else shapes | {"head.weight": (model.vocab, hidden)}


def _attention(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    rows = {"query": model.heads, "key": model.kv_heads, "value": model.kv_heads}
    rows = {name: heads * model.head_width for name, heads in rows.items()}
    weights: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (count, model.hidden) for name, count in rows.items()
    }
    weights["output.weight"] = (model.hidden, rows["query"])
    if model.qkv_bias:
        weights |= {f"{name}.bias": (count,) for name, count in rows.items()}
    if model.qk_norm:
        weights |= {f"{name}_norm.weight": (model.head_width,) for name in ("query", "key")}
    return weights


def _feed(model: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = model.hidden
    if not model.is_sparse(layer):
        return _swiglu("", hidden, model.ffn)
    weights: dict[str, tuple[int, ...]] = {"router.weight": (model.choices, hidden)}
    one = _swiglu("experts.", hidden, model.expert_ffn)
    weights |= {name: (model.experts, *shape) for name, shape in one.items()}
    if model.shared_ffn:
        weights |= _swiglu("shared.", hidden, model.shared_ffn)
        weights |= {"shared.switch.weight": (1, hidden)} if model.shared_gate else {}
    return weights


def _swiglu(start: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{start}gate.weight": (inner, hidden),
        f"{start}up.weight": (inner, hidden),
        f"{start}down.weight": (hidden, inner),
    }


@dataclass(frozen=True, slots=True)
class TrainedShares:
    """How much of a decoder is trained, part by part, each from 0 to 1."""

    layers: tuple[float, ...]
    first: float
    """The table of tokens."""
    last: float
    """Last norm and head; a tied head is the table."""
    first_back: int
    """The first layer through which the backward runs."""

    @property
    def least(self) -> float:
        """The smallest share of any part."""
        return min(*self.layers, self.first, self.last)

    def of_rank(
        self, model: ModelSpec, layers: Sequence[int], *, embeds: bool, has_head: bool
    ) -> float:
        """The share of the weights that one rank of a pipeline holds.

        Args:
            model: The whole decoder.
            layers: Numbers of the layers that it holds.
            embeds: It holds the table of tokens.
            has_head: It holds last norm and head.
        """
        sizes = _part_sizes(model)
        held = [(sizes.layers[at], self.layers[at]) for at in layers]
        held += [(sizes.first, self.first)] * embeds
        held += [(sizes.last, self.last)] * (has_head and not (model.tied and embeds))
        count = sum(each for each, _ in held)
        return sum(each * share for each, share in held) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class _PartSizes:
    """Weights of each layer, and of both ends."""

    layers: tuple[int, ...]
    first: int
    last: int


@functools.lru_cache(maxsize=64)
def _part_sizes(model: ModelSpec) -> _PartSizes:
    layers, first, last = [0] * model.layers, 0, 0
    for name, shape in decoder_shapes(model).items():
        if name.startswith("layers."):
            layers[int(name.split(".")[1])] += math.prod(shape)
        elif name.startswith("embed."):
            first += math.prod(shape)
        else:
            last += math.prod(shape)
    return _PartSizes(tuple(layers), first, first if model.tied else last)


def trained_shares(
    model: ModelSpec, patterns: Sequence[str], *, reads_back: bool
) -> TrainedShares | None:
    """How much of a decoder patterns of ``train.freeze`` leave to train; None if all of it.

    Args:
        model: Sizes.
        patterns: Of names; those of encoders name nothing here.
        reads_back: Whether something before the decoder is trained, so that the backward runs
            through all layers.

    >>> from equipoise.spec.model.presets import preset
    >>> half = trained_shares(preset("2m"), ["embed", "layers.0-1"], reads_back=False)
    >>> half.layers[:3], half.first, half.last, half.first_back
    ((0.0, 0.0, 1.0), 0.0, 1.0, 2)
    """
    shapes = decoder_shapes(model)
    frozen = set(match_any(patterns, shapes))
    if not frozen:
        return None
    sizes, left = _part_sizes(model), [0] * (model.layers + 2)
    for name, shape in shapes.items():
        part = name.split(".")
        at = int(part[1]) if part[0] == "layers" else model.layers + (part[0] != "embed")
        left[at] += 0 if name in frozen else math.prod(shape)
    layers = [each / size for each, size in zip(left, sizes.layers, strict=False)]
    first = left[-2] / sizes.first
    last = first if model.tied else left[-1] / sizes.last
    trained = [at for at, share in enumerate(layers) if share]
    first_back = 0 if reads_back or first else min(trained, default=model.layers)
    return TrainedShares(tuple(layers), first, last, first_back)
