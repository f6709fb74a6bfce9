"""What a run leaves open: legal layouts of the same ranks, no two alike, given keys as given."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.plan.settings import DEGREES, DIMENSIONS, list_choices
from equipoise.spec.load import read_run

GIVEN = {
    "layout.zero": "3",
    "train.recompute": "full",
    "layout.context": "1",
    "pack.policy": "in-order",
}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sets(st.sampled_from(sorted(GIVEN))))
def test_choices(ranks: int, named: set[str]) -> None:
    given_keys = {name: GIVEN[name] for name in sorted(named)}
    base = list(given_keys.items())
    try:
        found = list_choices(read_run(None, base), ranks)
    except SpecError:
        assert ranks == 1 and len(named) >= 2
        return
    assert found.settings.shape == (len(found.keys), len(DIMENSIONS))
    assert len(np.unique(found.settings, axis=0)) == len(found.keys)
    assert len({tuple(sorted(keys.items())) for keys in found.keys}) == len(found.keys)
    for keys in found.keys:
        assert not named & set(keys)
        run = read_run(None, [*base, *keys.items()])
        assert run.spec.layout.count_ranks(64) == ranks
        run.spec.layout.of_ranks(ranks).require_model(run.model)


def test_two_ranks() -> None:
    found = list_choices(read_run(None, []), 2)
    assert len(found.keys) == 36
    shapes = {tuple(keys[name] for name in DEGREES) for keys in found.keys}
    assert len(shapes) == 4
    stages = [keys["layout.zero"] for keys in found.keys if keys["layout.tensor"] == "2"]
    assert set(stages) == {"1"}  # one rank holds all of a weight's share: nothing to shard
    assert {keys["pack.policy"] for keys in found.keys} == {"by-work", "by-tokens"}
    assert len(list_choices(read_run(None, [("layout.dp", "2")]), 2).keys) == 12


def test_nothing_is_left() -> None:
    given_keys = [
        ("layout.dp", "2"),
        ("layout.zero", "1"),
        ("train.recompute", "none"),
        ("pack.policy", "by-work"),
    ]
    with pytest.raises(SpecError) as caught:
        list_choices(read_run(None, given_keys), 2)
    assert str(caught.value) == (
        "--measure finds 1 choices on 2 ranks where it needs two or more: given are layout.dp "
        "(--layout.dp), layout.zero (--layout.zero), train.recompute (--train.recompute), "
        "pack.policy (--pack.policy). Take one of these away, and it is searched."
    )
