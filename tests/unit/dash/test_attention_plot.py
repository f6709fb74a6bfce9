"""Pictures of schedules: the plane pixel by pixel, the lanes, and files that are the same again."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.balance.context.sharding import split_context
from equipoise.dash.attention_plane import lane_bars, paint_plane
from equipoise.dash.attention_plot import plot_attention, rank_colors
from equipoise.schedule.attention.count import Wire
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.attention.score import AssumedMachine, AttentionScore, score_attention
from equipoise.schedule.attention.strategies import STRATEGIES, write_attention

LENGTHS = [9, 1, 6]
MACHINE = AssumedMachine(1e12, LinkPrice(1e-6, 1e9))


def score(strategy: str, ranks: int = 2, sharding: str = "head-tail") -> AttentionScore:
    home = split_context(LENGTHS, ranks, sharding).pieces
    schedule = write_attention(strategy, home, LENGTHS, heads=4, kv_heads=2, ranks_per_node=ranks)
    return score_attention(schedule, Wire(8), MACHINE, sharding=sharding)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [1, 3])
def test_a_pixel_is_painted_where_a_query_reads_a_key(strategy: str, scale: int) -> None:
    painted = paint_plane(score(strategy).schedule, scale * sum(LENGTHS))
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    at = np.arange(sum(LENGTHS))
    reads = (document[:, None] == document) & (at[:, None] >= at)
    wanted = reads.repeat(scale, axis=0).repeat(scale, axis=1)
    assert ((painted[..., 0] >= 0) == wanted).all()
    assert ((painted[..., 1] >= 0) == wanted).all()


def test_keys_that_travel_are_read_by_the_rank_of_the_query() -> None:
    schedule = score("ring").schedule
    painted = paint_plane(schedule, sum(LENGTHS))
    owner = np.empty(sum(LENGTHS), dtype=int)
    begins = np.cumsum([0, *LENGTHS])
    for rank, home in enumerate(schedule.home):
        for document, start, stop in home.tolist():
            owner[begins[document] + start : begins[document] + stop] = rank
    rows, columns = np.nonzero(painted[..., 0] >= 0)
    assert (painted[rows, columns, 0] == owner[rows]).all()
    # Round 1 brings the other rank's keys.
    assert (painted[rows, columns, 1] == (owner[rows] != owner[columns])).all()


def test_ranks_that_share_heads_alternate() -> None:
    painted = paint_plane(score("ulysses").schedule, 200)[..., 0]
    counts = np.bincount(painted[painted >= 0])
    assert len(counts) == 2
    assert counts.min() > 0.8 * counts.max()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bars_of_a_lane_come_one_after_another(strategy: str) -> None:
    price = score(strategy, ranks=3).price
    for replay in (price.forward, price.backward):
        for rank in range(3):
            bars = lane_bars(replay, rank)
            assert (np.diff(bars.ravel()) >= -1e-6).all()
            assert bars[-1, 1] <= replay.ends_ns[rank] + 1e-6


@pytest.mark.parametrize("ranks", [1, 4, 8, 9, 64])
def test_each_rank_has_a_colour_of_its_own(ranks: int) -> None:
    colors = rank_colors(ranks)
    assert colors.shape == (ranks, 3)
    assert len(np.unique(colors, axis=0)) == ranks


def test_up_to_six_ranks_differ_for_people_who_see_no_red_or_no_green() -> None:
    """Distances in linear RGB as deuteranopes and protanopes see it (Vienot et al., 1999)."""
    linear = ((rank_colors(6) + 0.055) / 1.055) ** 2.4
    deutan = np.array([[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]])
    protan = np.array([[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.0040, -0.0040, 1]])
    for sees in (deutan, protan):
        seen = np.clip(linear @ sees.T, 0, 1) ** (1 / 2.2)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2) + np.eye(6)
        assert apart.min() > 0.12


@pytest.mark.parametrize("count", [1, 3])
def test_a_picture_is_the_same_again(tmp_path: Path, count: int) -> None:
    scores = [score(name) for name in list(STRATEGIES)[:count]]
    for name in ("a.svg", "b.svg"):
        plot_attention(tmp_path / name, scores, MACHINE, "a test")
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    plot_attention(tmp_path / "a.png", scores, MACHINE, "a test")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_can_be_drawn(tmp_path: Path) -> None:
    home = [np.empty((0, 3), dtype=np.int64)] * 2
    schedule = write_attention("ring", home, [], heads=2, kv_heads=1)
    empty = score_attention(schedule, Wire(8), MACHINE, sharding="mixed")
    plot_attention(tmp_path / "empty.png", [empty], MACHINE, "nothing")
    assert (tmp_path / "empty.png").exists()
