"""A model behind the HTTP surface: an engine that runs, and what clients may know of it."""

import time
from dataclasses import dataclass, field

from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.http.vocabulary import Vocabulary
from equipoise.serve.tokenizer import ModelTokenizer


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
    vocabulary: Vocabulary
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's own."""
        return self.engine.prompts.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.engine.prompts.end_ids

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.engine.context_tokens

    @property
    def first_ids(self) -> tuple[int, ...]:
        """What stands for a prompt without tokens."""
        return tuple(self.engine.prompts.encode(""))
