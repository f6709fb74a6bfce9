"""Sources in exact shares: of every block, at every position, whatever the steps."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.packing.pack import pack_step
from equipoise.base.errors import DataError
from equipoise.cost.curve import counted_curve
from equipoise.data.mixture import MixedStream, Mixture, open_stream
from equipoise.data.stream import DocumentStream
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec

BATCHES = (512, 256, 128, 128)
CURVE = counted_curve(preset("2m"))
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)
SOURCES = st.lists(
    st.tuples(LENGTHS, st.sampled_from([0.1, 0.25, 1.0, 1.5, 7.0, 1e-4])), min_size=1, max_size=4
)


def make(sources, seed: int = 0, context: int = 8) -> MixedStream:
    names = tuple(f"s{i}" for i in range(len(sources)))
    counts = tuple(len(lengths) for lengths, _ in sources)
    mixture = Mixture(names, tuple(weight for _, weight in sources), counts)
    lengths = [tokens for part, _ in sources for tokens in part]
    return MixedStream(lengths, mixture, seed=seed, context_tokens=context)


def tokens_of(pieces) -> list[tuple[int, int]]:
    return [(d, at) for d, start, stop in pieces.tolist() for at in range(start, stop)]


@given(SOURCES, st.integers(0, 5000))
def test_every_source_has_its_share_before_any_position(sources, position: int) -> None:
    stream = make(sources)
    taken = stream.taken(position)
    assert sum(taken) == position
    total = sum(Fraction(str(weight)) for _, weight in sources)
    smallest = min(Fraction(str(weight)) for _, weight in sources) / total
    block = -(-2 // smallest)
    for count, (_, weight) in zip(taken, sources, strict=True):
        assert abs(count - position * Fraction(str(weight)) / total) <= block
        at_block = stream.taken(position // block * block)
    for count, (_, weight) in zip(at_block, sources, strict=True):
        exact = position // block * block * Fraction(str(weight)) / total
        assert abs(count - exact) <= 1


@given(SOURCES, st.integers(0, 3000), st.integers(1, 400))
def test_shares_never_go_back(sources, position: int, step: int) -> None:
    stream = make(sources)
    before, after = stream.taken(position), stream.taken(position + step)
    assert all(first <= last for first, last in zip(before, after, strict=True))


@given(SOURCES, st.integers(0, 400), st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_steps_have_the_tokens_of_one_large_step(sources, position: int, steps) -> None:
    stream = make(sources, seed=3)
    whole = tokens_of(stream.step(position, sum(steps)))
    parts = []
    for size in steps:
        pieces = stream.step(position, size)
        lengths = pieces[:, 2] - pieces[:, 1]
        assert lengths.sum() == size
        assert lengths.min() > 0 and lengths.max() <= 8
        parts += tokens_of(pieces)
        position += size
    assert sorted(parts) == sorted(whole)


@given(SOURCES)
def test_each_source_has_every_token_once_in_an_epoch(sources) -> None:
    stream = make(sources)
    first = sum(len(lengths) for lengths, _ in sources[:-1])
    lengths = sources[-1][0]
    position = 0
    while stream.taken(position)[-1] < sum(lengths) and position < 4000:
        position += 1
    seen = [token for token in tokens_of(stream.step(0, max(1, position))) if token[0] >= first]
    if stream.taken(position)[-1] == sum(lengths):
        assert sorted(seen) == [(first + d, at) for d, n in enumerate(lengths) for at in range(n)]


@given(LENGTHS, st.integers(0, 99), st.integers(1, 200))
def test_one_source_alone_is_its_plain_stream(lengths, position: int, step: int) -> None:
    plain = DocumentStream(lengths, seed=5, context_tokens=8).step(position, step)
    assert make([(lengths, 0.3)], seed=5).step(position, step).tolist() == plain.tolist()


def test_sources_stand_side_by_side_within_a_step() -> None:
    pieces = make([([1] * 60, 3.0), ([1] * 20, 1.0)]).step(0, 40)
    is_second = pieces[:, 0] >= 60
    assert is_second.sum() == 10
    assert np.diff(np.flatnonzero(is_second)).tolist() == [4] * 9


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_uneven_sources_are_even_work(ranks: int) -> None:
    """Uneven tasks of SE-MoE (arXiv:2205.10034, UFO): batches of 512, 256, 128 and 128.

    A node for each task is 2.0 times the mean for the first; packers divide it, and the small
    ones share ranks, with no task bound to any.
    """
    drawn = np.random.default_rng(0)
    sources = [(drawn.integers(16, 600, 200).tolist(), float(batch)) for batch in BATCHES]
    pieces = make(sources, context=512).step(0, sum(BATCHES) * 64)
    pack = PackSpec(policy="by-work", context_tokens=512, step_tokens=sum(BATCHES) * 64)
    packed = pack_step(pieces, pack, ranks, CURVE)
    work = np.zeros((ranks, len(BATCHES)))
    for rank, batches in enumerate(packed.ranks):
        for batch in batches:
            ns = CURVE.slice_ns(batch.history_tokens, batch.history_tokens + batch.doc_tokens)
            np.add.at(work[rank], batch.pieces[:, 0] // 200, ns)
    of_source, of_rank = work.sum(axis=0), work.sum(axis=1)
    assert of_source.max() / of_source.mean() == pytest.approx(2.0, abs=0.1)
    assert of_rank.max() / of_rank.mean() < 1.02
    assert (work[:, 0] > 0).sum() == ranks and (work[:, 0] < of_source[0] / 2).all()
    assert ((work[:, 2] > 0) & (work[:, 3] > 0)).any()


def test_equal_sources_have_orders_of_their_own() -> None:
    pieces = make([([1] * 50, 1.0), ([1] * 50, 1.0)]).step(0, 100)
    first, second = pieces[pieces[:, 0] < 50, 0], pieces[pieces[:, 0] >= 50, 0] - 50
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()


def test_epochs_of_each_source() -> None:
    stream = make([([10], 3.0), ([20], 1.0)])
    assert stream.epochs(80) == [6.0, 1.0]
    assert isinstance(open_stream([3], seed=0, context_tokens=2), DocumentStream)


def test_no_slice() -> None:
    with pytest.raises(DataError) as caught:
        make([([1], 1.0)]).step(-1, 0)
    assert str(caught.value) == (
        "position_tokens = -1 and step_tokens = 0 do not name a slice. Give at least 0 and at "
        "least 1."
    )
