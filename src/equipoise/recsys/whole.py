"""Which checkpoints of a recommender are whole: digests of all files, and the newest that is right.

Why
    A flipped bit of a table is a number like any other, and a cut file may end the run that needs
    it. Neither may be loaded while an older checkpoint is right.

What it decides
    ``recommend.json`` lists every other file with its size and digest, and has a digest of itself;
    nothing else lies in the folder. Ranks divide the files among them, so each is read once to be
    verified, and pass over a damaged checkpoint together. Manifests of format 1 have no digests:
    their files are only opened.

Kept true (tests/multi/recsys/test_torn.py)
    Any byte changed in, dropped from or added to a checkpoint is detected and the file named; the
    run goes on from the newest that is whole, and ends with the weights of one without damage.
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import CheckpointError
from equipoise.base.read import read_json, reason, require_file
from equipoise.checkpoint.manifest import find_checkpoints, folder_name
from equipoise.spec.names import CHECKPOINTS

MANIFEST = "recommend.json"
_FORMAT = 2
_KINDS = {
    "step": int,
    "losses": list,
    "best": dict | None,
    "optimizer": str,
    "number": int,
    "ranks": int,
    "parts": list,
    "tables": dict,
}
_TORN = (ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError)
"""What readers raise of a file that was cut or written over."""

_Value = TypeVar("_Value")


def gather(ranks: int, value: _Value) -> list[_Value]:
    """What every rank has, in order; all of them call it."""
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def seal(facts: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> str:
    """The text of a manifest.

    Args:
        facts: What the checkpoint says of itself.
        files: Size [bytes] and digest of each other file.
    """
    whole = {**facts, "format": _FORMAT, "files": dict(sorted(files.items()))}
    return json.dumps(whole | {"digest": digest(whole)})


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: its step, ranks, tables and files.

    Raises:
        OSError: its manifest cannot be read.
        ValueError: that is damaged, or not what ``seal`` writes.
        CheckpointError: a newer version wrote it.
    """
    facts = read_json(checkpoint / MANIFEST)
    if isinstance(facts, dict):
        facts.setdefault("parts", [])  # of a version without towers
    wrong = [
        name
        for name, kind in _KINDS.items()
        if not isinstance(facts, dict) or name not in facts or not isinstance(facts[name], kind)
    ]
    if wrong:
        raise ValueError(f"it does not say {wrong[0]} as a checkpoint does")
    form = facts.get("format", 1)
    if isinstance(form, int) and form > _FORMAT:
        raise CheckpointError(
            f"{checkpoint} has checkpoint format {form}; this version of equipoise reads up to "
            f"{_FORMAT}. Upgrade equipoise."
        )
    if "digest" in facts or form != 1:
        if digest({key: facts[key] for key in facts if key != "digest"}) != facts.get("digest"):
            raise ValueError("its bytes have changed")
        facts["files"] = {name: (size, sum_) for name, (size, sum_) in facts["files"].items()}
    return dict(facts)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def stored_files(checkpoint: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Files with regions of tables, one a rank."""
    return [checkpoint / f"rank-{rank:05d}.safetensors" for rank in range(facts["ranks"])]


def find_damage(checkpoint: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint, as a sentence; "" if this rank finds nothing.

    Args:
        checkpoint: Its folder.
        rank: Which share of its files is read; every rank reads its manifest.
        ranks: Shares.

    Raises:
        CheckpointError: a newer version wrote it.
    """
    file = checkpoint / MANIFEST
    try:
        facts = read_facts(checkpoint)
        name = folder_name(facts["step"])
        if checkpoint.name != name:
            return (
                f"{checkpoint} holds the checkpoint of step {facts['step']} by its {MANIFEST}, "
                f"whose folder is named {name}."
            )
        if "files" not in facts:
            for file in _needed(checkpoint, facts)[rank::ranks]:
                _open(file)
            return ""
        for path in sorted(checkpoint.iterdir()):
            if path.name not in (*facts["files"], MANIFEST):
                return f"{checkpoint} holds {path.name}, which its {MANIFEST} does not list."
        for name, (size, expected) in [*facts["files"].items()][rank::ranks]:
            file = checkpoint / name
            if file.is_symlink() or (file.exists() and not file.is_file()):
                return f"{file} cannot be read: it is not a regular file."
            held = file.stat().st_size
            if held != size:
                return f"{file} has {held:,} bytes, and {MANIFEST} says {size:,}."
            if digest_file(file) != expected:
                return f"{file} is damaged: its bytes have changed{_tables(file)}."
    except (OSError, *_TORN) as error:
        # torch says "invalid argument" of a file that was cut.
        is_cut = file.suffix == ".pt" and getattr(error, "errno", 0) == errno.EINVAL
        says_why = isinstance(error, ValueError | OSError) and not is_cut
        return f"{file} cannot be read: {reason(error) if says_why else 'it is damaged'}."
    return ""


def _needed(checkpoint: Path, facts: Mapping[str, Any]) -> list[Path]:
    dense = [checkpoint / f"{part}.pt" for part in ("dense", *facts["parts"])]
    return stored_files(checkpoint, facts) + dense


def _open(file: Path) -> None:
    """Open a file whose digest nobody has written down."""
    require_file(file)
    if file.suffix == ".pt":
        torch.load(file, weights_only=True)
        return
    with safe_open(file, framework="numpy"):
        pass


def _tables(file: Path) -> str:
    """Whose rows a damaged file holds, as far as it still says."""
    try:
        with safe_open(file, framework="numpy") as stored:
            names = {key.partition(":")[2].rpartition(":")[0] for key in stored.keys()}  # noqa: SIM118
    except (OSError, *_TORN):
        return ""
    return f" (rows of {', '.join(sorted(names))})" if names else ""


def newest_whole(folder: Path, rank: int = 0, ranks: int = 1) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run's folder; all ranks call it together.

    Returns:
        Its folder, None if the run has no checkpoint; and a sentence for each newer one that is
        damaged.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or a newer version wrote one.
    """
    damaged: list[str] = []
    root = folder / CHECKPOINTS
    for checkpoint in gather(ranks, [*find_checkpoints(root)])[0]:
        try:
            own = find_damage(checkpoint, rank, ranks), ""
        except CheckpointError as error:
            own = "", str(error)
        rows = gather(ranks, own)
        for _, refusal in rows:
            if refusal:
                raise CheckpointError(refusal)
        sentence = next((each for each, _ in rows if each), "")
        if not sentence:
            return checkpoint, damaged
        damaged.append(sentence)
    if damaged:
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints in {root} is whole. {damaged[0]} Restore a "
            f"copy, or delete {root} to start from the first step."
        )
    return None, []
