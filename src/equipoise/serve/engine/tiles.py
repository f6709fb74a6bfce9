"""Matrix products over tiles of a fixed number of rows, so that a row's bits are its own.

Why
    A library chooses how to sum a matrix product by its shape: with other rows beside it, the same
    row gets other bits, and a greedy answer may turn at the next token. With one shape for all
    calls the sums are always the same.

What it decides
    How many rows a tile has: the first of ``SIZES`` for which this machine is shown, on this
    model's own layers, to give a row the same bits at every place and beside any other rows, with
    any number of threads if some size does. A tile that is not full is filled with zeros. Experts
    compute one tile for each expert that some row chose. Tiles are copied to fresh memory, whose
    alignment is always the same.

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
from equipoise.nn.attention import Attend
from equipoise.nn.decoder import DecoderLayer
from equipoise.nn.moe.layer import Experts, MixtureOfExperts
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.observe.machine import usable_cores
from equipoise.serve.engine.fused import FusedLayer, ServedDecoder, decoder_layers
from equipoise.spec.model.presets import ModelSpec

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


def begin_layer(
    layer: DecoderLayer | FusedLayer, rows: int, x_tD: Tensor, table: Tensor
) -> tuple[Tensor, ...]:
    """What comes before a layer's attention, in tiles of ``rows`` rows."""

    def begin(x_tD: Tensor, by_row: Tensor) -> tuple[Tensor, ...]:
        return layer.begin(x_tD, by_row.transpose(0, 1))

    return map_tiles(begin, rows, x_tD, table.transpose(0, 1))  # [2, t, 1, E/2] -> [t, 2, 1, E/2]


def end_layer(
    layer: DecoderLayer | FusedLayer, rows: int, x_tD: Tensor, o_tHE: Tensor, table: Tensor
) -> Tensor:
    """What comes after it, likewise."""

    def end(x_tD: Tensor, o_tHE: Tensor, by_row: Tensor) -> tuple[Tensor, ...]:
        return (layer.end(x_tD, o_tHE, by_row.transpose(0, 1)),)

    return map_tiles(end, rows, x_tD, o_tHE, table.transpose(0, 1))[0]


def run_layer(
    layer: DecoderLayer | FusedLayer,
    model: ModelSpec,
    rows: int,
    x_tD: Tensor,
    table: Tensor,
    attend: Attend,
) -> Tensor:
    """One layer in tiles of ``rows`` rows; attention sees all rows at once, or none."""
    if not len(x_tD):
        heads = model.heads, model.kv_heads, model.kv_heads
        attend(*(x_tD.new_empty(0, each, model.head_width) for each in heads))
        return x_tD
    return end_layer(layer, rows, x_tD, attend(*begin_layer(layer, rows, x_tD, table)), table)


@torch.no_grad()
def find_rows(
    decoder: ServedDecoder, sizes: Sequence[int] = SIZES, *, over_ranks: bool = False
) -> int:
    """Rows of a tile with which this machine gives every row of this model its own bits.

    A size with which they do not depend on the number of threads either comes before all others,
    so that processes with fewer threads each compute what one process with all of them does.

    Args:
        decoder: Its layers are tried.
        sizes: In the order in which they are tried.
        over_ranks: Whether the number of threads must not matter.

    Raises:
        ModelError: there is no such size.
    """
    kinds = {
        type(layer if isinstance(layer, FusedLayer) else layer.feed_forward): layer
        for layer in decoder_layers(decoder)
    }
    shown = []
    for rows in sizes:
        if all(_is_invariant(decoder, layer, rows) for layer in kinds.values()):
            shown.append(rows)
            if all(_is_of_any_threads(decoder, layer, rows) for layer in kinds.values()):
                return rows
    if shown and not over_ranks:
        return shown[0]
    tried = f"{', '.join(map(str, sizes))} rows were tried."
    if shown:
        raise ModelError(
            f"On this machine a row's bits depend on the number of threads, whatever the tile: "
            f"{tried} Serve the invariant mode in one process, or without it over several."
        )
    raise ModelError(
        f"On this machine a row's bits depend on the other rows, whatever the tile: "
        f"{tried} Serve without the invariant mode."
    )


def _is_of_any_threads(decoder: ServedDecoder, layer: DecoderLayer | FusedLayer, rows: int) -> bool:
    """Whether one thread computes the bits that all of them do."""
    run, x_tD = _probe(decoder, layer, rows)
    threads, first = torch.get_num_threads(), run(x_tD[:rows].clone())
    try:
        for count in {1, threads, len(usable_cores())}:
            torch.set_num_threads(count)
            if not all(map(torch.equal, first, run(x_tD[:rows].clone()))):
                return False
    finally:
        torch.set_num_threads(threads)
    return True


def _probe(
    decoder: ServedDecoder, layer: DecoderLayer | FusedLayer, rows: int
) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Tensor]:
    """A layer and the head as a function of ``rows`` rows, and twice as many rows to try."""
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

    return run, x


def _is_invariant(decoder: ServedDecoder, layer: DecoderLayer | FusedLayer, rows: int) -> bool:
    """Whether shifting rows and replacing their neighbours leaves the bits of a row."""
    run, x = _probe(decoder, layer, rows)
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
