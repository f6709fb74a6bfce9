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

    Weights in ``EncoderSpec.frozen`` have no gradient and no moments. The backward ends at the
    first trained layer; layers before it keep nothing for a backward and are not gathered for one.
    A frozen encoder is freed as soon as its rows are made.

Kept true (tests/unit/cost/test_modality.py, tests/unit/nn/modality/test_encoder.py,
tests/multi/check/test_modality.py)
    More patches, layers or width never cost less; one large item costs more than small ones of as
    many patches; bytes equal those that autograd saves, and those that ranks send.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.memory.weights import (
    SMALL_BYTES,
    HeldNumbers,
    WeightGroup,
    count_held,
    is_kept_whole,
)
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
_WORKING = 12
"""Numbers for each of a patch's ``hidden`` that a layer without a backward has at once, in its
feed-forward: the stream before and after attention, normed, 4 before and 4 after the activation,
and what is added."""
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
    layer = {
        "query_key_value": (total, 3 * hidden, hidden),
        "output": (total, hidden, hidden),
        "up": (total, spec.ffn, hidden),
        "down": (total, hidden, spec.ffn),
    }
    embed = (total, hidden, spec.values)
    ends = {"join": (rows, joined, joined), "project": (rows, width, joined)}

    def product_s(size: tuple[int, int, int]) -> float:
        return rates.product_s(*size, fp8=False)

    def backward_s(name: str, size: tuple[int, int, int], *, reaches: bool) -> float:
        n, columns, inner = size
        of_input = product_s((n, inner, columns)) if reaches else 0.0
        trained = f"{name}.weight" not in frozen
        return of_input + (product_s((columns, inner, n)) if trained else 0.0)

    frozen = set(spec.frozen)
    back = [at for at, runs in enumerate(spec.layers_back) if runs]
    forward = spec.layers * sum(map(product_s, layer.values()))
    forward += sum(map(product_s, [embed, *ends.values()]))
    # Layers that are trained alike cost alike.
    alike = {0: len(back)} if not spec.frozen else dict.fromkeys(back, 1)
    backward = sum(
        count * backward_s(f"layers.{at}.{name}", size, reaches=True)
        for at, count in alike.items()
        for name, size in layer.items()
    )
    backward += backward_s("embed", embed, reaches=False)
    reaches = bool(back) or spec.trains("embed", "norm")
    for name, size in ends.items():
        backward += backward_s(name, size, reaches=reaches)
        reaches = reaches or spec.trains(name)
    # n x n pairs of an item are those of a causal document of this length.
    lengths = (np.sqrt(1.0 + 8.0 * patches.astype(np.float64) ** 2) - 1.0) / 2.0
    of_heads = spec.heads, spec.heads, spec.hidden // spec.heads
    core, core_back = (
        float(rates.attention_s(lengths, *of_heads, backward=is_back).sum())
        for is_back in (False, True)
    )
    moved = total * _MOVED * hidden * ELEMENT_BYTES / rates.bytes_per_s * moves
    kernels, end_kernels = LAUNCH_S * (_KERNELS + sizes), LAUNCH_S * _END_KERNELS
    ends_s = 0.0 if spec.is_frozen else _BACKWARD_KERNELS * end_kernels
    return EncodePasses(
        forward + spec.layers * (core + moved + kernels) + end_kernels,
        backward
        + len(back) * (core_back + _MOVES_BACKWARD * moved + _BACKWARD_KERNELS * kernels)
        + ends_s,
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


def encoder_params(spec: EncoderSpec, width: int, *, trained: bool = False) -> int:
    """Weights of an encoder, biases and norms included.

    Args:
        spec: Sizes.
        width: Hidden width of the decoder.
        trained: Only those that are trained.
    """
    groups = encoder_groups(spec, width, Layout())
    return sum(group.trained.params if trained else group.params for group in groups)


_NOTHING = WeightGroup(0, 0)


@dataclass(frozen=True, slots=True)
class EncoderGroup(WeightGroup):
    """Weights of an encoder that are gathered together."""

    trained: WeightGroup = _NOTHING
    """Those of them that have a gradient."""
    runs_back: bool = True
    """Whether the backward computes with them."""


def encoder_groups(spec: EncoderSpec, width: int, layout: Layout) -> list[EncoderGroup]:
    """Weights that move together: those outside of layers first, then each layer's.

    Args:
        spec: Sizes, and what is trained.
        width: Hidden width of the decoder.
        layout: The encoders' own (``Layout.of_encoders``).
    """
    numbers = np.zeros((1 + spec.layers, 4), dtype=np.int64)
    frozen = set(spec.frozen)
    for name, (rows, *columns) in spec.shapes(width).items():
        group = 1 + int(name.split(".")[1]) if name.startswith("layers.") else 0
        inner = math.prod(columns)
        held = np.array([rows * inner, -(-rows // layout.shards) * inner])
        numbers[group] += np.concatenate((held, held * (name not in frozen)))
    runs = not spec.is_frozen, *spec.layers_back
    return [
        EncoderGroup(params, owned, trained=WeightGroup(some, own), runs_back=runs_back)
        for (params, owned, some, own), runs_back in zip(numbers.tolist(), runs, strict=True)
    ]


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
    numbers = messages = 0
    if layout.shards > 1:
        for group in (each for spec in encoders for each in encoder_groups(spec, width, layout)):
            gathers = count_gathers(group, layout, small_bytes=small_bytes)
            numbers += gathers * group.owned + group.trained.owned
            messages += gathers + (group.trained.params > 0)
    to_all = layout.world * (layout.shards - 1)
    return EncoderTraffic(to_all * numbers * element_bytes, to_all * messages)


def count_gathers(group: EncoderGroup, layout: Layout, *, small_bytes: int = SMALL_BYTES) -> int:
    """How often a group of encoders' weights is gathered in a step.

    Args:
        group: Of ``encoder_groups``.
        layout: As there.
        small_bytes: As for ``count_weight_traffic``.
    """
    if layout.shards == 1:
        return 0
    is_small = _is_small(group, layout, small_bytes)
    return 2 if layout.zero == 3 and group.runs_back and not is_small else 1


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
    owned = sum(each.owned + 2 * each.trained.owned for encoder in groups for each in encoder)
    trained = [each for each in groups if each[0].runs_back]
    held = _count_held(trained, layout)
    small = [each for encoder in trained for each in encoder if _is_small(each, layout)]
    gradients = sum(each.trained.params for encoder in trained for each in encoder)
    if layout.zero > 1:
        gradients = sum(each.trained.owned for encoder in trained for each in encoder)
        gradients += sum(each.trained.params - each.trained.owned for each in small)
    # Before rows arrive, layers without a backward work, and a frozen encoder is whole; both are
    # gone before gradients of rows are kept.
    passing = [2 * read_rows * width]
    for each, (spec, patches) in zip(groups, shares, strict=True):
        if not all(spec.layers_back):
            whole = 0 if each[0].runs_back else _count_held([each], layout).gathered
            arriving = max(group.params for group in each) if layout.world > 1 else 0
            works = _WORKING * spec.hidden * int(patches.sum())
            passing.append(whole + arriving + works)
    # A weight and its two moments; it in its gathered form, and its gradient.
    numbers = owned + held.gathered + gradients + sent_rows * width + max(passing)
    return ELEMENT_BYTES * numbers + sum(kept_bytes(*each) for each in shares)


def _count_held(encoders: Sequence[Sequence[EncoderGroup]], layout: Layout) -> HeldNumbers:
    ends, layers = [each[0] for each in encoders], [one for each in encoders for one in each[1:]]
    return count_held(ends, layers, layout, width=ELEMENT_BYTES)


def _is_small(group: WeightGroup, layout: Layout, small_bytes: int = SMALL_BYTES) -> bool:
    return is_kept_whole(
        group, width=ELEMENT_BYTES, zero=layout.zero, pp=layout.pp, small_bytes=small_bytes
    )


def kept_bytes(spec: EncoderSpec, patches: Ints) -> int:
    """What autograd keeps of a rank's items from their forward to their backward [bytes].

    Exact where what is frozen comes before what is trained; at most this elsewhere.

    Args:
        spec: Sizes, and what is trained.
        patches: Patches of each item that the rank encodes, int64 [items].
    """
    hidden, head_width = spec.hidden, spec.hidden // spec.heads
    # Of a layer: both norms' inputs, outputs and two figures each; queries, keys and values as one,
    # turned queries and keys; the core's output, as items and joined, and a figure for each head;
    # the activation's input and output.
    layer = 19 * hidden + 4 + spec.heads
    back = sum(spec.layers_back)
    of_patch = (spec.values if spec.trains("embed.weight") else 0) + back * layer
    of_patch += head_width if back else 0
    # The last norm's input and two figures; what joins items, its output, and the activation's.
    if back or spec.trains("embed", "norm"):
        of_patch += 4 * hidden + 2
    elif spec.trains("join"):
        of_patch += 3 * hidden
    elif spec.trains("project.weight"):
        of_patch += hidden
    return ELEMENT_BYTES * int(patches.sum()) * of_patch
