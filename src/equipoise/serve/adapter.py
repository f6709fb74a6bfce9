"""The adapters of a run as the folder that peft loads.

Kept true (tests/oracle/test_lora.py, tests/oracle/test_engine_lora.py)
    peft's model on the base folder has the logits of the merged weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from equipoise.base.errors import CheckpointError, ModelError, SpecError
from equipoise.checkpoint.export import lora_of, read_checkpoint_adapters
from equipoise.checkpoint.manifest import (
    MANIFEST,
    OWN_ENGINE,
    Manifest,
    newest_good,
    read_manifest,
    read_steadily,
)
from equipoise.nn.hf.adapter import write_adapter
from equipoise.nn.lora import ADAPTER
from equipoise.serve.source import require_transformers
from equipoise.spec.names import CHECKPOINTS
from equipoise.spec.run.lora import TARGETS, LoraSpec
from equipoise.spec.run.resolved import read_resolved

_READ_AS_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Names of experts before transformers 5: peft 0.21, ``transformers_weight_conversion.py``."""


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
    remarks: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is torn and was passed over."""


def export_adapter(source: Path, target: Path) -> WrittenAdapter:
    """Write the adapters of a run, or of one of its checkpoints, for peft.

    Args:
        source: A checkpoint, or a run's folder, whose newest whole checkpoint is read.
        target: The folder to make; must not exist.

    Raises:
        CheckpointError: there is no whole checkpoint, or it has no adapters.
        ModelError: the folder cannot be written, peft is not installed, or it would read the
            names of the adapters otherwise.
    """
    folder, manifest, torn, adapters = read_steadily(source / CHECKPOINTS, lambda: _read(source))
    lora = lora_of(folder, manifest)
    try:
        base = read_resolved(folder.resolve().parent.parent).init_folder
    except SpecError:
        base = ""
    _require_read_alike(folder, manifest, adapters)
    if manifest.engine == OWN_ENGINE:
        write_adapter(target, adapters, lora, base=base)
    else:
        require_transformers(folder)
        # It takes seconds to import, and is an extra.
        from equipoise.serve.theirs import write_their_adapter

        write_their_adapter(folder, target, adapters, lora, base=base)
    params = sum(weight.numel() for weight in adapters.values())
    return WrittenAdapter(folder, manifest.step, lora, params, base, tuple(torn))


def _read(source: Path) -> tuple[Path, Manifest, list[str], dict[str, Tensor]]:
    """A checkpoint, its manifest, sentences on newer ones that are torn, and its adapters."""
    if (source / MANIFEST).exists():
        return source, read_manifest(source), [], read_checkpoint_adapters(source)
    newest = newest_good(source / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            f"{source} has no checkpoint yet. Train it further; checkpoint.every_steps says how "
            f"often one is written."
        )
    return *newest, read_checkpoint_adapters(newest[0])


def _require_read_alike(folder: Path, manifest: Manifest, adapters: Mapping[str, Tensor]) -> None:
    """Refuse names that peft takes for those of experts.

    Raises:
        ModelError: names such a layer.
    """
    if not manifest.model.get("experts"):
        return
    for name in adapters:
        word = name.removesuffix(f".{ADAPTER}.lora_A").rpartition(".")[2]
        word = TARGETS.get(word, word)
        if word in _READ_AS_EXPERTS:
            raise ModelError(
                f"{folder} has adapters at layers named {word}, beside layers with experts, and "
                f"peft takes that name for the experts'. Convert it without --adapter, or train "
                f"with lora.targets that leave it out."
            )
