"""Let ranks find each other and compare what they run, before any of them enters a collective.

Why
    Two versions or two seeds train silently and wrongly, and a rank that never arrives leaves
    the others in a connection that names nobody.

What it decides
    Each rank leaves its facts in the store. Rank 0 reads them in the order of ranks, stops at the
    first difference or the deadline, and leaves a verdict that all others read. So each other
    rank reads twice, however many there are, and all report the same.

Kept true (tests/unit/comm/test_meet.py, tests/multi/launch/test_start.py)
    Before any process group is made, every rank reports a difference with both sides' values, and
    a missing rank by its number.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from equipoise.base.errors import FaultError, HungError, LayoutError

_NAMED_FACTS = 6
"""Most differences that a message names."""

_NAMED_RANKS = 16
"""Most ranks that a message names."""

_GRACE_S = 5.0
"""How long other ranks wait for the verdict beyond rank 0's own deadline."""

Facts = Mapping[str, str]


def name_ranks(ranks: list[int]) -> str:
    """Ranks as words in a sentence.

    >>> name_ranks([1]), name_ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    listed = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}{more}"


def open_store(rank: int, *, deadline_s: float) -> dist.Store:
    """The store that ``torchrun`` named in the environment, for this attempt.

    Each restart gets a prefix of its own: after a restart the agent's store still holds the
    addresses of the dead attempt, and gloo would dial those.

    Raises:
        FaultError: nobody answers at the address, or rank 0 cannot listen there.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_owns_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not agent_owns_store
    try:
        store = dist.TCPStore(
            host, port, is_master=is_master, timeout=timedelta(seconds=deadline_s)
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if is_master:
            raise FaultError(
                f"Rank 0 cannot listen at {host}:{port}, where the other ranks look for it. Set "
                f"MASTER_ADDR to its host and MASTER_PORT to a port that is free."
            ) from error
        raise FaultError(
            f"Rank {rank} found nobody at {host}:{port} within {deadline_s:g} s. Start rank 0 "
            f"there, or set MASTER_ADDR and MASTER_PORT to where it runs."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store)


def serve_store(listener: socket.socket) -> dist.Store:
    """Be the store of ranks that look for it where ``listener`` listens, while it is kept.

    The socket is the store's from then on.
    """
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def meet(store: dist.Store, rank: int, world: int, facts: Facts, *, deadline_s: float) -> None:
    """Wait until every rank has arrived, and refuse ranks that would run something else.

    Args:
        store: A store that all ranks reach.
        rank: This rank.
        world: Number of ranks.
        facts: What must be equal on all ranks, by name: versions, settings, digests.
        deadline_s: The longest wait for the last rank [s].

    Raises:
        LayoutError: facts differ; names the ranks and the values.
        HungError: some rank did not arrive in time.

    Cost: two reads of the store; on rank 0 one for each rank.
    """
    store.set(f"facts/{rank}", json.dumps(dict(facts)))
    if rank == 0:
        verdict = _judge(store, world, facts, deadline_s)
        store.set("verdict", json.dumps(verdict))
        if verdict[0] != "same":  # the store may end with this rank: others read it first
            present = [r for r in range(1, world) if store.check([f"facts/{r}"])]
            _waited(store, [f"read/{r}" for r in present], _GRACE_S)
    elif _waited(store, ["verdict"], deadline_s + _GRACE_S):
        verdict = json.loads(store.get("verdict"))
        with suppress(dist.DistNetworkError):
            store.set(f"read/{rank}", "")
    else:
        verdict = ["missing", _missing([0], world, rank, deadline_s), [0]]
    kind, text, missing = verdict
    if kind == "differ":
        raise LayoutError(text)
    if kind == "missing":
        raise HungError(text, tuple(missing), missing[0] if len(missing) == 1 else None)


def _judge(store: dist.Store, world: int, facts: Facts, deadline_s: float) -> list[Any]:
    """``same``, ``differ`` or ``missing``; a sentence; the missing ranks."""
    end = time.monotonic() + deadline_s
    for rank in range(1, world):
        came = _waited(store, [f"facts/{rank}"], max(0.001, end - time.monotonic()))
        if came and json.loads(store.get(f"facts/{rank}")) == facts:
            continue
        # Report differences of all ranks that are present, not only of this one.
        present = [r for r in range(1, world) if store.check([f"facts/{r}"])]
        others = {r: json.loads(store.get(f"facts/{r}")) for r in present}
        if text := tell_differences(others, facts):
            return ["differ", text, []]
        missing = sorted({*range(1, world)} - {*present})
        return ["missing", _missing(missing, world, 0, deadline_s), missing]
    return ["same", "", []]


def _waited(store: dist.Store, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except (dist.DistStoreError, dist.DistNetworkError):
        return False
    return True


def tell_differences(others: Mapping[int, Facts], mine: Facts) -> str:
    """Name the ranks whose facts differ from rank 0's, with the facts; empty if none do.

    Args:
        others: Facts of other ranks.
        mine: Facts of rank 0.

    >>> tell_differences({1: {"equipoise": "2"}, 2: {"equipoise": "1"}}, {"equipoise": "1"})[28:75]
    'equipoise is 2 on rank 1 and 1 on rank 0. Start'
    """
    names = list(dict.fromkeys([*mine, *(name for facts in others.values() for name in facts)]))
    differences = []
    for name in names:
        others_of: dict[str, list[int]] = {}
        for rank, facts in sorted(others.items()):
            if facts.get(name) != mine.get(name):
                others_of.setdefault(facts.get(name, "not known"), []).append(rank)
        if others_of:
            values = ", ".join(f"{value} on {name_ranks(r)}" for value, r in others_of.items())
            differences.append(f"{name} is {values} and {mine.get(name, 'not known')} on rank 0")
    if not differences:
        return ""
    more = (
        f"; and {len(differences) - _NAMED_FACTS} more" if len(differences) > _NAMED_FACTS else ""
    )
    return (
        f"Not all ranks run the same: {'; '.join(differences[:_NAMED_FACTS])}{more}. Start every "
        f"rank from one prepared folder and in one environment."
    )


def _missing(ranks: list[int], world: int, waiting: int, deadline_s: float) -> str:
    verb, them, their = ("has", "it", "its") if len(ranks) == 1 else ("have", "them", "their")
    named = name_ranks(ranks)
    return (
        f"{named[0].upper()}{named[1:]} of {world} {verb} not come within {deadline_s:g} s of rank "
        f"{waiting}. Start {them}, or look into {their} log; where starting takes longer, raise "
        f"layout.deadline_s."
    )
