"""Judge who holds up a collective, from where every rank reports to be.

Why
    The rank that complains is never the cause. Ranks wait for ranks that wait for others; the
    cause is the one that waits for nobody, or gives no sign of life.

What it decides
    A rank is missing from a collective if it has entered fewer in that group, or is silent. The
    chain of waits is followed to ranks that do not wait: the culprits.

Kept true (tests/unit/comm/test_standstill.py, tests/multi/comm/test_watchdog.py)
    The message names the collective, who is missing, and why: ranks may be busy, silent, gone, in
    another collective, or waiting for such.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from equipoise.comm.meet import name_ranks
from equipoise.comm.progress import Standing, Wait
from equipoise.comm.signature import CALL_ALIKE

_MOST_NAMED = 6
"""Most ranks whose state a message gives."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank reports of itself, several times per deadline."""

    count: int
    """Grows with each beat."""
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
        wait, stack = standing.pop("wait"), tuple(standing.pop("stack", ()))
        if wait is not None:
            wait = Wait(**(wait | {"ranks": tuple(wait["ranks"])}))
        return cls(**(data | {"standing": Standing(wait, stack=stack, **standing)}))


@dataclass(frozen=True, slots=True)
class Standstill:
    """A wait beyond its deadline."""

    rank: int
    """The rank that waits."""
    what: str
    phase: str
    waited_s: float
    missing: tuple[int, ...]
    """Ranks that have not entered."""
    culprits: tuple[int, ...]
    """Ranks that hold up the missing ones, or the missing ones themselves."""
    text: str
    stacks: dict[str, list[str]] = field(default_factory=dict)
    """Where the named ranks were last seen, by rank; innermost line first."""
    calls: dict[str, str] = field(default_factory=dict)
    """What each rank called, if the ranks' collectives do not match."""

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
    advice: str,
) -> Standstill:
    """Say who holds up a rank that has waited too long, and give the advice.

    ``beats`` holds the last beat of each rank that has sent one, ``silent`` the ranks whose beats
    have stopped.
    """
    phase = beats[rank].phase
    missing = _not_come(rank, wait, beats, silent)
    culprits = _culprits(missing, beats, silent)
    named = list(dict.fromkeys((*missing, *culprits)))
    begin = f"Rank {rank} has waited {waited_s:.0f} s in {wait.what}"
    begin += f" ({phase})" if phase else ""
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        begin += f", to which {name_ranks(list(missing))} {verb} not come"
    else:
        named = [each for each in wait.ranks if each != rank]
        begin += ", to which all have come and which does not end"
    states = "; ".join(
        f"{'it' if [each] == [*missing] else f'rank {each}'} "
        f"{_state(beats.get(each), each in silent)}"
        for each in named[:_MOST_NAMED]
    )
    more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    text = f"{begin}: {states}{more}. {advice}"
    stacks = {str(each): [*beats[each].standing.stack] for each in named if each in beats}
    return Standstill(rank, wait.what, phase, waited_s, missing, culprits, text, stacks)


def find_circle(rank: int, beats: Mapping[int, Beat], silent: set[int]) -> tuple[int, ...]:
    """Ranks that wait in collectives for each other, this one among them; empty if none do.

    Each has entered a collective that another one of them has not, so it cannot end, unless a rank
    has entered it without waiting: that shows in the processor time that it goes on taking.
    """
    seen, left = {rank}, [rank]
    while left:
        at = left.pop()
        beat = beats.get(at)
        wait = None if beat is None else beat.standing.wait
        if wait is None or not wait.group:
            return ()
        missing = _not_come(at, wait, beats, silent)
        if not missing or any(_is_free(each, beats, silent) for each in missing):
            return ()
        left += [each for each in missing if each not in seen]
        seen.update(missing)
    return tuple(sorted(seen))


def tell_circle(
    waits: Mapping[int, Wait | None], calls: Mapping[str, str], name: Mapping[int, str]
) -> str:
    """A sentence on ranks that wait for each other in collectives of several groups.

    Args:
        waits: What each waits for.
        calls: What each called there, by rank.
        name: What each was doing.
    """
    sides = []
    for rank, wait in waits.items():
        if wait is None:
            continue
        phase = f" ({name[rank]})" if name.get(rank) else ""
        group = ", ".join(map(str, wait.ranks))
        sides.append(
            f"rank {rank} in collective {wait.call} of ranks {group}, {calls[str(rank)]}{phase}"
        )
    return (
        f"Ranks {', '.join(map(str, waits))} wait for each other, each in a collective that "
        f"another has not entered: {'; '.join(sides)}. That cannot end, so the ranks do. "
        f"{CALL_ALIKE}"
    )


def judge_alone(rank: int, wait: Wait, waited_s: float, phase: str) -> Standstill:
    """Judge a wait if the store does not answer."""
    where = f" ({phase})" if phase else ""
    text = (
        f"Rank {rank} has waited {waited_s:.0f} s in {wait.what}{where}, and the ranks' store, "
        f"which would say who is missing, does not answer. Look at the host that MASTER_ADDR "
        f"names and at rank 0, and run the same command again to resume from the last checkpoint."
    )
    return Standstill(rank, wait.what, phase, waited_s, (), (), text)


def _is_free(rank: int, beats: Mapping[int, Beat], silent: set[int]) -> bool:
    """Whether a rank is not known to wait for another."""
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
    if wait.call:  # messages that somebody has not sent
        return free or tuple(others)
    return free


def _culprits(
    missing: tuple[int, ...], beats: Mapping[int, Beat], silent: set[int]
) -> tuple[int, ...]:
    """The ranks at the end of the missing ones' waits, or the missing ones themselves."""
    left, seen, free = list(missing), set(missing), []
    while left:
        rank = left.pop()
        if _is_free(rank, beats, silent):
            free.append(rank)
            continue
        wait = beats[rank].standing.wait
        if wait is not None:
            ahead = [each for each in _not_come(rank, wait, beats, silent) if each not in seen]
            seen.update(ahead)
            left += ahead
    return tuple(sorted(free))


def _state(beat: Beat | None, is_silent: bool) -> str:
    """A rank's state as a predicate."""
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
