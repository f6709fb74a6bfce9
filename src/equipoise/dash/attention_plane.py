"""What a picture of a schedule shows: the rank and round of each pixel, the bars of each lane.

Kept true (tests/unit/dash/test_attention_plot.py)
    A pixel is painted where its query reads its key, by a rank that computes it; bars of a lane
    do not overlap, and end with the pass.
"""

import numpy as np
import numpy.typing as npt

from equipoise.schedule.attention.price import Replay
from equipoise.schedule.attention.schedule import AttentionSchedule, Tiles

_STRIPE = 6
"""Pixels across a stripe of heads."""


def paint_plane(schedule: AttentionSchedule, pixels: int) -> npt.NDArray[np.int64]:
    """Which rank computes which part of the plane.

    Args:
        schedule: The schedule to draw.
        pixels: Side of the picture.

    Returns:
        int64 [pixels, pixels, 2]: rank and round by query (down) and key (across); -1 where
        the query does not read the key.
    """
    plane = np.full((pixels, pixels, 2), -1, dtype=np.int64)
    lengths = schedule.doc_tokens
    begins = np.cumsum(lengths) - lengths
    at = (np.arange(pixels) + 0.5) * schedule.tokens / pixels  # a place in the pack
    token = np.floor(at).astype(np.int64)
    shares = max(1, min(schedule.ranks, schedule.heads))
    place = np.add.outer(np.arange(pixels), np.arange(pixels)) // _STRIPE % shares
    head = (2 * place + 1) * schedule.heads // (2 * shares)
    for rank, index, each in schedule:
        for tile in each.tiles:
            _paint_tile(plane, tile, int(begins[tile[0]]), token, head, (rank, index))
    return plane


def _paint_tile(
    plane: npt.NDArray[np.int64],
    tile: Tiles,
    begin: int,
    token: npt.NDArray[np.int64],
    head: npt.NDArray[np.int64],
    paint: tuple[int, int],
) -> None:
    _, q0, q1, k0, k1, kind, h0, h1 = tile.tolist()
    top, bottom = np.searchsorted(token, (begin + q0, begin + q1))
    left, right = np.searchsorted(token, (begin + k0, begin + k1))
    query = token[top:bottom, None] - begin - q0
    key = token[None, left:right] - begin - k0
    heads = head[top:bottom, left:right]
    is_mine = (h0 <= heads) & (heads < h1)
    if kind == 1:
        is_mine &= key <= query
    elif kind == 2:
        is_mine &= key >= query
    plane[top:bottom, left:right][is_mine] = paint


def lane_bars(replay: Replay, rank: int) -> npt.NDArray[np.float64]:
    """What one rank computes in one pass: float64 [rounds, 2], begin and end [ns]."""
    begins = replay.begins_ns[rank]
    return np.stack((begins, begins + replay.compute_ns[rank]), axis=1)
