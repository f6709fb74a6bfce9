"""What a rehearsed run left in its folder: events, checkpoints, processes."""

import hashlib
import json
from pathlib import Path
from typing import Any

from equipoise.launch.agent import PROGRAM
from equipoise.launch.spare import AT_WORK, WAITING, state_of
from equipoise.observe.event import is_whole, journal_name
from equipoise.spec.names import CHECKPOINTS


def events(folder: Path, *names: str, rank: int = 0) -> list[dict[str, Any]]:
    """Events of these names in a rank's journal, in the order in which they were written."""
    path = folder / "journal" / journal_name(rank)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}\n") and is_whole(line)]
    return [event for event in whole if event["name"] in names]


def resumed_s(folder: Path, since: float | None = None) -> float | None:
    """To the end of the first step after a fault [s]; None if there is none.

    Args:
        folder: The run's.
        since: From this moment on, by the clock on the wall; from the launcher's decision on the
            first fault unless given.
    """
    for event in events(folder, "recovery", "step"):
        if event["name"] == "recovery":
            since = event["t"] if since is None else since
        elif since is not None and event["t"] > since:
            return float(event["t"] - since)
    return None


def state(folder: Path, step: int) -> str:
    """A digest of every byte of weights and moments that a run saved after a step; "" if none."""
    shards = sorted((folder / CHECKPOINTS / f"step-{step:06}").glob("shard-*"))
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.name.encode() + shard.read_bytes())
    return digest.hexdigest() if shards else ""


def ledger(folder: Path) -> dict[int, tuple[str, int]]:
    """What each step trained: the digest of its documents' pieces, and tokens seen until then."""
    packs = {event["step"]: event["digest"] for event in events(folder, "pack")}
    return {
        event["step"]: (packs.get(event["step"], ""), event["tokens_seen"])
        for event in events(folder, "step")
    }


def processes(folder: Path) -> dict[int, int]:
    """Process of each rank of a run's folder that is alive and at work."""
    return _processes(folder, AT_WORK)


def spares(folder: Path) -> dict[int, int]:
    """Process of each rank that is kept ready for the next start of a run's folder."""
    return _processes(folder, WAITING)


def _processes(folder: Path, state: str) -> dict[int, int]:
    alive = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if PROGRAM.encode() not in words or str(folder).encode() not in words:
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        ranks = [word for word in (*words, *environment) if word.startswith(b"RANK=")]
        number = ranks[0].removeprefix(b"RANK=") if ranks else b""  # the agent has none
        if number.isdigit() and state_of(int(entry.name)) == state:
            alive[int(number)] = int(entry.name)
    return alive
