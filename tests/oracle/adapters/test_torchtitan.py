"""Rows for torchtitan, through its own data loader: each token once, resumable."""

import itertools

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.data.adapters.torchtitan import IGNORED, balanced_dataloader

# torchdata calls a function that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LENGTHS = [50, 2, 97, 33, 8, 8, 61, 64, 5, 18, 2, 41, 77, 30, 90, 12]
DOCUMENTS = [list(range(100 * at, 100 * at + n)) for at, n in enumerate(LENGTHS)]


def make(**changed):
    arguments = {
        "seq_len": 100,
        "step_samples": 8,
        "price": "7m",
        "dp_rank": 0,
        "dp_world_size": 1,
        "infinite": False,
        **changed,
    }
    return balanced_dataloader(DOCUMENTS, **arguments)


def documents_of(batch) -> list[tuple[int, ...]]:
    """The documents of each row, cut where positions restart, without padding."""
    inputs, labels = batch
    cut = []
    for ids, positions, following in zip(inputs["input"], inputs["positions"], labels, strict=True):
        starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), len(ids)]
        for begin, stop in itertools.pairwise(starts):
            if (following[begin:stop] != IGNORED).any():
                assert (following[begin:stop] != IGNORED).all()
                assert positions[begin:stop].tolist() == list(range(stop - begin))
                cut.append((*ids[begin:stop].tolist(), int(following[stop - 1])))
    return cut


@pytest.mark.parametrize("rows", [1, 2])
def test_each_document_comes_once_over_the_ranks(rows) -> None:
    from torchtitan.components.dataloader import BaseDataLoader  # it takes seconds

    seen, counts = [], set()
    for rank in range(2):
        loader = make(dp_rank=rank, dp_world_size=2, local_batch_size=rows)
        assert isinstance(loader, BaseDataLoader)
        batches = list(loader)
        counts.add(len(batches))
        assert all(inputs["input"].shape == (rows, 100) for inputs, _ in batches)
        seen += [document for batch in batches for document in documents_of(batch)]
    assert len(counts) == 1
    assert sorted(seen) == sorted(map(tuple, DOCUMENTS))


def test_a_resumed_loader_yields_what_would_have_come() -> None:
    loader = make(infinite=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    resumed = make(infinite=True)
    resumed.load_state_dict(state)
    again = iter(resumed)
    for _ in range(20):  # beyond the epoch's end
        wanted, given = next(batches), next(again)
        assert torch.equal(wanted[0]["input"], given[0]["input"])
        assert torch.equal(wanted[1], given[1])


def test_its_labels_are_those_that_torchtitan_ignores() -> None:
    from torchtitan.components.loss import IGNORE_INDEX

    assert IGNORE_INDEX == IGNORED


def test_documents_longer_than_a_row_are_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        make(seq_len=95)
    assert str(caught.value) == (
        "Sample 2 has 96 tokens, but a micro-batch holds 95. Give max_tokens=96, or shorten the "
        "sample."
    )
