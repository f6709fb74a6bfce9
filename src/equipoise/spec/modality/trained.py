"""What a run freezes of its decoder and of its encoders, by name.

What it decides
    What the patterns of ``train.freeze`` stand for among the names of all weights. Plans and
    forecasts ask here, and so does whoever trains.

Kept true (tests/unit/spec/modality/test_trained.py, tests/unit/train/test_trained.py)
    A pattern that stands for nothing is refused, and so are patterns that leave nothing to train.
"""

import itertools
from collections.abc import Iterable, Sequence

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.modality.encoder import ENCODERS
from equipoise.spec.model.match import match_names
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.model.weights import TrainedShares, decoder_shapes, trained_shares
from equipoise.spec.run.keys import toml
from equipoise.spec.run.spec import RunSpec


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


def every_name(spec: RunSpec, model: ModelSpec) -> list[str]:
    """Names of all weights of a run's own model: the decoder's, then those of encoders."""
    return [
        *decoder_shapes(model),
        *(f"{ENCODERS}.{each.kind}.{name}" for each in spec.encoders for name in each.shapes(1)),
    ]


def run_shares(spec: RunSpec, model: ModelSpec) -> TrainedShares | None:
    """How much of a run's decoder is trained; None if all of it.

    Also None of adapters and of models that transformers builds: those are not counted.

    Raises:
        SpecError: as ``frozen_names``.
    """
    if spec.lora.rank or spec.model.engine != "equipoise" or not spec.train.freeze:
        return None
    frozen_names(spec.train.freeze, every_name(spec, model))
    reads_back = any(not each.is_frozen for each in spec.encoders)
    return trained_shares(model, spec.train.freeze, reads_back=reads_back)
