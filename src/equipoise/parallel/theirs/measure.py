"""The price of a model that transformers builds, measured on its own modules.

What it decides
    Linear layers are timed on transformers' modules, one layer and two. Attention is timed by kind
    of layer: with a sliding window or without, and with capped scores where the model has them.
    These prices decide how documents are packed, never what a step computes.

Kept true (tests/oracle/test_engine_models.py)
    The layers that are built are of the model's own classes, with experts where it has any.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from equipoise.base.digest import digest
from equipoise.nn.attention import Scoring
from equipoise.parallel.theirs.build import build_random, read_theirs_config, wrap_theirs
from equipoise.parallel.theirs.model import TransformersModel, attend_alone
from equipoise.parallel.theirs.shrink import cut_layers, write_config
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.model.presets import ModelSpec


@dataclass(frozen=True, slots=True)
class TheirMeasured:
    """A model of transformers whose parts are run alone."""

    config: PreTrainedConfig
    model: ModelSpec

    @classmethod
    def read(cls, folder: Path, model: ModelSpec) -> "TheirMeasured":
        """The model of a folder.

        Raises:
            ModelError: transformers does not know this kind of model.
        """
        return cls(read_theirs_config(folder), model)

    @property
    def name(self) -> str:
        """Digest of the configuration."""
        return digest(write_config(self.config))

    @property
    def attends(self) -> list[tuple[float, Callable[..., Tensor]]]:
        """Attention of each kind of layer, with the share of layers that are of it."""
        config: Any = self.config
        softcap = float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full"]
        near = sum(each == "sliding_attention" for each in types) / len(types) if window else 0.0
        kinds = [(1.0 - near, None), (near, window)]
        return [
            (share, partial(_attend, softcap=softcap, window=each))
            for share, each in kinds
            if share
        ]

    def build(self, layers: int) -> TransformersModel:
        """Some of its last layers, with embedding and head."""
        data = cut_layers(self.config.to_dict(), layers)
        theirs = build_random(type(self.config).from_dict(data), seed=0)
        return wrap_theirs(theirs, self.model, context_tokens=1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, softcap: float, window: int | None
) -> Tensor:
    is_hidden = window is not None and max(lengths) > window
    mask = Mask("window", window_tokens=window) if is_hidden and window else CAUSAL
    return attend_alone(q, k, v, Scoring(mask, softcap), tuple(lengths))
