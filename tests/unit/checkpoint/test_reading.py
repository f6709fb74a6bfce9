"""Which bytes ranks read of a checkpoint: against brute force on sets of bytes."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.checkpoint.blocks import BLOCK_BYTES
from equipoise.checkpoint.index import Chunk
from equipoise.checkpoint.reading import (
    NO_RUNS,
    bytes_of,
    count_reads,
    cut_runs,
    join_runs,
    needed_bytes,
    overlap,
    plan_readings,
    runs_of,
)

Box = list[tuple[int, int]]


@st.composite
def stored(draw: st.DrawFn) -> tuple[list[int], int, list[Chunk], Box]:
    """A tensor's shape and item size, chunks that fill it, and a box of it."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    item = draw(st.sampled_from([1, 2, 4, 8]))
    grids = [
        sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in shape
    ]
    chunks, start = [], draw(st.integers(0, 9))
    for corner in np.ndindex(*(len(grid) - 1 for grid in grids)):
        offsets = tuple(grid[at] for grid, at in zip(grids, corner, strict=True))
        sizes = tuple(grid[at + 1] - grid[at] for grid, at in zip(grids, corner, strict=True))
        size_bytes = item * math.prod(sizes)
        chunks.append(Chunk(offsets, sizes, "shard-00000.bin", start, size_bytes))
        start += size_bytes
    box = []
    for length in shape:
        first = draw(st.integers(0, length))
        box.append((first, draw(st.integers(first, length))))
    return shape, item, chunks, box


def bytes_in(runs: np.ndarray) -> list[int]:
    return [byte for first, stop in runs.tolist() for byte in range(first, stop)]


@given(stored())
def test_parts_of_chunks_are_the_bytes_of_a_box_in_order(case) -> None:
    shape, item, chunks, box = case
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    wanted = set(numbers[tuple(slice(*each) for each in box)].reshape(-1).tolist())
    read: list[int] = []
    for chunk in chunks:
        part = overlap(chunk, box)
        if part is None:
            continue
        inside = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.shape, strict=True))
        mine = numbers[inside][tuple(slice(*each) for each in part)].reshape(-1).tolist()
        read += mine
        places = {  # of each element of the chunk, where its bytes begin
            number: chunk.start + item * at
            for at, number in enumerate(numbers[inside].reshape(-1).tolist())
        }
        runs = runs_of(bytes_of(chunk, item, part))
        assert bytes_in(runs) == [
            byte for number in mine for byte in range(places[number], places[number] + item)
        ]
        assert (runs[1:, 0] > runs[:-1, 1]).all()  # as few as there can be
    assert sorted(read) == sorted(wanted)


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda each: (each[0], sum(each))),
    max_size=8,
)


@given(st.lists(spans, max_size=4))
def test_joined_runs_are_all_bytes_once_and_apart(parts: list[list[tuple[int, int]]]) -> None:
    runs = join_runs([np.array(each, dtype=np.int64).reshape(-1, 2) for each in parts])
    assert bytes_in(runs) == sorted({b for each in parts for run in each for b in range(*run)})
    assert (runs[1:, 0] > runs[:-1, 1]).all()


edges = st.sampled_from([0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 7, 3 * BLOCK_BYTES - 5])


@st.composite
def needed(draw: st.DrawFn) -> tuple[dict[str, int], list[dict[str, np.ndarray]]]:
    """Files, and what each of some ranks needs of them."""
    sizes = {name: draw(edges) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]}
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        needs = {}
        for name, size in sizes.items():
            places = sorted(draw(st.lists(edges, min_size=2, max_size=4)))
            pairs = zip(places[::2], places[1::2], strict=False)
            runs = [(first, min(stop, size)) for first, stop in pairs if first < min(stop, size)]
            needs[name] = join_runs([np.array(runs, dtype=np.int64).reshape(-1, 2)])
        ranks.append(needs)
    return sizes, ranks


def clipped(runs: np.ndarray, first: int, stop: int) -> list[list[int]]:
    both = np.clip(runs, first, stop)
    return both[both[:, 0] < both[:, 1]].tolist()


@given(needed())
def test_every_block_is_verified_and_every_part_compared(case) -> None:
    sizes, needs = case
    plans = plan_readings(sizes, needs)
    total = rest = 0
    for name, size in sizes.items():
        for number in range(-(-size // BLOCK_BYTES)):
            first, stop = number * BLOCK_BYTES, min(size, (number + 1) * BLOCK_BYTES)
            verifiers = [
                rank
                for rank, plan in enumerate(plans)
                if name in plan and number in plan[name].verified
            ]
            compared: list[int] = []
            for rank in verifiers:
                compared += plans[rank][name].compared.get(number, ())
            parts = [clipped(each[name], first, stop) for each in needs]
            wholes = [rank for rank, part in enumerate(parts) if part == [[first, stop]]]
            assert verifiers == wholes or (not wholes and len(verifiers) == 1)
            others = [rank for rank, part in enumerate(parts) if part and rank not in verifiers]
            assert sorted(compared) == others
            for rank in others:
                read = clipped(plans[rank][name].runs, first, stop)
                assert read == parts[rank]
            if not wholes:
                (checker,) = verifiers
                rest += (stop - first) - sum(b - a for a, b in parts[checker])
    for each, plan in zip(needs, plans, strict=True):
        counts = count_reads(sizes, each, plan)
        assert counts.needed_bytes == needed_bytes(each) <= counts.read_bytes
        total += counts.read_bytes - counts.needed_bytes
    assert total == rest  # what no rank needed whole is read once more, at most
    assert rest <= sum(sizes.values())


def test_one_rank_alone_reads_everything_once_in_one_range_a_file() -> None:
    sizes = {"a": 3 * BLOCK_BYTES + 5, "b": 7, "c": 0}
    needs = {"a": np.array([[5, 9]]), "b": np.array([[0, 7]])}
    (plan,) = plan_readings(sizes, [needs])
    counts = count_reads(sizes, needs, plan)
    assert (counts.needed_bytes, counts.read_bytes, counts.ranges) == (11, sum(sizes.values()), 2)


def columns(rows: int, width: int, ranks: int) -> Sequence[dict[str, np.ndarray]]:
    chunk = Chunk((0, 0), (rows, width), "a", 0, 4 * rows * width)
    share = width // ranks
    return [
        {"a": runs_of(bytes_of(chunk, 4, [(0, rows), (rank * share, (rank + 1) * share)]))}
        for rank in range(ranks)
    ]


def test_columns_of_one_file_cost_the_file_twice_at_most_and_no_rank_all_of_it() -> None:
    size = 8 * BLOCK_BYTES
    needs = columns(size // 4096, 1024, 4)
    plans = plan_readings({"a": size}, needs)
    read = [count_reads({"a": size}, each, plan).read_bytes for each, plan in zip(needs, plans)]  # noqa: B905
    assert sum(read) == size + size * 3 // 4
    assert max(read) == size * 7 // 16  # a quarter, and 3/4 of two blocks of the eight


def test_no_runs_are_cut_into_none() -> None:
    runs, numbers = cut_runs(NO_RUNS)
    assert (len(runs), len(numbers)) == (0, 0)
