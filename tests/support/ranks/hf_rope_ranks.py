"""Functions of ranks in ``test_hf_rope``; their first argument is their ``Ranks``."""

from typing import Any

import torch
import torch.distributed as dist
import transformers

from equipoise.comm.group import Ranks
from equipoise.parallel.context.attention import gather_tokens, token_positions
from equipoise.parallel.context.batch import shard_batch
from equipoise.parallel.context.transformers import use_context_parallelism
from support.ranks.hf_context_ranks import SIZES, draw, error, gradients, share_of_loss

SWITCH = 24  # original_max_position_embeddings, or max_position_embeddings
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 7.0, 20.0]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": SWITCH,
    "factor": 8.0,
    **_FACTORS,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
_LONG = {"max_position_embeddings": 8 * SWITCH}
_MOE = {"num_local_experts": 4, "experts_implementation": "eager", "router_jitter_noise": 0.0}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama longrope": (transformers.LlamaConfig, {"rope_parameters": LONGROPE, **_LONG}),
    "phi3 longrope": (
        transformers.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH, **_LONG},
    ),
    "llama dynamic": (
        transformers.LlamaConfig,
        {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH},
    ),
    "phimoe longrope": (
        transformers.PhimoeConfig,
        {
            "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.7},
            **_LONG,
            **_MOE,
        },
    ),
    # One RoPE for each kind of layer.
    "gemma3 dynamic": (
        transformers.Gemma3TextConfig,
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": DYNAMIC,
            },
            "max_position_embeddings": SWITCH,
            "head_dim": 8,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama yarn": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": SWITCH,
            },
            **_LONG,
        },
    ),
}
# Short; long; between; short again; longest; documents that all end before the switch.
PACKS = [(9, 5), (70, 11), (3, 40), (20, 23, 1), (150,), (12, 12, 12)]


def build(kind: str) -> Any:
    """A tiny model, the same on every rank."""
    config, options = MODELS[kind]
    torch.manual_seed(1)
    given = {**SIZES, "attn_implementation": "sdpa", **options}
    return transformers.AutoModelForCausalLM.from_config(config(**given)).double().train()


def compare_steps(ranks: Ranks, kind: str, sharding: str) -> list[tuple[float, float]]:
    """Errors of logits and gradients, pack after pack, beside one process with the packed row."""
    model, alone = build(kind), build(kind)
    use_context_parallelism(model)
    use_context_parallelism(model)  # preparing twice equals preparing once
    told = []
    for seed, lengths in enumerate(PACKS):
        ids, labels = draw(lengths, seed)
        batch = shard_batch(ids, lengths, labels_T=labels, sharding=sharding)
        for each in (model, alone):
            each.zero_grad()
        logits = model(**batch).logits
        share_of_loss(logits, batch).backward()
        actual = gradients(model)
        for each in actual:
            dist.all_reduce(each)
        held = len(token_positions(lengths, sharding=sharding))
        whole = gather_tokens(logits[0, :held].detach(), lengths, sharding=sharding)
        positions = torch.cat([torch.arange(length) for length in lengths])
        wanted = alone(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        shifted = labels.roll(-1)
        shifted[torch.tensor(lengths).cumsum(0) - 1] = -100
        sums = torch.nn.functional.cross_entropy(wanted, shifted, reduction="sum")
        (sums / batch["num_items_in_batch"]).backward()
        errors = [error(a, b) for a, b in zip(actual, gradients(alone), strict=True)]
        told.append((error(whole, wanted.detach()), max(errors)))
    return told
