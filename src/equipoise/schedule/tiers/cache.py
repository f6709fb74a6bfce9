"""A set-associative cache of rows: which stay, which go, which pass it by. Decides; moves nothing.

Why
    Which rows are worth a fast slot follows from the trace alone. The trainer's tables and a replay
    on a laptop make the very same decisions with this class.

What it decides
    A row has one set, by a hash, and any of its ways. After each step the step's rows want a slot.
    Rows that are in stay. A row that is not takes the way of its set that the policy values least,
    never one of this step's rows; where none is left, it passes by and lives in the slow tier::

        lru     the way whose last step is oldest
        lfu     the way whose row was in the fewest steps, counted for all rows in a byte each, and
                halved when one is full; a row that was in fewer still passes by
        trace   the way whose next step is farthest, known from the coming steps; a row whose own
                next step is farther still passes by

Kept true (tests/unit/schedule/test_tiers.py, by Hypothesis)
    A row is in one slot of its set or in none; a step's rows never evict each other; equal traces
    give equal decisions; no policy beats Belady's bound.

Sources
    32-way set-associative, LRU or LFU: arXiv:2010.11305 and Neo, arXiv:2104.05158.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError

CachePolicy = Literal["lru", "lfu", "trace"]
CACHE_POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
MOST_WAYS = 32
SLOT_BYTES = 9
"""What a slot takes beside its row: a tag of 4 bytes, a stamp of 4, whether it is dirty."""
_MOST_COUNT = 255
_NEVER = np.iinfo(np.int32).max
_HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """Where a step's rows lie from now on."""

    slots: Ints
    """The slot of each row, int64 [rows]; -1: it passes by."""
    is_new: np.ndarray
    """Whether the row came in with this step, bool [rows]."""
    leaving: Ints
    """Rows that must be written back, int64."""
    left: Ints
    """The slots that they leave, int64."""


class SetCache:
    """Tags of a cache."""

    def __init__(
        self, rows: int, slots: int, policy: CachePolicy = "lru", *, ways: int = MOST_WAYS
    ) -> None:
        """An empty cache of at most ``slots`` slots, in whole sets of ``ways``, for some rows.

        Raises:
            SpecError: the policy is unknown, or a number is out of range.
        """
        if policy not in CACHE_POLICIES:
            raise SpecError(
                f'"{policy}" is not a policy of a cache. Choose from {", ".join(CACHE_POLICIES)}.'
            )
        if slots < 0 or ways < 1:
            raise SpecError(
                f"A cache of {slots} slots in sets of {ways} cannot be. Give 0 or more slots, and "
                "sets of 1 or more."
            )
        if not 0 <= rows <= _NEVER:
            raise SpecError(
                f"A cache before {rows:,} rows cannot be: its tags have 4 bytes. Divide the table "
                "over more shards."
            )
        self.policy, self.ways = policy, max(1, min(ways, slots))
        self.sets = slots // self.ways
        self.now = 0
        self.tags = np.full((self.sets, self.ways), -1, dtype=np.int32)
        self.stamps = np.zeros((self.sets, self.ways), dtype=np.int32)
        self.dirty = np.zeros((self.sets, self.ways), dtype=bool)
        self.counts = np.zeros(rows if policy == "lfu" else 0, dtype=np.uint8)
        self._uses: tuple[Ints, int, int] | None = None

    @property
    def slots(self) -> int:
        """Slots of all sets."""
        return self.sets * self.ways

    @property
    def held_bytes(self) -> int:
        """What the cache takes beside the rows in it."""
        return self.slots * SLOT_BYTES + len(self.counts)

    def expect(self, steps: Sequence[Ints], first: int) -> None:
        """Tell ``trace`` the distinct rows of steps; ``first`` numbers the first of them, from 0.

        Steps that are over may stand among them.
        """
        if self.policy != "trace":
            return
        count = len(steps) + 1
        keys = [rows * count + place for place, rows in enumerate(steps)]
        joined = np.concatenate(keys) if keys else np.empty(0, dtype=np.int64)
        self._uses = (np.sort(joined), first, count)
        tags = self.tags.reshape(-1)
        held = np.flatnonzero(tags >= 0)
        self.stamps.reshape(-1)[held] = self._next_uses(tags[held].astype(np.int64))

    def find(self, rows: Ints) -> Ints:
        """The slot of each row, int64 [rows]; -1 where it is in none."""
        if not self.sets or not len(rows):
            return np.full(len(rows), -1, dtype=np.int64)
        sets = self._set_of(rows)
        match = self.tags[sets] == rows[:, None]
        return np.where(match.any(axis=1), sets * self.ways + match.argmax(axis=1), -1)

    def admit(self, rows: Ints) -> Admission:
        """Give the distinct rows of the next step their slots; all in slots are dirty then."""
        self.now += 1
        slots = self.find(rows)
        is_new = np.zeros(len(rows), dtype=bool)
        nothing = np.empty(0, dtype=np.int64)
        if not self.sets or not len(rows):
            return Admission(slots, is_new, nothing, nothing)
        tags, stamps, dirty = self.tags.reshape(-1), self.stamps.reshape(-1), self.dirty.reshape(-1)
        is_hit = slots >= 0
        hits = slots[is_hit]
        worth_of = self._worth_rows(rows)
        misses = np.flatnonzero(slots < 0)
        if worth_of is not None:
            misses = misses[np.argsort(-worth_of[misses], kind="stable")]
        sets = self._set_of(rows[misses])
        order = np.argsort(sets, kind="stable")
        misses, sets = misses[order], sets[order]
        touched, start, place = np.unique(sets, return_index=True, return_inverse=True)
        within = np.arange(len(misses)) - start[place]
        worth = self._worth(touched)
        locked = np.zeros(self.slots, dtype=bool)
        locked[hits] = True
        free = ~locked.reshape(self.sets, self.ways)[touched]
        worth = np.where(free, worth, np.iinfo(np.int64).max)
        ways = np.argsort(worth, axis=1, kind="stable")
        is_taken = within < free.sum(axis=1)[place]
        misses, place, within = misses[is_taken], place[is_taken], within[is_taken]
        chosen = ways[place, within]
        if worth_of is not None:
            is_better = worth_of[misses] > worth[place, chosen]
            misses, place, chosen = misses[is_better], place[is_better], chosen[is_better]
        came = touched[place] * self.ways + chosen
        is_written = dirty[came] & (tags[came] >= 0)
        leaving, left = tags[came[is_written]].astype(np.int64), came[is_written]
        tags[came] = rows[misses]
        slots[misses], is_new[misses] = came, True
        dirty[came] = dirty[hits] = True
        stamps[came] = stamps[hits] = self.now
        if self.policy == "trace" and worth_of is not None:
            stamps[came], stamps[hits] = -worth_of[misses], -worth_of[is_hit]
        return Admission(slots, is_new, leaving, left)

    def arrays(self) -> dict[str, np.ndarray]:
        """All that its decisions depend on, but for coming steps."""
        now = np.array([self.now], dtype=np.int64)
        parts = {"tags": self.tags, "stamps": self.stamps, "dirty": self.dirty, "now": now}
        return parts | {"counts": self.counts}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Take what ``arrays`` gave; False where that cache had another shape."""
        if any(arrays[name].shape != own.shape for name, own in self.arrays().items()):
            return False
        self.tags[:], self.stamps[:] = arrays["tags"], arrays["stamps"]
        self.dirty[:], self.now = arrays["dirty"], int(arrays["now"][0])
        self.counts[:] = arrays["counts"]
        return True

    def _set_of(self, rows: Ints) -> Ints:
        with np.errstate(over="ignore"):
            mixed = (rows.astype(np.uint64) * _HASH) >> np.uint64(32)
        sets: Ints = (mixed % np.uint64(self.sets)).astype(np.int64)
        return sets

    def _worth(self, sets: Ints) -> Ints:
        """What the policy holds of each way, int64 [sets, ways]; the least goes first."""
        tags, worth = self.tags[sets], self.stamps[sets].astype(np.int64)
        if self.policy == "trace":
            worth = -np.where(worth < self.now, _NEVER, worth)  # past steps come no more
        elif self.policy == "lfu":
            worth = self.counts[np.maximum(tags, 0)].astype(np.int64)
        return np.where(tags < 0, np.iinfo(np.int64).min, worth)

    def _worth_rows(self, rows: Ints) -> Ints | None:
        """What the policy holds of this step's rows; None: more than of any other."""
        if self.policy == "trace":
            return -self._next_uses(rows)
        if self.policy == "lfu":
            if (self.counts[rows] == _MOST_COUNT).any():
                self.counts >>= 1
            self.counts[rows] += 1
            return self.counts[rows].astype(np.int64)
        return None

    def _next_uses(self, rows: Ints) -> Ints:
        """The next step of each row after this one, int64 [rows]; never: the greatest int32."""
        if self._uses is None:
            return np.full(len(rows), _NEVER, dtype=np.int64)
        keys, first, count = self._uses
        # This step is number ``now - 1`` of all; look for one after it.
        at = np.searchsorted(keys, rows * count + (self.now - first))
        following = np.append(keys, -1)[np.minimum(at, len(keys))]
        is_same = (at < len(keys)) & (following // count == rows)
        return np.where(is_same, following % count + first, _NEVER)
