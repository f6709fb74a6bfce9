"""A transformer over items of any size: images at their own resolution, sound of any length.

Why
    Items of one size waste most of their patches on padding: 76% for 28 photographs of 24 to
    4,900 patches. Packed end to end they waste none, if each attends to itself alone.

What it decides
    Items lie end to end; products run over all their patches, attention over one item at a time, or
    over a run of neighbours with as many patches, which is one call. Whoever packs items by size
    has a call for each size.

    Patches have rotary positions of two axes, row and column: half of a head's pairs turn by one
    and half by the other. Patches come in blocks of those that are merged, so merging is a
    reshape::

        grid of 2 x 4 patches      0 1 4 5        rows of the decoder   [0 1 2 3] [4 5 6 7]
        in blocks of 2 x 2         2 3 6 7

    Sound is a grid of one column.

Kept true (tests/unit/nn/modality/test_encoder.py)
    Packed items equal each item alone, forward and backward; moving an item within a pack changes
    nothing; no item sees another; a run of equal items is one call of attention.

Sources
    Qwen2-VL, arXiv:2409.12191; MindVL, arXiv:2509.11662; rotary positions of two axes:
    arXiv:2403.13298.

Shapes: P packed patches, N rows for the decoder or patches of an item, C numbers in a patch, D
width of the encoder, B items of a run, H heads, E head width.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from equipoise.base.grid import Grid, places_of
from equipoise.nn.rope import rotate
from equipoise.spec.modality.encoder import EncoderSpec

_THETA = 10_000.0
"""Base of the rotary angles (Qwen2-VL)."""

Run = tuple[int, int]
"""Neighbours with as many patches: how many items, and the patches of each."""


class EncoderLayer(nn.Module):
    """Attention within each item and a feed-forward, each behind its norm."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.attention_norm = nn.LayerNorm(spec.hidden)
        self.query_key_value = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.output = nn.Linear(spec.hidden, spec.hidden)
        self.feed_forward_norm = nn.LayerNorm(spec.hidden)
        self.up = nn.Linear(spec.hidden, spec.ffn)
        self.down = nn.Linear(spec.ffn, spec.hidden)

    def forward(self, x_PD: Tensor, table: Tensor, runs: Sequence[Run]) -> Tensor:
        """One layer over packed items."""
        three = self.query_key_value(self.attention_norm(x_PD))
        q_PHE, k_PHE, v_PHE = three.unflatten(1, (3, self.heads, -1)).unbind(1)
        q_PHE, k_PHE = rotate(q_PHE, table), rotate(k_PHE, table)
        sizes = [items * patches for items, patches in runs]
        parts = []
        split = (x.split(sizes) for x in (q_PHE, k_PHE, v_PHE))
        for run, *qkv in zip(runs, *split, strict=True):
            three_BHNE = (x.unflatten(0, run).transpose(1, 2) for x in qkv)
            o_BHNE = scaled_dot_product_attention(*three_BHNE)
            parts.append(o_BHNE.transpose(1, 2).flatten(2).flatten(0, 1))
        o_PD = torch.cat(parts) if parts else v_PHE.flatten(1)
        x_PD = x_PD + self.output(o_PD)
        normed_PD = self.feed_forward_norm(x_PD)
        out_PD: Tensor = x_PD + self.down(gelu(self.up(normed_PD), approximate="tanh"))
        return out_PD


class ItemEncoder(nn.Module):
    """Patches of items in, rows for a decoder out."""

    def __init__(self, spec: EncoderSpec, width: int) -> None:
        """Build the modules, with torch's initial weights.

        Args:
            spec: Sizes.
            width: Hidden width of the decoder.
        """
        super().__init__()
        self.spec, self.width = spec, width
        joined = spec.merged * spec.hidden
        self.embed = nn.Linear(spec.values, spec.hidden)
        self.layers = nn.ModuleList(EncoderLayer(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.join = nn.Linear(joined, joined)
        self.project = nn.Linear(joined, width)

    def forward(self, patches_PC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Rows [N, decoder's width] of items that lie end to end.

        Args:
            patches_PC: All patches, each item's in blocks of those that are merged.
            grids: Rows and columns of each item's patches; without any, the backward of the result
                gives every weight a gradient of 0.
        """
        x_PD: Tensor = self.embed(patches_PC)
        table = self._table(grids, x_PD)
        runs = runs_of([rows * columns for rows, columns in grids])
        for layer in self.layers:
            x_PD = layer(x_PD, table, runs)
        joined = self.norm(x_PD).reshape(-1, self.join.in_features)
        out: Tensor = self.project(gelu(self.join(joined), approximate="tanh"))
        return out

    def _table(self, grids: Sequence[Grid], like: Tensor) -> Tensor:
        """Cosines and sines of every patch [2, P, 1, E/2]: by its row, then by its column."""
        quarter = self.spec.hidden // self.spec.heads // 4
        steps = torch.arange(quarter, dtype=torch.float64, device=like.device)
        frequency = _THETA ** (-steps / quarter)
        places = [places_of(grid, self.spec.merge) for grid in grids]
        at_P2 = torch.from_numpy(np.concatenate([np.zeros((0, 2)), *places])).to(like.device)
        angles = (at_P2[:, :, None] * frequency).flatten(1)
        return torch.stack((angles.cos(), angles.sin()))[:, :, None].to(like.dtype)


def runs_of(patches: Sequence[int]) -> list[Run]:
    """Neighbours with as many patches.

    >>> runs_of([4, 4, 9, 4])
    [(2, 4), (1, 9), (1, 4)]
    """
    return [(len(list(run)), size) for size, run in groupby(patches)]


def item_rows(grid: Grid, spec: EncoderSpec) -> int:
    """Rows that an item has in a decoder."""
    return grid[0] * grid[1] // spec.merged
