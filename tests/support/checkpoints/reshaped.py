"""Functions in which ranks of many layouts save and load one checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint import store
from equipoise.checkpoint.manifest import open_manifest
from equipoise.checkpoint.places import live_state
from equipoise.checkpoint.reading import ReadCounts
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.plan import Stages
from equipoise.spec.run.spec import TrainSpec
from equipoise.spec.words import read_layout
from support.ranks.on_ranks import _manifest, made_up_gradients

Held = dict[str, tuple[list[tuple[int, int]], np.ndarray]]
"""A rank's part of each tensor: its box, and what is in it."""


def build(
    ranks: Ranks, model: ModelSpec, layout: Layout, stages: Stages | None, seed: int
) -> tuple[Decoder, torch.optim.AdamW]:
    mesh = Mesh.join(ranks, layout)
    decoder = Decoder(model)
    initialize(decoder, seed)
    if stages is not None:
        held = [at for at, rank in enumerate(stages.ranks) if rank == mesh.coordinates["pp"]]
        decoder = DecoderPart(decoder, stages.edges, held)
    apply_axes(decoder, ranks, zero=layout.zero, precision="fp32", mesh=mesh)
    return decoder, make_adamw(decoder, TrainSpec())


def held(decoder: Decoder, optimizer: torch.optim.Optimizer) -> Held:
    """What this rank holds, by the checkpoint's names."""
    parts = {}
    for name, tensor in flatten_state_dict(live_state(decoder, optimizer)[0])[0].items():
        assert isinstance(tensor, Tensor)
        chunks = _create_chunk_list(tensor)
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if chunks and own.numel():
            (chunk,) = chunks
            box = [(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            parts[name] = box, own.detach().clone().numpy()
    return parts


def save_stepped(ranks: Ranks, root: Path, model: ModelSpec, words: str) -> Held:
    """Save after two steps; what this rank held."""
    decoder, optimizer = build(ranks, model, read_layout(words).layout, None, 0)
    for _ in range(2):
        made_up_gradients(decoder)
        optimizer.step()
    store.save(root, decoder, optimizer, ranks, _manifest(model, 2, ranks.world), keep=2)
    return held(decoder, optimizer)


def load_layouts(
    ranks: Ranks, model: ModelSpec, cases: dict[str, tuple[Path, Stages | None]]
) -> dict[str, tuple[Held, ReadCounts]]:
    """Load checkpoints into layouts: what this rank holds then, and what it has read."""
    answers: dict[str, Any] = {}
    for words, (folder, stages) in cases.items():
        decoder, optimizer = build(ranks, model, read_layout(words).layout, stages, 1)
        manifest = open_manifest(folder)
        counts = store.load(folder, decoder, optimizer, manifest=manifest, ranks=ranks)
        answers[words] = held(decoder, optimizer), counts
    return answers


def load_refused(ranks: Ranks, model: ModelSpec, folders: list[Path]) -> list[tuple[str, bool]]:
    """Load checkpoints one after another: what each is refused with, and if a byte has changed.

    Last the first one, which is gone where rank 1 looks for it.
    """
    layout = read_layout("dp=2").layout
    decoder, optimizer = build(ranks, model, layout, None, 1)
    made_up_gradients(decoder)
    optimizer.step()
    before = held(decoder, optimizer)
    ends = []
    for at, folder in enumerate([*folders, folders[0]]):
        said, own = "", folder
        if at == len(folders) and ranks.rank == 1:
            own = folder / "gone"
        try:
            store.load(own, decoder, optimizer, manifest=open_manifest(folder), ranks=ranks)
        except CheckpointError as error:
            said = str(error)
        now = held(decoder, optimizer)
        changed = any(
            now[name][1].tobytes() != part.tobytes() for name, (_, part) in before.items()
        )
        ends.append((said, changed))
    return ends
