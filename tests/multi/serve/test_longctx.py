"""An engine over real ranks answers as one process does, whatever moves between them."""

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from equipoise.balance.context.variant import VARIANTS, GatheredPrice
from equipoise.base.errors import LayoutError, ModelError
from equipoise.observe.journal import EventSink
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, page_tokens_of
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.pool import token_bytes
from equipoise.serve.engine.request import GenerateRequest, RanksLostError
from equipoise.serve.longctx.choice import VariantChoice
from equipoise.serve.longctx.decoder import ContextDecoder
from equipoise.spec.model.presets import ModelSpec
from support.serving.engine import SMALL, alone, reader, small_decoder
from support.serving.loop import LinearPrice
from support.serving.paged import chunk_of, paged

PAGES = 40
HEADS = [(9, 3), (8, 1), (4, 4)]
SIDES = [(ranks, heads) for ranks in (1, 2, 3, 4) for heads in HEADS[: 3 if ranks == 4 else 1]]


def model_of(heads: tuple[int, int]) -> ModelSpec:
    return dataclasses.replace(SMALL, heads=heads[0], kv_heads=heads[1], layers=2)


def spread(model: ModelSpec, ranks: int, **more) -> ContextDecoder:  # type: ignore[no-untyped-def]
    dtype = more.pop("dtype", torch.float32)
    return ContextDecoder(
        small_decoder(model, dtype),
        ranks=ranks,
        pages=PAGES,
        page_tokens=page_tokens_of(ranks, 4),
        swap_pages=PAGES,
        **more,
    )


@pytest.fixture(scope="module", params=SIDES, ids=[f"{n}-{h[0]}/{h[1]}" for n, h in SIDES])
def engine(request: pytest.FixtureRequest) -> Iterator[ContextDecoder]:
    ranks, heads = request.param
    engine = spread(model_of(heads), ranks)
    yield engine
    engine.close()


def only(engine: ContextDecoder, *variants: str) -> None:
    """Let nothing else move between the ranks."""
    model, choice = engine.decoder.model, engine.choice
    engine.choice = VariantChoice(model, choice.price, choice.wire, variants)


# (text, tokens) in each iteration: whole prompts, parts of prompts, single tokens, and mixtures.
PHASES = [
    [(0, 37), (1, 5)],
    [(2, 16)],
    [(0, 1), (1, 1)],
    [(0, 1), (2, 9), (1, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 2), (1, 3)],
    [(1, 1)],
]


def run_phases(engine: PagedDecoder) -> list[torch.Tensor]:
    """Logits of every token of every iteration."""
    size, vocab, done = engine.pool.page_tokens, engine.decoder.model.vocab, [0, 0, 0]
    pages = [range(10), [*range(18, 22), *range(12, 16)], range(22, 30)]
    logits = []
    for phase in PHASES:
        chunks, tokens = [], list[int]()
        for text, count in phase:
            stop = done[text] + count
            held = list(pages[text])[: -(-stop // size)]
            chunks.append(chunk_of(str(text), held, done[text], count))
            tokens += [(7 * at * at + 3 * text) % vocab for at in range(done[text], stop)]
            done[text] = stop
        x_TD = engine.run(chunks, tokens)
        logits.append(torch.cat(list(engine.logits(x_TD, range(len(tokens))))))
    return logits


def test_logits_equal_one_process_in_all_phases_and_bytes_are_the_schedules(
    engine: ContextDecoder,
) -> None:
    one = paged(engine.decoder, pages=PAGES, page_tokens=engine.pool.page_tokens)
    alone_logits = run_phases(one)
    ranks = engine.ranks
    hidden = engine.decoder.model.hidden * 4
    # Last with all of them: single tokens go to the keys beside longer chunks that go otherwise.
    for variants in (*((each,) for each in VARIANTS), VARIANTS):
        only(engine, *variants)
        before = np.array([each["sent"] for each in engine.peers.counts()])
        moved = sum(engine.moved_bytes.values())
        for ours, theirs in zip(run_phases(engine), alone_logits, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        sent = np.array([each["sent"] for each in engine.peers.counts()]) - before
        moved = sum(engine.moved_bytes.values()) - moved
        rows = sent.sum() - moved  # hidden states, for the head
        assert rows % hidden == 0
        assert 0 <= rows <= hidden * sum(count for phase in PHASES for _, count in phase)
        assert (rows > 0) == (ranks > 1)
        assert (np.diag(sent) == 0).all()


def test_each_rank_keeps_its_share_of_the_cache(engine: ContextDecoder) -> None:
    ranks, tokens = engine.ranks, PAGES * engine.pool.page_tokens
    whole = tokens * token_bytes(engine.decoder.model, torch.float32)
    assert [each["pool"] * ranks for each in engine.peers.counts()] == [whole] * ranks


class Noted(EventSink):
    """Keeps what is journaled."""

    def __init__(self) -> None:
        self.lines = list[dict[str, object]]()

    def write(self, kind: str, name: str, **fields: object) -> None:  # type: ignore[override]
        self.lines.append({"name": name, **fields})


@pytest.fixture(scope="module")
def two() -> Iterator[ContextDecoder]:
    engine = spread(SMALL, 2, sink=Noted())
    yield engine
    engine.close()


class Unclosed(EngineLoop):
    """A loop whose ranks go on for the next test."""

    def close(self) -> None:
        close, self._decoder.close = self._decoder.close, lambda: None  # type: ignore[method-assign]
        super().close()
        self._decoder.close = close  # type: ignore[method-assign]


def loop_of(
    engine: ContextDecoder, price: LinearPrice | None = None, pages: int = PAGES, **limits: float
) -> EngineLoop:
    settings = BatchSettings(
        pages,
        page_tokens=engine.pool.page_tokens,
        shares_chunks=True,
        **limits,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(settings, price or LinearPrice(), FAIR_POLICIES["fifo"])
    return Unclosed(engine, reader(engine.decoder.model), scheduler, context_tokens=100)


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple((7 * at * at + 31 * seed + 5) % 280 for at in range(tokens))


def asked(prompt: Sequence[int], tokens: int, tenant: str = "") -> GenerateRequest:
    return GenerateRequest(tuple(prompt), most_tokens=tokens, ignores_end=True, tenant=tenant)


@pytest.mark.parametrize("iteration_s", [1.0, 2e-3])
def test_greedy_tokens_are_those_of_each_request_by_itself(
    two: ContextDecoder, iteration_s: float
) -> None:
    """In one chunk and in several, with more requests than pages: some are preempted."""
    batch = [asked(prompt_of(seed, 11 + 9 * seed), 20) for seed in range(5)]
    for price, swap_pages in ((LinearPrice(), 0), (LinearPrice(swap=1e-9), PAGES)):
        only(two, *VARIANTS)
        loop = loop_of(
            two, price, 28, iteration_s=iteration_s, prefill_iteration_s=iteration_s,
            swap_pages=swap_pages,
        )  # fmt: skip
        handles = [loop.submit(each) for each in batch]
        with loop:
            answers = [handle.result() for handle in handles]
        assert [list(each.ids) for each in answers] == [alone(each.prompt, 20) for each in batch]
        assert loop.stats().preemptions["swap" if swap_pages else "recompute"] > 0


def test_a_prefix_is_found_up_to_where_a_chunk_ended(two: ContextDecoder) -> None:
    prompt = prompt_of(1, 64)
    with loop_of(two, iteration_s=2.5e-3, prefill_iteration_s=2.5e-3) as loop:
        first = loop.submit(asked(prompt, 9)).result().ids
        again = loop.submit(asked(prompt, 9))
        longer = loop.submit(asked((*prompt, *first, 5), 3))
        parted = loop.submit(asked((*prompt[:30], 9, 9), 3))
        assert again.result().ids == first == tuple(alone(prompt, 9))
        assert list(longer.result().ids) == alone((*prompt, *first, 5), 3)
        assert list(parted.result().ids) == alone((*prompt[:30], 9, 9), 3)
    size = two.pool.page_tokens
    hits = [handle.cached_tokens for handle in (again, longer, parted)]
    assert all(hits) and all(hit % size == 0 for hit in hits)
    assert hits[1] > hits[0] > hits[2]


def test_the_same_prompt_at_the_same_time_is_computed_in_any_chunks(two: ContextDecoder) -> None:
    batch = [asked(prompt_of(2, tokens), 6) for tokens in (50, 50, 37, 50)]
    loop = loop_of(two, iteration_s=2.2e-3)
    handles = [loop.submit(each) for each in batch]
    with loop:
        ids = [list(handle.result().ids) for handle in handles]
    assert ids == [alone(each.prompt, 6) for each in batch]


def test_a_request_given_up_within_its_prompt_leaves_nothing_behind(
    two: ContextDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pages nor how its tokens lie; one with the same prompt had waited for it."""
    loop = loop_of(two, iteration_s=2.2e-3, prefill_iteration_s=2.2e-3)
    gone, other = (loop.submit(asked(prompt_of(4, 70), 6)) for _ in range(2))
    starts, run = list[int](), two.run

    def run_and_leave(chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> torch.Tensor:
        starts.extend(chunk.start for chunk in chunks if chunk.request == gone.name)
        if len(starts) == 2:
            gone.abort()
        return run(chunks, tokens)

    monkeypatch.setattr(two, "run", run_and_leave)
    with loop:
        assert gone.result().finish == "abort"
        assert list(other.result().ids) == alone(prompt_of(4, 70), 6)
    assert len(starts) == 2 and 0 < starts[1] < 64
    stats = loop.stats()
    assert (stats.running, stats.waiting, stats.used_pages, two._shared) == (0, 0, 0, {})


def test_the_choice_is_journaled_with_its_price(two: ContextDecoder) -> None:
    noted = two._sink
    assert isinstance(noted, Noted)
    noted.lines.clear()
    only(two, *VARIANTS)
    price = two.choice.price
    assert all(each > 0 for each in dataclasses.astuple(price.gathered))
    two.choice.price = dataclasses.replace(price, gathered=GatheredPrice(7.0))
    run_phases(two)
    two.choice.price = price
    assert len(noted.lines) == len(PHASES)
    for line, phase in zip(noted.lines, PHASES, strict=True):
        assert line["strategy"] in VARIANTS
        if all(count == 1 for _, count in phase):
            assert line["strategy"] == "gather-q"  # whatever tiles cost: they are one call
            assert line["predicted_s"] == 7.0 * SMALL.layers
        has_singles = any(count == 1 for _, count in phase)
        assert has_singles == (line["predicted_s"] >= 7.0 * SMALL.layers)  # type: ignore[operator]
        assert line["tokens"] == sum(count for _, count in phase)
        assert line["predicted_s"] > 0 and line["iteration_s"] > line["measured_s"] > 0  # type: ignore[operator]


def test_a_killed_rank_ends_the_requests_that_it_had_tokens_of(two: ContextDecoder) -> None:
    with loop_of(two, most_sequences=1) as loop:
        run, may_run, iterations = two.run, threading.Event(), list[int]()

        def held(*given: object) -> object:
            """Some iterations; the rest after the kill."""
            iterations.append(1)
            assert len(iterations) <= 5 or may_run.wait(120)
            return run(*given)  # type: ignore[arg-type]

        two.run = held  # type: ignore[assignment,method-assign]
        running = loop.submit(asked(prompt_of(1, 20), 79))
        waiting = loop.submit(asked(prompt_of(2, 20), 5))
        next(iter(running))
        (victim,) = two.peers.pids
        os.kill(victim, signal.SIGKILL)
        may_run.set()
        ended = running.result()
        two.run = run  # type: ignore[method-assign]
        assert (ended.finish, ended.error) == (
            "error",
            "Rank 1 of 2 was lost: SIGKILL ended it. Ask again.",
        )
        assert ended.retry_after_s is not None and ended.retry_after_s > 0
        assert list(waiting.result().ids) == alone(prompt_of(2, 20), 5)
        again = loop.submit(asked(prompt_of(1, 20), 9))
        assert list(again.result().ids) == alone(prompt_of(1, 20), 9)
        assert again.cached_tokens == 0  # what was computed before is gone
    assert two.peers.pids != [victim]
    stats = loop.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)


def test_a_rank_that_is_stopped_is_waited_for_until_the_deadline() -> None:
    engine = spread(SMALL, 3, deadline_s=12.0)
    try:
        os.kill(engine.peers.pids[1], signal.SIGSTOP)
        with pytest.raises(RanksLostError) as caught:
            run_phases(engine)
        words = str(caught.value)
        assert words.startswith("One of 3 ranks was lost: rank ")
        assert words.endswith(" waited 12 s for rank 2. Ask again.")
        assert len(run_phases(engine)) == len(PHASES)  # all ranks were started anew
    finally:
        engine.close()
    assert engine.peers.pids == []


def test_bf16_is_as_near_as_in_one_process_whatever_moves() -> None:
    """With heads of 64, whose tiles are products of pairs where the processor has them."""
    model = dataclasses.replace(model_of((9, 3)), head_width=64)
    engine = spread(model, 2, dtype=torch.bfloat16)
    ours = list[list[torch.Tensor]]()
    try:
        for variants in (*((each,) for each in VARIANTS), VARIANTS):
            only(engine, *variants)
            ours.append(run_phases(engine))
    finally:
        engine.close()
    exact = run_phases(paged(small_decoder(model), pages=PAGES, page_tokens=4))
    one = run_phases(paged(engine.decoder, pages=PAGES, page_tokens=4))
    for by_strategy in ours:
        for mine, its, whole in zip(by_strategy, one, exact, strict=True):
            bound = 1.5 * (its - whole).abs().max() + 0.02 * whole.abs().max()
            assert (mine - whole).abs().max() <= bound


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"ranks": 3, "page_tokens": 16},
            LayoutError,
            "Pages of 16 tokens cannot be spread evenly over 3 ranks. Take pages of 18 tokens, or "
            "other ranks.",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(settings, error, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        ContextDecoder(small_decoder(), pages=4, **settings)
    assert str(caught.value) == words


def test_experts_with_a_capacity_are_refused_and_no_rank_stays() -> None:
    model = dataclasses.replace(SMALL, experts=4, top_k=2, expert_ffn=24, capacity_factor=1.25)
    with pytest.raises(ModelError, match="Experts with a capacity factor"):
        spread(model, 2)
