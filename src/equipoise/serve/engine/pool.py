"""Keys and values of all sequences, in pages of rows that a scheduler gives out and takes back.

Why
    Sequences grow one token at a time and end without warning. Buffers of their own would be
    copied or too large; pages of one pool are neither.

What it decides
    Nothing: which page is whose is the scheduler's decision. A page is ``page_tokens`` rows of
    every layer; neighbouring pages are neighbouring rows, so a run of pages is a view.

    ::

        rows     0    16   32   48   64        pages of 16 tokens
        page     |  0  |  1  |  2  |  3  |
        a sequence of 37 tokens in pages 1, 2, 0: rows 16 to 48, then 0 to 5

    Pages that are swapped out lie in slots of host memory, which are allocated with the pool.

Kept true (tests/unit/serve/engine/test_pool.py)
    Rows cover a sequence once and in order; pages that were swapped out and into other pages
    hold the same bits; memory is taken for rows that were written, and not for others.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.base.errors import FitError
from equipoise.base.units import format_bytes
from equipoise.observe.machine import available_bytes
from equipoise.schedule.batching.iteration import PageRun, Swap
from equipoise.serve.engine.fused import ServedDecoder
from equipoise.spec.model.presets import ModelSpec


def token_bytes(model: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * model.layers * model.kv_heads * model.head_width * dtype.itemsize


class KvPool:
    """Keys and values of every layer, in pages."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_pages: int = 0,
        ranks: int = 1,
    ) -> None:
        """Allocate the pool.

        Args:
            model: Its layers and heads.
            pages: Pages on the device.
            page_tokens: Tokens of a page.
            dtype: What keys and values are kept in.
            device: Where they are.
            swap_pages: Slots in host memory.
            ranks: Pools that a sequence is spread over, each of which has a part of every page:
                tokens are then those of this rank.

        Raises:
            FitError: the memory is not there.
        """
        self.pages, self.page_tokens, self.swap_pages = pages, page_tokens, swap_pages
        self._page_rows = page_tokens // ranks
        self._rows = self._allocate(model, pages, dtype, device)
        self._slots = self._allocate(model, swap_pages, dtype, torch.device("cpu"))

    def _allocate(
        self, model: ModelSpec, pages: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Zeros: rows that nobody wrote are multiplied by 0, and 0 times NaN would be NaN."""
        shape = model.layers, 2, pages * self._page_rows, model.kv_heads, model.head_width
        size = pages * self._page_rows * token_bytes(model, dtype)
        try:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            if size <= available_bytes():
                return _lazy_zeros(size).view(dtype).view(shape)
        except (RuntimeError, MemoryError, OSError):
            pass
        raise FitError(
            f"A cache of {pages:,} pages of {self.page_tokens} tokens needs {format_bytes(size)}, "
            f"and {device} does not have that. Give it fewer pages."
        )

    @property
    def page_rows(self) -> int:
        """Rows of a page: its tokens that are here."""
        return self._page_rows

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are kept in."""
        return self._rows.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._rows.device

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages on the device."""
        return self._rows.nbytes

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer [pool rows, kv heads, width]."""
        return self._rows[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Values of a layer, shaped like the keys."""
        return self._rows[layer, 1]

    def views(self, runs: Sequence[PageRun], tokens: int) -> list[slice]:
        """The rows of a sequence's first ``tokens`` tokens, run by run.

        >>> from equipoise.spec.model.presets import preset
        >>> pool = KvPool(preset("7m"), pages=4, page_tokens=16, dtype=torch.float32,
        ...     device=torch.device("cpu"))
        >>> pool.views([PageRun(1, 2), PageRun(0, 1)], 37)
        [slice(16, 48, None), slice(0, 5, None)]
        """
        size, views = self._page_rows, list[slice]()
        for run in runs:
            if tokens <= 0:
                break
            rows = min(tokens, run.pages * size)
            views.append(slice(run.first * size, run.first * size + rows))
            tokens -= rows
        return views

    def row_numbers(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """The row of each of a sequence's tokens ``start`` to ``stop`` - 1."""
        size = self._page_rows
        return [pages[at // size] * size + at % size for at in range(start, stop)]

    def swap_out(self, swap: Swap) -> None:
        """Copy pages to slots of host memory."""
        self._slots[:, :, self._of(swap.slots)] = self._rows[:, :, self._of(swap.pages)].cpu()

    def swap_in(self, swap: Swap) -> None:
        """Copy slots of host memory to pages."""
        held = self._slots[:, :, self._of(swap.slots)]
        self._rows[:, :, self._of(swap.pages)] = held.to(self.device)

    def _of(self, pages: Sequence[int]) -> Tensor:
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self._page_rows
        return (first + torch.arange(self._page_rows)).flatten()


def _lazy_zeros(size: int) -> Tensor:
    """The system's own zeros [bytes]: memory is taken when rows are first written.

    It is taken in small pages: a text's first rows are in every layer's part of the pool, and to
    clear a huge page for each of these takes ten times as long.
    """
    held = mmap.mmap(-1, max(1, size))
    with suppress(OSError, AttributeError):  # a system without such advice has no huge pages
        held.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(held, dtype=torch.uint8)[:size]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes of a pool, or of every rank's."""

    pages: int
    page_tokens: int
    swap_pages: int = 0
    ranks: int = 1
    """Ranks that each have a part of every page."""

    def allocate(self, decoder: ServedDecoder) -> KvPool:
        """A rank's pool in the dtype and on the device of a decoder's weights.

        Raises:
            FitError: the memory is not there.
        """
        weight = decoder.embed.weight
        return KvPool(
            decoder.model,
            pages=self.pages,
            page_tokens=self.page_tokens,
            dtype=weight.dtype,
            device=weight.device,
            swap_pages=self.swap_pages,
            ranks=self.ranks,
        )
