"""Adapters as peft reads them, and merged into the weights that they stand beside.

What it decides
    A folder with ``adapter_config.json``, which peft's own ``LoraConfig`` writes, and
    ``adapter_model.safetensors``, under the names that peft gives its layers. Scale, rank and
    layers are those of training, so ``PeftModel.from_pretrained`` on the base gives equal logits.

Kept true (tests/oracle/test_lora.py)
    peft on the base, and transformers on the merged folder, have the logits that were trained.

Sources
    peft 0.21, ``utils/save_and_load.py`` for the names.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.hf.folder import whole_folder
from equipoise.nn.hf.names import hf_names
from equipoise.nn.lora import ADAPTER
from equipoise.spec.run.lora import TARGETS, LoraSpec

_A, _B = f".{ADAPTER}.lora_A", f".{ADAPTER}.lora_B"


def is_adapter(name: str) -> bool:
    """Whether a weight of ours is part of an adapter."""
    return name.endswith((_A, _B))


def merge_adapters(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoraSpec
) -> dict[str, Tensor]:
    """Every weight with ``scale B A`` added where it has an adapter.

    Args:
        weights: A model's own weights, by our names.
        adapters: A and B of each adapter, by our names.
        lora: Their scale.
    """
    merged = dict(weights)
    for name, first in adapters.items():
        if name.endswith(_A):
            stem = name.removesuffix(_A)
            second = adapters[stem + _B]
            wide = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
            change = lora.scale * (second.to(wide) @ first.to(wide))
            weight = merged[f"{stem}.weight"]
            merged[f"{stem}.weight"] = (weight.to(wide) + change).to(weight.dtype)
    return merged


def write_adapter(
    folder: Path, adapters: Mapping[str, Tensor], lora: LoraSpec, *, base: str
) -> None:
    """Write the adapters of our own decoder for peft, whole or not at all.

    Args:
        folder: The folder to make; must not exist.
        adapters: A and B of each adapter, by our names.
        lora: Rank, scale and layers.
        base: The Hugging Face folder that the run began from.

    Raises:
        ModelError: the folder exists or cannot be written, or peft is not installed.
    """
    named = {}
    for name, weight in adapters.items():
        stem, _, kind = name.rpartition(f".{ADAPTER}.")
        named[f"{hf_names(f'{stem}.weight')[0].removesuffix('.weight')}.{kind}"] = weight
    held = last_words(named)  # layers with experts have none at their feed-forwards
    targets = [TARGETS[each] for each in lora.layers if TARGETS[each] in held]
    write_peft(folder, named, lora, targets, base=base)


def last_words(names: Iterable[str]) -> set[str]:
    """The last words of the layers of ``NAME.lora_A`` and ``NAME.lora_B``."""
    return {name.split(".")[-2] for name in names}


def write_peft(
    folder: Path,
    adapters: Mapping[str, Tensor],
    lora: LoraSpec,
    targets: Sequence[str],
    *,
    base: str,
    is_transposed: bool = False,
) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads, whole or not at all.

    Args:
        folder: The folder to make; must not exist.
        adapters: ``NAME.lora_A`` and ``NAME.lora_B``, by transformers' names of the layers.
        lora: Rank and scale.
        targets: Names by which peft finds the layers.
        base: The Hugging Face folder that the run began from.
        is_transposed: Whether the weights beside them are stored [in, out], as GPT-2's are.

    Raises:
        ModelError: the folder exists or cannot be written, or peft is not installed.
    """
    try:
        from peft import LoraConfig, TaskType
    except ImportError as error:
        raise ModelError(
            "An adapter's folder is written by peft, which is not installed. Run `pip install "
            "'equipoise[lora]'`, or convert without --adapter: the adapters are then merged."
        ) from error
    if folder.exists():
        raise ModelError(f"{folder} already exists. Name a new folder, or delete it.")
    state = {
        f"base_model.model.{name}.weight": weight.detach().cpu().contiguous()
        for name, weight in adapters.items()
    }
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        fan_in_fan_out=is_transposed,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with whole_folder(folder) as partial:
        config.save_pretrained(str(partial))
        save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
