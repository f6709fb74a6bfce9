"""Checkpoints of runs that take no step."""

import dataclasses
from pathlib import Path

import torch

from equipoise.checkpoint.manifest import FORMAT, Manifest
from equipoise.checkpoint.store import save
from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder, initialize
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec, RopeScaling

MODEL = ModelSpec(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    vocab=301,
    head_width=8,
    tied=True,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
)


def save_steps(ranks: Ranks, root: str) -> None:
    """Two checkpoints of ZeRO 3: the weights of seed 2, then those of seed 4."""
    decoder = Decoder(MODEL)
    initialize(decoder, 2)
    sharded = ShardedDecoder(decoder, ranks, zero=3, precision="fp32")
    optimizer = torch.optim.AdamW(decoder.parameters())
    for step in (2, 4):
        manifest = Manifest(
            FORMAT, "0", step, 10 * step, ranks.world, dataclasses.asdict(MODEL), "c", 0, 96, {}
        )
        save(Path(root), sharded.decoder, optimizer, ranks, manifest, keep=2)
        with torch.no_grad():
            for weight in decoder.parameters():
                weight.mul_(2)
