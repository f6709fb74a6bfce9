"""How often a run reads its corpus, in sentences: what it has, its shares, and what repeats.

Sources
    Up to four epochs repeated text trains about as well as new text, and later ones less and
    less: Muennighoff et al., Scaling Data-Constrained Language Models, arXiv:2305.16264.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.data.mixture import MixedStream, Mixture
from equipoise.spec.run.spec import RunSpec

if TYPE_CHECKING:
    from equipoise.data.cache.store import TokenStore  # which needs tokenizers

_GOOD_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class SourceReading:
    """One source of a run, and how often the run reads it."""

    name: str
    documents: int
    tokens: int
    share: float
    """Its part of the trained tokens."""
    epochs: float


def read_sources(
    spec: RunSpec, name: str, doc_tokens: Ints, mixture: Mixture | None
) -> list[SourceReading]:
    """Every source of a run, one unless they are mixed.

    Args:
        spec: Steps, seed and window.
        name: Of the corpus.
        doc_tokens: Length of each document [tokens].
        mixture: How they are mixed, if they are of several sources.
    """
    trained = spec.train.steps * spec.pack.step_tokens
    tokens = int(doc_tokens.sum())
    if mixture is None:
        return [SourceReading(name, len(doc_tokens), tokens, 1.0, trained / tokens)]
    stream = MixedStream(
        doc_tokens, mixture, seed=spec.train.seed, context_tokens=spec.pack.context_tokens
    )
    parts = np.split(doc_tokens, np.cumsum(mixture.documents)[:-1])
    rows = zip(mixture.names, parts, mixture.shares, stream.epochs(trained), strict=True)
    return [
        SourceReading(source, len(part), int(part.sum()), float(share), epochs)
        for source, part, share, epochs in rows
    ]


def describe_reading(spec: RunSpec, sources: Sequence[SourceReading]) -> list[str]:
    """A line for each source, and one for what the run repeats too often, with the fix.

    >>> spec = RunSpec()
    >>> describe_reading(spec, [SourceReading("text:a", 9, 4_000_000, 1.0, 0.8192)])
    ['text:a: 9 documents, 4,000,000 tokens; 100 steps of 32,768 read 0.82 epochs.']
    """
    steps, size = spec.train.steps, spec.pack.step_tokens
    lines = [
        f"{each.name}: {each.documents:,} documents, {each.tokens:,} tokens; "
        + (f"{each.share:.1%} of every step; " if len(sources) > 1 else "")
        + f"{steps:,} step{'s' * (steps != 1)} of {size:,} read {_count(each.epochs)} epochs."
        for each in sources
    ]
    worst = max(sources, key=lambda each: each.epochs)
    name = f"of {worst.name} " if len(sources) > 1 else ""
    a_step = size * worst.share
    if a_step > worst.tokens:
        fits = int(worst.tokens / worst.share) // spec.pack.context_tokens
        fix = (
            f"Set pack.step_tokens to {fits * spec.pack.context_tokens:,} or less"
            if fits
            else "Lower pack.context_tokens and pack.step_tokens"
        )
        lines.append(
            f"Every step reads each document {name}{_count(a_step / worst.tokens)} times. {fix}, "
            "or add documents."
        )
    elif worst.epochs > _GOOD_EPOCHS:
        fewer = int(_GOOD_EPOCHS * worst.tokens / a_step)
        lines.append(
            f"Each document {name}is read {_count(worst.epochs)} times; after {_GOOD_EPOCHS} "
            f"repeated text teaches less and less. train.steps = {fewer:,} reads it "
            f"{_GOOD_EPOCHS} times; or add documents."
        )
    return lines


def _count(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def cut_sentence(spec: RunSpec, store: "TokenStore") -> str:
    """What to say of conversations that are longer than a window; nothing where none is."""
    window = spec.pack.context_tokens
    each_source = [store] if store.mixture is None else store.sources
    doc_tokens = np.concatenate(
        [
            each.doc_tokens if is_whole else each.doc_tokens[:0]
            for each, is_whole in zip(each_source, spec.data.whole, strict=True)
        ]
    )
    long = doc_tokens[doc_tokens > window]
    if not len(long):
        return ""
    return (
        f"{len(long):,} of {len(doc_tokens):,} conversations exceed pack.context_tokens = "
        f"{window:,} and get cut there: the rest of an answer is learned without what came before "
        f"it. The longest has {int(long.max()):,} tokens."
    )
