"""Real tokens of the standard library behind documents of any lengths."""

import dataclasses
from pathlib import Path

import numpy as np

from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec


def open_corpus() -> TokenStore:
    """The default corpus, from its cache if there is one."""
    return prepare(DataSpec(), Path.cwd(), progress=SilentProgress())


def recut(store: TokenStore, lengths: np.ndarray) -> TokenStore:
    """The same tokens under other document boundaries, from the start of the corpus."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    if offsets[-1] > len(store.tokens):
        raise ValueError(f"{offsets[-1]:,} tokens wanted, the corpus has {len(store.tokens):,}")
    return dataclasses.replace(store, doc_tokens=np.asarray(lengths), offsets=offsets)


def lognormal_step(tokens: int, *, seed: int, median: float, sigma: float) -> np.ndarray:
    """Lognormal document lengths that sum to ``tokens`` exactly, the last one cut."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, 4 * tokens)
    lengths = np.clip(np.rint(drawn), 2, tokens).astype(np.int64)
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, tokens)) + 1
    chosen = lengths[:count].copy()
    chosen[-1] -= int(ends[count - 1]) - tokens
    return chosen[chosen > 0]
