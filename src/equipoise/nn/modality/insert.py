"""Rows of items among the embedded tokens of a decoder.

What it decides
    Nothing: a row replaces the embedding of the token that stands in for it. So that token's own
    embedding gets no gradient, and which token stands there makes no difference.

    Ranks meet in a decoder's backward, so each needs one, even for tokens without a row under a
    frozen table: zero rows that need a gradient give it one.

Kept true (tests/unit/nn/modality/test_encoder.py)
    The stand-in's embedding has no gradient; each row gets the gradient of its place.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """Rows of one micro-batch on one rank."""

    places_N: Tensor
    """Which of this rank's hidden states they replace, int64 [N], ascending."""
    rows_ND: Tensor
    """The rows."""

    def into(self, x_tD: Tensor) -> Tensor:
        """Hidden states [t, D] with the rows in their places."""
        if not len(self.places_N) and (x_tD.requires_grad or not self.rows_ND.requires_grad):
            return x_tD
        return x_tD.index_copy(0, self.places_N, self.rows_ND.to(x_tD.dtype))
