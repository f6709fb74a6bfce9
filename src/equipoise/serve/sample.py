"""Choose the next token from logits: the likeliest, or one drawn by a counter.

What it decides
    Temperature first, then the ``top_k`` likeliest tokens, then the fewest whose probabilities
    reach ``top_p``, as transformers orders them. A draw depends on the seed and on the token's
    position alone: how a text was cut into calls changes nothing.

Kept true (tests/unit/serve/test_sample.py)
    Draws follow the filtered probabilities; what transformers' own filters remove is never drawn.

Sources
    Nucleus sampling: arXiv:1904.09751. Counter-based draws: Philox, as ``numpy`` has it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import SpecError


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

    def __post_init__(self) -> None:
        for name, value, is_right, range_ in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not is_right:
                raise SpecError(f"{name} must be {range_}; it is {value}.")


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn by, float64 [V]; most are zero after ``top_k``."""
    logits_V = logits_V.double() / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        least = torch.topk(logits_V, sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    shares_V = torch.softmax(logits_V, dim=0)
    if sampling.top_p < 1:
        falling = torch.sort(shares_V, descending=True, stable=True)
        before_V = falling.values.cumsum(0) - falling.values
        shares_V[falling.indices[before_V >= sampling.top_p]] = 0
        shares_V /= shares_V.sum()
    return shares_V


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
