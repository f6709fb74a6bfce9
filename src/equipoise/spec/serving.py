"""What one iteration of a serving engine computes: the sizes that its price depends on.

Why
    The scheduler adds these numbers up, the cost model prices them, the engine is timed by them.
    All three must count alike.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationWork:
    """One iteration: all sequences that run together, once through the model."""

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

    def after(self, iterations: int) -> "IterationWork":
        """As many iterations of single tokens later, with every context as much longer.

        >>> IterationWork(2, 30, 30, 2, 2).after(3)
        IterationWork(tokens=2, pairs=36, kv_tokens=36, sequences=2, logits=2)
        """
        grown = iterations * self.sequences
        return IterationWork(
            self.tokens, self.pairs + grown, self.kv_tokens + grown, self.sequences, self.logits
        )


def chunk_pairs(start: int, tokens: int) -> int:
    """Query-key pairs of the tokens [start, start + tokens) of one sequence.

    >>> chunk_pairs(0, 3), chunk_pairs(3, 1)
    (6, 4)
    """
    return tokens * start + tokens * (tokens + 1) // 2
