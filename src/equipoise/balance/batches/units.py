"""What is placed: samples, or groups of samples that share a prefix, with what each costs.

Why
    Answers to one prompt begin alike. Where the attention computes their common tokens once, the
    group costs less than its samples, and must lie in one micro-batch.

What it decides
    A *unit* is what stays together. Its load is one number per phase, its size one number per
    kind of token. A group is a tree::

        Shared(4, [0, 1, Shared(3, [2, 3])])        lengths 6, 5, 9, 8

        prompt, 4 tokens  +- sample 0, 2 more
                          +- sample 1, 1 more
                          +- 3 tokens  +- sample 2, 2 more          13 tokens instead of 28
                                       +- sample 3, 1 more

    A branch costs its tokens, and the pairs that they form with all tokens before them.

Kept true (tests/unit/balance/batches/test_units.py, by Hypothesis)
    Pairs of a tree are those of its explicit mask; every sample is in one unit.

Sources
    Masks of shared prefixes: ``spec.mask``, kind prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import DataError
from equipoise.base.fields import is_whole
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve
from equipoise.spec.limits import MOST_SIZE

_DEEPEST = 64
"""Prefixes on the way to one sample; published trees of prompts have three or four."""

_MOST_NS = 2.0**62


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens that several samples begin with."""

    tokens: int
    """Tokens of the prefix, counted from the end of the prefix around it [tokens]; may be 0,
    which keeps samples together that share nothing."""
    members: Sequence["int | Shared"]
    """Samples by index, and prefixes within this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What is placed."""

    unit_of: Ints
    """The unit of each sample, int64 [samples]."""
    loads: Ints
    """int64 [units, phases] [ns]."""
    sizes: Ints
    """Tokens, int64 [units, kinds]; a shared prefix counts once."""

    def __len__(self) -> int:
        return len(self.loads)


def read_lengths(lengths: npt.ArrayLike) -> Ints:
    """Lengths as int64 [samples, kinds].

    Raises:
        DataError: there are none, or one is not a whole number of tokens in range.
    """
    table = read_numbers("Lengths", lengths, "[412, 96, 2048]")
    if table.ndim not in (1, 2) or not table.size:
        raise DataError(
            f"Lengths have shape {table.shape}, and a batch needs one sample or more. Give one "
            f"length per sample, or a row of lengths, one for each kind of token."
        )
    if table.dtype.kind == "f":
        wrong = np.argwhere(~(np.isfinite(table) & (table == np.floor(table))))
        if len(wrong):
            raise DataError(
                f"Sample {int(wrong[0][0]):,} has {table[tuple(wrong[0])]:g} tokens, which is not "
                f"a whole number. Count its tokens again."
            )
    rows = table.reshape(len(table), -1)
    whole = rows.sum(axis=1)
    for at, name in ((int(rows.min(1).argmin()), "least"), (int(rows.max(1).argmax()), "most")):
        one = rows[at].min() if name == "least" else rows[at].max()
        if not 0 <= one <= MOST_SIZE or whole[at] < 1:
            raise DataError(
                f"Sample {at:,} has {one:,} tokens. Samples have 1 to {MOST_SIZE:,} tokens; leave "
                f"empty ones out."
            )
    if whole.min() < 1:
        raise DataError(
            f"Sample {int(whole.argmin()):,} has 0 tokens. Samples have 1 to {MOST_SIZE:,} tokens; "
            f"leave empty ones out."
        )
    return rows.astype(np.int64)


def read_seconds(seconds: npt.ArrayLike, samples: int) -> Floats:
    """Given prices as float64 [samples, phases].

    Raises:
        DataError: they are not one row per sample, or one is negative or not finite.
    """
    table = read_numbers("Prices", seconds, "[0.8, 0.1, 2.5]").astype(np.float64)
    if table.ndim not in (1, 2) or len(table) != samples or not table.size:
        raise DataError(
            f"Prices have shape {table.shape} for {samples:,} samples. Give one price per sample, "
            f"or a row of prices, one for each phase."
        )
    rows = table.reshape(len(table), -1)
    wrong = np.argwhere(~(np.isfinite(rows) & (rows >= 0)))
    if len(wrong):
        raise DataError(
            f"Sample {int(wrong[0][0]):,} has a price of {rows[tuple(wrong[0])]:g} s. Prices are 0 "
            f"or more, and finite."
        )
    with np.errstate(over="ignore"):
        whole = rows.sum()
    if not 0 < whole < np.inf:
        raise DataError(
            f"Prices add up to {whole:g} s, so there is nothing to even out. Give each sample its "
            f"seconds."
        )
    return rows


def read_numbers(what: str, values: npt.ArrayLike, example: str) -> npt.NDArray[Any]:
    """What somebody gave as numbers; floats as float64.

    Raises:
        DataError: as ``read_array``, or it holds something else.
    """
    table = read_array(what, values, example)
    if table.dtype.kind not in "iuf" and table.size:
        kind = {"U": "text", "S": "text", "b": "flags"}.get(table.dtype.kind, "not numbers")
        raise DataError(f"{what} are {kind}. Give numbers, such as {example}.")
    if isinstance(values, list | tuple) and any(map(_is_flag, values)):  # NumPy counts it as 0 or 1
        raise DataError(f"{what} have flags among them. Give numbers, such as {example}.")
    return table.astype(np.float64) if table.dtype.kind == "f" else table


def read_array(what: str, values: npt.ArrayLike, example: str) -> npt.NDArray[Any]:
    """What somebody gave as an array, whatever it holds.

    Raises:
        DataError: it is ragged, masked, or on another device.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(
            f"{what} are a masked array, whose masked numbers would count. Give those that are "
            f"not masked: values.compressed()."
        )
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        if isinstance(values, list | tuple):  # rows of different lengths
            raise DataError(
                f"{what} are ragged. Give one number per sample, such as {example}, or rows that "
                f"are all as long."
            ) from None
        raise DataError(
            f"{what} are {shown(values)} that NumPy cannot read: it needs a gradient, is on a "
            f"device, is sparse, or has a dtype that NumPy lacks. Give values.tolist()."
        ) from None


def single_units(lengths: Ints, curves: Sequence[LoadCurve]) -> Units:
    """One unit per sample; phase ``p`` computes column ``p`` of the lengths."""
    columns = []
    for column, curve in zip(lengths.T, curves, strict=True):
        _require_countable(int(column.max()), len(column), curve)
        columns.append(np.where(column > 0, curve.document_ns(column), 0))
    return Units(np.arange(len(lengths)), np.stack(columns, axis=1), lengths)


def priced_units(lengths: Ints, seconds: Floats) -> Units:
    """One unit per sample, with given prices."""
    whole = float(seconds.sum())
    is_usual = 1.0 <= whole < 2.0**30
    scaled = 1e9 * seconds if is_usual else seconds / whole * 2.0**50
    loads = np.rint(scaled).astype(np.int64)
    return Units(np.arange(len(lengths)), loads, lengths)


def grouped_units(
    lengths: Ints, groups: Sequence[Shared | Sequence[int]], curve: LoadCurve
) -> Units:
    """Groups as units, each prefix priced once; samples outside groups are their own units.

    Raises:
        DataError: a group is not one, names a sample twice or one that is not there, or a prefix
            is longer than a sample that begins with it.
    """
    samples = len(lengths)
    tokens = lengths[:, 0]
    _require_countable(int(tokens.max()), samples, curve)
    unit_of = np.full(samples, -1, dtype=np.int64)
    begins = np.zeros(samples, dtype=np.int64)
    prefixes: list[tuple[int, int, int]] = []
    for unit, group in enumerate(groups):
        root = group if isinstance(group, Shared) else Shared(0, group)
        prefixes += _walk(root, unit, unit_of, begins)
    alone = np.flatnonzero(unit_of < 0)
    unit_of[alone] = len(groups) + np.arange(len(alone))
    short = np.flatnonzero(begins > tokens)
    if len(short):
        at = int(short[0])
        raise DataError(
            f"Sample {at:,} has {int(tokens[at]):,} tokens, and its group's prefix has "
            f"{int(begins[at]):,}. Give whole lengths, prompt and answer together."
        )
    table = np.array(prefixes, dtype=np.int64).reshape(-1, 3)
    owner = np.concatenate((table[:, 0], unit_of))
    starts = np.concatenate((table[:, 1], begins))
    stops = np.concatenate((table[:, 2], tokens))
    units = len(groups) + len(alone)
    loads, sizes = np.zeros((2, units, 1), dtype=np.int64)
    np.add.at(loads[:, 0], owner, np.where(stops > starts, curve.slice_ns(starts, stops), 0))
    np.add.at(sizes[:, 0], owner, stops - starts)
    return Units(unit_of, loads, sizes)


def _walk(root: Shared, unit: int, unit_of: Ints, begins: Ints) -> list[tuple[int, int, int]]:
    """Mark the samples of a tree, and where each begins; its prefixes as (unit, start, stop)."""
    prefixes = []
    open_nodes: list[tuple[Shared, int, int]] = [(root, 0, 1)]
    members = 0
    while open_nodes:
        node, start, depth = open_nodes.pop()
        if not is_whole(node.tokens) or not 0 <= node.tokens <= MOST_SIZE:
            raise DataError(
                f"Group {unit:,} has a prefix of {shown(node.tokens)} tokens. Give 0 to "
                f"{MOST_SIZE:,}."
            )
        if depth > _DEEPEST:
            raise DataError(
                f"Group {unit:,} has more than {_DEEPEST} prefixes inside each other. Join those "
                f"with one member."
            )
        stop = start + int(node.tokens)
        prefixes.append((unit, start, stop))
        if not isinstance(node.members, list | tuple | range | np.ndarray):
            raise DataError(
                f"Group {unit:,} has {shown(node.members)} as members. Give a list of samples, "
                f"such as [0, 1, 2, 3], or Shared(tokens, [0, 1, 2, 3])."
            )
        for member in node.members:
            if isinstance(member, Shared):
                open_nodes.append((member, stop, depth + 1))
                continue
            if not is_whole(member) or not 0 <= member < len(unit_of):
                raise DataError(
                    f"Group {unit:,} names sample {shown(member)}. Samples are 0 to "
                    f"{len(unit_of) - 1:,}."
                )
            if unit_of[member] >= 0:
                raise DataError(
                    f"Sample {member:,} is in group {int(unit_of[member]):,} and in group "
                    f"{unit:,}. Name each sample once."
                )
            unit_of[member], begins[member] = unit, stop
            members += 1
    if not members:
        raise DataError(f"Group {unit:,} has no samples. Leave it out.")
    return prefixes


def _is_flag(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (
        isinstance(value, list | tuple) and any(map(_is_flag, value))
    )


def _require_countable(longest: int, samples: int, curve: LoadCurve) -> None:
    pairs = longest * (longest + 1) / 2
    most = float(curve.attention_ns(pairs)) + curve.ns_per_token * longest
    if not most * samples < _MOST_NS:
        raise DataError(
            f"{samples:,} samples of up to {longest:,} tokens cost up to "
            f"{most * samples / 1e9:.3g} s, more than is counted here. Give a price below "
            f"{_MOST_NS / 1e9:.3g} s in all."
        )
