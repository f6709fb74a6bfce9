"""The BPE of a GGUF file, by bytes or by pieces, rebuilt as a ``tokenizers.Tokenizer``.

What it decides
    Of a tokenizer by bytes (GPT-2's kind) a file has pieces and merges, and of the rules by which
    text is split before it is merged only a name. The rules of the names in ``_SPLITS`` are known;
    a file with another one is refused.

    Of a tokenizer by pieces (SentencePiece's kind, of Llama 2 and Mistral) it has pieces with
    scores, from which the merges follow.

Kept true (tests/oracle/test_smollm2.py, tests/oracle/serving/test_serving_engine.py)
    Token ids are those of transformers, except for spaces and number signs before a digit under
    "smollm": transformers 5.23 does not know that name and splits like GPT-2.

Sources
    llama.cpp, ``llama-vocab.cpp``: the expressions of each name, and whose texts begin with a token
    unless the file says otherwise. transformers 5.23, ``Qwen2Tokenizer``: letters are composed
    (NFC) first; ``convert_slow_tokenizer.generate_merges``: merges of pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import ModelError
from equipoise.base.read import reason

if TYPE_CHECKING:
    import tokenizers

_BYTES, _PIECES = "gpt2", "llama"  # tokenizer.ggml.model
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
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type


def rebuild_bpe(file: Path, say: Callable[..., Any]) -> "tokenizers.Tokenizer":
    """Rebuild the tokenizer of a GGUF file.

    Args:
        file: For messages.
        say: The value of a key of ``tokenizer.ggml``; of an absent one its second argument.

    Raises:
        ModelError: it is of another kind, or its merges do not fit its pieces.
    """
    from tokenizers import AddedToken, processors

    kind, name = say("model"), say("pre", "gpt-2")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if kind != _PIECES and (kind != _BYTES or split is None):
        known = ", ".join(f'"{each}"' for each in _SPLITS)
        raise ModelError(
            f'{file}: a tokenizer with model "{kind}" and pre-tokenizer "{name}" cannot be '
            f'rebuilt; only model "{_BYTES}" with {known}, and model "{_PIECES}", can. Supply the '
            "model's tokenizer.json."
        )
    tokens, types = say("tokens"), say("token_type", [])
    try:
        if kind == _PIECES:
            core, begins = _of_pieces(tokens, types, say), True
        else:
            assert split is not None  # noqa: S101 - as asked above
            core, begins = _of_bytes(tokens, split, say), split.begins
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{file}: its tokenizer cannot be rebuilt ({reason(error)}). Supply the model's "
            f"tokenizer.json."
        ) from None
    begin = say("bos_token_id")
    if say("add_bos_token", begins) and begin is not None:
        token = tokens[int(begin)]
        core.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, int(begin))]
        )
    for numbers, add in (
        ((_UNKNOWN, _CONTROL), core.add_special_tokens),
        ((_USER_DEFINED,), core.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=_CONTROL in numbers)
                for token, each in zip(tokens, types, strict=False)
                if each in numbers
            ]
        )
    return core


def _of_bytes(
    tokens: Sequence[str], split: _Split, say: Callable[..., Any]
) -> "tokenizers.Tokenizer":
    """GPT-2's kind: pieces of bytes, and merges in their order."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    merges = [tuple(merge.split(" ")) for merge in say("merges", [])]
    vocab = {token: number for number, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=split.knows_words)
    )
    if split.composes:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(split)
    core.decoder = decoders.ByteLevel()
    return core


def _of_pieces(
    tokens: Sequence[str], types: Sequence[int], say: Callable[..., Any]
) -> "tokenizers.Tokenizer":
    """SentencePiece's kind: pieces of characters with scores; of two merges the higher one first.

    Raises:
        ValueError: there is not a score for each piece.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    scores, unknown = say("scores", []), say("unknown_token_id")
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens):,} pieces and {len(scores):,} scores")
    vocab = {token: number for number, token in enumerate(tokens)}
    others = {
        token
        for token, each in zip(tokens, types, strict=False)
        if each in (_UNKNOWN, _CONTROL, _BYTE)
    }
    merges = list[tuple[float, int, int, str, str]]()
    for piece, score in zip(tokens, scores, strict=True):
        if piece in others:
            continue
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [
            (left, right)
            for left, right in halves
            if left in vocab and right in vocab and not {left, right} & others
        ]
        known.sort(key=lambda each: (vocab[each[0]], vocab[each[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda each: each[:3], reverse=True)
    has_prefix = bool(say("add_space_prefix", True))
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[each[3:] for each in merges],
            unk_token=None if unknown is None else tokens[int(unknown)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # As tokenizer.json of Llama 2 and Mistral has it: a blank before every text between specials.
    blanks = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
    core.normalizer = prefixed if has_prefix else blanks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if has_prefix else steps
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
