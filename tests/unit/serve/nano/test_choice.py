"""Which chunks form which nano-batch: each once, legal, and only what is predicted to gain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.schedule.nano.check import check_nano
from equipoise.serve.nano.choice import KINDS, LaneCosts, NanoChoice, NanoCosts, kind_of


def chunk(start: int, tokens: int) -> ServeChunk:
    return ServeChunk("", start, tokens, (PageRun(0, 1),), samples=False, logits=0)


def costs(*, one: float, fixed: float = 0.0) -> NanoCosts:
    """Every operation takes ``one`` times as long on one lane."""

    def lane(times: float) -> LaneCosts:
        points = ((1, times * (fixed + 1e-3)), (1001, times * (fixed + 1.001)))
        return LaneCosts(points, points, points)

    return NanoCosts(lane(1.0), lane(one), ())


MIXED = [chunk(0, 64), *(chunk(500, 1) for _ in range(6))]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=20),
    layers=st.integers(1, 9),
    one=st.sampled_from([1.0, 1.5, 2.0]),
)
def test_each_chunk_is_in_one_nano_batch(
    sizes: list[tuple[int, int]], layers: int, one: float
) -> None:
    chunks = [chunk(*each) for each in sizes]
    order = NanoChoice(layers, costs(one=one)).choose(chunks)
    if layers == 1 or len(chunks) == 1:
        assert order is None
        return
    assert order is not None
    assert sorted(at for part in order.parts for at in part) == list(range(len(chunks)))
    assert all(order.parts)
    assert layers - order.layers in (0, 1)
    check_nano(order.graph, order.schedule)


def test_lanes_that_scale_perfectly_gain_nothing() -> None:
    order = NanoChoice(4, costs(one=2.0)).choose(MIXED)
    assert order is not None
    assert order.gain <= 1.0 + 1e-9


def test_cores_that_wait_for_each_other_gain() -> None:
    order = NanoChoice(4, costs(one=1.0)).choose(MIXED)
    assert order is not None
    assert order.gain > 1.3


def test_what_is_cut_pays_its_fixed_costs_twice() -> None:
    plain = NanoChoice(4, costs(one=1.5)).choose(MIXED)
    costly = NanoChoice(4, costs(one=1.5, fixed=1.0)).choose(MIXED)
    assert plain is not None
    assert costly is not None
    assert costly.gain < plain.gain


@pytest.mark.parametrize(
    ("chunks", "kind"), [(MIXED, KINDS[2]), (MIXED[:1], KINDS[0]), (MIXED[1:], KINDS[1])]
)
def test_kinds(chunks: list[ServeChunk], kind: str) -> None:
    assert kind_of(chunks) == kind
