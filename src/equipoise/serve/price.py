"""What an iteration costs here, timed when a server starts.

What it decides
    Seconds are linear in new tokens and in query-key pairs; both are fitted to two chunks.
"""

import time
from dataclasses import dataclass

from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.spec.serving import IterationWork, chunk_pairs

_TOKENS = 128
_TRIES = 2


@dataclass(frozen=True, slots=True)
class LinearPrice:
    """Seconds that are linear in every size."""

    fixed_s: float
    token_s: float
    pair_s: float

    def iteration_s(self, work: IterationWork) -> float:
        """One whole iteration [s]."""
        return self.fixed_s + self.token_s * work.tokens + self.pair_s * work.pairs

    def prompt_s(self, start: int, tokens: int) -> float:
        """The share of prompt tokens [start, start + tokens) [s]."""
        return self.token_s * tokens + self.pair_s * chunk_pairs(start, tokens)

    def output_s(self, start: int, tokens: int) -> float:
        """Likewise tokens that are generated one by one [s]."""
        return self.prompt_s(start, tokens)

    def swap_s(self, tokens: int) -> float:
        """Moving keys and values costs more than computing them again: nothing is measured."""
        return 2 * self.prompt_s(0, tokens)


def measure_price(decoder: PagedDecoder) -> LinearPrice:
    """Time a short and a longer chunk."""
    page_tokens = decoder.pool.page_tokens
    most = min(_TOKENS, decoder.pool.pages * page_tokens)

    def seconds(tokens: int) -> float:
        run = PageRun(0, -(-tokens // page_tokens))
        chunk = ServeChunk("timed", 0, tokens, (run,), samples=True, logits=1)
        times = []
        for _ in range(_TRIES):
            begin_s = time.perf_counter()
            for _ in decoder.logits(decoder.run([chunk], [0] * tokens), [tokens - 1]):
                pass
            times.append(time.perf_counter() - begin_s)
        return min(times)

    one_s, most_s = seconds(1), seconds(most)
    token_s = max(1e-9, (most_s - one_s) / max(1, most - 1))
    attention = decoder.decoder.model
    per_pair = 2 * attention.heads * attention.head_width * attention.layers / attention.params
    return LinearPrice(max(1e-6, one_s - token_s), token_s, token_s * per_pair)
