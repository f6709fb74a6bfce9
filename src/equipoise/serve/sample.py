"""Choose the next token from logits: the likeliest, or one drawn by a counter.

What it decides
    Biases and penalties come first and change the likeliest token, too. Then temperature, then the
    ``top_k`` likeliest tokens, then the fewest whose probabilities reach ``top_p``, then those that
    are likely enough beside the likeliest (``min_p``), as transformers orders them. A draw depends
    on the seed and on the token's position alone: how a text was cut into calls, and which texts
    are computed beside it, changes nothing.

Kept true (tests/unit/serve/test_sample.py)
    Draws follow the filtered probabilities; what transformers' own filters remove is never drawn.

Sources
    Nucleus sampling: arXiv:1904.09751. ``min_p``: arXiv:2407.01082. Repetition penalty:
    arXiv:1909.05858. Presence and frequency penalties: OpenAI's API reference. Counter-based
    draws: Philox, as ``numpy`` has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import SpecError

_INFINITE = float("inf")
_TWO = "from -2 to 2"
_CANDIDATES = 256
"""Likeliest tokens among which a nucleus is looked for first: to sort a vocabulary takes ms."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        SpecError: a setting is out of range.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities reach this sum."""
    seed: int = 0
    min_p: float = 0.0
    """Draw from tokens at least this likely, as a share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and answer, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it is in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        biases = self.logit_bias
        bias = next((each for each in biases.values() if not -100 <= each <= 100), 0.0)
        for name, value, is_right, range_ in (
            ("temperature", self.temperature, 0 <= self.temperature < _INFINITE, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.01 <= self.repetition_penalty <= 100,
                "from 0.01 to 100",
            ),
            ("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, _TWO),
            ("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, _TWO),
            ("logit_bias", bias, -100 <= bias <= 100, "from -100 to 100"),
        ):
            if not is_right:
                raise SpecError(f"{name} must be {range_}; it is {value}.")

    @property
    def penalises(self) -> bool:
        """Whether ``adjust`` reads which tokens there are so far."""
        return any((self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1))

    @property
    def changes_logits(self) -> bool:
        """Whether ``adjust`` does anything."""
        return bool(self.logit_bias) or self.penalises


class TokenCounts:
    """Which tokens a text has so far, by the vocabulary; a further token is one step."""

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], vocab: int, device: torch.device
    ) -> None:
        """Count the tokens of a prompt, and of what was generated after it."""
        self.is_used_V = torch.zeros(vocab, dtype=torch.bool, device=device)
        """Whether prompt or answer has the token."""
        self.is_used_V[torch.tensor([*prompt, *answer], dtype=torch.int64, device=device)] = True
        counts_V = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab)
        self.answer_V = counts_V.to(device, torch.float32)
        """How often the answer has it."""

    def add(self, token: int) -> None:
        """The answer goes on with a token."""
        self.is_used_V[token] = True
        self.answer_V[token] += 1


def adjust(logits_V: Tensor, sampling: Sampling, counts: TokenCounts | None) -> Tensor:
    """Logits with biases and penalties, fp32 [V]; the ones given are left as they are.

    Args:
        logits_V: Of the next token [V].
        sampling: Biases and penalties; their tokens are in the vocabulary.
        counts: Tokens so far; None where nothing is penalised.
    """
    logits_V = logits_V.float().clone()
    if counts is not None and (penalty := sampling.repetition_penalty) != 1:
        held = logits_V[counts.is_used_V]
        logits_V[counts.is_used_V] = torch.where(held > 0, held / penalty, held * penalty)
    if counts is not None and (sampling.presence_penalty or sampling.frequency_penalty):
        answer_V = counts.answer_V
        logits_V -= sampling.presence_penalty * (answer_V > 0)
        logits_V -= sampling.frequency_penalty * answer_V
    if biases := sampling.logit_bias:
        at = torch.tensor([*biases], device=logits_V.device)
        logits_V[at] += torch.tensor([*biases.values()], device=logits_V.device)
    return logits_V


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn by, float64 [V]; most are zero after ``top_k``."""
    logits_V = logits_V.double()
    # The largest becomes 0: divided by the smallest temperatures, others are minus infinity.
    logits_V = (logits_V - logits_V.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        least = torch.topk(logits_V, sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    shares_V = torch.softmax(logits_V, dim=0)
    if sampling.top_p < 1:
        shares_V = _nucleus(shares_V, sampling.top_p)
    if sampling.min_p:
        shares_V[shares_V < sampling.min_p * shares_V.max()] = 0
        shares_V /= shares_V.sum()
    return shares_V


def _nucleus(shares_V: Tensor, top_p: float) -> Tensor:
    """The fewest likeliest tokens whose probabilities reach ``top_p``, scaled to sum to 1."""
    for candidates in (_CANDIDATES, len(shares_V)):
        at = torch.arange(len(shares_V), device=shares_V.device)
        if candidates < len(shares_V):
            least = torch.topk(shares_V, candidates).values[-1]
            at = torch.nonzero(shares_V >= least).squeeze(1)
        falling = torch.sort(shares_V[at], descending=True, stable=True)
        before = falling.values.cumsum(0) - falling.values
        kept = at[falling.indices[before < top_p]]
        if len(kept) < len(at):
            break
    nucleus_V = torch.zeros_like(shares_V)
    nucleus_V[kept] = shares_V[kept]
    return nucleus_V / nucleus_V.sum()


def log_probabilities(logits_RV: Tensor) -> Tensor:
    """Logarithms of probabilities before any filter, fp32 [rows, V]; each row by itself."""
    return torch.log_softmax(logits_RV.float(), dim=-1)


def choose_token(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The next token.

    Args:
        logits_V: Of the next token [V].
        sampling: How to choose.
        position: The token's index in the text, prompt included.
    """
    if not sampling.temperature:
        return int(logits_V.float().argmax())
    sums_V = probabilities(logits_V, sampling).cumsum(0)
    drawn = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).random()
    # The last of equal sums is a token of probability zero: "right" passes over those.
    at = int(torch.searchsorted(sums_V, drawn * float(sums_V[-1]), right=True))
    return min(at, int(torch.searchsorted(sums_V, sums_V[-1])))
