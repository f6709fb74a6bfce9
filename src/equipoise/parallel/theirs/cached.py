"""A model of transformers that continues one sequence, by its own cache of keys and values.

What it decides
    The prompt runs through the model at once, as ``generate`` of transformers runs it. A cache is
    extended, never cut: a sequence that is cut back is computed anew, because a cache of windows
    has forgotten what would be needed.

    Where RoPE goes by the longest sequence, all positions are computed anew once its frequencies
    change, so that logits are always those of the whole sequence.

Kept true (tests/oracle/test_generate.py)
    Greedy continuations equal those of transformers, token for token; logits equal those of the
    whole sequence.

Sources
    transformers 5.23, ``cache_utils.py`` and ``modeling_rope_utils.py`` dynamic_rope_update.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from equipoise.parallel.context.transformers_rope import length_dependent_types, switch_lengths


class CachedTheirs:
    """One sequence and its model: give it tokens, get the logits of the next one."""

    def __init__(self, theirs: PreTrainedModel) -> None:
        """Start with no tokens; the model is ready for inference, with its own attention."""
        self._theirs = theirs
        config = theirs.config.get_text_config()
        self._types = length_dependent_types(config)
        self._switches = switch_lengths(config)
        named = inspect.signature(theirs.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
        self._cache: Any = None
        self._kept_tokens = 0
        self.tokens: list[int] = []

    def cut(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens."""
        if tokens < len(self.tokens):
            del self.tokens[tokens:]
            self._forget()

    def _forget(self) -> None:
        self._cache, self._kept_tokens = None, 0

    @torch.no_grad()
    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Append at least one token; the logits of the next one [V], in the weights' dtype."""
        before = self._frequencies(self._kept_tokens)
        self.tokens += tokens
        if self._frequencies(len(self.tokens)) != before:
            self._forget()
        ids = torch.tensor([self.tokens[self._kept_tokens :]], device=self._theirs.device)
        out = self._theirs(
            input_ids=ids, past_key_values=self._cache, use_cache=True, **self._options
        )
        self._cache = out.past_key_values
        self._kept_tokens = 0 if self._cache is None else len(self.tokens)
        logits_V: Tensor = out.logits[0, -1]
        return logits_V

    def _frequencies(self, tokens: int) -> int:
        """A number for the frequencies that a sequence of this length has."""
        if not self._types:
            return 0
        passed = sum(tokens > each for each in self._switches)
        is_stretched = passed > 0 and self._types != ["longrope"]
        return tokens if is_stretched else passed
