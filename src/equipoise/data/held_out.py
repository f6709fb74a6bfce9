"""Held-out documents: which of them an evaluation reads, how they are cut, and what training saw.

Why
    A held-out loss is compared between runs, so the documents and their cuts depend on the corpus
    and on two keys alone: no seed, no layout and no packing policy changes them.

What it decides
    Documents are whole and come once. A document longer than the window is cut as in training, at
    multiples of ``context_tokens`` from its start; every label is counted, also those at the cuts.

    Under ``eval.tokens`` documents are taken in one fixed random order for as long as they fit;
    the first that does not fit ends the draw. The order is that of a counter, so it is the same on
    every machine and for every run.

    A bucket holds the documents of ``2**n`` to ``2**(n+1) - 1`` tokens, cut or not.

Kept true (tests/unit/data/test_held_out.py)
    Each token of each document is in exactly one piece; a larger cap holds the documents of a
    smaller one; a document that is also trained is found wherever it stands.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.compressed import without_compression
from equipoise.data.modality.rules import ItemRules
from equipoise.data.progress import Progress
from equipoise.spec.pack import Pieces
from equipoise.spec.run.spec import PYTHON_SOURCES, DataSpec, RunSpec, Source

_SUFFIXES: dict[str, Source] = {".jsonl": "jsonl", ".parquet": "parquet"}

_PROBE_TOKENS = 16
"""Tokens by which documents of equal length are told apart before they are compared."""

_READ_TOKENS = 1 << 22
"""Tokens that are read at a time, or one document."""


def held_out_data(spec: RunSpec, tokenizer: Path) -> DataSpec:
    """The held-out documents as a corpus, in the tokens of the one that is trained on.

    >>> from equipoise.spec.run.spec import EvalSpec
    >>> spec = RunSpec(eval=EvalSpec(path="held.jsonl.gz"))
    >>> held_out_data(spec, Path("tokenizer.json")).source
    'jsonl'
    """
    asked = spec.eval
    usual: Source = "text" if spec.data.source in PYTHON_SOURCES else spec.data.source
    source = asked.source
    if source == "by-path":
        source = _SUFFIXES.get(Path(without_compression(asked.path)).suffix, usual)
    return dataclasses.replace(
        spec.data,
        source=source,
        path=asked.path,
        mix=(),
        field=asked.field or spec.data.field,
        # One that is named may have more beside it than its own file: a chat template.
        tokenizer=str(tokenizer.resolve())
        if spec.data.tokenizer == "train"
        else spec.data.tokenizer,
    )


def prepare_held_out(
    spec: RunSpec, base: Path, trained: TokenStore, *, progress: Progress
) -> TokenStore:
    """Open the token cache of the held-out documents, or make it.

    Args:
        spec: All keys.
        base: Folder of run.toml, where relative paths start.
        trained: The corpus that is trained on, whose tokenizer is used.
        progress: Shows the bytes tokenized.

    Raises:
        DataError: the documents are missing, empty or wrong.
    """
    data = held_out_data(spec, trained.tokenizer_file)
    try:
        return prepare(data, base, progress=progress, rules=ItemRules.of(spec))
    except DataError as error:
        message = re.sub(r"\bdata\.(path|source|field)\b", r"eval.\1", str(error))
        raise DataError(message) from error


def draw_documents(doc_tokens: Ints, most_tokens: int | Literal["all"]) -> Ints:
    """The documents that an evaluation reads, in ascending order; at least one.

    Args:
        doc_tokens: Length of each document [tokens].
        most_tokens: Their tokens at most, unless the first drawn is longer.

    >>> draw_documents(np.array([5, 5, 5, 5]), 12).size
    2
    """
    count = len(doc_tokens)
    if most_tokens == "all":
        return np.arange(count, dtype=np.int64)
    draws = np.random.Philox(key=np.zeros(2, dtype=np.uint64)).random_raw(count)
    order = np.argsort(draws, kind="stable")
    fits = int(np.searchsorted(np.cumsum(doc_tokens[order]), most_tokens, side="right"))
    return np.sort(order[: max(1, fits)])


def cut_documents(documents: Ints, doc_tokens: Ints, context_tokens: int) -> Pieces:
    """Pieces of whole documents, int64 [n, 3]: document, start, stop.

    >>> cut_documents(np.array([0, 2]), np.array([5, 9, 3]), 4).tolist()
    [[0, 0, 4], [0, 4, 5], [2, 0, 3]]
    """
    lengths = doc_tokens[documents]
    windows = -(-lengths // context_tokens)
    owner = np.repeat(np.arange(len(documents)), windows)
    first = np.repeat(np.cumsum(windows) - windows, windows)
    start = (np.arange(len(owner)) - first) * context_tokens
    stop = np.minimum(start + context_tokens, lengths[owner])
    return np.stack((documents[owner], start, stop), axis=1)


def bucket_of(doc_tokens: Ints) -> Ints:
    """The power of two that each length reaches.

    >>> bucket_of(np.array([1, 2, 3, 4, 1023, 1024])).tolist()
    [0, 1, 1, 2, 9, 10]
    """
    return np.frexp(doc_tokens.astype(np.float64))[1].astype(np.int64) - 1


def find_trained(held: TokenStore, documents: Ints, trained: TokenStore) -> Ints:
    """Those of some held-out documents that are also trained on, token for token, image for image.

    Args:
        held: The held-out corpus.
        documents: Documents of it, in ascending order.
        trained: The other corpus, in the tokens of the same tokenizer.

    Raises:
        DataError: a cache is damaged where it is read.

    Cost: one pass over the tokens of trained documents that are as long as one of these.
    """
    alike = np.flatnonzero(np.isin(trained.doc_tokens, held.doc_tokens[documents]))
    probes = dict[bytes, list[int]]()
    for document, probe in zip(documents.tolist(), _probes(held, documents), strict=True):
        probes.setdefault(probe.tobytes(), []).append(document)
    both: set[int] = set()
    for document, probe in zip(alike.tolist(), _probes(trained, alike), strict=True):
        for held_document in probes.get(probe.tobytes(), ()):
            if held_document not in both and _is_same(held, held_document, trained, document):
                both.add(held_document)
    return np.array(sorted(both), dtype=np.int64)


def _is_same(held: TokenStore, held_document: int, trained: TokenStore, document: int) -> bool:
    """Whether two documents of one length have the same tokens, and the same images and sound."""
    tokens = int(held.doc_tokens[held_document])
    if not np.array_equal(held.read(held_document, 0, tokens), trained.read(document, 0, tokens)):
        return False
    if held.items is None or trained.items is None:
        return held.items is trained.items
    one, other = held.items.of(held_document), trained.items.of(document)
    return np.array_equal(held.items.content[one], trained.items.content[other])


def _probes(store: TokenStore, documents: Ints) -> Ints:
    """The length of each document, and tokens from its first to its last, int64 [n, 17]."""
    lengths, starts = store.doc_tokens[documents], store.offsets[documents]
    rows = np.empty((len(documents), 1 + _PROBE_TOKENS), dtype=np.int64)
    rows[:, 0] = lengths
    at = 0
    while at < len(documents):
        first = int(starts[at])
        stop = max(at + 1, int(np.searchsorted(starts, first + _READ_TOKENS)))
        end = int(starts[stop - 1] + lengths[stop - 1])
        tokens = store.tokens[first:end]
        steps = np.arange(_PROBE_TOKENS) * (lengths[at:stop, None] - 1) // (_PROBE_TOKENS - 1)
        rows[at:stop, 1:] = tokens[starts[at:stop, None] - first + steps]
        at = stop
    return rows
