"""What a scheduler may use, and what an iteration may take."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from equipoise.base.errors import FitError, SpecError
from equipoise.base.shown import shorten
from equipoise.schedule.batching.request import ServeRequest
from equipoise.spec.serving import IterationWork

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Shares of tenants: beyond these, sums of work over weight would lose their digits."""
PAGE_TOKENS = 16
"""Tokens of a page unless given."""

_SINGLES = 32
"""A prompt that is alone fills an iteration up to this many times what a single token takes:
more is hardly faster, and whoever comes next would wait longer. Ranks that share it compute a part
of its rows each, so as many times again as there are ranks."""


class ServingPrice(Protocol):
    """Predicted seconds. All of them rise with every size."""

    def iteration_s(self, work: IterationWork) -> float:
        """One whole iteration [s]."""

    def prompt_s(self, start: int, tokens: int) -> float:
        """The share that prompt tokens [start, start + tokens) have in well-filled iterations [s].

        Adds up over ranges that touch: the unit of fairness.
        """

    def output_s(self, start: int, tokens: int) -> float:
        """Likewise tokens [start, start + tokens) that are generated one by one [s]."""

    def swap_s(self, tokens: int) -> float:
        """Moving the keys and values of this many tokens to host memory, or back [s]."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Limits of one scheduler.

    Raises:
        SpecError: names the limit that is out of range.
    """

    pages: int
    """Pages of the pool."""
    page_tokens: int = PAGE_TOKENS
    most_sequences: int = 64
    """Sequences that hold pages at the same time."""
    queued_requests: int = 256
    """Requests that may wait; one more is refused."""
    iteration_s: float = 0.05
    """Predicted seconds that prefills fill an iteration up to. Every decode runs in any case, and
    at least a page of one prefill."""
    prefill_iteration_s: float = 0.2
    """The same where nothing decodes, so that nobody waits for a next token; used as far as larger
    iterations are faster."""
    iteration_tokens: int = 8192
    """Most tokens of an iteration's prefills, which bounds activations."""
    is_chunked: bool = True
    """Whether prompts may be computed in parts. If not, an iteration may take as long as one."""
    swap_pages: int = 0
    """Slots in host memory for pages of requests that are preempted."""
    shares_chunks: bool = False
    """Whether cached pages are shared only up to where a chunk ended: for pools over several ranks,
    where a chunk's tokens are spread over all of its pages."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants; 1 for those not named."""
    grace_s: float = 2.5
    """Time within which a further stage of a job continues its user's virtual time [s]."""

    def __post_init__(self) -> None:
        for name in ("pages", "page_tokens", "most_sequences", "queued_requests"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}. It must be at least 1.")
        if self.iteration_tokens < self.page_tokens:
            raise SpecError(
                f"iteration_tokens is {self.iteration_tokens}. It must be at least one page: "
                f"{self.page_tokens} tokens."
            )
        if self.swap_pages < 0:
            raise SpecError(f"swap_pages is {self.swap_pages}. It must be at least 0.")
        for name in ("iteration_s", "prefill_iteration_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} is {getattr(self, name)}. It must be above 0.")
        for tenant, weight in self.weights.items():
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                raise SpecError(
                    f'The weight of tenant "{shorten(tenant)}" is {weight}. Give {LEAST_WEIGHT:f} '
                    f"to {MOST_WEIGHT:,.0f}."
                )
        if not self.grace_s >= 0:
            raise SpecError(f"grace_s is {self.grace_s}. It must be at least 0.")


def single_s(price: ServingPrice) -> float:
    """Predicted time of an iteration with a single token [s]."""
    return price.iteration_s(IterationWork(1, 1, 1, 1, 1))


def paced(settings: BatchSettings, price: ServingPrice, ranks: int = 1) -> BatchSettings:
    """Limits for a machine of this pace: iterations of prompts as long as makes them faster.

    Args:
        settings: With times for a fast machine, which are kept where they are longer.
        price: The machine's.
        ranks: That share every sequence.
    """
    least_s = _SINGLES * ranks * single_s(price)
    long_s = max(settings.prefill_iteration_s, least_s)
    return dataclasses.replace(settings, prefill_iteration_s=long_s)


def page_tokens_of(ranks: int, page_tokens: int = PAGE_TOKENS) -> int:
    """The smallest page from ``page_tokens`` on that the ranks divide.

    >>> [page_tokens_of(ranks) for ranks in (1, 2, 3, 4)]
    [16, 16, 18, 16]
    """
    return -(-page_tokens // ranks) * ranks


def require_possible(request: ServeRequest, settings: BatchSettings) -> None:
    """Refuse a request that could never run, however long it waited.

    Raises:
        FitError: it may need more pages than there are.
        SpecError: a size is out of range, or its time is not a number.
    """
    prompt, most = request.prompt_tokens, request.most_tokens
    if not math.isfinite(request.arrival_s):
        raise SpecError(f"A request arrives at {request.arrival_s} s. Give a finite time.")
    if prompt < 1 or most < 0:
        raise SpecError(
            f"A request has {prompt} tokens of prompt and may generate {most}. It needs at least "
            "1 and 0."
        )
    if not 0 <= request.given_tokens < prompt:
        raise SpecError(
            f"A request brings {request.given_tokens} computed tokens of a prompt of {prompt}. The "
            "last one at least is computed here."
        )
    pages = -(-(prompt + most) // settings.page_tokens)
    if pages > settings.pages:
        raise FitError(
            f"{prompt:,} tokens of prompt and up to {most:,} generated ones need {pages:,} pages "
            f"of {settings.page_tokens} tokens; there are {settings.pages:,}. Send a shorter "
            "prompt, or ask for fewer tokens."
        )
