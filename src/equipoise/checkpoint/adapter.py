"""The adapters of a run as the folder that peft loads.

Kept true (tests/oracle/test_lora.py)
    peft's model on the base folder has the logits of the merged weights.
"""

from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.checkpoint.export import lora_of, read_checkpoint_adapters
from equipoise.checkpoint.manifest import MANIFEST, newest_good, read_manifest
from equipoise.nn.hf.adapter import write_adapter
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.resolved import read_resolved


@dataclass(frozen=True, slots=True)
class WrittenAdapter:
    """What ``export_adapter`` wrote."""

    origin: Path
    """The checkpoint."""
    step: int
    lora: LoraSpec
    params: int
    base: str
    """The Hugging Face folder that the run began from; empty where that is not known."""


def export_adapter(source: Path, target: Path) -> WrittenAdapter:
    """Write the adapters of a run, or of one of its checkpoints, for peft.

    Args:
        source: A checkpoint, or a run's folder, whose newest whole checkpoint is read.
        target: The folder to make; must not exist.

    Raises:
        CheckpointError: there is no whole checkpoint, or it has no adapters.
        ModelError: the folder cannot be written, or peft is not installed.
    """
    if (source / MANIFEST).exists():
        folder, manifest = source, read_manifest(source)
    else:
        newest = newest_good(source / "checkpoint")
        if newest is None:
            raise CheckpointError(
                f"{source} has no checkpoint yet. Train it further; checkpoint.every_steps says "
                "how often one is written."
            )
        folder, manifest, _ = newest
    adapters = read_checkpoint_adapters(folder)
    lora = lora_of(folder, manifest)
    try:
        base = read_resolved(folder.resolve().parent.parent).init_folder
    except SpecError:
        base = ""
    write_adapter(target, adapters, lora, base=base)
    params = sum(weight.numel() for weight in adapters.values())
    return WrittenAdapter(folder, manifest.step, lora, params, base)
