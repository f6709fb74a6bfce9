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

    A sparse layer keeps, instead of gate and up, for each of a token's K choices the row that
    its expert computes and what comes back (2 D), gate and up (2 F) and where the row went; for
    the token the scores of all experts, and gate and up of the shared expert. Experts that live
    on other ranks are not held here, and the tokens that come are taken to be as many as go.
    Ranks that share the hidden units of an expert each keep the rows of all, and their part of F.

Kept true (tests/unit/cost/test_memory.py)
    Terms are positive, grow with tokens and shrink with ranks. How near the forecast is to a
    real rank's peak is printed by ``bench/memory.py`` and by every run's report.
"""

from dataclasses import dataclass
from typing import Literal

from equipoise.spec.model import ModelSpec
from equipoise.spec.run import Precision, Recompute

_LOSS_CHUNK_BYTES = 8 << 20

_ROUTE_BYTES = 40
"""Of one choice: expert, token, slot, place (int64 each), weight and score (fp32)."""

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


def _layer_token_bytes(model: ModelSpec, width: int, *, sparse: bool, expert_parts: int) -> int:
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    normed_heads = (query + key) * width if model.qk_norm else 0
    values = 4 * model.hidden + 2 * query + 2 * key
    scales = 4 * (model.heads + 2)
    if not sparse:
        return (values + 2 * model.ffn) * width + normed_heads + scales
    rows = (1 + expert_parts) * model.hidden + 2 * model.expert_ffn  # with all who share them
    values += model.top_k * rows + 2 * model.shared_ffn
    values += model.hidden if model.shared_gate else 0
    routes = 4 * model.experts + _ROUTE_BYTES * model.top_k
    return values * width + normed_heads + scales + routes


def forecast_memory(
    model: ModelSpec,
    *,
    tokens: int,
    ranks: int,
    zero: Literal[0, 1, 2, 3],
    precision: Precision,
    recompute: Recompute,
    expert_ranks: int = 1,
    expert_parts: int = 1,
) -> MemoryForecast:
    """Peak memory of a rank whose largest micro-batch has ``tokens`` tokens.

    Args:
        model: Sizes.
        tokens: Tokens of the largest micro-batch.
        ranks: Data-parallel ranks.
        zero: ZeRO stage.
        precision: Of activations and gathered parameters; master weights are fp32.
        recompute: Activation recomputation.
        expert_ranks: Ranks that share the experts of a layer.
        expert_parts: Ranks that share the hidden units of each expert.
    """
    width = 2 if precision == "bf16" else 4
    table = model.hidden * model.vocab * (1 if model.tied else 2) + model.hidden
    here = -(-model.experts // expert_ranks) * model.expert_params // expert_parts
    away = model.experts * model.expert_params - here  # of a layer, on other ranks
    held = model.params - model.sparse_layers * away
    layer_params = model.layer_params - (away if model.sparse_layers else 0)
    gathered_params = held if zero < 3 else table + 2 * layer_params
    held_grads = 4 * held if zero < 2 else 4 * (table + layer_params)
    owned, shard = (held, 1) if zero == 0 else (model.params, ranks)
    kinds = [model.is_sparse(layer) for layer in range(model.layers)]
    kept = {
        kind: _layer_token_bytes(model, width, sparse=kind, expert_parts=expert_parts)
        for kind in set(kinds)
    }
    if recompute == "full":
        layers_bytes = tokens * (model.hidden * width * model.layers + max(kept.values()))
    else:
        layers_bytes = tokens * sum(kept[kind] for kind in kinds)
    # A group of parameters is gathered and reduced through flat copies; the tables' is largest.
    # One layer's backward works on the gradients of gate, up and their product.
    widest = max(
        model.ffn if False in kept else 0,
        model.top_k * (model.expert_ffn + model.hidden) if True in kept else 0,
        model.shared_ffn,
    )
    working = tokens * width * (3 * widest + 2 * model.hidden)
    head = 2 * tokens * model.hidden * width + 4 * model.hidden * model.vocab
    angles = tokens * model.head_width * width
    passing = layers_bytes + angles + head + 2 * _LOSS_CHUNK_BYTES + working
    return MemoryForecast(
        {
            "master parameters": 4 * owned // shard,
            "gathered parameters": width * gathered_params,
            "gradients": held_grads,
            "optimizer": 8 * owned // shard,
            "activations": layers_bytes + angles,
            "loss": head + 2 * _LOSS_CHUNK_BYTES,
            "working space": working,
            "collectives": 12 * table,
            "allocator": int(_ALLOCATOR_SHARE * passing),
        }
    )
