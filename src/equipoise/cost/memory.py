"""Forecast of a rank's peak memory, term by term.

Why
    Whether a step fits is asked before it runs. The terms are what the model keeps for its
    backward, read off ``nn``: change what a layer saves and this file changes with it.

What it decides
    Let ``b`` be the bytes of an activation, T a micro-batch's tokens, ``q`` the query width
    and ``k`` the key width of all heads. A layer keeps, for each token: the streams before
    and after attention (2 D), their norms' outputs (2 D), rotated queries, keys, values and
    attention's output (2 q + 2 k), gate and up (2 F), and float32 log-sum-exps and norm
    scales. Full recomputation keeps D, and one layer's worth while that layer runs.

Kept true (tests/unit/cost/test_memory.py)
    Terms are positive, grow with tokens and shrink with ranks. How near the forecast is to a
    real rank's peak is printed by ``bench/memory.py`` and by every run's report.
"""

from dataclasses import dataclass
from typing import Literal

from equipoise.spec.model import ModelSpec
from equipoise.spec.run import Precision, Recompute

_LOSS_CHUNK_BYTES = 8 << 20

_ALLOCATOR_SHARE = 0.2
"""What malloc holds beyond live activations, as a share of them.

Measured on glibc 2.36 with a 7M decoder of 4,096 tokens in fp32 on one rank (bench/memory.py
scores the others): 500 MiB live at the peak, of which 375 come and go, 570 MiB resident.
"""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Peak bytes of one rank by term; the interpreter and its libraries are not in it."""

    terms: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())


def _layer_token_bytes(model: ModelSpec, width: int) -> int:
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    normed_heads = (query + key) * width if model.qk_norm else 0
    values = 4 * model.hidden + 2 * query + 2 * key + 2 * model.ffn
    scales = 4 * (model.heads + 2)
    return values * width + normed_heads + scales


def forecast_memory(
    model: ModelSpec,
    *,
    tokens: int,
    ranks: int,
    zero: Literal[0, 1, 2, 3],
    precision: Precision,
    recompute: Recompute,
) -> MemoryForecast:
    """Peak memory of a rank whose largest micro-batch has ``tokens`` tokens.

    Args:
        model: Sizes.
        tokens: Tokens of the largest micro-batch.
        ranks: Data-parallel ranks.
        zero: ZeRO stage.
        precision: Of activations and gathered parameters; master weights are fp32.
        recompute: Activation recomputation.
    """
    width = 2 if precision == "bf16" else 4
    shard = 1 if zero == 0 else ranks
    table = model.hidden * model.vocab * (1 if model.tied else 2) + model.hidden
    gathered_params = model.params if zero < 3 else table + 2 * model.layer_params
    held_grads = 4 * model.params if zero < 2 else 4 * (table + model.layer_params)
    kept = _layer_token_bytes(model, width)
    if recompute == "full":
        layers_bytes = tokens * (model.hidden * width * model.layers + kept)
    else:
        layers_bytes = tokens * kept * model.layers
    # A group of parameters is gathered and reduced through flat copies; the tables' is largest.
    # One layer's backward works on the gradients of gate, up and their product.
    working = tokens * width * (3 * model.ffn + 2 * model.hidden)
    head = 2 * tokens * model.hidden * width + 4 * model.hidden * model.vocab
    angles = tokens * model.head_width * width
    passing = layers_bytes + angles + head + 2 * _LOSS_CHUNK_BYTES + working
    return MemoryForecast(
        {
            "master parameters": 4 * model.params // shard,
            "gathered parameters": width * gathered_params,
            "gradients": held_grads,
            "optimizer": 8 * model.params // shard,
            "activations": layers_bytes + angles,
            "loss": head + 2 * _LOSS_CHUNK_BYTES,
            "working space": working,
            "collectives": 12 * table,
            "allocator": int(_ALLOCATOR_SHARE * passing),
        }
    )
