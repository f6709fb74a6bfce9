"""Parts of divided documents: which tokens each part has, and what it costs.

What it decides
    Where a document is cut, given its number of parts or how full each micro-batch is.

Kept true (tests/unit/balance/packing/test_divided.py, by Hypothesis)
    The parts of a document hold each of its tokens once, and together have its pairs.

Sources
    Head and tail runs: Llama 3, arXiv:2407.21783, section 3.3.2. Wrap-around: McNaughton,
    "Scheduling with deadlines and loss functions", Management Science 6(1), 1959.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.cost.curve import LoadCurve


@dataclass(frozen=True, slots=True)
class DocumentParts:
    """A document's parts: runs of tokens counted from its start, and what each part costs."""

    runs: tuple[tuple[tuple[int, int], ...], ...]
    """The runs of each part."""
    prices: Ints
    tokens: Ints


def shares_over_ranks(sizes: Ints, parts: Ints, curve: LoadCurve) -> list[DocumentParts]:
    """Cut into 2 x parts nearly equal runs; part j is the j-th from the front and from the back."""
    bounds = [np.arange(2 * n + 1) * d // (2 * n) for d, n in zip(sizes, parts, strict=True)]
    starts = np.concatenate([each[:-1] for each in bounds])
    stops = np.concatenate([each[1:] for each in bounds])
    ends = np.cumsum(2 * parts)[:-1]
    shares = []
    for start, stop, price in zip(
        np.split(starts, ends),
        np.split(stops, ends),
        np.split(curve.slice_ns(starts, stops), ends),
        strict=True,
    ):
        half = len(start) // 2
        length = stop - start
        pairs = zip(
            zip(start[:half].tolist(), stop[:half].tolist(), strict=True),
            zip(start[half:][::-1].tolist(), stop[half:][::-1].tolist(), strict=True),
            strict=True,
        )
        runs = [
            ((head[0], tail[1]),) if head[1] == tail[0] else (head, tail) for head, tail in pairs
        ]
        shares.append(
            DocumentParts(
                tuple(tuple(run for run in both if run[0] < run[1]) for both in runs),
                price[:half] + price[half:][::-1],
                length[:half] + length[half:][::-1],
            )
        )
    return shares


def shares_in_time(sizes: Ints, parts: Ints, curve: LoadCurve) -> list[DocumentParts]:
    """Slices of nearly equal work with at least one token each; all cuts are bisected at once."""
    owner = np.repeat(np.arange(len(sizes)), parts - 1)
    ends = np.cumsum(parts - 1)[:-1]
    inner = np.concatenate([np.arange(1, n) for n in parts])
    of_whole = curve.slice_ns(np.zeros_like(sizes), sizes)
    reach = reach_tokens(sizes[owner], of_whole[owner] * (inner / parts[owner]), curve)
    cuts = np.clip(reach, inner, sizes[owner] - parts[owner] + inner)
    return _slices(
        [
            [0, *np.maximum.accumulate(mine).tolist(), size]
            for size, mine in zip(sizes.tolist(), np.split(cuts, ends), strict=True)
        ],
        curve,
    )


def wrapped_in_time(
    sizes: Ints, loads: Ints, turns: int, curve: LoadCurve
) -> list[tuple[int, DocumentParts]]:
    """Lay documents end to end and cut where equal work ends (McNaughton's wrap-around rule).

    Returns:
        Each document's slices, with the micro-batch of the first.
    """
    ends = np.cumsum(loads)
    edges = ends[-1] * np.arange(1, turns) // turns
    owner = np.searchsorted(ends, edges, side="right")
    reach = reach_tokens(sizes[owner], (edges - (ends - loads)[owner]).astype(np.float64), curve)
    begins = np.searchsorted(owner, np.arange(len(sizes) + 1)).tolist()  # owners ascend
    inside, turns_of = [], []
    for document, size in enumerate(sizes.tolist()):
        mine = reach[begins[document] : begins[document + 1]].tolist()
        # Cuts before its first token and after its last leave it whole.
        turns_of.append(begins[document] + sum(cut <= 0 for cut in mine))
        inside.append([0, *(cut for cut in mine if 0 < cut < size), size])
    return list(zip(turns_of, _slices(inside, curve), strict=True))


def reach_tokens(sizes: Ints, wanted_ns: npt.NDArray[np.float64], curve: LoadCurve) -> Ints:
    """Tokens from each document's start that cost ``wanted_ns``."""
    low, high = np.zeros_like(sizes), sizes.copy()
    while (low < high).any():
        middle = (low + high) // 2
        is_short = curve.slice_ns(np.zeros_like(middle), middle) < wanted_ns
        low, high = np.where(is_short, middle + 1, low), np.where(is_short, high, middle)
    return low


def _slices(bounds: list[list[int]], curve: LoadCurve) -> list[DocumentParts]:
    """The slices between the bounds of each document; all are priced at once."""
    starts = np.array([start for each in bounds for start in each[:-1]], dtype=np.int64)
    stops = np.array([stop for each in bounds for stop in each[1:]], dtype=np.int64)
    prices, tokens, first = curve.slice_ns(starts, stops), stops - starts, 0
    shares = []
    for each in bounds:
        last = first + len(each) - 1
        runs = tuple((run,) for run in itertools.pairwise(each))
        shares.append(DocumentParts(runs, prices[first:last], tokens[first:last]))
        first = last
    return shares
