"""Which keys of its own document a query reads.

Why
    Counting, sharding and computing pairs must mean the same mask.

Kept true (tests/unit/cost/test_work.py, tests/unit/schedule/attention/test_mask.py)
    Pairs counted under a mask are those of the explicit mask.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest

MaskKind = Literal["causal", "full", "window", "prefix"]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of its own document a query reads; no mask reaches into another document.

    ::

        causal          full            window 2        prefix 2, branches 1 and 2
        x . . . .       x x x x x       x . . . .       x . . . .
        x x . . .       x x x x x       x x . . .       x x . . .
        x x x . .       x x x x x       . x x . .       x x x . .
        x x x x .       x x x x x       . . x x .       x x . x .
        x x x x x       x x x x x       . . . x x       x x . x x

    >>> print(Mask(), Mask("window", 4096), Mask("prefix", prefix_tokens=9, branch_tokens=(2, 3)))
    causal window 4,096 prefix 9 + 2, 3
    """

    kind: MaskKind = "causal"
    window_tokens: int = 0
    """Most keys that a query reads, itself included [tokens]; for a window."""
    prefix_tokens: int = 0
    """Tokens that every branch reads [tokens]; for a shared prefix."""
    branch_tokens: tuple[int, ...] = ()
    """Length of each branch after the prefix, in order [tokens]; for a shared prefix."""

    def __post_init__(self) -> None:
        kinds = get_args(MaskKind)
        if self.kind not in kinds:
            raise SpecError(
                f'No mask is called "{self.kind}". Nearest: {nearest(self.kind, kinds)}. All: '
                f"{', '.join(kinds)}."
            )
        if self.kind == "window" and self.window_tokens < 1:
            raise SpecError(
                f"A sliding window of {self.window_tokens} tokens reads no key. Set "
                f"window_tokens to 1 or more."
            )
        if min(self.prefix_tokens, *self.branch_tokens, 0) < 0:
            raise SpecError(
                f"The prefix is {self.prefix_tokens} tokens and the branches "
                f"{list(self.branch_tokens)}. Give 0 or more tokens each."
            )

    def __str__(self) -> str:
        if self.kind == "window":
            return f"window {self.window_tokens:,}"
        if self.kind == "prefix":
            branches = ", ".join(f"{tokens:,}" for tokens in self.branch_tokens)
            return f"prefix {self.prefix_tokens:,} + {branches or 'no branch'}"
        return self.kind


CAUSAL = Mask()
