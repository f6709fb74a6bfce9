"""Iterations of many sequences, whose logits are those of each sequence by itself."""

import dataclasses
import random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import Decoder
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.fused import FusedDecoder, Packs
from equipoise.spec.model.presets import RopeScaling
from support.serving.paged import PLAIN, built, chunk_of, paged, whole_logits

MODELS = {
    "plain": PLAIN,
    "bias": dataclasses.replace(PLAIN, qkv_bias=True, kv_heads=4),
    "norms": dataclasses.replace(PLAIN, qk_norm=True, kv_heads=1, tied=True),
    "nine to three": dataclasses.replace(PLAIN, heads=9, kv_heads=3),
    "scaled": dataclasses.replace(PLAIN, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    "experts": dataclasses.replace(PLAIN, experts=4, top_k=2, expert_ffn=24, shared_ffn=16),
}
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def run_all(
    engine: PagedDecoder,
    texts: list[list[int]],
    pages: list[list[int]],
    iterations: list[list[tuple[int, int]]],
) -> list[torch.Tensor]:
    """Logits of every token; an iteration is a list of (sequence, tokens)."""
    done = [0] * len(texts)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for iteration in iterations:
        chunks, tokens = [], list[int]()
        for which, count in iteration:
            chunks.append(chunk_of(str(which), pages[which], done[which], count))
            tokens += texts[which][done[which] : done[which] + count]
            done[which] += count
        x_tD = engine.run(chunks, tokens)
        logits = torch.cat(list(engine.logits(x_tD, range(len(tokens)))))
        parts = logits.split([count for _, count in iteration])
        for (which, _), part in zip(iteration, parts, strict=True):
            rows[which].append(part)
    return [torch.cat(each) for each in rows]


@st.composite
def iterations(draw: st.DrawFn, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Some sequences get some tokens, until all have all."""
    left, made = list(lengths), list[list[tuple[int, int]]]()
    while any(left):
        here = [at for at in range(len(left)) if left[at]]
        chosen = draw(st.lists(st.sampled_from(here), min_size=1, unique=True))
        counts = [draw(st.sampled_from([1, 1, 2, left[at]])) for at in chosen]
        made.append([(at, min(n, left[at])) for at, n in zip(chosen, counts, strict=True)])
        for at, count in made[-1]:
            left[at] -= count
    return made


def scattered(lengths: list[int], *, page_tokens: int, seed: int) -> list[list[int]]:
    """Pages for each sequence, partly neighbours, partly not."""
    source = random.Random(seed)
    needed = [-(-length // page_tokens) for length in lengths]
    order = list(range(sum(needed)))
    for _ in range(sum(needed) // 3):
        a, b = source.sample(order, 2)
        order[a], order[b] = order[b], order[a]
    return [[order.pop() for _ in range(count)][::-1] for count in needed]


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= BOUND[ours.dtype] * float(theirs.abs().max())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)
@given(data=st.data())
def test_logits_are_those_of_each_sequence_by_itself(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    page_tokens = data.draw(st.sampled_from([1, 4, 16]))
    texts = [[(7 * at * at + 3 * n) % 67 for at in range(k)] for n, k in enumerate(lengths)]
    decoder = built(model, dtype)
    pages = scattered(lengths, page_tokens=page_tokens, seed=data.draw(st.integers(0, 99)))
    served = decoder
    if data.draw(st.booleans(), label="is_fused"):
        served = FusedDecoder(built(model, dtype), data.draw(st.sampled_from(get_args(Packs))))
        served.pack()
    engine = paged(served, pages=sum(map(len, pages)), page_tokens=page_tokens)
    ours = run_all(engine, texts, pages, data.draw(iterations(lengths)))
    for text, logits in zip(texts, ours, strict=True):
        if dtype == torch.float32 or not model.experts:  # a rounding may choose another expert
            assert near(logits, whole_logits(decoder, text))


def test_tiles_are_merged_over_long_sequences() -> None:
    decoder = built(PLAIN)
    texts = [[at * at % 67 for at in range(700)], [at % 67 for at in range(300)]]
    pages = scattered([700, 300], page_tokens=16, seed=1)
    engine = paged(decoder, pages=63, page_tokens=16)
    cuts = [[(0, 300)], [(0, 8), (1, 290)], [(1, 1), (0, 1)], [(0, 390), (1, 1)], [(0, 1), (1, 8)]]
    for text, logits in zip(texts, run_all(engine, texts, pages, cuts), strict=True):
        assert near(logits, whole_logits(decoder, text))


def test_the_logits_of_chosen_rows_come_in_order_and_in_blocks() -> None:
    decoder = built(PLAIN)
    engine = paged(decoder, pages=40)
    text = [at % 67 for at in range(150)]
    x_tD = engine.run([chunk_of("a", range(40), 0, 150)], text)
    blocks = list(engine.logits(x_tD, range(149, -1, -1)))
    assert [len(each) for each in blocks] == [64, 64, 22]
    assert near(torch.cat(blocks).flip(0), whole_logits(decoder, text))


def test_a_capacity_is_refused() -> None:
    model = dataclasses.replace(MODELS["experts"], capacity_factor=1.25)
    with pytest.raises(ModelError) as caught:
        paged(Decoder(model), pages=1)
    assert str(caught.value) == (
        "Experts with a capacity factor of 1.25 drop tokens by micro-batch, so a continued text "
        "has no one answer. Set capacity_factor to 0."
    )
