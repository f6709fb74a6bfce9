"""Turn text into token ids, with a tokenizer.json that is trained here or supplied.

Why
    A run must work on a machine that has no tokenizer and no network, and must take the
    tokenizer of the model that it continues when there is one.

What it decides
    How a tokenizer is trained (byte-level BPE, so that no text is unknown), which part of the
    corpus it sees, and which token ends a document. Text never becomes that token: if a document
    spells ``<|end|>``, it is encoded letter by letter.

Kept true (tests/unit/data/test_tokenizer.py)
    The same texts train the same bytes, on any number of threads; a trained tokenizer decodes
    exactly what it encoded; only the store writes the end token.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import DataError
from equipoise.base.read import reason
from equipoise.data.text.cut import can_be_cut, cut
from equipoise.data.text.folder import TokenizerFolder, read_tokenizer_folder
from equipoise.spec.names import TOKENIZER_FILE

END = "<|end|>"
_END_NAMES = (END, "<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")
_BYTES_AND_END = 257

# Longer texts are cut, so that one of them is at most 1 % of what is trained on.
_SAMPLE_CHARS = 6_000_000
_SAMPLE_DOCUMENT_CHARS = 60_000


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A loaded tokenizer.json. ``vocab`` is its highest id + 1; ``end`` ends a document.

    ``folder`` is what the files beside it say, where they were asked; ``is_cut`` says whether long
    texts are encoded in parts, which have the same tokens.
    """

    file: Path
    digest: str
    vocab: int
    end: int
    core: tokenizers.Tokenizer = field(repr=False)
    folder: TokenizerFolder | None = None
    is_cut: bool = False

    @property
    def tokens_digest(self) -> str:
        """Equal for the same tokens by the same ids, whatever else is in their files."""
        return digest(self.core.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids int64[tokens], without an end token."""
        return self.encode_batch([text])[0]

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """Token ids of a text that comes in blocks, int64[tokens] of one part after another.

        In memory are one block and the encoding of 1 Mi characters, some 20 MB; of the whole
        text where the tokenizer may join any two of its words.
        """
        parts = cut(blocks) if self.is_cut else ["".join(blocks)]
        for part in parts:
            yield self.encode(part)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of several texts, on as many threads as the library takes."""
        encodings = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of token ids; the end token appears by its name."""
        return str(self.core.decode([int(token) for token in tokens], skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab: int, file: Path) -> None:
    """Train a byte-level BPE on a sample of texts and write it, whole or not at all.

    The sample has at most 6,000,000 characters: evenly spaced texts, each cut after 60,000
    characters. It depends only on the texts, and a corpus of any size takes about as long as
    6 MB: 2 s on one core for 4,096 tokens of Python.

    Args:
        texts: Documents; read once, keeping one sample in memory.
        vocab: Tokens wanted, >= 257: the end token (id 0), 256 bytes, merges. The tokenizer is
            smaller if a small corpus runs out of pairs that occur twice.
        file: tokenizer.json to write.

    Raises:
        DataError: fewer than 257 tokens are wanted, or there is no text.
    """
    if vocab < _BYTES_AND_END:
        raise DataError(
            f"data.vocab = {vocab:,} is too small: {_BYTES_AND_END - 1} bytes and the end token "
            f"are {_BYTES_AND_END} tokens before the first merge. Set data.vocab to at least "
            f"{_BYTES_AND_END}."
        )
    sample = _sample(texts)
    if not sample:
        raise DataError(
            "There is no text to train a tokenizer on: all documents are empty. Set data.path to "
            "a corpus with text in it."
        )
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(sample, trainer)
    building = file.with_name(f"{file.name}.building-{os.getpid()}")
    with building.open("wb") as out:
        out.write(core.to_str().encode())
        out.flush()
        os.fsync(out.fileno())
    building.replace(file)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that ``data.tokenizer`` names, by itself or by its folder.

    Raises:
        DataError: it does not exist.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    missing = f"{path} has no {TOKENIZER_FILE}" if path.is_dir() else f"{path} does not exist"
    raise DataError(
        f'data.tokenizer {missing}. Set data.tokenizer to "train" or to the path of a '
        "tokenizer.json."
    )


def load_tokenizer(path: Path, *, asks_folder: bool = False) -> Tokenizer:
    """Read a tokenizer.json, ours or another's.

    The end token is the first of ``<|end|>``, ``<|endoftext|>``, ``</s>``,
    ``<|end_of_text|>``, ``<|im_end|>``, ``<eos>`` that the file has; or, if a folder is given,
    the one that its files name.

    Args:
        path: The file, or its folder.
        asks_folder: Ask the files beside it also where ``path`` is the file.

    Raises:
        DataError: the file is missing, is not a tokenizer.json, or has no end token.
    """
    file = tokenizer_file(path)
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"data.tokenizer {file} is not a tokenizer.json: {reason(error)}. Set data.tokenizer "
            'to a file written by the tokenizers library, or to "train".'
        ) from None
    folder = None
    if asks_folder or path.is_dir():
        folder = read_tokenizer_folder(file.parent)
        folder.complete(core)
    ids = core.get_vocab(with_added_tokens=True)
    end = None if folder is None else folder.end(core)
    if end is None:
        end = next((ids[name] for name in _END_NAMES if name in ids), None)
    if end is None:
        raise DataError(
            f"data.tokenizer {file} has none of the {len(_END_NAMES)} known end tokens "
            f"({', '.join(_END_NAMES)}) among its {len(ids):,} tokens. Add one of them to the "
            'file\'s added_tokens, or set data.tokenizer to "train".'
        )
    core.no_padding()
    core.no_truncation()
    core.encode_special_tokens = True  # encode special tokens' names as plain text
    vocab = max(ids.values()) + 1
    return Tokenizer(file, digest_file(file), vocab, end, core, folder, can_be_cut(core))


def read_token_bytes(file: Path) -> NDArray[np.int64] | None:
    """Bytes of text that each token stands for, int64 [highest id + 1]; None where unknown.

    Known for byte-level tokenizers that change no text before they encode it. A special token
    stands for none.

    Args:
        file: A tokenizer.json that ``load_tokenizer`` reads.
    """
    data = json.loads(file.read_bytes())
    steps = data.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    decoder = data.get("decoder") or {}
    changes_text = data.get("normalizer") is not None or any(
        step.get("add_prefix_space", True) for step in byte_level
    )
    removes = any(
        step.get("type") not in ("ByteLevel", "Digits", "Split")
        or step.get("behavior") == "Removed"
        for step in steps
    )
    is_byte_level = decoder.get("type") == "ByteLevel" and byte_level
    if not is_byte_level or changes_text or removes or data["model"].get("type") != "BPE":
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocab = {int(index): token for token, index in data["model"]["vocab"].items()}
    added = {int(each["id"]): each for each in data.get("added_tokens", [])}
    lengths = np.zeros(max([*vocab, *added]) + 1, dtype=np.int64)
    for index, token in vocab.items():
        if index not in added and not alphabet.issuperset(token):
            return None
        lengths[index] = len(token)
    for index, each in added.items():
        lengths[index] = 0 if each["special"] else len(each["content"].encode())
    return lengths


def _sample(texts: Iterable[str]) -> list[str]:
    kept: list[str] = []
    kept_chars = 0
    stride = 1
    for index, text in enumerate(texts):
        if index % stride:
            continue
        kept.append(text[:_SAMPLE_DOCUMENT_CHARS])
        kept_chars += len(kept[-1])
        while kept_chars > 2 * _SAMPLE_CHARS:
            kept = kept[::2]
            kept_chars = sum(map(len, kept))
            stride *= 2
    if kept_chars <= _SAMPLE_CHARS:
        return kept
    # Keeps between one and two samples in memory. Takes a text whenever the wanted share of the
    # texts seen so far exceeds the number taken, like drawing a line on a grid.
    taken: list[str] = []
    taken_chars = passed_chars = 0
    for text in kept:
        passed_chars += len(text)
        if taken_chars + len(text) <= passed_chars * _SAMPLE_CHARS // kept_chars:
            taken.append(text)
            taken_chars += len(text)
    return taken
