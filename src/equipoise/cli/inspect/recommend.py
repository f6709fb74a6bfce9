"""What the folder of a recommender's run, or one of its checkpoints, holds, read and verified."""

from pathlib import Path
from typing import Any

from equipoise.base.errors import CheckpointError

OK = "ok"
Facts = dict[str, Any]


def describe_run(folder: Path) -> Facts:
    """The facts of a run but for its checkpoints.

    Raises:
        SpecError: nobody has prepared it, or its file is damaged.
    """
    from equipoise.recsys.folder import read_prepared, read_trained

    spec, _ = read_prepared(folder)
    facts: Facts = {
        "kind": "recommender",
        "path": str(folder),
        "name": spec.name,
        "architecture": spec.model.architecture,
        "columns": ", ".join((*spec.data.ids, *spec.data.bags, *spec.data.numbers)),
        "width": spec.model.width,
        "precision": spec.tables.precision,
        "optimizer": spec.tables.optimizer,
        "ranks": spec.layout.dp,
        "epochs_wanted": spec.train.epochs,
        "seed": spec.train.seed,
    }
    try:
        record = read_trained(folder)
    except CheckpointError as error:
        return facts | {"record": str(error)}
    best = record.get("best")
    scores = best if isinstance(best, dict) else {}
    return facts | {
        "steps": record.get("step", 0),
        "best_epoch": scores.get("epoch"),
        "test_auc": scores.get("test_auc"),
        "test_entropy": scores.get("test_entropy"),
        "record": OK if record else "no rank has ended yet",
    }


def describe_checkpoint(folder: Path) -> Facts:
    """The facts of a checkpoint but for its size; every byte is verified."""
    from equipoise.recsys.whole import find_damage, read_facts

    try:
        state = find_damage(folder) or OK
    except CheckpointError as error:  # a newer version wrote it
        state = str(error)
    facts: Facts = {"kind": "checkpoint", "path": str(folder), "state": state}
    if state != OK:
        return facts
    held = read_facts(folder)
    run = held.get("run", {})
    return facts | {
        "step": held["step"],
        "ranks": held["ranks"],
        "optimizer": held["optimizer"],
        "tables": {name: f"{rows:,} x {width}" for name, (rows, width) in held["tables"].items()},
        "architecture": run.get("model.architecture"),
        "seed": run.get("train.seed"),
        "samples_digest": held.get("samples"),
        "files": len(held.get("files", {})) or None,
    }
