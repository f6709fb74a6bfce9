"""Name a rank that takes longer for its work than the others take for theirs, and in which part.

Why
    Ranks meet in every step, so one that is slow by a fifth makes all slow by a fifth, and nothing
    in the loss shows it. Seconds alone do not name it either: who has more documents works longer.

What it decides
    The rank that waits least arrives last. What counts is what a rank spent itself, its *own*
    seconds: from the start of the step to the meeting, less what it waited for others and less
    pauses with a known reason. Beside them stands what it should have spent: the predicted work of
    its own documents, at the price that the other ranks paid for theirs in the same step; for
    reading data, what the others spent. The *excess* of a rank is the difference over the whole.

    Excesses are summed up as evidence (a cumulative sum of log-likelihood ratios, which forgets
    what is below zero): for ``_SLOW`` against ``_EVEN``, in units of the noise of the last steps.
    One step counts for little, however long it was, so several must agree. ::

        step            1     2     3     4     5   ...  10
        excess        0.02 -0.04  0.21  0.19  0.22 ... 0.20     of rank 1
        evidence      0.0   0.0   1.5   3.0   4.5  ... 12.0     rank 1 is named

    The sum is kept twice: as it is, and without the time in which other programs had a rank's core.
    The second has far less noise on a shared host; the first finds ranks that such a program slows,
    if it does so for 32 steps or more. What comes and goes for some steps is noise.

    With two ranks only their difference is known: rank 1 takes longer for its work than rank 0.

Kept true (tests/unit/fault/detect/test_slow.py, by Hypothesis and on the noise of a real run)
    A rank that is slower by 20% is named within 20 steps, with its part, 95 times in 100; one that
    has more work is not; of even ranks at most one is named in 10,000 steps.

Sources
    Waits in reverse: C4, arXiv:2406.04594. Cumulative sums: Page, Biometrika 41 (1954); by Wald's
    inequality a false alarm takes at least ``exp(_PROOF)`` steps of independent normal noise.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.base.arrays import Flags, Floats

Part = Literal["data", "compute", "communication"]
PARTS: tuple[Part, ...] = ("data", "compute", "communication")

_EVEN, _SLOW = 0.0, 0.16
"""Logarithms of own over expected seconds that are told apart; 20% more is 0.18."""

_PROOF, _HOST_PROOF = 12.0, 48.0
"""Evidence that names a rank: by its own seconds, and by those that other programs took as well.
Such programs come and go, and a rank that they slow for some steps is nobody's fault."""

_KEPT_PROOF = 12.0
"""The most that is kept beyond, so that a rank can be cleared."""

_STEP_PROOF = 1.5
"""The most by which one step changes evidence: eight steps must agree."""

_LEAST_NOISE = 0.02
_RECENT = 64

_BLOCK, _MOST_BLOCKS, _LEAST_BLOCKS = 5, 32, 4
"""Steps whose median is compared with that of the next ones, and how many such medians are kept,
and needed: load that lasts longer than a step shows there."""

_BLOCK_NOISE = 1.45
"""Noise of a step over that of such a median. For independent normal steps it is 1.9; less is
taken, since few medians are known and too much noise hides slow ranks: of 40 in the noise of a real
run 39 are named, by 1.9 37, while load that comes and goes accuses as many."""

_KNOWN_STEPS = 5
"""Steps before any counts: the first ones warm up, and show the noise."""

_NOISE_STEPS = 8
"""Steps after which noise is measured again."""

_SHOWN = 12
"""Last steps from which a verdict takes its numbers."""

_MOSTLY = 0.5
"""Share of a rank's extra seconds from which on what caused them is its host."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What each rank spent on a step before all of them met, float64 [ranks] each [s]."""

    predicted_s: Floats
    """Forward and backward of its documents, as the price curve has them."""
    data_s: Floats
    """Packing, and reading its documents."""
    compute_s: Floats
    """Forward and backward, without waits and known pauses."""
    communication_s: Floats
    """What it did in exchanges besides waiting."""
    core_s: Floats
    """``compute_s`` without the time in which other programs had its core."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A verdict: a rank that has become slow, or that is not slow any more."""

    rank: int
    part: Part
    excess: float
    """Its seconds beyond those expected, over the expected: the median of the steps [ratio]."""
    extra_s: float
    """The same in each step [s]."""
    cause: Literal["rank", "host"]
    """Whether the rank itself is slow, or other programs on its host slow it."""
    host_share: float
    """Share of its extra seconds in which other programs had its core; 0 if unknown."""
    since: int
    """The first step that counts against it."""
    step: int
    """The step after which it was named."""
    is_over: bool = False
    """Whether it is as fast as the others again."""

    @property
    def sentence(self) -> str:
        """For the user."""
        if self.is_over:
            return f"Rank {self.rank} is as fast as the others again (step {self.step})."
        where = {
            "data": "in packing and reading data",
            "compute": "in forward and backward",
            "communication": "in exchanges, besides waiting",
        }[self.part]
        text = (
            f"Rank {self.rank} is slow: since step {self.since} it has taken {self.excess:.0%} "
            f"longer for its work than the other ranks take for theirs, most of it {where}."
        )
        if self.cause == "host":
            text += (
                f" Other programs had its core for {min(self.host_share, 1.0):.0%} of the extra "
                "time: look at what else runs on its host."
            )
        return text


@dataclass(frozen=True, slots=True)
class _Compared:
    """What is kept of a step; NaN where a rank does not count."""

    step: int
    extra_s: Floats
    """Beyond the expected, float64 [parts, ranks]."""
    whole_s: Floats
    """Expected, float64 [ranks]."""

    @property
    def excess(self) -> Floats:
        """Each rank's, float64 [ranks]."""
        whole_s = np.where(self.whole_s > 0, self.whole_s, np.nan)
        return np.asarray(self.extra_s.sum(axis=0) / whole_s)

    @property
    def ratio(self) -> Floats:
        """Logarithm of own over expected seconds of each rank: as far below 0 as above."""
        return np.log(np.maximum(1 + self.excess, 0.1))


class SlowRanks:
    """Watches the steps of a run; depends on nothing but what it is given."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._every, self._own = _Evidence(ranks, _HOST_PROOF), _Evidence(ranks, _PROOF)
        """By all seconds, and by those in which the rank had its core."""
        self._named = np.zeros(ranks, dtype=bool)

    def learn(self, step: int, times: StepTimes) -> list[SlowRank]:
        """Take a step into account; who is named by it, or cleared.

        Args:
            step: Its number.
            times: What ranks spent.

        Cost: O(ranks log ranks); some 0.3 ms for eight ranks.
        """
        if self._ranks < 2:
            return []
        data_s, sent_s = _others(times.data_s), _others(times.communication_s)
        for evidence, compute_s in ((self._every, times.compute_s), (self._own, times.core_s)):
            expected_s = np.array([data_s, _expected(times.predicted_s, compute_s), sent_s])
            own_s = np.array([times.data_s, compute_s, times.communication_s])
            evidence.learn(_Compared(step, own_s - expected_s, expected_s.sum(axis=0)))
        is_proven = self._every.is_proven | self._own.is_proven
        is_cleared = (self._every.proof == 0) & (self._own.proof == 0)
        newly, over = is_proven & ~self._named, is_cleared & self._named
        self._named = (self._named | is_proven) & ~is_cleared
        return [
            self._verdict(int(rank), step, is_over=bool(over[rank]))
            for rank in np.flatnonzero(newly | over)
        ]

    def _verdict(self, rank: int, step: int, *, is_over: bool) -> SlowRank:
        is_own = bool(self._own.is_proven[rank])
        by = self._own if is_own else self._every
        rows = by.rows_against(rank)
        steps = {row.step for row in rows}
        every_s, own_s = (
            float(sum(row.extra_s[:, rank].sum() for row in each.rows if row.step in steps))
            for each in (self._every, self._own)
        )
        host_share = min(1.0, max(0.0, 1 - own_s / every_s)) if every_s > 0 else 0.0
        extra_s = np.array([row.extra_s[:, rank] for row in rows])
        parts = np.median(extra_s / np.array([[row.whole_s[rank]] for row in rows]), axis=0)
        return SlowRank(
            rank,
            PARTS[int(np.argmax(parts))],
            float(np.median([row.excess[rank] for row in rows])),
            float(np.median(extra_s.sum(axis=1))),
            "rank" if is_own or host_share < _MOSTLY else "host",
            host_share,
            rows[0].step,
            step,
            is_over,
        )


class _Evidence:
    """Evidence that each rank is slow, from its excess in each step."""

    def __init__(self, ranks: int, needed: float) -> None:
        self.proof, self._needed = np.zeros(ranks), needed
        self.rows: deque[_Compared] = deque(maxlen=_RECENT)
        self._against: deque[Flags] = deque(maxlen=_RECENT)
        """Ranks that each step counts against."""
        self._ratios: deque[Floats] = deque(maxlen=_RECENT)
        self._blocks: deque[Floats] = deque(maxlen=_MOST_BLOCKS)
        """Median ratios of ``_BLOCK`` steps each."""
        self._noise = np.full(ranks, _LEAST_NOISE)
        self._steps = 0

    @property
    def is_proven(self) -> Flags:
        """Which ranks are slow."""
        return np.asarray(self.proof >= self._needed)

    def learn(self, row: _Compared) -> None:
        """Take a step into account."""
        self._steps += 1
        self.rows.append(row)
        self._ratios.append(ratio := row.ratio)
        if self._steps % _BLOCK == 0:
            self._blocks.append(np.median(np.array(self._ratios)[-_BLOCK:], axis=0))
        if self._steps % _NOISE_STEPS == 0 or self._steps == _KNOWN_STEPS + 1:
            self._noise = self._measure_noise()
        gained = (_SLOW - _EVEN) / self._noise**2 * (ratio - (_SLOW + _EVEN) / 2)
        gained = np.clip(np.nan_to_num(gained), -_STEP_PROOF, _STEP_PROOF)
        if self._steps <= _KNOWN_STEPS:
            gained[:] = 0.0
        self._against.append(gained > 0)
        self.proof = np.clip(self.proof + gained, 0.0, self._needed + _KEPT_PROOF)

    def rows_against(self, rank: int) -> list[_Compared]:
        """Recent steps that count against a rank, at least the last one."""
        pairs = list(zip(self.rows, self._against, strict=True))[-_SHOWN:]
        return [row for row, against in pairs if against[rank]] or [self.rows[-1]]

    def _measure_noise(self) -> Floats:
        """Noise of each rank's ratio in one step, whatever its level.

        Evidence adds up as if steps were independent. Where they are not, since other programs come
        and go, medians of some steps differ by more than that says, and count as noise as well.
        """
        noise = np.maximum(_LEAST_NOISE, _deviation(self._ratios))
        if len(self._blocks) < _LEAST_BLOCKS:
            return noise
        return np.maximum(noise, _BLOCK_NOISE * _deviation(self._blocks))


def _deviation(rows: Sequence[Floats]) -> Floats:
    """Standard deviation by the median change from row to row; 0 where nothing is known."""
    changes = np.abs(np.diff(np.array(rows), axis=0))
    deviation = np.zeros(changes.shape[1])
    known = np.isfinite(changes).any(axis=0)
    # 1.4826: of a normal distribution's median deviation; a difference has twice the variance.
    deviation[known] = 1.4826 / np.sqrt(2) * np.nanmedian(changes[:, known], axis=0)
    return deviation


def _expected(predicted_s: Floats, compute_s: Floats) -> Floats:
    """What the others would have spent on each rank's forward and backward, float64 [ranks]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        price = np.where(predicted_s > 0, compute_s / predicted_s, np.nan)
    return predicted_s * _others(price)


def _others(values: Floats) -> Floats:
    """For each rank the median of all others; NaN where no other has a value.

    >>> _others(np.array([1.0, 2.0, 9.0, np.nan])).tolist()
    [5.5, 5.0, 1.5, 2.0]
    """
    order = np.sort(values[np.isfinite(values)])
    known = np.isfinite(values)
    left = len(order) - known  # values of others
    place = np.where(known, np.searchsorted(order, values), len(order))
    middles = np.full((2, len(values)), np.nan)
    for row, at in zip(middles, ((left - 1) // 2, left // 2), strict=True):
        index = at + (at >= place)  # a rank's own value is passed over
        row[left > 0] = order[index[left > 0]]
    return np.asarray(middles.mean(axis=0))
