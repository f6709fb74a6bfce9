"""Check an attention schedule's messages: each send has its receive, and nobody waits for ever.

Kept true (tests/unit/schedule/attention/test_check.py)
    Dropped, doubled, changed and reordered messages are reported, and so is a deadlock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from equipoise.schedule.attention.schedule import AttentionSchedule, Message

_Listed = tuple[int, Message]
"""A message and the round in which it is listed."""


def _by_link(schedule: AttentionSchedule, *, is_sent: bool) -> dict[tuple[int, int], list[_Listed]]:
    """Messages of each (source, target), in order."""
    links: dict[tuple[int, int], list[_Listed]] = defaultdict(list)
    for rank, at, each in schedule:
        for message in each.sends if is_sent else each.receives:
            link = (rank, message.peer) if is_sent else (message.peer, rank)
            links[link].append((at, message))
    return links


def _name(message: Message) -> tuple[object, ...]:
    return message.carries, message.heads, message.rounds, tuple(map(tuple, message.runs.tolist()))


def message_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield sends without a receive, receives without a send, and wrong orders."""
    sent, received = _by_link(schedule, is_sent=True), _by_link(schedule, is_sent=False)
    for link in sorted({*sent, *received}):
        source, target = link
        if not (0 <= source < schedule.ranks and 0 <= target < schedule.ranks) or source == target:
            yield f"A message goes from rank {source} to rank {target} of {schedule.ranks} ranks."
            return
        ours, theirs = sent.get(link, []), received.get(link, [])
        left = Counter(_name(message) for _, message in theirs)
        for at, message in ours:
            if not message.tokens or message.heads[0] >= message.heads[1] or message.rounds < 1:
                yield f"Rank {source} sends an empty message to rank {target} in round {at}."
                return
            if not left[_name(message)]:
                yield (
                    f"Rank {source} sends {message} to rank {target} in round {at}, and rank "
                    f"{target} has no receive for it."
                )
                return
            left[_name(message)] -= 1
        for at, message in theirs:
            if left[_name(message)]:
                yield (
                    f"Rank {target} receives {message} from rank {source} in round {at}, and rank "
                    f"{source} has no send for it."
                )
                return
        for (at, one), (_, other) in zip(ours, theirs, strict=True):
            if _name(one) != _name(other):
                yield (
                    f"Rank {source} sends {one} to rank {target} in round {at}, and rank {target} "
                    f"receives {other} first."
                )
                return


def deadlock_faults(schedule: AttentionSchedule) -> Iterator[str]:
    """Yield a circle of ranks waiting for each other, if sends block until received."""
    sent, received = _by_link(schedule, is_sent=True), _by_link(schedule, is_sent=False)
    # What each rank waits for before it ends a round: (peer, round in which the peer posts it).
    waits: list[dict[int, list[_Wait]]] = [defaultdict(list) for _ in range(schedule.ranks)]
    for (source, target), ours in sent.items():
        for (at, message), (then, _) in zip(ours, received[source, target], strict=True):
            waits[source][at + message.rounds - 1].append((target, then, message))
            waits[target][then + message.rounds - 1].append((source, at, message))
    for rank, due in enumerate(waits):
        late = max(due, default=0)
        if late >= len(schedule.rounds[rank]) and due:
            yield (
                f"Rank {rank} has a message in flight until round {late} but only "
                f"{len(schedule.rounds[rank])} rounds."
            )
            return
    now = [0] * schedule.ranks
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, due in enumerate(waits):
            while now[rank] < len(schedule.rounds[rank]) and all(
                then <= now[peer] for peer, then, _ in due.get(now[rank], ())
            ):
                now[rank] += 1
                is_moving = True
    for rank, due in enumerate(waits):
        if now[rank] < len(schedule.rounds[rank]):
            peer, then, message = next(w for w in due[now[rank]] if w[1] > now[w[0]])
            yield (
                f"Rank {rank} waits in round {now[rank]} for {message} with rank {peer}, which "
                f"lists it in its round {then} and waits in round {now[peer]}."
            )
            return


_Wait = tuple[int, int, Message]
