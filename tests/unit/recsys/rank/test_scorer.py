"""A score depends on its own sample alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.recsys.rank.scorer import TILE
from equipoise.spec.architectures import ARCHITECTURES, Architecture
from support.recsys.rankers import small_ranker


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_logit_is_the_same_alone_and_at_any_place_of_any_batch(
    architecture: Architecture,
) -> None:
    torch.set_num_threads(1)
    ranker = small_ranker(architecture)
    source = np.random.default_rng(1)
    count = 2 * TILE + 11
    columns = {
        "user": [f"u{at}" for at in source.integers(0, 22, count)],
        "ad": source.integers(0, 10, count).tolist(),
        "words": [["red", "blue", "new"][: int(size)] for size in source.integers(0, 4, count)],
        "price": source.standard_normal(count).tolist(),
    }
    (whole,) = ranker.score([ranker.code({}, columns)])
    order = source.permutation(count)
    shuffled = {name: [column[at] for at in order] for name, column in columns.items()}
    (moved,) = ranker.score([ranker.code({}, shuffled)])
    assert moved == [whole[at] for at in order]
    alone = [
        ranker.code({}, {name: [column[at]] for name, column in columns.items()})
        for at in (0, 1, 2, TILE, count - 1)
    ]
    assert ranker.score(alone) == [[whole[at]] for at in (0, 1, 2, TILE, count - 1)]
    assert ranker.score(alone[:1]) == [[whole[0]]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=10, deadline=None)
def test_requests_that_are_scored_together_get_their_own_scores(sizes: list[int]) -> None:
    ranker = small_ranker()
    requests = [
        ranker.code(
            {"user": f"u{size}", "price": 1.5},
            {"ad": [at % 11 for at in range(size)], "words": ["red green"] * size},
        )
        for size in sizes
    ]
    together = ranker.score(requests)
    assert together == [ranker.score([each])[0] for each in requests]
    assert [len(each) for each in together] == sizes
