"""The invariant mode over real ranks: the bits of one process, whatever happens on the way."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, page_tokens_of
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.pool import token_bytes
from equipoise.serve.engine.request import Answered, GenerateRequest
from equipoise.serve.longctx.decoder import ContextDecoder
from equipoise.serve.longctx.message import Text
from equipoise.serve.longctx.ordered import IN_ORDER, ordered_bytes
from equipoise.serve.sample import Sampling
from equipoise.spec.model.presets import ModelSpec
from support.serving.engine import SMALL, make_engine, reader, small_decoder
from support.serving.loop import LinearPrice

PAGES = 40
MODELS = {
    "plain": SMALL,
    "odd heads": dataclasses.replace(SMALL, hidden=36, heads=9, kv_heads=3, head_width=4, ffn=41),
    "experts": dataclasses.replace(SMALL, experts=4, top_k=2, expert_ffn=24, shared_ffn=16),
}
SIDES = [
    ("plain", 3, torch.bfloat16),
    ("odd heads", 4, torch.float32),
    ("experts", 2, torch.float32),
]


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple((7 * at * at + 31 * seed + 5) % 280 for at in range(tokens))


REQUESTS = [
    GenerateRequest(
        prompt_of(at % 4, 9 + 23 * (at % 4)),
        most_tokens=9 + 5 * (at % 3),
        ignores_end=True,
        top=2,
        sampling=Sampling(1.0, top_p=0.9, seed=at) if at % 3 == 1 else Sampling(),
    )
    for at in range(8)
]
PROMPT_SCORES = GenerateRequest(prompt_of(5, 60), most_tokens=0, scores_prompt=True, top=1)
EMBEDDING = GenerateRequest(prompt_of(6, 51), most_tokens=0, embeds=True)


def bits(answer: Answered) -> str:
    """All that an answer is, to the bit."""
    scores = [
        (each.token, each.logprob.hex(), [(token, share.hex()) for token, share in each.top])
        for each in (*answer.scores, *answer.prompt_scores)
    ]
    return repr((answer.ids, answer.finish, scores, [x.hex() for x in answer.embedding]))


def alone(model: ModelSpec, dtype: torch.dtype, request: GenerateRequest) -> str:
    """Its bits on one process, by itself, on pages of another size."""
    with make_engine(model, dtype=dtype, is_invariant=True, page_tokens=16) as engine:
        return bits(engine.submit(request).result())


@pytest.fixture(scope="module", params=SIDES, ids=[f"{n}-{r}-{d}" for n, r, d in SIDES])
def side(request: pytest.FixtureRequest) -> Iterator[tuple[ContextDecoder, list[str]]]:
    name, ranks, dtype = request.param
    engine = ContextDecoder(
        small_decoder(MODELS[name], dtype),
        ranks=ranks,
        pages=PAGES,
        page_tokens=page_tokens_of(ranks, 4),
        swap_pages=PAGES,
        is_invariant=True,
    )
    asked = [*REQUESTS, PROMPT_SCORES, EMBEDDING]
    yield engine, [alone(MODELS[name], dtype, each) for each in asked]
    engine.close()


class _Kept(EngineLoop):
    """A loop whose ranks go on for the next test."""

    def close(self) -> None:
        close, self._decoder.close = self._decoder.close, lambda: None  # type: ignore[method-assign]
        super().close()
        self._decoder.close = close  # type: ignore[method-assign]


def loop_of(engine: ContextDecoder, price: LinearPrice, **limits: float) -> EngineLoop:
    size = engine.pool.page_tokens
    settings = BatchSettings(page_tokens=size, **{"pages": PAGES, **limits})  # type: ignore[arg-type]
    scheduler = Scheduler(settings, price, FAIR_POLICIES["fifo"])
    return _Kept(engine, reader(engine.decoder.model), scheduler, context_tokens=150)


@pytest.mark.parametrize(("iteration_s", "swap_s"), [(1.0, 1.0), (2.5e-3, 1e-9)])
def test_bits_are_those_of_one_process_together_in_chunks_and_preempted(
    side: tuple[ContextDecoder, list[str]], iteration_s: float, swap_s: float
) -> None:
    engine, wanted = side
    loop = loop_of(
        engine,
        LinearPrice(swap=swap_s),
        pages=30,
        iteration_s=iteration_s,
        prefill_iteration_s=iteration_s,
        swap_pages=PAGES if swap_s < 1 else 0,
    )
    handles = [loop.submit(each) for each in (*REQUESTS, PROMPT_SCORES, EMBEDDING)]
    with loop:
        assert [bits(handle.result()) for handle in handles] == wanted
    if iteration_s == 1.0 and engine.ranks != 3:  # whose pages are larger
        assert loop.stats().preemptions["recompute"] > 0


def test_bits_after_a_prefix_hit_are_the_same(side: tuple[ContextDecoder, list[str]]) -> None:
    engine, wanted = side
    request, size = REQUESTS[3], engine.pool.page_tokens
    with loop_of(engine, LinearPrice()) as loop:
        first = loop.submit(request)
        assert bits(first.result()) == wanted[3]
        again = loop.submit(request)
        assert bits(again.result()) == wanted[3]
    assert first.cached_tokens == 0
    assert again.cached_tokens == (len(request.prompt) - 1) // size * size


def test_ranks_send_what_is_counted_and_each_keeps_its_share(
    side: tuple[ContextDecoder, list[str]],
) -> None:
    engine, wanted = side
    model, ranks, size = engine.decoder.model, engine.ranks, engine.pool.page_tokens
    whole = PAGES * size * token_bytes(model, engine.pool.dtype)
    counts = engine.peers.counts()
    assert [each["pool"] * ranks for each in counts] == [whole] * ranks
    before = np.array([each["sent"] for each in counts])
    moved = engine.moved_bytes.get(IN_ORDER, 0)
    with loop_of(engine, LinearPrice(), iteration_s=1.0, prefill_iteration_s=1.0) as loop:
        loop.submit(dataclasses.replace(REQUESTS[2], most_tokens=2)).result()
    sent = np.array([each["sent"] for each in engine.peers.counts()]) - before
    prompt = len(REQUESTS[2].prompt)
    token = token_bytes(model, engine.pool.dtype) // model.layers
    texts = [Text(0, prompt, 1, (), ()), Text(prompt, 1, 1, (), ())]
    expected = sum(model.layers * ordered_bytes([each], size, ranks, token) for each in texts)
    rows = sent - expected
    hidden = model.hidden * engine.pool.dtype.itemsize
    assert (rows[:, 1:] == 0).all() and rows[0, 0] == 0
    assert set(rows[:, 0].tolist()) <= {0, hidden, 2 * hidden}  # for the head, on rank 0
    assert engine.moved_bytes[IN_ORDER] - moved == np.sum(expected)
    assert [*engine.moved_bytes] == [IN_ORDER]
    del wanted
