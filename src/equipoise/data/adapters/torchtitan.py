"""Even micro-batches in torchtitan: rows of one length that take all ranks equally long.

Why
    torchtitan fills rows with documents in order. Rows have equal tokens, and unequal attention.

What it decides
    A step's documents go whole into rows of ``seq_len`` tokens, by ``balance.batch``; what is left
    of a row is padding without labels. Labels are shifted inside documents, positions restart
    with each: torchtitan's masks read document borders from them.

Kept true (tests/oracle/adapters/test_torchtitan.py)
    Its own data loader yields the rows and resumes them; each token of each document appears once
    over the ranks.

Sources
    torchtitan 0.3, ``hf_datasets/text_datasets.py``: ``ChatDataset``, whose rows these are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from equipoise.balance.batches.prices import Price
from equipoise.data.adapters.sampler import BalancedBatchSampler

IGNORED = -100
"""torchtitan's ``IGNORE_INDEX``."""

Row = tuple[dict[str, Tensor], Tensor]


class BalancedRows(IterableDataset[Row]):
    """Rows of one data-parallel rank, epoch after epoch; torchdata saves and restores its place.

    Args:
        documents: Tokens of each document, two or more each.
        seq_len: Tokens of a row. A document needs one token less than it has.
        sampler: Chooses the rows; made of the documents' lengths minus one.
        infinite: Whether another epoch follows.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        seq_len: int,
        sampler: BalancedBatchSampler,
        *,
        infinite: bool = True,
    ) -> None:
        self._documents, self._seq_len = documents, seq_len
        self._sampler, self._infinite = sampler, infinite
        self._rows = 0

    def __iter__(self) -> Iterator[Row]:
        while True:
            for row in self._sampler:
                self._rows += 1
                yield self._row(row)
            self._rows = 0
            if not self._infinite:
                return

    def _row(self, chosen: list[int]) -> Row:
        inputs = torch.zeros(self._seq_len, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED)
        positions = torch.zeros_like(inputs)
        at = 0
        for document in chosen:
            tokens = torch.as_tensor(self._documents[document], dtype=torch.int64)
            stop = at + len(tokens) - 1
            inputs[at:stop], labels[at:stop] = tokens[:-1], tokens[1:]
            positions[at:stop] = torch.arange(stop - at)
            at = stop
        positions[at:] = torch.arange(self._seq_len - at)
        return {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Epoch and rows that were yielded."""
        return self._sampler.state_dict(self._rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the rows of a state."""
        self._sampler.load_state_dict(state)
        self._rows = 0


def balanced_dataloader(
    documents: Sequence[Sequence[int]],
    *,
    seq_len: int,
    step_samples: int,
    price: Price,
    dp_rank: int,
    dp_world_size: int,
    local_batch_size: int = 1,
    infinite: bool = True,
    seed: int = 0,
) -> Any:
    """A ``ParallelAwareDataloader`` of torchtitan over rows that are even in work.

    Args:
        documents: Tokens of each document, two or more each; at most ``seq_len + 1``.
        seq_len: Tokens of a row.
        step_samples: Documents that are evened out together, over all ranks; about those of an
            optimizer step.
        price: What a document costs, as in ``balance.batch``.
        dp_rank: This data-parallel rank.
        dp_world_size: Data-parallel ranks.
        local_batch_size: Rows of a micro-batch.
        infinite: Whether another epoch follows the first.
        seed: Seed of the order, which differs in each epoch.

    Raises:
        DataError: there are no documents, or one is too short.
        LayoutError: a document is longer than a row, or there are too few for all ranks.
        ModuleNotFoundError: torchtitan is not installed.
    """
    from torchtitan.components.dataloader import ParallelAwareDataloader

    sampler = BalancedBatchSampler(
        [len(each) - 1 for each in documents],
        step_samples,
        price=price,
        max_tokens=seq_len,
        multiple_of=local_batch_size,
        ranks=dp_world_size,
        rank=dp_rank,
        seed=seed,
    )
    rows = BalancedRows(documents, seq_len, sampler, infinite=infinite)
    return ParallelAwareDataloader(
        rows, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size
    )
