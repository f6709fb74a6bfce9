"""What rank 0 tells the other ranks of an iteration: plain data, one small message.

Kept true (tests/unit/serve/longctx/test_message.py)
    A message that was written and read is the same.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.schedule.batching.iteration import PageRun, Swap


@dataclass(frozen=True, slots=True)
class Text:
    """A chunk of one sequence."""

    start: int
    """Tokens before it, which ranks have."""
    tokens: int
    logits: int
    """Last tokens of the chunk whose hidden states rank 0 needs."""
    cached: tuple[int, ...]
    """Tokens before it, by rank."""
    runs: tuple[PageRun, ...]
    """All pages of the sequence."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """One iteration for every rank."""

    strategy: str
    """What moves between ranks in its attention."""
    gathers: bool
    """Whether queries of single tokens go to the keys, whatever moves for longer chunks."""
    texts: tuple[Text, ...]
    tokens: tuple[int, ...]
    """Ids of all chunks' tokens, one chunk after another."""
    swaps_out: tuple[Swap, ...] = ()
    """Before the iteration, and before ``swaps_in``."""
    swaps_in: tuple[Swap, ...] = ()
    tile_rows: int = 0
    """Rows of the tiles that all layers compute in the invariant mode; 0 in the other one."""

    @property
    def cached(self) -> list[tuple[int, ...]]:
        """Tokens that each rank has of each text."""
        return [text.cached for text in self.texts]

    @property
    def new(self) -> list[int]:
        """New tokens of each text."""
        return [text.tokens for text in self.texts]


def write_work(work: RankWork) -> bytes:
    """The message."""
    return json.dumps(dataclasses.asdict(work), separators=(",", ":")).encode()


def read_work(message: bytes) -> RankWork:
    """The iteration in a message."""
    given = json.loads(message)
    texts = tuple(
        Text(
            each["start"],
            each["tokens"],
            each["logits"],
            tuple(each["cached"]),
            tuple(PageRun(*run) for run in each["runs"]),
        )
        for each in given["texts"]
    )
    out, back = (_swaps(given[name]) for name in ("swaps_out", "swaps_in"))
    tokens, rows = tuple(given["tokens"]), given["tile_rows"]
    return RankWork(given["strategy"], given["gathers"], texts, tokens, out, back, rows)


def _swaps(given: Sequence[dict[str, object]]) -> tuple[Swap, ...]:
    return tuple(
        Swap(str(each["request"]), tuple(each["pages"]), tuple(each["slots"]))  # type: ignore[arg-type]
        for each in given
    )
