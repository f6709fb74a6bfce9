"""A model behind the HTTP surface: an engine, and what clients may know of it.

Kept true (tests/unit/serve/http/test_served.py)
    A server's fingerprint changes with its weights; a run is called by its folder's name.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from equipoise.checkpoint.manifest import MANIFEST
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.http.vocabulary import Vocabulary
from equipoise.serve.source import TrainedModel
from equipoise.serve.tokenizer import ModelTokenizer

_TEXTS = 2
"""Texts of a tenant that are tokenized at a time: with more, the others' would wait for them."""
_SAMPLED = 1024
"""Values at each end of a weight that a fingerprint reads: training changes all of them."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model and its engine."""

    name: str
    """What clients call it."""
    engine: EngineLoop
    vocab: int
    """Tokens that the model knows."""
    fingerprint: str
    """Digest of weights, sizes and how they are computed."""
    vocabulary: Vocabulary = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    long_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a very long text is tokenized."""
    texts: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(_TEXTS))
    )
    """By tenant, held while one of its texts is tokenized beside other requests."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", Vocabulary(self.tokenizer.core))

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's own."""
        return self.engine.prompts.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.engine.prompts.end_ids

    @property
    def width(self) -> int:
        """Numbers of a hidden state, and of an embedding."""
        return self.engine.width

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of keys and values holds."""
        return self.engine.pool.pages * self.engine.pool.page_tokens

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together: all of them must fit in the cache."""
        return min(self.engine.context_tokens, self.kv_tokens)

    @property
    def first_ids(self) -> tuple[int, ...]:
        """What stands for a prompt without tokens."""
        return tuple(self.engine.prompts.encode(""))


def serve_model(source: Path, trained: TrainedModel, engine: EngineLoop) -> ServedModel:
    """A model that was opened, under the name of what it was opened from."""
    return ServedModel(
        model_name(source), engine, trained.model.vocab, fingerprint(trained, engine.pool.dtype)
    )


def fingerprint(trained: TrainedModel, dtype: torch.dtype) -> str:
    """A digest that changes with the weights, the sizes and how they are computed."""
    digest = hashlib.sha256(f"{trained.model} {dtype} {torch.__version__}".encode())
    for name in sorted(trained.state):
        flat = trained.state[name].detach().reshape(-1)
        for part in (flat[:_SAMPLED], flat[-_SAMPLED:]):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return f"fp_{digest.hexdigest()[:16]}"


def model_name(source: Path) -> str:
    """What clients call a model: the name of its run, folder or file."""
    source = source.resolve()
    if source.is_file():
        return source.stem
    return source.parent.parent.name if (source / MANIFEST).exists() else source.name
