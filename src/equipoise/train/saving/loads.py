"""What routers chose in the last step, in a checkpoint and out of it.

Why
    ``experts.policy`` = hecate, eplb and auto plan a step by the loads of the one before. A resumed
    run without them would copy other experts, and train other bits.

Kept true (tests/multi/parallel/test_expert_life.py)
    A run that resumes has the bits of one that was never interrupted, under every policy.
"""

import json
from pathlib import Path

import numpy as np

from equipoise.base.errors import CheckpointError
from equipoise.nn.decoder import Decoder
from equipoise.nn.packed import PackedModel
from equipoise.parallel.expert.loads import remember_loads

EXPERTS = "experts.json"
"""File of a checkpoint with the loads of its step; the first versions wrote none."""


def loads_texts(loads: list[list[int]] | None) -> dict[str, str]:
    """The file with these loads, if there are experts."""
    return {} if loads is None else {EXPERTS: json.dumps({"loads": loads})}


def resume_loads(checkpoint: Path, decoder: PackedModel, step: int) -> list[list[int]] | None:
    """Let policies plan as after the step of a checkpoint; its loads, if it has any.

    Raises:
        CheckpointError: the file cannot be read, or is of other experts.
    """
    if not isinstance(decoder, Decoder):
        return None
    file, model, loads = checkpoint / EXPERTS, decoder.model, None
    if file.exists():
        try:
            loads = np.array(json.loads(file.read_bytes())["loads"], dtype=np.int64)
            if loads.shape != (model.sparse_layers, model.choices) or (loads < 0).any():
                raise ValueError(loads.shape)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{checkpoint} is torn: its {EXPERTS} cannot be read.") from error
    remember_loads(decoder, loads, step=step)
    return None if loads is None else loads.tolist()
