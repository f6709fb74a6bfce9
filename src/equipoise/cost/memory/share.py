"""What one rank of a pipeline holds: the same for every program that runs it."""

from dataclasses import dataclass

from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class StageShare:
    """A pipeline rank's layers, tables and micro-batches in flight."""

    layers: tuple[int, ...]
    """Numbers of the layers that it holds, over all its stages."""
    embeds: bool = True
    """Whether the embedding is here."""
    has_head: bool = True
    """Whether last norm, head and loss are here."""
    kept_micro_batches: float = 1.0
    """Micro-batches whose activations are kept at once, each as large as the largest: the tokens
    of those in flight, summed over the layers held, over layers x tokens of the largest."""


def whole_model(model: ModelSpec) -> StageShare:
    """The share of a rank that holds every layer."""
    return StageShare(tuple(range(model.layers)))
