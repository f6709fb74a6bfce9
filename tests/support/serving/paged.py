"""Sequences in a pool of pages, run by hand-written iterations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.nn.decoder import Decoder, initialize
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.fused import ServedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.spec.model.presets import ModelSpec

PLAIN = ModelSpec(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=67, head_width=8)


def built(model: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights, large enough that logits differ."""
    decoder = Decoder(model)
    initialize(decoder, 3)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return decoder.to(dtype).requires_grad_(False)


def paged(
    decoder: ServedDecoder,
    *,
    pages: int,
    page_tokens: int = 4,
    swap_pages: int = 0,
    is_invariant: bool = False,
) -> PagedDecoder:
    """A decoder over a pool that has as many slots as pages, or more."""
    pool = KvPool(
        decoder.model,
        pages=pages,
        page_tokens=page_tokens,
        dtype=decoder.embed.weight.dtype,
        device=torch.device("cpu"),
        swap_pages=max(pages, swap_pages),
    )
    return PagedDecoder(decoder, pool, is_invariant=is_invariant)


def joined(pages: Sequence[int]) -> tuple[PageRun, ...]:
    """Pages as runs of neighbours."""
    runs = list[PageRun]()
    for page in pages:
        if runs and runs[-1].first + runs[-1].pages == page:
            runs[-1] = PageRun(runs[-1].first, runs[-1].pages + 1)
        else:
            runs.append(PageRun(page, 1))
    return tuple(runs)


def chunk_of(name: str, pages: Sequence[int], start: int, tokens: int) -> ServeChunk:
    return ServeChunk(name, start, tokens, joined(pages), samples=True, logits=tokens)


def whole_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits of every token of a sequence by itself [t, V]."""
    with torch.no_grad():
        return decoder(torch.tensor(tokens), [len(tokens)])
