"""Hidden states of overlapped nano-batches are those of the iteration; bit by bit if invariant."""

import dataclasses
import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.fused import FusedDecoder
from equipoise.serve.nano.choice import KINDS, LaneCosts, NanoChoice, NanoCosts
from equipoise.serve.nano.lanes import Lanes
from equipoise.serve.nano.run import NanoBatches, run_order
from support.serving.paged import PLAIN, built, chunk_of, paged

MODELS = {
    "odd layers": PLAIN,
    "even layers, 9 and 3 heads": dataclasses.replace(
        PLAIN, layers=4, hidden=36, heads=9, kv_heads=3, head_width=4, ffn=41, qkv_bias=True
    ),
    "experts": dataclasses.replace(PLAIN, experts=4, top_k=2, expert_ffn=24, shared_ffn=16),
}
PAGE, PAGES = 4, 400
EACH = ((1, 1.0),)
# On one lane everything takes as long as on both: every order overlaps.
COSTS = NanoCosts(LaneCosts(EACH, EACH, EACH), LaneCosts(EACH, EACH, EACH), ())


@functools.cache
def engine(name: str, dtype: torch.dtype, *, is_invariant: bool) -> PagedDecoder:
    decoder = built(MODELS[name], dtype)
    served = FusedDecoder(decoder) if name.endswith("heads") else decoder
    return paged(served, pages=PAGES, is_invariant=is_invariant)


def fill(engine: PagedDecoder, chunks: list[ServeChunk]) -> None:
    """Keys and values of what is before each chunk."""
    for each in chunks:
        if each.start:
            before = each._replace(start=0, tokens=each.start)
            engine.run([before], [at % 67 for at in range(each.start)])


def overlapped(engine: PagedDecoder, chunks: list[ServeChunk], tokens: list[int]) -> Tensor:
    order = NanoChoice(engine.layers, COSTS).choose(chunks)
    assert order is not None
    steps = order.schedule.steps
    assert any(one.begin_s <= two.begin_s < one.end_s for one, two in pairwise(steps))
    before = torch.get_num_threads()
    lanes = Lanes(1)
    x_tD = run_order(engine, lanes, order, chunks, tokens, layers=engine.layers)
    lanes.close()
    torch.set_num_threads(before)
    return x_tD


def drawn(sizes: list[tuple[int, int]]) -> tuple[list[ServeChunk], list[int]]:
    chunks, first = [], 0
    for start, tokens in sizes:
        pages = -(-(start + tokens) // PAGE)
        chunks.append(chunk_of("", range(first, first + pages), start, tokens))
        first += pages
    return chunks, [(3 * at * at + 1) % 67 for at in range(sum(x.tokens for x in chunks))]


CASES = [
    (name, dtype, is_invariant)
    for name in MODELS
    for dtype in (torch.float32, torch.bfloat16)
    for is_invariant in (False, True)
    if name == "odd layers" or is_invariant == (dtype == torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype", "is_invariant"), CASES)
@settings(max_examples=3)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 5, 23, 40])),
        min_size=2,
        max_size=6,
    )
)
def test_as_the_iteration_by_itself(
    name: str, dtype: torch.dtype, is_invariant: bool, sizes: list[tuple[int, int]]
) -> None:
    whole = engine(name, dtype, is_invariant=is_invariant)
    chunks, tokens = drawn(sizes)
    fill(whole, chunks)
    wanted = whole.run(chunks, tokens)
    given = overlapped(whole, chunks, tokens)
    if is_invariant:
        assert torch.equal(given, wanted)
    else:
        close = 1e-5 if dtype == torch.float32 else 5e-2
        assert (given - wanted).abs().max() <= close * wanted.abs().max()


def test_only_kinds_that_gain_are_overlapped() -> None:
    whole = engine("odd layers", torch.float32, is_invariant=False)
    lanes = Lanes(1)
    nano = NanoBatches(whole, NanoChoice(whole.layers, COSTS), lanes, KINDS[1:2])
    decodes, tokens = drawn([(5, 1), (9, 1)])
    prompts, more = drawn([(0, 5), (0, 9)])
    assert nano.run(decodes, tokens) is not None
    assert nano.run(prompts, more) is None
    assert nano.run(decodes[:1], tokens[:1]) is None
    perfect = NanoCosts(COSTS.both, LaneCosts(*[((1, 2.0),)] * 3), ())
    nano.choice = NanoChoice(whole.layers, perfect)
    assert nano.run(decodes, tokens) is None
    lanes.close()
