"""Who holds up a collective, judged from where every rank says that it stands.

Why
    The rank that complains is never the one to look at. Ranks wait for ranks that wait for
    others: the cause is the one that waits for nobody, or that gives no sign of life.

What it decides
    A rank has not come to a collective if it has entered fewer in that group, or is silent. Whom
    those wait for is followed until there are ranks that do not wait: these are the culprits.

Kept true (tests/unit/comm/test_standstill.py, tests/multi/comm/test_watchdog.py)
    The sentence names the collective, who is missing from it, and why, for ranks that are busy,
    silent, gone, in another collective, or waiting for such.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.comm.meet import name_ranks
from equipoise.comm.progress import Standing, Wait

_TOLD = 6
"""Most ranks whose place is told."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself, some times a minute."""

    count: int
    """Grows with each."""
    phase: str
    """``forward of step 7``."""
    standing: Standing
    host: str
    process: int
    has_left: bool = False

    @classmethod
    def read(cls, data: dict[str, Any]) -> "Beat":
        """From JSON of ``dataclasses.asdict``."""
        standing = dict(data["standing"])
        wait = standing.pop("wait")
        if wait is not None:
            wait = Wait(**(wait | {"ranks": tuple(wait["ranks"])}))
        return cls(**(data | {"standing": Standing(wait, **standing)}))


@dataclass(frozen=True, slots=True)
class Standstill:
    """A wait that is over its deadline."""

    rank: int
    """Who waits."""
    what: str
    phase: str
    waited_s: float
    missing: tuple[int, ...]
    """Ranks that have not come."""
    culprits: tuple[int, ...]
    """Ranks that hold the missing ones up, or are these."""
    text: str

    @classmethod
    def read(cls, data: dict[str, Any]) -> "Standstill":
        """From JSON of ``dataclasses.asdict``."""
        ranks = {name: tuple(data[name]) for name in ("missing", "culprits")}
        return cls(**(data | ranks))


def judge(
    rank: int,
    wait: Wait,
    waited_s: float,
    beats: Mapping[int, Beat],
    silent: set[int],
    *,
    deadline_s: float,
) -> Standstill:
    """Say of a rank that waits for too long who holds it up.

    Args:
        rank: Who waits.
        wait: For what.
        waited_s: For how long [s].
        beats: The last beat of each rank of which there is any, and its own.
        silent: Ranks whose beats have ended.
        deadline_s: What waits may last [s].
    """
    phase = beats[rank].phase
    missing = _not_come(rank, wait, beats, silent)
    culprits = _culprits(missing, beats, silent)
    told = list(dict.fromkeys((*missing, *culprits)))
    begin = f"Rank {rank} has waited {waited_s:.0f} s in {wait.what}"
    begin += f" ({phase})" if phase else ""
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        begin += f", to which {name_ranks(list(missing))} {verb} not come"
    else:
        told = [each for each in wait.ranks if each != rank]
        begin += ", to which all have come and which does not end"
    states = "; ".join(
        f"{'it' if [each] == [*missing] else f'rank {each}'} "
        f"{_state(beats.get(each), each in silent)}"
        for each in told[:_TOLD]
    )
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    text = (
        f"{begin}: {states}{more}. Run the same command again to resume from the last checkpoint; "
        f"where a rank was only slow, raise layout.deadline_s = {deadline_s:g}."
    )
    return Standstill(rank, wait.what, phase, waited_s, missing, culprits, text)


def judge_alone(rank: int, wait: Wait, waited_s: float, phase: str) -> Standstill:
    """Say it where the others cannot be asked."""
    where = f" ({phase})" if phase else ""
    text = (
        f"Rank {rank} has waited {waited_s:.0f} s in {wait.what}{where}, and the ranks' store, "
        f"which would tell who has not come, does not answer. Look at the host that MASTER_ADDR "
        f"names and at rank 0, and run the same command again to resume from the last checkpoint."
    )
    return Standstill(rank, wait.what, phase, waited_s, (), (), text)


def _is_free(rank: int, beats: Mapping[int, Beat], silent: set[int]) -> bool:
    """Whether a rank waits for nobody, as far as is known."""
    beat = beats.get(rank)
    return beat is None or rank in silent or beat.has_left or beat.standing.wait is None


def _not_come(
    rank: int, wait: Wait, beats: Mapping[int, Beat], silent: set[int]
) -> tuple[int, ...]:
    others = [each for each in wait.ranks if each != rank]
    if wait.group:
        return tuple(
            each
            for each in others
            if each in silent
            or each not in beats
            or beats[each].standing.calls.get(wait.group, 0) < wait.call
        )
    free = tuple(each for each in others if _is_free(each, beats, silent))
    if wait.call:  # messages, which somebody has not sent
        return free or tuple(others)
    return free


def _culprits(
    missing: tuple[int, ...], beats: Mapping[int, Beat], silent: set[int]
) -> tuple[int, ...]:
    """Whom the missing ones wait for in the end, or themselves."""
    left, seen, found = list(missing), set(missing), []
    while left:
        rank = left.pop()
        if _is_free(rank, beats, silent):
            found.append(rank)
            continue
        wait = beats[rank].standing.wait
        if wait is not None:
            ahead = [each for each in _not_come(rank, wait, beats, silent) if each not in seen]
            seen.update(ahead)
            left += ahead
    return tuple(sorted(found))


def _state(beat: Beat | None, is_silent: bool) -> str:
    """What is known of a rank, after its name."""
    if beat is None:
        return "has given no sign of life"
    process = f"process {beat.process} on {beat.host}"
    where = ", ".join(filter(None, (beat.phase, beat.standing.place)))
    if beat.has_left:
        return f"has ended ({process})"
    if is_silent:
        return f"gives no sign of life ({process}; last in {where or 'nothing that is known'})"
    wait = beat.standing.wait
    if wait is not None:
        return f"waits in {wait.what} ({where})"
    return f"is busy ({process}; in {where or 'nothing that is known'})"
