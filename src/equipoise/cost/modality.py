"""Seconds and bytes of encoders: packed items of any size, from the kernels of a device.

What it decides
    Products run over all patches of a rank, attention over one item at a time. An item attends to
    all of itself, so its core is priced as a causal document of as many pairs. Each product has two
    in the backward, but for the first, whose input is data. Everything between products moves a
    counted number of bytes and is launched, one attention for each size of items.

    What a rank keeps until the backward is what ``nn.modality.encoder`` saves for it, counted. It
    keeps that for the whole step, since the decoder's micro-batches lie between. Weights are held
    and moved as ``parallel.modality.shard`` does it: each is split by rows, the same number on
    every rank, so the last one's may be padded.

Kept true (tests/unit/cost/test_modality.py, tests/unit/nn/modality/test_encoder.py,
tests/multi/check/test_modality.py)
    More patches, layers or width never cost less; one large item costs more than small ones of as
    many patches; bytes equal those that autograd saves, and those that ranks send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.memory.weights import SMALL_BYTES, WeightGroup, count_held, is_kept_whole
from equipoise.cost.step.layer import LAUNCH_S, Rates
from equipoise.spec.device.parts import EncoderPoint
from equipoise.spec.layout import Layout
from equipoise.spec.modality.encoder import EncoderSpec

ELEMENT_BYTES = 4
"""Encoders keep and compute fp32, whatever the decoder's precision."""

_MOVED = 24
"""Numbers for each of a patch's ``hidden`` that a layer reads or writes between its products in a
forward: two norms 4, rotations 4, residuals 6, the activation 8, joining items 2."""
_MOVES_BACKWARD = 1.6
_KERNELS, _END_KERNELS, _BACKWARD_KERNELS = 12, 5, 1.7
"""Launches of a layer without attention, of what is outside of layers, and of a backward over a
forward."""


@dataclass(frozen=True, slots=True)
class EncodePasses:
    """Seconds of one rank's items."""

    forward_s: float
    backward_s: float

    def __add__(self, other: "EncodePasses") -> "EncodePasses":
        return EncodePasses(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


def encode_passes(
    spec: EncoderSpec, patches: Ints, width: int, rates: Rates, *, moves: float = 1.0
) -> EncodePasses:
    """Forward and backward of items that lie end to end on one rank.

    Args:
        spec: Sizes.
        patches: Patches of each item, int64 [items]; none costs nothing.
        width: Hidden width of the decoder.
        rates: Kernels of the device.
        moves: Time of moved bytes over what bandwidth says.
    """
    total, sizes = int(patches.sum()), len(np.unique(patches))
    if not total:
        return EncodePasses(0.0, 0.0)
    hidden, joined, rows = spec.hidden, spec.merged * spec.hidden, total // spec.merged
    layer = [(total, 3 * hidden, hidden), (total, hidden, hidden)]
    layer += [(total, spec.ffn, hidden), (total, hidden, spec.ffn)]
    ends = [(rows, joined, joined), (rows, width, joined)]

    def product_s(size: tuple[int, int, int]) -> float:
        return rates.product_s(*size, fp8=False)

    def backward_s(size: tuple[int, int, int]) -> float:
        n, columns, inner = size
        return product_s((n, inner, columns)) + product_s((columns, inner, n))

    embed = (total, hidden, spec.values)
    forward = spec.layers * sum(map(product_s, layer)) + sum(map(product_s, [embed, *ends]))
    backward = spec.layers * sum(map(backward_s, layer)) + sum(map(backward_s, ends))
    backward += product_s((hidden, spec.values, total))
    # n x n pairs of an item are those of a causal document of this length.
    lengths = (np.sqrt(1.0 + 8.0 * patches.astype(np.float64) ** 2) - 1.0) / 2.0
    of_heads = spec.heads, spec.heads, spec.hidden // spec.heads
    core, core_back = (
        float(rates.attention_s(lengths, *of_heads, backward=back).sum()) for back in (False, True)
    )
    moved = spec.layers * total * _MOVED * hidden * ELEMENT_BYTES / rates.bytes_per_s * moves
    launched = LAUNCH_S * (spec.layers * (_KERNELS + sizes) + _END_KERNELS)
    return EncodePasses(
        forward + spec.layers * core + moved + launched,
        backward + spec.layers * core_back + _MOVES_BACKWARD * moved + _BACKWARD_KERNELS * launched,
    )


def timed_passes(point: EncoderPoint, spec: EncoderSpec, patches: Ints, width: int) -> EncodePasses:
    """The same as it was timed on this machine, with the reading of items in the forward.

    Args:
        point: What was timed.
        spec: Sizes.
        patches: Patches of each item, int64 [items].
        width: Hidden width of the decoder.
    """
    sizes, work = len(np.unique(patches)), float(spec.multiplications(patches, width).sum())
    read_s = point.reading.seconds(len(patches), float(patches.sum()))
    return EncodePasses(
        read_s + point.forward.seconds(sizes, work), point.backward.seconds(sizes, work)
    )


def encoder_params(spec: EncoderSpec, width: int) -> int:
    """Weights of an encoder, biases and norms included.

    Args:
        spec: Sizes.
        width: Hidden width of the decoder.
    """
    return sum(group.params for group in encoder_groups(spec, width, Layout()))


def encoder_groups(spec: EncoderSpec, width: int, layout: Layout) -> list[WeightGroup]:
    """Weights that move together: those outside of layers first, then each layer's.

    Args:
        spec: Sizes.
        width: Hidden width of the decoder.
        layout: The encoders' own (``Layout.of_encoders``).
    """
    hidden, joined = spec.hidden, spec.merged * spec.hidden
    embed, norm = [(hidden, spec.values), (hidden, 1)], [(hidden, 1)] * 2
    join, project = [(joined, joined), (joined, 1)], [(width, joined), (width, 1)]
    attention = [(3 * hidden, hidden), (3 * hidden, 1), (hidden, hidden), (hidden, 1)]
    feed_forward = [(spec.ffn, hidden), (spec.ffn, 1), (hidden, spec.ffn), (hidden, 1)]
    ends, layer = (
        WeightGroup(
            sum(rows * columns for rows, columns in shapes),
            sum(-(-rows // layout.shards) * columns for rows, columns in shapes),
        )
        for shapes in (embed + norm + join + project, 2 * norm + attention + feed_forward)
    )
    return [ends, *[layer] * spec.layers]


@dataclass(frozen=True, slots=True)
class EncoderTraffic:
    """What all ranks send of encoders' weights and gradients in a step, sums over copies apart."""

    sent_bytes: int
    messages: int


def count_weight_traffic(
    encoders: Sequence[EncoderSpec],
    width: int,
    layout: Layout,
    *,
    element_bytes: int = ELEMENT_BYTES,
    small_bytes: int = SMALL_BYTES,
) -> EncoderTraffic:
    """Bytes and messages in which weights are gathered and gradients split.

    Args:
        encoders: Each of another kind.
        width: Hidden width of the decoder.
        layout: The encoders' own (``Layout.of_encoders``).
        element_bytes: Of a weight.
        small_bytes: The most that a group has, gathered, which ZeRO 3 keeps for the step [bytes].

    >>> one = EncoderSpec("audio", layers=1, hidden=8, heads=1, values=160, merge=(2, 1))
    >>> traffic = [
    ...     count_weight_traffic([one], 16, Layout(dp=2, zero=zero), small_bytes=0)
    ...     for zero in (0, 1, 3)
    ... ]
    >>> [each.messages for each in traffic]
    [0, 8, 12]
    >>> traffic[1].sent_bytes == 2 * 4 * encoder_params(one, 16)
    True
    """
    sent_bytes = messages = 0
    for spec in encoders:
        for group in encoder_groups(spec, width, layout):
            sends = count_moves(group, layout, small_bytes=small_bytes) * (layout.shards - 1)
            sent_bytes += layout.world * sends * group.owned * element_bytes
            messages += layout.world * sends
    return EncoderTraffic(sent_bytes, messages)


def count_moves(group: WeightGroup, layout: Layout, *, small_bytes: int = SMALL_BYTES) -> int:
    """How often a group of encoders' weights is gathered, or its gradients split, in a step.

    Args:
        group: Of ``encoder_groups``.
        layout: As there.
        small_bytes: As for ``count_weight_traffic``.
    """
    if layout.shards == 1:
        return 0
    is_small = is_kept_whole(
        group, width=ELEMENT_BYTES, zero=layout.zero, pp=layout.pp, small_bytes=small_bytes
    )
    return 3 if layout.zero == 3 and not is_small else 2


def held_bytes(
    shares: Sequence[tuple[EncoderSpec, Ints]],
    width: int,
    layout: Layout,
    *,
    sent_rows: int,
    read_rows: int,
) -> int:
    """What a rank holds beside its decoder at the fullest moment of a step [bytes].

    Args:
        shares: Each encoder, and the patches of each item that the rank encodes with it.
        width: Hidden width of the decoder.
        layout: The encoders' own (``Layout.of_encoders``).
        sent_rows: Rows that it encodes for any reader, once for each.
        read_rows: Rows that it reads, whose gradients it keeps, too.
    """
    groups = [encoder_groups(spec, width, layout) for spec, _ in shares]
    ends, layers = [each[0] for each in groups], [layer for each in groups for layer in each[1:]]
    held = count_held(ends, layers, layout, width=ELEMENT_BYTES)
    # A weight and its two moments; it in its gathered form, and its gradient.
    states = 3 * held.owned + held.gathered + held.gradients
    rows = (sent_rows + 2 * read_rows) * width
    return ELEMENT_BYTES * (states + rows) + sum(kept_bytes(*each) for each in shares)


def kept_bytes(spec: EncoderSpec, patches: Ints) -> int:
    """What autograd keeps of a rank's items from their forward to their backward [bytes].

    Args:
        spec: Sizes.
        patches: Patches of each item that the rank encodes, int64 [items].
    """
    hidden, head_width = spec.hidden, spec.hidden // spec.heads
    # Of a layer: both norms' inputs, outputs and two figures each; queries, keys and values as one,
    # turned queries and keys; the core's output, as items and joined, and a figure for each head;
    # the activation's input and output.
    layer = 19 * hidden + 4 + spec.heads
    of_patch = spec.values + head_width + spec.layers * layer + 4 * hidden + 2
    return ELEMENT_BYTES * int(patches.sum()) * of_patch
