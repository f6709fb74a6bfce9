"""One iteration through the decoder: the new tokens of many sequences, packed as rows.

What it decides
    Linear layers, norms and experts see the rows of all sequences as one batch; attention alone
    knows whose they are. Only rows whose logits are read pass the head, some at a time.

    In the invariant mode layers compute tiles of a fixed number of rows (``tiles``), and all
    attention is the kernel's: a row's bits are those of its sequence by itself.

    ::

        chunks   A: tokens 40..71 of a prompt | B: one token | C: one token
        rows     [ 32                          , 1            , 1           ]  -> layers
        head     [ last of A, if it ends the prompt; B; C ]

Kept true (tests/unit/serve/engine/test_forward.py, tests/unit/serve/engine/test_invariant.py)
    Logits are those of each sequence by itself; in the invariant mode, to the bit.

Shapes: t packed new tokens, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.schedule.batching.iteration import ServeChunk, Swap
from equipoise.serve.engine.attend import IterationAttention
from equipoise.serve.engine.fused import ServedDecoder, decoder_layers
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.request import RanksLostError
from equipoise.serve.engine.tiles import (
    begin_layer,
    end_layer,
    find_rows,
    map_tiles,
    set_experts,
)

_HEAD_ROWS = 64
"""Rows that pass the head at once: logits of a long prompt together would not fit."""


class Overlap(Protocol):
    """Computes iterations in parts beside each other, where that is faster."""

    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> Tensor | None:
        """Hidden states as of ``PagedDecoder.run``; None if it is not faster."""

    def close(self) -> None:
        """Nothing computes any more."""


class PagedDecoder:
    """A decoder whose sequences lie in a pool."""

    def __init__(
        self, decoder: ServedDecoder, pool: KvPool, *, is_invariant: bool = False, ranks: int = 1
    ) -> None:
        """Take a decoder with its weights.

        Args:
            decoder: Capacities of experts must be unlimited: which rows they drop depends on the
                other tokens of an iteration.
            pool: In the dtype and on the device of the weights.
            is_invariant: Whether a row's results may depend on nothing but its own sequence.
            ranks: Ranks that have a part of every sequence.

        Raises:
            ModelError: the experts have a capacity, the invariant mode is asked for on another
                device than CPU, or this machine has no invariant product.
        """
        if decoder.model.capacity_factor:
            raise ModelError(
                f"Experts with a capacity factor of {decoder.model.capacity_factor:g} drop tokens "
                "by micro-batch, so a continued text has no one answer. Set capacity_factor to 0."
            )
        if is_invariant and pool.device.type != "cpu":
            raise ModelError(
                f"The invariant mode runs on CPU alone; the model is on {pool.device}. Serve it "
                "there without."
            )
        self.decoder, self.pool = decoder, pool
        self.ranks = ranks
        """Ranks that have a part of every sequence."""
        self.tile_rows = 0
        """Rows of the tiles that all layers compute in the invariant mode; 0 in the other one."""
        self.moved_bytes: dict[str, int] = {}
        """Bytes that ranks have sent each other for attention, by what moved."""
        if is_invariant:
            set_experts(decoder)
            self.tile_rows = find_rows(decoder, over_ranks=ranks > 1)
        self.overlap: Overlap | None = None
        self.frequency = rotary_frequencies(decoder.model, device=pool.device)

    @torch.no_grad()
    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> Tensor:
        """Keep the keys and values of some new tokens, and compute their hidden states.

        Args:
            chunks: At least one; their sequences' earlier tokens are in the pool.
            tokens: Ids of all chunks' tokens, one chunk after another.

        Returns:
            Hidden states before the last norm [t, D].
        """
        if self.overlap is not None and (x_tD := self.overlap.run(chunks, tokens)) is not None:
            return x_tD
        return ChunkPass(self, chunks, tokens).run(self.layers)

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        return len(self.decoder.layers)

    def swap(self, out: Sequence[Swap], back: Sequence[Swap]) -> None:
        """Move pages to host memory, then others back."""
        for swap in out:
            self.pool.swap_out(swap)
        for swap in back:
            self.pool.swap_in(swap)

    def forget(self, request: str) -> None:
        """A request is gone; here nothing is remembered of it."""

    @property
    def missing(self) -> RanksLostError | None:
        """Why a part of it is gone, which ``restore`` brings back; None here and while none is."""
        return None

    def restore(self) -> None:
        """Bring back what is missing."""

    def close(self) -> None:
        """Nothing computes any more."""
        if self.overlap is not None:
            self.overlap.close()

    @torch.no_grad()
    def logits(self, x_tD: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
        """Logits of some rows in order, a few rows at a time [rows, V], in the weights' dtype."""
        for begin in range(0, len(rows), _HEAD_ROWS):
            at = torch.tensor(rows[begin : begin + _HEAD_ROWS], device=x_tD.device)
            if self.tile_rows:
                yield map_tiles(self._finish, self.tile_rows, x_tD[at])[0]
            else:
                yield self.decoder.finish(x_tD[at], None)

    @torch.no_grad()
    def hidden(self, x_tD: Tensor, rows: Sequence[int]) -> Tensor:
        """Hidden states of some rows after the last norm [rows, D], in the weights' dtype."""
        at = torch.tensor(rows, device=x_tD.device)
        if self.tile_rows:
            return map_tiles(self._norm, self.tile_rows, x_tD[at])[0]
        return self._norm(x_tD[at])[0]

    def _norm(self, x_tD: Tensor) -> tuple[Tensor]:
        return (self.decoder.norm(x_tD),)

    def _finish(self, x_tD: Tensor) -> tuple[Tensor]:
        return (self.decoder.finish(x_tD, None),)


class ChunkPass:
    """Some chunks on their way through the layers; each layer is three steps."""

    def __init__(
        self, paged: PagedDecoder, chunks: Sequence[ServeChunk], tokens: Sequence[int]
    ) -> None:
        """Embed the chunks' tokens; arguments as for ``PagedDecoder.run``."""
        pool, decoder = paged.pool, paged.decoder
        positions = [at for each in chunks for at in range(each.start, each.start + each.tokens)]
        self._layers, self._tile_rows = decoder_layers(decoder), paged.tile_rows
        self._attention = IterationAttention(pool, chunks, is_invariant=paged.tile_rows > 0)
        self.x_tD = decoder.begin(torch.tensor(tokens, device=pool.device))
        """Hidden states of the chunks' tokens."""
        at_t = torch.tensor(positions, device=pool.device)
        self._table = rotary_table(paged.frequency, at_t, self.x_tD.dtype)  # [2, t, 1, E/2]
        self._heads: tuple[Tensor, ...] = ()
        self._o_tHE = self.x_tD

    def run(self, layers: int) -> Tensor:
        """Hidden states after the first layers [t, D]."""
        for number in range(layers):
            self.begin(number)
            self.attend(number)
            self.end(number)
        return self.x_tD

    def begin(self, number: int) -> None:
        """Queries, keys and values of a layer."""
        layer = self._layers[number]
        if self._tile_rows:
            self._heads = begin_layer(layer, self._tile_rows, self.x_tD, self._table)
        else:
            self._heads = layer.begin(self.x_tD, self._table)

    def attend(self, number: int) -> None:
        """Attention of the layer that has begun."""
        q_tHE, k_tGE, v_tGE = self._heads
        self._o_tHE = self._attention.attend(number, q_tHE, k_tGE, v_tGE)

    def end(self, number: int) -> None:
        """The rest of the layer."""
        layer = self._layers[number]
        if self._tile_rows:
            self.x_tD = end_layer(layer, self._tile_rows, self.x_tD, self._o_tHE, self._table)
        else:
            self.x_tD = layer.end(self.x_tD, self._o_tHE, self._table)
