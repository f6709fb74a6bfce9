"""The documents that a packer lets wait, in a checkpoint and out of it.

Kept true (tests/multi/train/test_resume.py)
    No document is lost: a packer that would lose them is refused.
"""

import json
from pathlib import Path

from equipoise.balance.packing.pack import StepPacker
from equipoise.base.errors import CheckpointError
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.spec import RunSpec

PACKER = "packer.json"
"""File of a checkpoint with the documents that a packer lets wait."""


def packer_texts(packer: StepPacker) -> dict[str, str]:
    """The file with the documents that wait, if the packer lets any wait."""
    waiting = packer.state_dict()
    return {PACKER: json.dumps(waiting)} if waiting else {}


def resume_packer(checkpoint: Path, packer: StepPacker, spec: RunSpec, world: int) -> str:
    """Take up the documents that were left waiting; a sentence if they will be packed otherwise.

    Raises:
        CheckpointError: the file cannot be read, or the packer would lose them.
    """
    file = checkpoint / PACKER
    if not file.exists():
        return ""
    try:
        state = json.loads(file.read_bytes())
        waiting = state["waiting"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint} is torn: its {PACKER} cannot be read.") from error
    lets_wait = POLICIES[spec.pack.policy].lets_wait
    if not waiting and not lets_wait:
        return ""
    if not lets_wait:
        raise CheckpointError(
            f'{checkpoint} was packed by "delayed" and {waiting} documents still '
            f'wait in its queues; "{spec.pack.policy}" would lose them. Set pack.policy '
            f'= "delayed", or train into another folder with --out.'
        )
    packer.load_state_dict(state)
    ranks = world // spec.layout.sharing
    if state.get("ranks", ranks) == ranks:
        return ""
    return (
        f'pack.policy = "delayed" packed for {state["ranks"]} data-parallel ranks before '
        f"and packs for {ranks} now: which documents share a step depends on that number. "
        f"Each is still trained once; {state['waiting']} wait."
    )
