"""SkyRL's sequence packer, by work: the same arguments and contract as its ``SeqPacker``.

Why
    SkyRL's ``balanced`` packer evens out tokens, and lets a sample that is too long exceed the
    capacity.

What it decides
    Every bin has a sample, none is over its capacity, and their number is a multiple of what is
    asked, so that ranks get equally many; then the heaviest is light.

Kept true (tests/oracle/adapters/test_verl.py, by Hypothesis)
    The contract of SkyRL's packers holds, and no bin is heavier than the heaviest of theirs.

Sources
    SkyRL 0.3, ``train/dataset/bin_packing.py``: ``SeqPacker``.
"""

from collections.abc import Sequence

from equipoise.balance.batches.prices import Price, curve_of
from equipoise.balance.batches.request import batch


class BalancedPacker:
    """Packs sequences into bins of even work.

    Args:
        bin_capacity: Most tokens of a bin.
        min_bin_count: Fewest bins.
        bin_count_multiple: Number that divides the bins: the data-parallel ranks.
        price: What a sequence costs, as in ``balance.batch``: the model's configuration.
    """

    def __init__(
        self,
        bin_capacity: int,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        price: Price,
    ) -> None:
        self.bin_capacity = bin_capacity
        self.min_bin_count, self.bin_count_multiple = min_bin_count, bin_count_multiple
        self._curve = curve_of(price)

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences in each bin.

        Raises:
            LayoutError: a sequence is over the capacity, or there are fewer than bins.
        """
        answer = batch(
            sequence_lengths,
            price=self._curve,
            max_tokens=self.bin_capacity,
            min_micro_batches=self.min_bin_count or 1,
            multiple_of=self.bin_count_multiple or 1,
        )
        return answer.micro_batches[0]
