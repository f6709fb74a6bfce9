"""One iteration through the decoder: the new tokens of many sequences, packed as rows.

What it decides
    Linear layers, norms and experts see the rows of all sequences as one batch; attention alone
    knows whose they are. Only rows whose logits are read pass the head, some at a time.

    ::

        chunks   A: tokens 40..71 of a prompt | B: one token | C: one token
        rows     [ 32                          , 1            , 1           ]  -> layers
        head     [ last of A, if it ends the prompt; B; C ]

Kept true (tests/unit/serve/engine/test_forward.py)
    Logits are those of each sequence by itself.

Shapes: t packed new tokens, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import Decoder
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.attend import IterationAttention
from equipoise.serve.engine.pool import KvPool

_HEAD_ROWS = 64
"""Rows that pass the head at once: logits of a long prompt together would not fit."""


class PagedDecoder:
    """A decoder whose sequences lie in a pool."""

    def __init__(self, decoder: Decoder, pool: KvPool, *, is_invariant: bool = False) -> None:
        """Take a decoder with its weights.

        Args:
            decoder: Capacities of experts must be unlimited: which rows they drop depends on the
                other tokens of an iteration.
            pool: In the dtype and on the device of the weights.
            is_invariant: Whether a row's results may depend on nothing but its own sequence.

        Raises:
            ModelError: the experts have a capacity.
        """
        if decoder.model.capacity_factor:
            raise ModelError(
                f"Experts with a capacity factor of {decoder.model.capacity_factor:g} drop tokens "
                "by micro-batch, so a continued text has no one answer. Set capacity_factor to 0."
            )
        self.decoder, self.pool, self._is_invariant = decoder, pool, is_invariant
        self._frequency = rotary_frequencies(decoder.model, device=pool.device)

    @torch.no_grad()
    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> Tensor:
        """Keep the keys and values of some new tokens, and compute their hidden states.

        Args:
            chunks: At least one; their sequences' earlier tokens are in the pool.
            tokens: Ids of all chunks' tokens, one chunk after another.

        Returns:
            Hidden states before the last norm [t, D].
        """
        device = self.pool.device
        positions = [at for each in chunks for at in range(each.start, each.start + each.tokens)]
        attention = IterationAttention(self.pool, chunks, is_invariant=self._is_invariant)
        x_tD = self.decoder.begin(torch.tensor(tokens, device=device))
        table = rotary_table(self._frequency, torch.tensor(positions, device=device), x_tD.dtype)
        for number, layer in enumerate(self.decoder.layers):
            x_tD = layer(x_tD, table, partial(attention.attend, number))
        return x_tD

    @torch.no_grad()
    def logits(self, x_tD: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
        """Logits of some rows in order, a few rows at a time [rows, V], in the weights' dtype."""
        for begin in range(0, len(rows), _HEAD_ROWS):
            at = torch.tensor(rows[begin : begin + _HEAD_ROWS], device=x_tD.device)
            yield self.decoder.finish(x_tD[at], None)
