"""Matrix products over tiles of a fixed number of rows, so that a row's bits are its own.

Why
    A library chooses how to sum a matrix product by its shape: with other rows beside it, the same
    row gets other bits, and a greedy answer may turn at the next token. With one shape for all
    calls the sums are always the same.

What it decides
    How many rows a tile has: the first of ``SIZES`` for which this machine is shown, on this
    model's own layers, to give a row the same bits at every place and beside any other rows. A
    tile that is not full is filled with zeros. Experts compute one tile for each expert that some
    row chose. Tiles are copied to fresh memory, whose alignment is always the same.

Kept true (tests/unit/serve/engine/test_invariant.py)
    Rows have the same bits whatever their place and their neighbours.

Sources
    Fixed-M products and their invariance: "Defeating nondeterminism in LLM inference", Thinking
    Machines, September 2025.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import DecoderLayer
from equipoise.nn.moe.layer import Experts, MixtureOfExperts
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.serve.engine.fused import FusedLayer, ServedDecoder, decoder_layers

SIZES = (32, 64, 16, 8)
"""Rows of a tile, in the order in which they are tried: 32 costs a single row least."""


def map_tiles(
    run: Callable[..., tuple[Tensor, ...]], rows: int, *given: Tensor
) -> tuple[Tensor, ...]:
    """Run a function of rows on tiles of ``rows`` rows, and join what it returns.

    Args:
        run: From tensors of ``rows`` rows to tensors of as many.
        rows: Rows of a tile.
        given: Tensors with as many rows as each other, at least one.
    """
    count, parts = len(given[0]), list[tuple[Tensor, ...]]()
    for begin in range(0, count, rows):
        taken = min(rows, count - begin)
        filled = [x.new_zeros(rows, *x.shape[1:]) for x in given]
        for tile, x in zip(filled, given, strict=True):
            tile[:taken] = x[begin : begin + taken]
        parts.append(tuple(x[:taken] for x in run(*filled)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def run_experts(x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
    """Outputs of rows sorted by expert, each expert on a tile of its own.

    Args:
        x_RD: Rows of at most one tile's tokens; a token is in an expert's rows at most once.
        counts_X: Rows of each expert.
        experts: Their weights.
    """
    y_RD, begin = torch.empty_like(x_RD), 0
    for expert, count in enumerate(counts_X.tolist()):
        if count:
            tile = x_RD.new_zeros(max(SIZES), x_RD.shape[1])
            tile[:count] = x_RD[begin : begin + count]
            alone_X = torch.zeros_like(counts_X)
            alone_X[expert] = len(tile)
            y_RD[begin : begin + count] = experts(tile, alone_X)[:count]
            begin += count
    return y_RD


def set_experts(decoder: ServedDecoder) -> None:
    """Let all experts of a decoder compute tile by tile."""
    for layer in decoder_layers(decoder):
        if isinstance(layer, DecoderLayer) and isinstance(layer.feed_forward, MixtureOfExperts):
            layer.feed_forward.exchange = run_experts


@torch.no_grad()
def find_rows(decoder: ServedDecoder, sizes: Sequence[int] = SIZES) -> int:
    """Rows of a tile with which this machine gives every row of this model its own bits.

    Raises:
        ModelError: there is no such size.
    """
    kinds = {
        type(layer if isinstance(layer, FusedLayer) else layer.feed_forward): layer
        for layer in decoder_layers(decoder)
    }
    for rows in sizes:
        if all(_is_invariant(decoder, layer, rows) for layer in kinds.values()):
            return rows
    raise ModelError(
        f"On this machine a row's bits depend on the other rows, whatever the tile: "
        f"{', '.join(map(str, sizes))} rows were tried. Serve without the invariant mode."
    )


def _is_invariant(decoder: ServedDecoder, layer: DecoderLayer | FusedLayer, rows: int) -> bool:
    """Whether shifting rows and replacing their neighbours leaves the bits of a row."""
    weight = decoder.embed.weight
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2 * rows, decoder.model.hidden, generator=source).to(weight)
    table = rotary_table(
        rotary_frequencies(decoder.model, device=weight.device),
        torch.full((rows,), 7, device=weight.device),
        weight.dtype,
    )

    def run(x_tD: Tensor) -> tuple[Tensor, ...]:
        q_tHE, k_tGE, v_tGE = layer.begin(x_tD, table)
        return q_tHE, k_tGE, v_tGE, layer.end(x_tD, q_tHE, table), decoder.finish(x_tD, None)

    first = run(x[:rows].clone())
    for shift in (1, rows // 2 + 1):
        moved = run(torch.cat((x[shift:rows], x[rows : rows + shift])))
        lone = run(torch.cat((0 * x[:shift], x[shift : shift + 1], x[rows + shift + 1 :])))
        for wanted, here, there in zip(first, moved, lone, strict=True):
            if not torch.equal(wanted[shift:], here[: rows - shift]):
                return False
            if not torch.equal(wanted[shift], there[shift]):
                return False
    return True
