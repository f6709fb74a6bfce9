"""The kernel of rows: a softmax, and the same bits whatever runs beside a row."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from equipoise.serve.engine.jit import use_threads
from equipoise.serve.engine.kernel import TILE, attend_rows

Floats = NDArray[np.float32]


@dataclass
class Sequence:
    """Queries for the last ``len(q)`` of a sequence's tokens."""

    q: Floats
    k: Floats
    v: Floats


def draw(
    tokens: int, queries: int, *, heads: int, kv_heads: int, width: int, seed: int
) -> Sequence:
    source = np.random.default_rng(seed)

    def some(*shape: int) -> Floats:
        return source.standard_normal(shape, dtype=np.float32)

    return Sequence(
        some(queries, heads, width), some(tokens, kv_heads, width), some(tokens, kv_heads, width)
    )


def stored(x: Floats, is_bf16: bool) -> NDArray[np.generic]:
    wide = torch.from_numpy(x)
    if is_bf16:
        return wide.to(torch.bfloat16).view(torch.uint16).numpy()
    return x


def attend(
    sequences: list[Sequence], *, page_tokens: int, block: int, is_bf16: bool, seed: int = 0
) -> list[Floats]:
    """Outputs of each sequence's queries, from pages in random order."""
    needed = [-(-len(each.k) // page_tokens) for each in sequences]
    free = np.random.default_rng(seed).permutation(sum(needed) + 2).tolist()
    shape = (len(free) * page_tokens, *sequences[0].k.shape[1:])
    # What nobody wrote may be anything finite.
    keys = stored(np.full(shape, 3e38, np.float32), is_bf16)
    values = keys.copy()
    pages = np.zeros((len(sequences), max(needed)), np.int32)
    positions, work = list[int](), list[tuple[int, int, int, int]]()
    for at, each in enumerate(sequences):
        k, v = stored(each.k, is_bf16), stored(each.v, is_bf16)
        for number in range(needed[at]):
            pages[at, number] = free.pop()
            begin, end = number * page_tokens, min(len(k), (number + 1) * page_tokens)
            row = pages[at, number] * page_tokens
            keys[row : row + end - begin] = k[begin:end]
            values[row : row + end - begin] = v[begin:end]
        start = len(each.k) - len(each.q)
        for begin in range(0, len(each.q), block):
            rows = min(block, len(each.q) - begin)
            last = start + begin + rows - 1
            first = len(positions) + begin
            work += [(at, first, rows, tile) for tile in range(last // TILE + 1)]
        positions += range(start, len(each.k))
    q = np.concatenate([each.q for each in sequences])
    tiles = max(positions) // TILE + 1
    parts = np.full((len(q), tiles, q.shape[1], q.shape[2] + 2), np.nan, np.float32)
    o = np.full(q.shape, np.nan, np.float32)
    attend_rows(
        q,
        keys,
        values,
        pages,
        page_tokens,
        np.array(positions, np.int32),
        np.array(work, np.int32),
        2,
        parts,
        o,
        np.empty(o.shape[:2], np.float32),
    )
    return np.split(o, np.cumsum([len(each.q) for each in sequences])[:-1])


def softmax(each: Sequence, *, is_bf16: bool) -> Floats:
    """In float64, with a mask."""
    k, v = (torch.from_numpy(x) for x in (each.k, each.v))
    if is_bf16:
        k, v = k.bfloat16(), v.bfloat16()
    group = each.q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = torch.from_numpy(each.q).double().transpose(0, 1) @ k.transpose(1, 2)
    start = len(each.k) - len(each.q)
    mask = torch.ones(len(each.q), len(each.k), dtype=torch.bool).tril_(start)
    shares = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
    result: Floats = (shares @ v).transpose(0, 1).numpy()
    return result


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1), (4, 4)])
@pytest.mark.parametrize("width", [8, 64])
def test_it_is_a_softmax(heads: tuple[int, int], width: int, is_bf16: bool) -> None:
    sequences = [
        draw(tokens, queries, heads=heads[0], kv_heads=heads[1], width=width, seed=tokens)
        for tokens, queries in ((1, 1), (127, 1), (128, 3), (129, 129), (700, 9))
    ]
    for each in sequences:
        each.q /= np.float32(width**0.5)
    outputs = attend(sequences, page_tokens=16, block=8, is_bf16=is_bf16)
    for each, o in zip(sequences, outputs, strict=True):
        assert float(np.abs(o - softmax(each, is_bf16=is_bf16)).max()) <= 2e-6


@settings(max_examples=12)
@given(data=st.data())
def test_a_row_has_the_same_bits_whatever_runs_beside_it(data: st.DataObject) -> None:
    is_bf16 = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    sequences = [
        draw(n, min(n, 20), heads=6, kv_heads=2, width=16, seed=at) for at, n in enumerate(lengths)
    ]
    together = attend(
        sequences,
        page_tokens=data.draw(st.sampled_from([1, 16, 32])),
        block=data.draw(st.integers(1, 8)),
        is_bf16=is_bf16,
        seed=data.draw(st.integers(0, 9)),
    )
    use_threads(2)
    for each, o in zip(sequences, together, strict=True):
        rows = [
            attend(
                [Sequence(each.q[row : row + 1], each.k[:stop], each.v[:stop])],
                page_tokens=16,
                block=1,
                is_bf16=is_bf16,
            )[0]
            for row, stop in enumerate(range(len(each.k) - len(each.q) + 1, len(each.k) + 1))
        ]
        assert np.concatenate(rows).tobytes() == o.tobytes()
    use_threads(1)


def test_a_bad_number_is_seen() -> None:
    (each,) = [draw(200, 1, heads=2, kv_heads=1, width=8, seed=0)]
    each.k[150, 0, 3] = np.nan
    (o,) = attend([each], page_tokens=16, block=1, is_bf16=False)
    assert np.isnan(o).all()


_PRINT_BITS = """
import numpy as np
from equipoise.serve.engine.kernel import attend_rows
draw = np.random.default_rng(0).standard_normal
shapes = (5, 9, 64), (300, 3, 64), (300, 3, 64)
q, k, v = (draw(shape, dtype=np.float32) for shape in shapes)
parts, o = np.empty((5, 3, 9, 66), np.float32), np.empty_like(q)
pages, positions = np.arange(75, dtype=np.int32)[None], np.arange(295, 300, dtype=np.int32)
work = np.array([(0, 0, 5, tile) for tile in range(3)], np.int32)
attend_rows(q, k, v, pages, 4, positions, work, 2, parts, o, o[:, :, 0].copy())
print(o.tobytes().hex())
"""


@pytest.mark.long
def test_bits_are_the_same_where_it_was_just_compiled_and_where_it_was_kept(tmp_path: Path) -> None:
    """Two processes, the first of which has it compiled: 8 s."""
    command = [sys.executable, "-c", _PRINT_BITS]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (subprocess.check_output(command, env=environment) for _ in range(2))
    assert first == second
    assert [*tmp_path.rglob("*attend_rows*.nbi")]


_COUNT_THREADS = """
import torch
from equipoise.serve.engine.jit import use_threads
counts = [torch.get_num_threads()]
for _ in range(2):
    use_threads(torch.get_num_threads())
    counts.append(torch.get_num_threads())
print(*counts)
"""


@pytest.mark.long
def test_torch_keeps_its_threads_when_the_pool_is_made() -> None:
    """Only the first call in a process makes it."""
    command = [sys.executable, "-c", _COUNT_THREADS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 1 1\n", "")
