"""What ``balance.batch`` is asked: read, priced, and refused where it makes no sense.

Kept true (tests/unit/balance/batches/test_arguments.py)
    The whole text of each message.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equipoise.balance.batches.prices import Price, curve_of
from equipoise.balance.batches.units import (
    Shared,
    Units,
    grouped_units,
    priced_units,
    read_seconds,
    single_units,
)
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError
from equipoise.base.fields import is_whole
from equipoise.base.shown import shown
from equipoise.cost.curve import LoadCurve
from equipoise.spec.limits import MOST_SIZE


def require_count(name: str, number: int) -> int:
    """A number of things as a plain integer, which NumPy's are not; refuses what is none."""
    if not is_whole(number) or not 1 <= number <= MOST_SIZE:
        raise SpecError(f"{name} is {shown(number)}. Give a whole number from 1 to {MOST_SIZE:,}.")
    return int(number)


def read_limits(max_tokens: int | Sequence[int] | None, table: Ints) -> Ints:
    """Most tokens of each kind in a micro-batch, int64 [kinds]; all of them unless given."""
    kinds = table.shape[1]
    if max_tokens is None:
        return np.asarray(np.maximum(table.sum(0), 1))
    is_number = isinstance(max_tokens, int | float | np.number)
    given: object = [max_tokens] * kinds if is_number else max_tokens
    if not isinstance(given, list | tuple) or len(given) != kinds:
        raise SpecError(
            f"max_tokens is {shown(max_tokens)} for {kinds} kind{'s' * (kinds > 1)} of token. Give "
            f"one number, or one for each kind."
        )
    for number in given:
        require_count("max_tokens", number)
    return np.array(given, dtype=np.int64)


def price_units(
    table: Ints,
    price: Price | Sequence[Price] | None,
    seconds: npt.ArrayLike | None,
    groups: Sequence[Shared | Sequence[int]],
    *,
    shares_prefix: bool,
) -> tuple[Units, Floats, list[LoadCurve]]:
    """Units, their seconds in each phase, and the curves that priced them."""
    kinds = table.shape[1]
    if (price is None) == (seconds is None):
        raise SpecError(
            'Samples need one price: price="llama3-8b", your model\'s config or a LoadCurve; or '
            "seconds, one number per sample."
        )
    if not isinstance(groups, list | tuple):
        raise SpecError(
            f"groups is {shown(groups)}. Give a list of groups, each a list of samples or a "
            f"Shared(tokens, samples)."
        )
    grouped = bool(groups) and shares_prefix
    if seconds is not None:
        unit_s = read_seconds(seconds, len(table))
        if grouped:
            raise SpecError(
                "Given seconds say what a sample costs, not what its prefix does. Give a price "
                "in place of seconds, or shares_prefix=False."
            )
        return priced_units(table, unit_s), unit_s, []
    asked = list(price) if isinstance(price, list | tuple) else [price]
    curves = [curve_of(each) for each in asked]
    if len(curves) != kinds:
        raise SpecError(
            f"There are {len(curves)} prices for {kinds} kind{'s' * (kinds > 1)} of token. Give "
            f"one price for each."
        )
    if grouped and kinds > 1:
        raise SpecError(
            "Samples that share a prefix must have one kind of token. Give one length per sample, "
            "or shares_prefix=False."
        )
    units = grouped_units(table, groups, curves[0]) if grouped else single_units(table, curves)
    return units, np.asarray(1e-9 * units.loads, dtype=np.float64), curves


def shifted(loads: Ints, cells: int) -> Ints:
    """Loads whose sum over all cells fits 62 bits; none that is above 0 becomes 0."""
    bits = int(loads.sum()).bit_length() + cells.bit_length()
    if bits <= 62:
        return loads
    return np.where(loads > 0, np.maximum(loads >> (bits - 62), 1), 0)


def count_samples(samples: int) -> str:
    """A number of samples, in words.

    >>> count_samples(1), count_samples(2000)
    ('1 sample', '2,000 samples')
    """
    return f"{samples:,} sample{'s' * (samples > 1)}"


def count_units(units: Units) -> str:
    """How many samples there are to place, and in how many groups."""
    samples = len(units.unit_of)
    if len(units) == samples:
        return count_samples(samples)
    groups = "1 group that stays" if len(units) == 1 else f"{len(units):,} groups that stay"
    return f"{samples:,} samples in {groups} together"


def too_long(
    units: Units, unit: int, kind: int, limits: Ints, groups: Sequence[Shared | Sequence[int]]
) -> str:
    """The refusal of a unit that no micro-batch holds."""
    size, limit = int(units.sizes[unit, kind]), int(limits[kind])
    if len(units) < len(units.unit_of) and unit < len(groups):
        return (
            f"Group {unit:,} has {size:,} tokens and stays together, but a micro-batch holds "
            f"{limit:,}. Give max_tokens={size}, or shares_prefix=False."
        )
    sample = int(np.flatnonzero(units.unit_of == unit)[0])
    return (
        f"Sample {sample:,} has {size:,} tokens, but a micro-batch holds {limit:,}. Give "
        f"max_tokens={size}, divides=True, or a shorter sample."
    )


def require_divisible(
    curves: list[LoadCurve],
    groups: Sequence[Shared | Sequence[int]],
    units: Units,
    limits: Ints,
    *,
    equal_counts: bool,
) -> None:
    """Refuse to divide what has no price for a part, or into parts of one token."""
    if len(curves) != 1 or len(units) < len(units.unit_of) or not equal_counts:
        what = (
            "of given seconds"
            if not curves
            else "of several kinds of token"
            if len(curves) > 1
            else "that share a prefix"
            if len(groups)
            else "of ranks with counts of their own"
        )
        raise SpecError(f"Samples {what} are not divided. Give divides=False, or leave that out.")
    if limits[0] < min(2, int(units.sizes.sum())):
        raise SpecError(
            "max_tokens is 1, and samples are divided into micro-batches of 2 tokens or more. Give "
            "max_tokens=2 or more, or divides=False."
        )
