"""What the engine obeys: one iteration as data.

The order of an iteration: ``swaps_out``, ``swaps_in``, then all chunks together.

What every decision makes is a tuple, which is made in a fraction of a frozen dataclass's time.
"""

from dataclasses import dataclass
from typing import NamedTuple

from equipoise.spec.serving import IterationWork


class PageRun(NamedTuple):
    """Neighbouring pages, whose rows are one contiguous view of the pool."""

    first: int
    pages: int


class ServeChunk(NamedTuple):
    """Tokens [start, start + tokens) of one request, computed now; a decode is a chunk of 1."""

    request: str
    start: int
    """Tokens of the request whose keys and values are in its pages already."""
    tokens: int
    runs: tuple[PageRun, ...]
    """All pages of the request in the order of its tokens, also those of later tokens. They may
    differ from those of the last iteration: a page that equals a cached one is replaced by it."""
    samples: bool
    """Whether a token is sampled after the chunk's last token."""
    logits: int
    """Last tokens of the chunk whose hidden states are needed: none, the one that is sampled from
    or embedded, or all that were not scored before."""

    @property
    def pages(self) -> list[int]:
        """All pages of the request, one by one."""
        return [page for run in self.runs for page in range(run.first, run.first + run.pages)]


@dataclass(frozen=True, slots=True)
class Swap:
    """One request's rows moved between pages and slots of host memory, pair by pair."""

    request: str
    pages: tuple[int, ...]
    slots: tuple[int, ...]


class Iteration(NamedTuple):
    """One decision, or ``repeats`` equal ones: cheap to make, whatever the number of decodes."""

    number: int
    prefills: tuple[ServeChunk, ...]
    """Chunks of prompts, and of texts that are recomputed."""
    decodes: int
    """Sequences that get one token each; ``Scheduler.write`` lists them."""
    work: IterationWork
    """The first of the repeats."""
    predicted_s: float
    """The first of the repeats [s]."""
    repeats: int = 1
    """Iterations in a row that would be decided alike as long as nothing arrives or ends."""
    swaps_out: tuple[Swap, ...] = ()
    swaps_in: tuple[Swap, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests that lost their pages and wait again."""
    rested: tuple[str, ...] = ()
    """Requests that decoded, and leave this and perhaps further iterations to others."""
    resumed: tuple[str, ...] = ()
    """Those that decode again from this iteration on."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """An iteration with every chunk written out."""

    number: int
    chunks: tuple[ServeChunk, ...]
    """Decodes first."""
    work: IterationWork
    predicted_s: float
    swaps_out: tuple[Swap, ...]
    swaps_in: tuple[Swap, ...]
    preempted: tuple[str, ...]
    """Requests that lost their pages and wait again."""
    iteration: Iteration


class ServeOutcome(NamedTuple):
    """What became of one request in an iteration. A request without one goes on."""

    request: str
    ended: bool = False
    """Its last token was sampled, or its prompt was computed and nothing was to be sampled."""
    page_keys: tuple[bytes, ...] = ()
    """Contents of further whole pages, behind all that were given before; see ``ServeRequest``."""
    failed: bool = False
    """Whether the rows of its chunk are wrong, so that no page of them may be cached."""
