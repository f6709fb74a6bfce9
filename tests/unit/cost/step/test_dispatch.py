"""Rows on their way to experts: copies, ports and links."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.step.dispatch import ExpertRoutes, carried_bytes_per_s

H100 = {1: ExpertRoutes(8, 1, 450e9, 0.0), 2: ExpertRoutes(16, 2, 450e9, 50e9),
        4: ExpertRoutes(32, 4, 450e9, 50e9)}  # fmt: skip


def travel_s(routes: ExpertRoutes, rows: float = 4096, **changed: object) -> float:
    asked = {"is_return": False, "fp8": True, "skew": 1.0, "top_k": 8, "hidden": 7168}
    return routes.travel_s(rows, **(asked | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "out_us", "back_us"), [
    (1, 491.24, 972.51), (2, 748.87, 1777.0), (4, 1791.0, 3522.0),
])  # fmt: skip
def test_measured_points_are_met_within_a_tenth(nodes: int, out_us: float, back_us: float) -> None:
    out, back = travel_s(H100[nodes]), travel_s(H100[nodes], is_return=True, fp8=False)
    assert 1e6 * out == pytest.approx(out_us, rel=0.1)
    assert 1e6 * back == pytest.approx(back_us, rel=0.1)


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 65_536))
def test_never_more_copies_than_experts(top_k: int, places: int, rows: int) -> None:
    routes = ExpertRoutes(places, places, 450e9, 50e9)
    sent = rows * top_k * 7168 * 2.0 / (0.92 * 50e9)
    alone = travel_s(routes, rows, top_k=top_k, fp8=False) - travel_s(routes, 0, top_k=top_k)
    assert alone <= sent * (1 + 1e-9)


def test_more_of_anything_takes_longer() -> None:
    base = travel_s(H100[4])
    more = [travel_s(H100[4], 8192), travel_s(H100[4], hidden=8192), travel_s(H100[4], top_k=9),
            travel_s(H100[4], fp8=False), travel_s(H100[4], skew=1.5)]  # fmt: skip
    assert all(each > base for each in more)
    assert all(travel_s(a) < travel_s(b) for a, b in itertools.pairwise(H100.values()))


def test_a_router_that_chooses_nodes_first_sends_less() -> None:
    eight = ExpertRoutes(64, 8, 450e9, 50e9)
    limited = ExpertRoutes(64, 8, 450e9, 50e9, most_nodes=4)
    assert travel_s(limited) < travel_s(eight)
    assert travel_s(ExpertRoutes(32, 4, 450e9, 50e9, most_nodes=4)) == travel_s(H100[4])


@pytest.mark.parametrize(("ranks", "out_rate", "back_rate"), [
    (8, 545.71e9, 568.94e9), (16, 523.48e9, 521.55e9), (36, 479.02e9, 447.89e9),
])  # fmt: skip
def test_kernels_on_nvlink_5_carry_more(ranks: int, out_rate: float, back_rate: float) -> None:
    routes = ExpertRoutes(ranks, 1, 900e9, 0.0, 0, carried_bytes_per_s(900e9))
    reaching = 4096 * ranks * (1 - (1 - 1 / ranks) ** 8) * 7168 * 2
    for back, rate in ((False, out_rate), (True, back_rate)):
        mine = travel_s(routes, is_return=back, fp8=False)
        assert mine == pytest.approx(reaching / rate, rel=0.12)
    assert travel_s(routes) < travel_s(ExpertRoutes(ranks, 1, 900e9, 0.0))
