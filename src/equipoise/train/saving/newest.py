"""Load the newest checkpoint that is whole.

What it decides
    Rank 0 looks for the newest checkpoint whose manifest is sound, and ranks verify its blocks
    while they load them, each what it needs. If one finds damage, all go on to the checkpoint
    before it, which replaces whatever was loaded.

Kept true (tests/multi/train/test_train.py, tests/multi/checkpoint/test_damage.py)
    A torn checkpoint is passed over with a sentence that names the file and the tensor.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import Manifest, newest_good, open_manifest
from equipoise.checkpoint.same import OtherTensorsError
from equipoise.checkpoint.store import load
from equipoise.comm.group import Ranks
from equipoise.observe.journal import Journal
from equipoise.parallel.zero.shard import ShardedDecoder

Newest = tuple[Path, Manifest, list[str]]
"""A checkpoint, its manifest, and a sentence for each torn one that was passed over."""


def load_newest(
    root: Path,
    model: ShardedDecoder,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    journal: Journal,
    require: Callable[[Path, Manifest], None],
    *,
    second: Path | None = None,
    frozen: Sequence[str] = (),
) -> Newest | None:
    """Fill a model and its optimizer from the newest whole checkpoint, if there is any.

    Args:
        root: Folder of the run's checkpoints.
        model: Sharded weights.
        optimizer: Its moments.
        ranks: All ranks; each of them calls this.
        journal: This rank's.
        require: Refuses a checkpoint that is not the run's, by a ``CheckpointError``.
        second: Another folder of its checkpoints.
        frozen: The run's ``train.freeze``; if it was another one when the checkpoint was saved,
            weights that are newly trained begin without moments.

    Raises:
        CheckpointError: none is whole, or the newest is refused, or has other tensors.
    """
    torn: dict[Path, str] = {}
    while (newest := _newest(root, torn, ranks, require, second)) is not None:
        path, manifest, _ = newest
        others = list(manifest.run.get("train.freeze", ())) != list(frozen)
        try:
            with journal.span("load", step=manifest.step), model.loading(optimizer):
                counts = load(
                    path,
                    model.decoder,
                    optimizer,
                    manifest=manifest,
                    ranks=ranks,
                    other_moments=others,
                )
        except OtherTensorsError:
            raise
        except CheckpointError as error:
            torn[path] = str(error)
        else:
            journal.write("scalar", "loaded", step=manifest.step, **dataclasses.asdict(counts))
            break
    return newest


def _newest(
    root: Path,
    torn: dict[Path, str],
    ranks: Ranks,
    require: Callable[[Path, Manifest], None],
    second: Path | None,
) -> Newest | None:
    """What rank 0 finds."""
    newest: Newest | None = None
    fault = ""
    if ranks.rank == 0:
        try:
            newest = newest_good(root, read=open_manifest, torn=torn, second=second)
            if newest is not None:
                require(newest[0], newest[1])
        except CheckpointError as error:
            fault = str(error)
    heard: tuple[str, Newest | None] = ranks.gather_objects((fault, newest))[0]
    if heard[0]:
        raise CheckpointError(heard[0])
    return heard[1]
