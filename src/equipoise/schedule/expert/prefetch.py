"""When slices of experts are read and gathered, while layers before them compute.

Why
    Weights of experts and their moments are most of a sparse model. Where memory does not hold
    them, they lie in a file, and fetching a layer when it is needed stops every rank.

What it decides
    A rank keeps a *slice* of each sparse layer, 1 / ranks of its experts, in a file of its own. A
    layer is computed with the *whole* of it, gathered from all ranks. Both ways are prefetched at
    once, each to its depth; capacity holds what is in memory::

        turn        0          1          2          3       ...
        computes    layer 0    layer 1    layer 2    layer 3
        network     gather 1   gather 2   gather 3   gather 4
        storage     read 2     read 3     read 4     read 5

    The forward visits layers upward and the backward downward, so the layers at the turn are still
    there. The optimizer visits them downward, with moments, and writes both back. What stays in
    memory beyond that is whatever is needed soonest: the order of visits is known, so this is
    Belady's choice, which no count of hits betters. A rank that is alone gathers nothing, and
    computes with its slice.

Kept true (tests/unit/schedule/expert/test_prefetch.py, by Hypothesis)
    Everything is in memory before it is used and nothing is fetched twice while it is there;
    capacity is never exceeded; from the least capacity on, nothing after the first turn waits to
    be asked for.

Sources
    2D prefetch, fused slices: SE-MoE, arXiv:2205.10034; its cache in memory goes by counts of hits.
    L. Belady, IBM Systems Journal 5(2), 1966.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from equipoise.base.errors import LayoutError
from equipoise.base.units import format_bytes
from equipoise.spec.model.experts import split_experts
from equipoise.spec.model.presets import ModelSpec

FP32_BYTES = 4

What = Literal["slice", "moments", "whole"]


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """What memory may hold of a layer."""

    what: What
    """``slice``: this rank's weights; ``moments``: of its optimizer; ``whole``: of all ranks."""
    layer: int


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """What one sparse layer takes on a rank."""

    slice: int
    moments: int
    whole: int
    """0 where a rank is alone, and its slice is the whole."""

    @classmethod
    def of_model(
        cls, model: ModelSpec, *, ranks: int, ep: int = 1, gather_bytes: int = FP32_BYTES
    ) -> "SliceBytes":
        """A layer of a model with AdamW in fp32.

        Args:
            model: With experts.
            ranks: All that share a stage.
            ep: Of them share experts; the others share the slices of these.
            gather_bytes: Of a weight as it is gathered.

        Raises:
            LayoutError: a rank would have no expert.
        """
        peers = ranks // ep
        longest = -(-split_experts(model.experts, ranks=ep)[0] // peers)
        weights = longest * model.expert_params
        is_own = peers == 1 and gather_bytes == FP32_BYTES
        whole = 0 if is_own else peers * weights * gather_bytes
        return cls(FP32_BYTES * weights, 2 * FP32_BYTES * weights, whole)

    def of(self, buffer: Buffer) -> int:
        """Bytes of a buffer."""
        sizes = {"slice": self.slice, "moments": self.moments, "whole": self.whole}
        return sizes[buffer.what]

    @property
    def least(self) -> int:
        """The least capacity: two layers, one used and one on its way, in a pass or an update."""
        return 2 * max(self.slice + self.whole, self.slice + self.moments)

    def require(self, capacity: int, *, layers: int, flag: str = "") -> None:
        """Refuse a capacity that does not hold two layers.

        Args:
            capacity: Of a rank [bytes].
            layers: Sparse layers of the model.
            flag: What gave it; ``experts.memory_mib``, which may be 0, unless given.

        Raises:
            LayoutError: says what would do.

        >>> SliceBytes(2 << 20, 4 << 20, 4 << 20).require(8 << 20, layers=3)
        Traceback (most recent call last):
            ...
        equipoise.base.errors.LayoutError: experts.memory_mib = 8 does not hold two of 3 sparse \
layers: one takes 6.0 MiB of a rank with its moments, and 6.0 MiB gathered. Set it to 12 or more, \
or to 0 for no limit.
        """
        if capacity >= self.least:
            return
        said = f"{flag or 'experts.memory_mib ='} {round(capacity / 2**20, 5):.10g}"
        gathered = f", and {format_bytes(self.slice + self.whole)} gathered" * bool(self.whole)
        unlimited = "" if flag else ", or to 0 for no limit"
        raise LayoutError(
            f"{said} does not hold two of {layers} sparse layers: one takes "
            f"{format_bytes(self.slice + self.moments)} of a rank with its moments{gathered}. Set "
            f"it to {_whole_mib(self.least)} or more{unlimited}."
        )


def _whole_mib(size: int) -> str:
    """MiB, rounded up to a hundredth.

    >>> _whole_mib(8 << 20), _whole_mib((123_456 << 20) + 1)
    ('8', '123456.01')
    """
    return f"{-(-size * 100 // 2**20) / 100:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Visit:
    """A layer's turn to be used."""

    layer: int
    is_update: bool = False
    """Whether the optimizer uses it, with moments, and writes both back."""


@dataclass(frozen=True, slots=True)
class Move:
    """A buffer comes into memory, or leaves it."""

    action: Literal["read", "gather", "free"]
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class PrefetchTurn:
    """One visit: what it must ask for itself, and what is begun before it computes."""

    visit: Visit
    demand: tuple[Move, ...]
    """Before it can compute; it waits for them."""
    ahead: tuple[Move, ...]
    """For later visits, while it computes."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """For how many visits to come slices are gathered and read; 0: on demand."""

    network: int = 1
    storage: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchSchedule:
    """The turns of a pass or an update, and what memory holds before and after."""

    turns: tuple[PrefetchTurn, ...]
    sizes: SliceBytes
    capacity: int
    before: frozenset[Buffer]
    after: frozenset[Buffer]
    peak_bytes: int

    @property
    def moves(self) -> list[Move]:
        """All of them, in order."""
        return [move for turn in self.turns for move in (*turn.demand, *turn.ahead)]

    @property
    def gathers(self) -> int:
        """Layers that are gathered."""
        return sum(move.action == "gather" for move in self.moves)

    @property
    def read_bytes(self) -> int:
        """From this rank's file."""
        return sum(self.sizes.of(move.buffer) for move in self.moves if move.action == "read")

    @property
    def written_bytes(self) -> int:
        """To this rank's file."""
        updates = sum(turn.visit.is_update for turn in self.turns)
        return updates * (self.sizes.slice + self.sizes.moments)

    @property
    def demanded(self) -> int:
        """Buffers that a visit had to ask for itself."""
        return sum(move.action != "free" for turn in self.turns for move in turn.demand)


def there_and_back(layers: int) -> list[Visit]:
    """A forward and its backward; the last layer is used twice in one turn.

    >>> [visit.layer for visit in there_and_back(3)]
    [0, 1, 2, 1, 0]
    """
    up = list(range(layers))
    return [Visit(layer) for layer in up + up[-2::-1]]


def upward(layers: int) -> list[Visit]:
    """A forward alone."""
    return [Visit(layer) for layer in range(layers)]


def updates(layers: int) -> list[Visit]:
    """The optimizer, last layer first: it leaves what the next forward begins with."""
    return [Visit(layer, is_update=True) for layer in reversed(range(layers))]


def schedule_prefetch(
    sizes: SliceBytes,
    capacity: int,
    visits: Sequence[Visit],
    *,
    before: Iterable[Buffer] = (),
    later: Sequence[Visit] = (),
    ahead: Ahead | None = None,
) -> PrefetchSchedule:
    """Decide what is read, gathered and freed in each turn.

    Args:
        sizes: Of a layer; all are alike.
        capacity: The most that memory holds of all buffers [bytes].
        visits: Of one pass, or of one update.
        before: What memory holds already.
        later: Visits that are expected after these; nothing is fetched for them.
        ahead: How far to look; one gather and two reads unless given.

    Raises:
        LayoutError: the capacity does not hold two layers.

    >>> sizes = SliceBytes(slice=1, moments=2, whole=2)
    >>> plan = schedule_prefetch(sizes, 6, there_and_back(4))
    >>> plan.gathers, plan.read_bytes, plan.peak_bytes, plan.demanded
    (6, 6, 6, 2)
    """
    sizes.require(capacity, layers=1 + max((visit.layer for visit in visits), default=0))
    work = _Work(sizes, capacity, [*visits, *later], set(before))
    if visits and visits[0].is_update:
        # Gathered weights are those of before.
        work.fresh = False
    turns = [work.turn(at, len(visits), ahead or Ahead()) for at in range(len(visits))]
    return PrefetchSchedule(
        tuple(turns), sizes, capacity, frozenset(before), frozenset(work.held), work.peak
    )


class _Work:
    """What memory holds while turns are planned."""

    def __init__(
        self, sizes: SliceBytes, capacity: int, visits: list[Visit], held: set[Buffer]
    ) -> None:
        self.sizes, self.capacity, self.visits, self.held = sizes, capacity, visits, held
        self.used = self.peak = sum(map(sizes.of, held))
        self.fresh = True
        self._moves: list[Move] = []

    def turn(self, at: int, count: int, ahead: Ahead) -> PrefetchTurn:
        """What is done for and beside one visit."""
        visit, self._moves = self.visits[at], []
        if not self.fresh:
            for buffer in sorted(each for each in self.held if each.what == "whole"):
                self._free(buffer)
            self.fresh = True
        needs = self._needs(visit)
        keep = set(needs)
        for buffer in needs:
            self._bring(buffer, at, keep, at)
        demand, self._moves = tuple(self._moves), []
        coming = [(n, self.visits[n]) for n in range(at + 1, min(count, at + 1 + ahead.storage))]
        near = coming[: ahead.network]
        for _, other in near:
            keep |= {*self._needs(other), Buffer("slice", other.layer)}
        for n, other in coming:
            self._read_ahead(n, other, at, keep)
        for n, other in near:
            if self.sizes.whole and not other.is_update:
                self._bring(Buffer("whole", other.layer), n, keep, at)
        return PrefetchTurn(visit, demand, tuple(self._moves))

    def _needs(self, visit: Visit) -> list[Buffer]:
        """What a visit uses."""
        if visit.is_update:
            return [Buffer("slice", visit.layer), Buffer("moments", visit.layer)]
        return [Buffer("whole" if self.sizes.whole else "slice", visit.layer)]

    def _read_ahead(self, n: int, visit: Visit, at: int, keep: set[Buffer]) -> None:
        """Read what a coming visit needs of the file."""
        for need in self._needs(visit):
            buffer = Buffer("slice", need.layer) if need.what == "whole" else need
            if need not in self.held:
                self._bring(buffer, n, keep, at)
                keep.add(buffer)

    def _bring(self, buffer: Buffer, n: int, keep: set[Buffer], at: int) -> bool:
        """Have a buffer for visit ``n``, if there is room without what is used before it."""
        if buffer in self.held:
            return True
        source = Buffer("slice", buffer.layer)
        if buffer.what == "whole" and not self._bring(source, n, keep | {source}, at):
            return False
        if not self._make_room(self.sizes.of(buffer), n, keep | {buffer, source}, at):
            return False
        self._moves.append(Move("gather" if buffer.what == "whole" else "read", buffer))
        self.held.add(buffer)
        self.used += self.sizes.of(buffer)
        self.peak = max(self.peak, self.used)
        return True

    def _make_room(self, size: int, n: int, keep: set[Buffer], at: int) -> bool:
        """Free what is used last, as long as that is after visit ``n``."""
        chosen: list[Buffer] = []
        left = self.used + size - self.capacity
        order = sorted(self.held - keep, key=lambda each: (-self._next_use(each, at), each))
        for buffer in order:
            if left <= 0:
                break
            if self._next_use(buffer, at) <= n:
                return False
            chosen.append(buffer)
            left -= self.sizes.of(buffer)
        if left > 0:
            return False
        for buffer in chosen:
            self._free(buffer)
        return True

    def _free(self, buffer: Buffer) -> None:
        self._moves.append(Move("free", buffer))
        self.held.remove(buffer)
        self.used -= self.sizes.of(buffer)

    def _next_use(self, buffer: Buffer, at: int) -> int:
        """The next visit after this one that takes a buffer from memory; past all of them: none."""
        never = len(self.visits)
        skips = buffer.what == "slice" and Buffer("whole", buffer.layer) in self.held
        for n in range(at + 1, never):
            visit = self.visits[n]
            if visit.layer != buffer.layer:
                continue
            if buffer.what == "whole":
                return never if visit.is_update else n
            if buffer.what == "moments" and not visit.is_update:
                continue
            if skips and not visit.is_update:
                skips = False
                continue
            return n
        return never
