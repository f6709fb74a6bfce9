"""The files that a run keeps beside its weights: a Hugging Face folder's, with its own tokenizer.

What it decides
    A run that began from a folder and reads text by that folder's tokenizer keeps every file as
    it was. With another tokenizer the folder's special tokens and chat template mean nothing:
    the run's own tokenizer takes their place, and its end token ends a text. A run from random
    weights has its tokenizer alone.

Kept true (tests/oracle/test_round_trip.py)
    What is left out or replaced is said in a sentence.
"""

from pathlib import Path

from equipoise.base.errors import ModelError
from equipoise.data.text.tokenizer import Tokenizer, load_tokenizer
from equipoise.nn.hf.files import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    KeptFiles,
    ModelFiles,
    as_json,
    is_tokenizer_file,
    read_files,
    tokenizer_files,
)

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def files_to_keep(
    source: Path | None, tokenizer_file: Path, *, may_draw: bool = False
) -> KeptFiles:
    """What a run keeps when it begins.

    Args:
        source: The Hugging Face folder that it begins from; None for random weights.
        tokenizer_file: The tokenizer.json that its corpus was read by.
        may_draw: Whether a folder without weights means random ones.

    Raises:
        ModelError: a file of the folder cannot be read.
    """
    tokenizer = load_tokenizer(tokenizer_file)
    if source is None:
        return KeptFiles(with_tokenizer(ModelFiles({}, ""), tokenizer), "", {}, ())
    try:
        files = read_files(source)
    except OSError as error:
        raise ModelError(
            f"{source} cannot be read ({error.strerror or error}). Make its files readable."
        ) from None
    is_drawn = may_draw and not any(source.glob("*.safetensors"))
    dtypes, remarks = dict[str, str](), tuple[str, ...]()
    if not is_drawn:
        from equipoise.nn.hf.read import stored_dtypes  # which imports torch

        dtypes = stored_dtypes(source)
    if not _has_tokenizer(files, tokenizer):
        files = with_tokenizer(files, tokenizer)
        remarks = (
            f"The run's tokenizer is not that of {source}, so it is written instead, with its end "
            f"token {tokenizer.core.id_to_token(tokenizer.end)} ({tokenizer.end}); the folder's "
            "special tokens and chat template are left out.",
        )
    return KeptFiles(files, str(source), dtypes, remarks)


def with_tokenizer(files: ModelFiles, tokenizer: Tokenizer) -> ModelFiles:
    """The files with another tokenizer, whose end token ends a text."""
    kept = {
        name: content for name, content in files.contents.items() if not is_tokenizer_file(name)
    }
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.end, "pad_token_id": None}
    if CONFIG in kept:
        kept[CONFIG] = as_json(files.table(CONFIG) | ids)
    generation = {key: each for key, each in files.table(GENERATION).items() if key not in _IDS}
    settings = {"eos_token": tokenizer.core.id_to_token(tokenizer.end)}
    kept |= tokenizer_files(tokenizer.file.read_bytes(), settings)
    kept[GENERATION] = as_json(generation | {"eos_token_id": tokenizer.end})
    return ModelFiles(kept, files.where)


def _has_tokenizer(files: ModelFiles, tokenizer: Tokenizer) -> bool:
    """Whether the files' tokenizer has the same tokens, by the same ids."""
    if TOKENIZER not in files.contents:
        return False
    if files.contents[TOKENIZER] == tokenizer.file.read_bytes():
        return True
    import tokenizers

    try:
        theirs = tokenizers.Tokenizer.from_str(files.contents[TOKENIZER].decode())
    except Exception:  # the library raises bare Exception
        return False
    ours = tokenizer.core
    return bool(theirs.get_vocab(with_added_tokens=True) == ours.get_vocab(with_added_tokens=True))
