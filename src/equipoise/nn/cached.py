"""A decoder that continues one sequence, and keeps the keys and values of its tokens.

Why
    The logits after token n depend on the keys and values of all tokens before it. Computed
    anew for every token, a text of n tokens costs n forwards; kept, it costs one.

What it decides
    A long prompt enters in chunks, so that activations and masks stay small. The first chunk
    attends exactly as training does; later ones read the kept keys under a mask that lets each
    query read the keys up to its own token.

Kept true (tests/unit/nn/test_cached.py)
    However a sequence is cut into calls, its logits equal those of the whole forward within
    rounding. A sequence cut back continues as if it had never been longer.

Shapes: t new tokens, S tokens so far and new, G key/value heads, E head width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.attention import attend_documents, lead_heads
from equipoise.nn.decoder import Decoder
from equipoise.nn.rope import rotary_frequencies, rotary_table

_CHUNK_TOKENS = 512
_READ_TOKENS = 4096
"""Tokens of a prompt that are computed before it is said how far it is."""


class Cached(Protocol):
    """One sequence that a model continues."""

    tokens: list[int]

    def cut(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens."""

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Append at least one token; the logits of the next one [V], in the weights' dtype."""


class _LayerCache:
    """Keys and values of one layer, in buffers that double when they are full."""

    def __init__(self) -> None:
        self.tokens = 0
        self._k_SGE: Tensor | None = None
        self._v_SGE: Tensor | None = None

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor) -> Tensor:
        """Keep the new keys and values, and attend to all: outputs [t, H, E]."""
        new, begin = len(q_tHE), self.tokens
        self._k_SGE = self._keep(self._k_SGE, k_tGE)
        self._v_SGE = self._keep(self._v_SGE, v_tGE)
        self.tokens += new
        if not begin:
            return attend_documents(q_tHE, k_tGE, v_tGE, [new])
        mask_tS = None
        if new > 1:
            mask_tS = torch.ones(new, self.tokens, dtype=torch.bool, device=q_tHE.device)
            mask_tS = mask_tS.tril_(begin)
        o_tHE = torch.nn.functional.scaled_dot_product_attention(
            lead_heads(q_tHE),
            lead_heads(self._k_SGE[: self.tokens]),
            lead_heads(self._v_SGE[: self.tokens]),
            attn_mask=mask_tS,
            enable_gqa=q_tHE.shape[1] != k_tGE.shape[1],
        )
        return o_tHE.squeeze(0).transpose(0, 1)

    def _keep(self, held_SGE: Tensor | None, new_tGE: Tensor) -> Tensor:
        needed = self.tokens + len(new_tGE)
        if held_SGE is None or len(held_SGE) < needed:
            grown = new_tGE.new_empty(max(2 * self.tokens, needed), *new_tGE.shape[1:])
            if held_SGE is not None:
                grown[: self.tokens] = held_SGE[: self.tokens]
            held_SGE = grown
        held_SGE[self.tokens : needed] = new_tGE
        return held_SGE


class CachedDecoder:
    """One sequence and its decoder: give it tokens, get the logits of the next one."""

    def __init__(self, decoder: Decoder, *, chunk_tokens: int = _CHUNK_TOKENS) -> None:
        """Start with no tokens.

        Args:
            decoder: With its weights. Capacities of experts must be unlimited: which rows they
                drop depends on the tokens of a call.
            chunk_tokens: Most tokens that run through the layers at once.

        Raises:
            ModelError: the experts have a capacity.
        """
        if decoder.model.capacity_factor:
            raise ModelError(
                f"Experts with a capacity factor of {decoder.model.capacity_factor:g} drop tokens "
                "by micro-batch, so a continued text has no one answer. Set capacity_factor to 0."
            )
        self._decoder, self._chunk_tokens = decoder, chunk_tokens
        self._layers = [_LayerCache() for _ in decoder.layers]
        self._frequency = rotary_frequencies(decoder.model, device=decoder.embed.weight.device)
        self.tokens: list[int] = []

    def cut(self, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens."""
        del self.tokens[tokens:]
        for layer in self._layers:
            layer.tokens = len(self.tokens)

    @torch.no_grad()
    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Append at least one token; the logits of the next one [V], in the weights' dtype."""
        x_tD = torch.empty(0)
        for start in range(0, len(tokens), self._chunk_tokens):
            x_tD = self._run(tokens[start : start + self._chunk_tokens])
        return self._decoder.finish(x_tD[-1:], None)[0]

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states of some more tokens, before the last norm [t, D]."""
        device, begin = self._frequency.device, len(self.tokens)
        x_tD = self._decoder.begin(torch.tensor(tokens, device=device))
        positions_t = torch.arange(begin, begin + len(tokens), device=device)
        table = rotary_table(self._frequency, positions_t, x_tD.dtype)
        for layer, cache in zip(self._decoder.layers, self._layers, strict=True):
            x_tD = layer(x_tD, table, cache.attend)
        self.tokens += tokens
        return x_tD


def continue_with(
    cached: Cached, tokens: Sequence[int], advance: Callable[[int], None] | None = None
) -> Tensor:
    """Make the sequence ``tokens``, computing only what differs from its beginning so far.

    Args:
        cached: The sequence so far.
        tokens: What it shall be, at least one token.
        advance: Called with the number of new tokens whenever some are there.

    Returns:
        The logits of the next token [V].
    """
    shared = 0
    for ours, theirs in zip(cached.tokens, tokens, strict=False):
        if ours != theirs:
            break
        shared += 1
    cached.cut(min(shared, len(tokens) - 1))
    begin, size = len(cached.tokens), len(tokens) if advance is None else _READ_TOKENS
    logits_V = torch.empty(0)
    for start in range(begin, len(tokens), size):
        new = tokens[start : start + size]
        logits_V = cached.extend(new)
        if advance is not None:
            advance(len(new) + (begin if start == begin else 0))
    return logits_V
