"""What one iteration of a serving engine computes: the sizes that its price depends on.

Why
    The scheduler adds these numbers up, the cost model prices them, the engine is timed by them.
    All three must count alike.
"""

from typing import NamedTuple


class IterationWork(NamedTuple):
    """One iteration: all sequences that run together, once through the model.

    A tuple, since the scheduler makes several for every decision.
    """

    tokens: int
    """New tokens: rows of every matrix product."""
    pairs: int
    """Query-key pairs: each new token with each token up to itself."""
    kv_tokens: int
    """Rows of keys and values that are read: each sequence's context, once."""
    sequences: int
    """Sequences with at least one new token."""
    logits: int
    """Rows that pass through the head."""
    chunks: int = 0
    """Those of the sequences that compute a chunk of a prompt: each attends by itself, single
    tokens together."""
    chunk_kv_tokens: int = 0
    """Those of the rows of keys and values that chunks read."""

    def with_decode(self, context_tokens: int) -> "IterationWork":
        """Beside a single token more, which reads this context, itself included.

        >>> IterationWork(0, 0, 0, 0, 0).with_decode(4)[:5]
        (1, 4, 4, 1, 1)
        """
        return IterationWork(
            self.tokens + 1,
            self.pairs + context_tokens,
            self.kv_tokens + context_tokens,
            self.sequences + 1,
            self.logits + 1,
            self.chunks,
            self.chunk_kv_tokens,
        )

    def with_chunk(self, start: int, tokens: int, logits: int) -> "IterationWork":
        """Beside tokens [start, start + tokens) of one more sequence.

        >>> IterationWork(0, 0, 0, 0, 0).with_chunk(3, 2, 1)[:5]
        (2, 9, 5, 1, 1)
        """
        rows, pairs, kv_tokens, sequences, head_rows, chunks, chunk_kv_tokens = self
        return IterationWork(
            rows + tokens,
            pairs + chunk_pairs(start, tokens),
            kv_tokens + start + tokens,
            sequences + 1,
            head_rows + logits,
            chunks + 1,
            chunk_kv_tokens + start + tokens,
        )

    def after(self, iterations: int) -> "IterationWork":
        """As many iterations of single tokens later, with every context as much longer.

        >>> IterationWork(2, 30, 30, 2, 2).after(3)[:5]
        (2, 36, 36, 2, 2)
        """
        grown = iterations * self.sequences
        return IterationWork(
            self.tokens, self.pairs + grown, self.kv_tokens + grown, self.sequences, self.logits
        )


def decodes_of(sequences: int, context_tokens: int) -> IterationWork:
    """One token for each of some sequences, which read this context together, themselves included.

    >>> decodes_of(2, 30)[:5]
    (2, 30, 30, 2, 2)
    """
    return IterationWork(sequences, context_tokens, context_tokens, sequences, sequences)


def chunk_pairs(start: int, tokens: int) -> int:
    """Query-key pairs of the tokens [start, start + tokens) of one sequence.

    >>> chunk_pairs(0, 3), chunk_pairs(3, 1)
    (6, 4)
    """
    return tokens * start + tokens * (tokens + 1) // 2
