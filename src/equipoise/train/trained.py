"""Which of a model's weights a run trains: all, all but those of ``train.freeze``, or adapters.

What it decides
    A pattern names a weight, or everything below a name: ``embed`` is ``embed.weight``, and
    ``layers.1`` is all of that layer. ``*`` stands for any letters, dots too, and ``0-3`` between
    dots for the numbers from 0 to 3. What a pattern matches follows from the names of the whole
    model, so it is the same on every stage of a pipeline. Encoders of images and sound are part of
    it: ``encoders.image`` is all of one, ``encoders.*.project`` the last product of each.

    A frozen weight has no gradient, no moments and no weight decay; checkpoints hold it, so that a
    run goes on without the folder that it began from.

Kept true (tests/unit/train/test_trained.py, tests/multi/check/test_trained.py)
    Gradients of the other weights are those of a run that trains all of them, on every layout.
"""

import math
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cost.modality import encoder_params
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.read import weight_shapes
from equipoise.nn.packed import PackedModel
from equipoise.spec.modality.trained import every_name, frozen_names
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import RunSpec

_THEIRS = "theirs."
"""Where a model of transformers stands in what trains it."""


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
        frozen = frozen_names(spec.train.freeze, every_name(spec, model))
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
    """Names of the decoder's own weights that a run trains: none beside adapters."""
    if spec.lora.rank:
        return set()
    return set(weight_shapes(model)) - frozen_names(spec.train.freeze, every_name(spec, model))


def choose_trained(decoder: PackedModel, spec: RunSpec, model: ModelSpec) -> None:
    """Add the adapters of a run, or freeze what it does not train of a decoder, in place.

    Encoders are made as ``EncoderSpec.frozen`` says (``nn.modality.attach``).

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
        names = every_name(spec, model) if is_ours else list(held)
        frozen = frozen_names(spec.train.freeze, names)
        for name, weight in held.items():
            weight.requires_grad_(name not in frozen)


def count_trained(spec: RunSpec, model: ModelSpec) -> int:
    """How many numbers of the decoder a run trains, adapters and all: each has two moments.

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


def saved_bytes(spec: RunSpec, model: ModelSpec, params: int) -> int:
    """Bytes of a checkpoint's tensors: fp32 weights, and two moments of each that is trained.

    Args:
        spec: The run's keys.
        model: Its sizes.
        params: Weights of its decoder.
    """
    moments = count_trained(spec, model)
    for each in spec.encoders:
        params += encoder_params(each, model.hidden)
        moments += encoder_params(each, model.hidden, trained=True)
    return 4 * params + 8 * moments
