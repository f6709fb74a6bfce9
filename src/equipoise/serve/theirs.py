"""Models that transformers computes: read from a checkpoint or a folder, and their weights written.

What it decides
    transformers names the weights of a folder, splits and joins them, and leaves out tied ones; all
    other files are those that the run kept. Adapters are merged. Each weight is written in the
    dtype that it had in the folder that the run began from.

Kept true (tests/oracle/test_round_trip.py, tests/oracle/test_engine_lora.py)
    A folder of any family that is trained for no step and converted has equal files and weights,
    bit for bit, and equal logits in transformers.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from equipoise.base.errors import CheckpointError, ModelError
from equipoise.base.read import read_json
from equipoise.checkpoint.export import lora_of, read_other_weights
from equipoise.checkpoint.manifest import Manifest
from equipoise.nn.hf.adapter import is_adapter, write_peft
from equipoise.nn.hf.files import as_json, write_files
from equipoise.nn.hf.folder import whole_folder
from equipoise.nn.hf.read import FLOATS, stored_dtypes
from equipoise.nn.hf.weights import INDEX
from equipoise.nn.hf.write import cast_weight
from equipoise.nn.lora import ADAPTER
from equipoise.parallel.theirs.build import build_random, load_theirs, read_theirs_config, silenced
from equipoise.parallel.theirs.lora import merge_their_adapters, peft_targets
from equipoise.parallel.theirs.model import PREFIX
from equipoise.spec.run.lora import LoraSpec

_MOST_SHARD = "5GB"
_HALF = torch.bfloat16


def load_checkpoint(folder: Path, manifest: Manifest) -> PreTrainedModel:
    """The model of a verified checkpoint in fp32, adapters merged, for inference.

    Raises:
        CheckpointError: a weight is missing, left over, or has another dtype.
        ModelError: transformers cannot build the model.
    """
    theirs = build_random(read_theirs_config(folder), seed=0)
    held = read_other_weights(folder, PREFIX)
    _require_dtypes(folder, held, theirs.state_dict())
    adapters = {name: held.pop(name) for name in list(held) if is_adapter(name)}
    outcome = theirs.load_state_dict(held, strict=False)
    tied = set(getattr(theirs, "all_tied_weights_keys", None) or ())
    wrong = [*sorted(set(outcome.missing_keys) - tied), *outcome.unexpected_keys]
    if wrong:
        more = f" and {len(wrong) - 1} more differ" if len(wrong) > 1 else " differs"
        raise CheckpointError(
            f"{folder} is of another model than its config.json: {wrong[0]}{more}. Restore a copy "
            f"of the checkpoint."
        )
    theirs.tie_weights()
    if adapters:
        merge_their_adapters(theirs, adapters, lora_of(folder, manifest))
    theirs.train(False)
    return theirs


def _require_dtypes(folder: Path, held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a weight in another dtype than it was trained in: loading would convert its bits.

    Raises:
        CheckpointError: names the weight.
    """
    for name, weight in held.items():
        dtype = wanted[name].dtype if name in wanted else torch.float32
        if weight.dtype != dtype and (name in wanted or is_adapter(name)):
            kept, meant = (str(each).removeprefix("torch.") for each in (weight.dtype, dtype))
            raise CheckpointError(
                f"{folder} holds another model: its {name} is {kept}, and it is trained in "
                f"{meant}. Restore a copy of it."
            )


def load_folder(folder: Path) -> PreTrainedModel:
    """The model of a Hugging Face folder, for inference: in bf16 if all of it is, else in fp32.

    Raises:
        ModelError: transformers cannot build it, or its weights are not all there.
    """
    is_half = set(stored_dtypes(folder).values()) == {"bfloat16"}
    theirs = load_theirs(folder, seed=0, dtype=_HALF if is_half else torch.float32)
    theirs.train(False)
    return theirs


def write_theirs(
    theirs: PreTrainedModel,
    target: Path,
    files: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None,
    dtypes: Mapping[str, str],
) -> set[torch.dtype]:
    """Write a folder that transformers loads, whole or not at all.

    Args:
        theirs: The model; left as it is.
        target: The folder to make; must not exist.
        files: What stands beside the weights, by name.
        dtype: Of all weights; None gives each its own of ``dtypes``.
        dtypes: torch's name of the dtype of each weight, by its name in a folder.

    Returns:
        The dtypes of the weights.

    Raises:
        ModelError: the folder exists or cannot be written, or a weight does not fit its dtype.
    """
    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    dtypes = {name: kind for name, kind in dtypes.items() if kind in FLOATS}
    kinds = {getattr(torch, kind) for kind in dtypes.values()}
    if dtype is None and len(kinds) == 1:
        (dtype,) = kinds
    state = theirs.state_dict()
    if dtype is not None:
        kinds = {dtype}
        cast: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay one tensor
        for name, weight in state.items():
            place = weight.data_ptr(), weight.shape
            if place not in cast:
                cast[place] = cast_weight(name, weight, dtype)
            state[name] = cast[place]
    with whole_folder(target) as partial:
        with silenced():
            theirs.save_pretrained(partial, state_dict=state, max_shard_size=_MOST_SHARD)
        for path in partial.iterdir():
            if path.suffix != ".safetensors" and path.name != INDEX:
                path.unlink()
        if dtype is None:
            _cast_files(partial, dtypes)
        write_files(files, partial)
    return kinds


def write_their_adapter(
    folder: Path, target: Path, adapters: Mapping[str, Tensor], lora: LoraSpec, *, base: str
) -> None:
    """Write the adapters of a checkpoint for peft, whole or not at all.

    Args:
        folder: The checkpoint.
        target: The folder to make; must not exist.
        adapters: A and B of each adapter, as the checkpoint names them.
        lora: Rank and scale.
        base: The Hugging Face folder that the run began from.

    Raises:
        ModelError: the folder exists or cannot be written, or peft is not installed.
    """
    theirs = build_random(read_theirs_config(folder), seed=0, device="meta")
    named = {}
    for name, weight in adapters.items():
        stem, _, kind = name.removeprefix(PREFIX).rpartition(f".{ADAPTER}.")
        named[f"{stem}.{kind}"] = weight
    stems = sorted({name.rpartition(".")[0] for name in named})
    targets, is_transposed = peft_targets(theirs, stems)
    write_peft(target, named, lora, targets, base=base, is_transposed=is_transposed)


def _cast_files(folder: Path, dtypes: Mapping[str, str]) -> None:
    """Give every weight of a folder its own dtype."""
    total_bytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        held = {
            name: cast_weight(name, weight, getattr(torch, dtypes[name]))
            if name in dtypes
            else weight
            for name, weight in load_file(file).items()
        }
        save_file(held, file, metadata={"format": "pt"})
        total_bytes += sum(weight.numel() * weight.element_size() for weight in held.values())
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        index["metadata"]["total_size"] = total_bytes
        (folder / INDEX).write_bytes(as_json(index))
