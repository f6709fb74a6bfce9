"""Activation recomputation: which layers keep their input alone.

Sources
    Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174.
"""

from equipoise.nn.decoder import Decoder, DecoderLayer
from equipoise.spec.run import Recompute


def apply_recompute(decoder: Decoder, policy: Recompute) -> None:
    """Make every layer keep its input alone ("full"), or all it needs ("none")."""
    for layer in decoder.layers:
        if isinstance(layer, DecoderLayer):
            layer.recompute = policy == "full"
