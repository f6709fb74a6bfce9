"""A training step of the same documents and sizes, by this package and by others."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.comm.group import Ranks
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import Journal
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.step import StepRunner

Side = Callable[[], None]
"""One step."""


def has(module: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(module) is not None


def our_side(
    store: TokenStore, ranks: Ranks, model: ModelSpec, precision: str, folder: Path
) -> Side:
    """The product's own step: pack, sharded model, clip, AdamW."""
    decoder = Decoder(model)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder.to(ranks.device), ranks, zero=1, precision=precision)
    runner = StepRunner(
        sharded, make_adamw(decoder, TrainSpec()), store, ranks, Journal(folder / precision, 0)
    )
    index = np.arange(store.documents, dtype=np.int64)
    pieces = np.stack((index, np.zeros_like(index), store.doc_tokens), axis=1)
    packed = PackedStep("by-work", ((MicroBatch(pieces),),))

    def step() -> None:
        runner.run(
            packed, step=1, rate=1e-3, clip_norm=1.0, last_good=lambda: None, stop_asked=False
        )

    return step


def _make_step(
    model: nn.Module,
    losses: Callable[[], list[Callable[[], torch.Tensor]]],
    device: torch.device,
    precision: str,
) -> Side:
    """Forward, backward, clip and fused AdamW as a plain loop does them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for loss in losses():
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                value = loss()
            value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_side(
    store: TokenStore,
    model: ModelSpec,
    precision: str,
    *,
    flattened: bool,
    device: torch.device,
    attention: str = "sdpa",
) -> Side:
    """Its packing collator, one row whose position ids restart; or each document alone."""
    import transformers

    config = transformers.AutoConfig.for_model(**hf_config(model))
    config._attn_implementation = attention
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    rows = [
        {"input_ids": torch.from_numpy(store.tokens[a:b].astype(np.int64)).tolist()}
        for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)
    ]
    # flash attention takes the bounds of documents from the collator, and would find them itself
    # by waiting for the device in every layer.
    more: dict[str, Any] = {}
    if flattened and attention != "sdpa":
        more = {"return_flash_attn_kwargs": True}
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **more)
    batches = [collator(rows)] if flattened else [collator([row]) for row in rows]
    labels = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    moved = [
        {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
        for batch in batches
    ]

    def losses() -> list[Callable[[], torch.Tensor]]:
        return [
            lambda batch=batch: theirs(**batch, use_cache=False, num_items_in_batch=labels).loss
            for batch in moved
        ]

    return _make_step(theirs, losses, device, precision)


def titan_side(store: TokenStore, model: ModelSpec, precision: str, device: torch.device) -> Side:
    """torchtitan's Llama 3, packed, with its attention for documents of any lengths; on CUDA."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import VarlenMetadata

    norm = RMSNorm.Config(normalized_shape=model.hidden, param_init=llama3._NORM_INIT)
    layers = llama3._build_llama3_layers(
        n_layers=model.layers,
        dim=model.hidden,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        hidden_dim=model.ffn,
        rope=ComplexRoPE.Config(
            dim=model.head_width, max_seq_len=len(store.tokens), theta=model.rope_theta
        ),
        attn_backend="varlen",
    )
    theirs = llama3.Llama3Model.Config(
        dim=model.hidden,
        vocab_size=model.vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab,
            embedding_dim=model.hidden,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=norm,
        lm_head=Linear.Config(
            in_features=model.hidden,
            out_features=model.vocab,
            param_init=llama3._output_linear_init(model.hidden),
        ),
        layers=layers,
    ).build()
    theirs = theirs.to(device)
    theirs.init_states()
    tokens = torch.from_numpy(store.tokens[: store.offsets[-1]].astype(np.int64)).to(device)
    positions = torch.cat([torch.arange(int(n)) for n in store.doc_tokens]).to(device)[None]
    labels = tokens.roll(-1)
    labels[torch.from_numpy(store.offsets[1:] - 1).to(device)] = -100
    bounds = torch.from_numpy(store.offsets.astype(np.int32)).to(device)
    longest = int(store.doc_tokens.max())
    masks = VarlenMetadata(bounds, bounds, longest, longest)
    count = len(tokens) - store.documents

    def losses() -> list[Callable[[], torch.Tensor]]:
        def loss() -> torch.Tensor:
            logits = theirs(tokens[None], positions, masks)
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels, reduction="sum"
            ) / max(1, count)

        return [loss]

    return _make_step(theirs, losses, device, precision)
