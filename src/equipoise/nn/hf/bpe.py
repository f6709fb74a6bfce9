"""The byte-level BPE of a GGUF file, rebuilt as a ``tokenizers.Tokenizer``.

What it decides
    A file has pieces and merges, and of the rules by which text is split before it is merged only
    a name. The rules of the names in ``_SPLITS`` are known; a file with another one is refused.

Kept true (tests/oracle/test_smollm2.py, tests/oracle/serving/test_serving_engine.py)
    Token ids are those of transformers, except for spaces and number signs before a digit under
    "smollm": transformers 5.23 does not know that name and splits like GPT-2.

Sources
    llama.cpp, ``llama-vocab.cpp``: the expressions of each name, and whose texts begin with a token
    unless the file says otherwise. transformers 5.23, ``Qwen2Tokenizer``: letters are composed
    (NFC) first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import ModelError
from equipoise.base.read import reason

if TYPE_CHECKING:
    import tokenizers

KIND = "gpt2"
"""``tokenizer.ggml.model`` of a byte-level BPE."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """What a ``tokenizer.ggml.pre`` stands for."""

    words: str = ""
    """Expression of the texts that are merged apart; GPT-2's own if empty."""
    splits_digits: bool = False
    """Whether digits stand alone before that."""
    composes: bool = False
    """Whether letters and their marks are composed first."""
    knows_words: bool = False
    """Whether a text that is a piece by itself is not made by merges."""
    begins: bool = False
    """Whether a text begins with a token, unless the file says otherwise."""


_SPLITS = {
    "smollm": _Split(splits_digits=True),
    "gpt-2": _Split(),
    "qwen2": _Split(_WORDS % "", composes=True),
    "llama-bpe": _Split(_WORDS % "{1,3}", knows_words=True, begins=True),
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def rebuild_bpe(file: Path, say: Callable[..., Any]) -> "tokenizers.Tokenizer":
    """Rebuild the tokenizer of a GGUF file.

    Args:
        file: For messages.
        say: The value of a key of ``tokenizer.ggml``; of an absent one its second argument.

    Raises:
        ModelError: it is of another kind, or its merges do not fit its pieces.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, processors

    kind, name = say("model"), say("pre", "gpt-2")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if kind != KIND or split is None:
        known = ", ".join(f'"{each}"' for each in _SPLITS)
        raise ModelError(
            f'{file}: a tokenizer with model "{kind}" and pre-tokenizer "{name}" cannot be '
            f'rebuilt; only model "{KIND}" with {known} can. Supply the model\'s tokenizer.json.'
        )
    tokens = say("tokens")
    merges = [tuple(merge.split(" ")) for merge in say("merges", [])]
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        core = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=split.knows_words)
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{file}: its tokenizer cannot be rebuilt ({reason(error)}). Supply the model's "
            f"tokenizer.json."
        ) from None
    if split.composes:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(split)
    core.decoder = decoders.ByteLevel()
    begin = say("bos_token_id")
    if say("add_bos_token", split.begins) and begin is not None:
        token = tokens[int(begin)]
        core.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, int(begin))]
        )
    types = say("token_type", [])
    for number, add in (
        (_CONTROL, core.add_special_tokens),
        (_USER_DEFINED, core.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=number == _CONTROL)
                for token, each in zip(tokens, types, strict=False)
                if each == number
            ]
        )
    return core


def _pre_tokenizer(split: _Split) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split.words:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.words), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not split.splits_digits:
        return byte_level
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, byte_level])
