"""Which files of a Hugging Face folder hold its weights, and which of these are read.

Why
    Folders hold more safetensors files than a model is read from: the same weights in one file
    under another name, adapters, what a killed download left behind.

What it decides
    ``model.safetensors`` if it is there, else the shards that the index names. No torch.

Kept true (tests/unit/nn/hf/test_read.py, tests/oracle/test_convert.py)
    What is read is what transformers reads; ``equipoise inspect`` counts just that.
"""

from collections.abc import Iterable
from pathlib import Path

from equipoise.base.errors import ModelError
from equipoise.base.read import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

TIED_HEAD = "lm_head.weight"
"""Stored by some writers also where it is the embedding."""
_COMPUTED = ".rotary_emb.inv_freq"
"""transformers before 4.32 wrote this table, which is computed from config.json."""
_NAMES_SHOWN = 3


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Files to read, each with the names that the index lists for it; None without an index.

    Raises:
        ModelError: there are none, or the index is damaged.
    """
    if (folder / WEIGHTS).exists():  # a pipe too, which the reader refuses by name
        return {folder / WEIGHTS: None}
    if not (folder / INDEX).is_file():
        held = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth"))
        hint = f" It has {held[0]}, which may run code when it is read." if held else ""
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}.{hint} Save the model as safetensors."
        )
    try:
        weight_map = read_json(folder / INDEX)["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            # A shard's name must be a bare name: no path may lead out of the index's folder.
            names = files.setdefault(folder / Path(file).name, [])
            assert names is not None  # noqa: S101 - only lists are put in
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / INDEX} is damaged: it has no readable weight_map.") from error
    return files


def names_to_read(file: Path, held: Iterable[str], listed: Iterable[str] | None) -> list[str]:
    """The names of a file's tensors that are weights, in order.

    Args:
        file: The file.
        held: What it holds.
        listed: What the index says that it holds, if there is one.

    Raises:
        ModelError: it lacks one.
    """
    names = set(held)
    if absent := [name for name in listed or () if name not in names]:
        raise ModelError(
            f"{file} lacks {some(absent)}, which {INDEX} says it holds. Download it again."
        )
    return sorted(name for name in names if not name.endswith(_COMPUTED))


def require_once(file: Path, names: Iterable[str], earlier: Iterable[str]) -> None:
    """Refuse a weight that two shards hold: which of them was meant, nobody knows.

    Raises:
        ModelError: names it.
    """
    if twice := sorted(set(names) & set(earlier)):
        raise ModelError(
            f"{file} holds {some(twice)}, which another file of {INDEX} holds too. Download the "
            f"folder again, or delete the files that are not of this model."
        )


def some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
