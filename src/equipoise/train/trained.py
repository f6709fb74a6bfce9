"""Which of a model's weights a run trains: all, all but those of ``train.freeze``, or adapters.

What it decides
    A pattern names a weight, or everything below a name: ``embed`` is ``embed.weight``, and
    ``layers.1`` is all of that layer. ``*`` stands for any letters, dots too, and ``0-3`` between
    dots for the numbers from 0 to 3. What a pattern matches follows from the names of the whole
    model, so it is the same on every stage of a pipeline.

    A frozen weight has no gradient, no moments and no weight decay; checkpoints hold it, so that a
    run goes on without the folder that it began from.

Kept true (tests/unit/train/test_trained.py, tests/multi/check/test_trained.py)
    Gradients of the other weights are those of a run that trains all of them, on every layout.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.read import weight_shapes
from equipoise.nn.packed import PackedModel
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.keys import toml
from equipoise.spec.run.spec import RunSpec

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_THEIRS = "theirs."
"""Where a model of transformers stands in what trains it."""

_MOST_LAYERS = 4096
"""As run.toml has them."""


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern of ``train.freeze`` stands for.

    >>> match_names("layers.0-1.norm", ["layers.1.norm.weight", "layers.2.norm.weight"])
    ['layers.1.norm.weight']
    >>> match_names("*.bias", ["layers.0.query.bias", "norm.weight"])
    ['layers.0.query.bias']
    """
    shape = re.compile(r"\.".join(map(_part, pattern.split("."))) + r"(?:\..*)?", re.DOTALL)
    return [name for name in names if shape.fullmatch(name)]


def _part(part: str) -> str:
    """The regular expression of what stands between two dots of a pattern."""
    if span := _RANGE.fullmatch(part):
        numbers = range(int(span[1]), min(int(span[2]), _MOST_LAYERS) + 1)
        return f"(?:{'|'.join(map(str, numbers))})" if numbers else r"(?!)"
    return ".*".join(map(re.escape, part.split("*")))


def frozen_names(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Every name that some pattern stands for.

    Raises:
        SpecError: a pattern matches nothing, or all of them leave nothing to train.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matched = match_names(pattern, names)
        if not matched:
            stems = {".".join(parts) for name in names for parts in _beginnings(name)}
            raise SpecError(
                f"train.freeze: {toml(pattern)} matches none of the model's {len(names)} weights. "
                f"Nearest: {toml(nearest(pattern, sorted(stems)))}."
            )
        frozen.update(matched)
    if frozen.issuperset(names):
        raise SpecError(
            f"train.freeze = {toml(tuple(patterns))} leaves none of the model's {len(names)} "
            f"weights to train. Remove a pattern."
        )
    return frozen


def _beginnings(name: str) -> Iterable[tuple[str, ...]]:
    return itertools.accumulate(((part,) for part in name.split(".")), lambda a, b: a + b)


def require_trained(spec: RunSpec, model: ModelSpec, folder: Path) -> None:
    """Refuse patterns and targets that match nothing, and patterns that match everything.

    Args:
        spec: The run's keys.
        model: Its sizes.
        folder: Of its first weights, where transformers builds the model.

    Raises:
        SpecError: as ``frozen_names``, a target is the name of no layer, or experts in a file are
            frozen.
        ModelError: transformers cannot build the model.
    """
    if spec.model.engine == "equipoise":
        frozen = frozen_names(spec.train.freeze, list(weight_shapes(model)))
        held = [name for name in sorted(frozen) if ".experts." in name]
        if spec.experts.memory_mib and held:
            raise SpecError(
                f"experts.memory_mib = {spec.experts.memory_mib:g} holds experts that are trained, "
                f"and train.freeze leaves {len(held)} of their weights as they are, the first "
                f"{held[0]}. Remove one of the two."
            )
    elif spec.train.freeze or spec.lora.rank:
        # It takes seconds to import, and is an extra.
        from equipoise.parallel.theirs.build import build_random, read_theirs_config
        from equipoise.parallel.theirs.lora import adapted_layers

        theirs = build_random(read_theirs_config(folder), seed=0, device="meta")
        frozen_names(spec.train.freeze, [name for name, _ in theirs.named_parameters()])
        if spec.lora.rank:
            adapted_layers(theirs, spec.lora)


def trained_names(spec: RunSpec, model: ModelSpec) -> set[str]:
    """Names of the model's own weights that a run trains: none beside adapters."""
    names = list(weight_shapes(model))
    return set() if spec.lora.rank else set(names) - frozen_names(spec.train.freeze, names)


def choose_trained(decoder: PackedModel, spec: RunSpec, model: ModelSpec) -> None:
    """Add the adapters of a run, or freeze what it does not train, in place.

    Args:
        decoder: The whole, or some stages of a pipeline; not divided over ranks yet.
        spec: The run's keys.
        model: The whole model's sizes.
    """
    if spec.lora.rank:
        decoder.add_adapters(spec.lora, spec.train.seed)
    elif spec.train.freeze:
        held = {name.removeprefix(_THEIRS): each for name, each in decoder.named_parameters()}
        is_ours = isinstance(decoder, Decoder)
        frozen = frozen_names(spec.train.freeze, list(weight_shapes(model) if is_ours else held))
        for name, weight in held.items():
            weight.requires_grad_(name not in frozen)


def count_trained(spec: RunSpec, model: ModelSpec) -> int:
    """How many numbers a run trains, adapters and all: each has a gradient and two moments.

    Models of transformers are counted as if nothing of them were frozen.
    """
    if spec.model.engine != "equipoise":
        return model.params
    trained, ends = (
        trained_names(spec, model),
        tuple(f".{each}.weight" for each in spec.lora.layers),
    )
    count = 0
    for name, shape in weight_shapes(model).items():
        count += math.prod(shape) if name in trained else 0
        if spec.lora.rank and name.endswith(ends) and ".shared." not in name and len(shape) == 2:
            count += spec.lora.rank * sum(shape)
    return count
