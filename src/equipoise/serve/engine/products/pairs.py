"""Products with bf16 weights on processors that multiply pairs of bf16, but have no matrix units.

Why
    A generated token reads all weights once. Libraries cut a product by its rows, and with few of
    them wait for memory twice as long as it takes; with many they win little. One layout serves
    both here, and what follows a product is computed while its sums are in registers or near.

What it decides
    Weights are laid out once in panels of ``ADDED_LANES`` outputs. Threads have panels, and parts
    of the rows where panels are few; each block of rows passes over a panel in parts of ``_DEPTH``
    pairs, which stay in the cache. Sums begin with what is added, are in fp32 over the inputs in
    ascending order whatever the other rows and the number of threads, and are rounded once. ::

        rows x (panel | panel | panel)       of a gate:   panel = [gates of some | their ups]

    Measured on two cores of Zen 4, gigaflops a second here and by oneDNN, 576 outputs of 1,536
    inputs: one row 27 and 18, 8 rows 235 and 150, 88 rows 400 and 372, 512 rows 426 and 433.

Kept true (tests/unit/serve/engine/test_products.py)
    Equal to products in float64 up to the rounding of bf16; a row has the same bits whatever rows
    stand beside it.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from equipoise.nn.device.halves import widens
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.jit import compile_rows, exp, narrow, use_threads, wide
from equipoise.serve.engine.products.dot import (
    ADDED_LANES,
    ADDED_LINES,
    add_pairs,
    multiplies_pairs,
)
from equipoise.serve.engine.products.panels import added_rows, panels_of

_DEPTH = 2048
"""Pairs of a panel that stay in a core's cache: 384 KiB."""

_BLOCK = 12 * ADDED_LINES
"""Rows that pass over such a part before the next one comes."""

_ITEMS = 4
"""Items of work for each thread, at least: the last one to end is not far behind."""

_UPS = ADDED_LANES // 2
_ZERO, _ONE = np.float32(0), np.float32(1)
_MOST = np.float32(88)


def multiplies_by_pairs(weight: Tensor) -> bool:
    """Whether products with this weight [outputs, inputs] are computed here."""
    is_bf16 = weight.is_cpu and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return is_bf16 and multiplies_pairs() and not widens(weight)


@compile_rows()
def _sum_block(x: Any, words: Any, panel: Any, first: Any, rows: Any, sums: Any) -> None:
    """Add the products of some rows with a panel to their sums."""
    pairs = words.shape[1]
    for begin in range(0, pairs, _DEPTH):
        depth = min(_DEPTH, pairs - begin)
        where = (panel * pairs + begin) * ADDED_LANES
        for block in range((rows + ADDED_LINES - 1) // ADDED_LINES):
            at = (first + block * ADDED_LINES) * pairs + begin
            add_pairs(x, at, pairs, words, where, ADDED_LANES, depth, sums[block])


@compile_rows()
def _begin_row(added: Any, sums: Any) -> None:
    """Sums of a row begin with what is added."""
    if len(added) == ADDED_LANES:
        for lane in range(ADDED_LANES):
            sums[lane] = wide(added[lane])
    else:
        for lane in range(len(added)):
            sums[lane] = wide(added[lane])


@compile_rows()
def _round_row(sums: Any, out: Any) -> None:
    """Sums of a row are stored."""
    if len(out) == ADDED_LANES:
        for lane in range(ADDED_LANES):
            out[lane] = narrow(sums[lane], out[0])
    else:
        for lane in range(len(out)):
            out[lane] = narrow(sums[lane], out[0])


@compile_rows()
def _gate_row(sums: Any, out: Any) -> None:
    """Sums of gates and ups of a row become its outputs."""
    for lane in range(len(out)):
        gate = wide(narrow(sums[lane], out[0]))
        up = wide(narrow(sums[_UPS + lane], out[0]))
        part = gate / (_ONE + exp(min(-gate, _MOST)))
        out[lane] = narrow(part * up, out[0])


@compile_rows(parallel=True)
def multiply_pairs(x: Any, words: Any, added: Any, step: Any, shares: Any, out: Any) -> None:
    """Products of rows, plus what is added; all arrays are contiguous.

    Args:
        x: Pairs of bf16, uint32 [rows rounded up to ADDED_LINES, inputs / 2].
        words: Weights, uint32 [panels, inputs / 2, ADDED_LANES].
        added: bf16 as uint16 [rows or 1, outputs].
        step: Rows of ``added`` from one row to the next: 1, or 0 if it has one for all.
        shares: Parts that the rows are cut into.
        out: Written, bf16 as uint16 [rows, outputs].
    """
    rows, outputs = out.shape
    each = (rows + shares * ADDED_LINES - 1) // (shares * ADDED_LINES) * ADDED_LINES
    for item in numba.prange(len(words) * shares):
        panel, share = item // shares, item % shares
        left, last = panel * ADDED_LANES, min(rows, (share + 1) * each)
        lanes = min(ADDED_LANES, outputs - left)
        sums = np.empty((_BLOCK // ADDED_LINES, ADDED_LINES, ADDED_LANES), np.float32)
        for first in range(share * each, last, _BLOCK):
            count = min(_BLOCK, last - first)
            for r in range(count):
                _begin_row(
                    added[(first + r) * step, left : left + lanes],
                    sums[r // ADDED_LINES, r % ADDED_LINES],
                )
            _sum_block(x, words, panel, first, count, sums)
            for r in range(count):
                _round_row(
                    sums[r // ADDED_LINES, r % ADDED_LINES], out[first + r, left : left + lanes]
                )


@compile_rows(parallel=True)
def gate_pairs(x: Any, words: Any, shares: Any, out: Any) -> None:
    """``silu(x @ gate.T) * (x @ up.T)`` of rows; arrays as for ``multiply_pairs``.

    Both products are rounded before they meet, as where they are stored.
    """
    rows, outputs = out.shape
    each = (rows + shares * ADDED_LINES - 1) // (shares * ADDED_LINES) * ADDED_LINES
    for item in numba.prange(len(words) * shares):
        panel, share = item // shares, item % shares
        left, last = panel * _UPS, min(rows, (share + 1) * each)
        lanes = min(_UPS, outputs - left)
        sums = np.empty((_BLOCK // ADDED_LINES, ADDED_LINES, ADDED_LANES), np.float32)
        for first in range(share * each, last, _BLOCK):
            count = min(_BLOCK, last - first)
            sums[: (count + ADDED_LINES - 1) // ADDED_LINES] = _ZERO
            _sum_block(x, words, panel, first, count, sums)
            for r in range(count):
                _gate_row(
                    sums[r // ADDED_LINES, r % ADDED_LINES], out[first + r, left : left + lanes]
                )


class PairWeight:
    """A weight for products of pairs."""

    def __init__(self, weight: Tensor, *, is_gate: bool = False) -> None:
        """Lay out a weight of which ``multiplies_by_pairs`` is true.

        Args:
            weight: [outputs, inputs]; of a gate, the gates' outputs, then as many ups.
            is_gate: Whether outputs are gates and ups.
        """
        self.outputs = len(weight) // (2 if is_gate else 1)
        """Outputs of a product."""
        if is_gate:
            inputs = weight.shape[1]
            both = weight.new_zeros(2, -(-self.outputs // _UPS) * _UPS, inputs)
            both[:, : self.outputs] = weight.view(2, -1, inputs)
            weight = both.view(2, -1, _UPS, inputs).transpose(0, 1).reshape(-1, inputs)
        self._words = panels_of(weight, ADDED_LANES)

    def multiply(self, x: Tensor, added: Tensor | None) -> Tensor:
        """``x @ weight.T + added`` in bf16, rounded once.

        Args:
            x: Rows [rows, inputs].
            added: A bias [outputs], or rows [rows, outputs].
        """
        more, step = added_rows(x, added, self.outputs)
        out = x.new_empty(len(x), self.outputs)
        rows, words, shares = self._given(x)
        multiply_pairs(rows, words, bits_of(more), step, shares, bits_of(out))
        return out

    def gate(self, x: Tensor) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)`` in bf16 [rows, outputs]."""
        out = x.new_empty(len(x), self.outputs)
        gate_pairs(*self._given(x), bits_of(out))
        return out

    def _given(self, x: Tensor) -> tuple[Any, Any, int]:
        """Rows in whole blocks, words, and parts of the rows."""
        blocks, threads = -(-len(x) // ADDED_LINES), torch.get_num_threads()
        if len(x) % ADDED_LINES:
            whole = x.new_empty(blocks * ADDED_LINES, x.shape[1])
            whole[: len(x)] = x
            x = whole
        use_threads(threads)
        shares = max(1, min(blocks, _ITEMS * threads // len(self._words)))
        return bits_of(x.contiguous()).view(np.uint32), self._words.numpy(), shares
