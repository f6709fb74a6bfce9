"""Checkpoints of runs that take no step."""

import dataclasses
from pathlib import Path

import torch

from equipoise.checkpoint.manifest import FORMAT, Manifest
from equipoise.checkpoint.store import save
from equipoise.comm.group import Ranks
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.read import load_hf
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec, RopeScaling
from equipoise.spec.run.resolved import read_resolved

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


def save_first(ranks: Ranks, run: str) -> None:
    """Save the weights that a prepared run begins from."""
    resolved = read_resolved(Path(run))
    decoder = Decoder(resolved.model)
    load_hf(decoder, Path(resolved.init_folder))
    manifest = Manifest(
        FORMAT,
        "0",
        0,
        0,
        1,
        dataclasses.asdict(resolved.model),
        "c",
        0,
        resolved.spec.pack.context_tokens,
        {},
    )
    optimizer = torch.optim.AdamW(decoder.parameters())
    save(Path(run) / "checkpoint", decoder, optimizer, ranks, manifest, keep=1)
