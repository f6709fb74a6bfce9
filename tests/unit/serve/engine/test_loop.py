"""The engine's thread: the answers of each request by itself, whatever else runs."""

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import FaultError, FitError, SpecError
from equipoise.nn.decoder import Decoder
from equipoise.schedule.batching.iteration import ServeChunk, Swap
from equipoise.schedule.batching.request import QueueFullError
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.request import (
    Answered,
    Event,
    GenerateRequest,
    PromptScored,
    RanksLostError,
    TokenEvent,
)
from equipoise.serve.sample import Sampling, log_probabilities
from equipoise.serve.text import TextStream
from support.serving.engine import END, alone, byte_level, make_engine, small_decoder
from support.serving.loop import LinearPrice
from support.serving.paged import whole_logits


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple((7 * at * at + 31 * seed + 5) % 280 for at in range(tokens))


def answers(engine: EngineLoop, requests: Sequence[GenerateRequest]) -> list[Answered]:
    """All submitted at once, before the engine starts."""
    handles = [engine.submit(each) for each in requests]
    with engine:
        return [handle.result() for handle in handles]


def requests() -> st.SearchStrategy[list[GenerateRequest]]:
    one = st.builds(
        GenerateRequest,
        prompt=st.builds(prompt_of, st.integers(0, 2), st.integers(1, 40)),
        most_tokens=st.integers(1, 20),
        ignores_end=st.booleans(),
        sampling=st.sampled_from([Sampling(), Sampling(0.8, top_p=0.9, seed=4)]),
        tenant=st.sampled_from("ab"),
    )
    return st.lists(one, min_size=1, max_size=8)


@settings(max_examples=12)
@given(
    batch=requests(),
    policy=st.sampled_from(["fifo", "vtc", "uwfq"]),
    pages=st.integers(16, 40),
    swap_pages=st.sampled_from([0, 40]),
    iteration_s=st.sampled_from([1e-4, 2e-3, 1.0]),
    most_sequences=st.integers(1, 6),
)
def test_answers_are_those_of_each_request_by_itself(
    batch: list[GenerateRequest],
    policy: str,
    pages: int,
    swap_pages: int,
    iteration_s: float,
    most_sequences: int,
) -> None:
    engine = make_engine(
        pages=pages,
        policy=policy,
        price=LinearPrice(swap=1e-7 if swap_pages else 1.0),
        swap_pages=swap_pages,
        iteration_s=iteration_s,
        most_sequences=most_sequences,
    )
    for request, answer in zip(batch, answers(engine, batch), strict=True):
        end = None if request.ignores_end else END
        most = request.most_tokens or 0
        ids = alone(request.prompt, most, sampling=request.sampling, end=end)
        assert list(answer.ids) == ids
        assert answer.finish == ("stop" if ids[-1] == end else "length")
        shown = ids[:-1] if answer.finish == "stop" else ids
        text = TextStream(byte_level(), request.prompt)
        assert answer.text == "".join(map(text.push, shown)) + text.finish()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    assert sum(stats.finished.values()) == len(batch)


def test_preempted_requests_answer_as_if_nothing_had_happened() -> None:
    batch = [
        GenerateRequest(prompt_of(at, 20), most_tokens=30, ignores_end=True) for at in range(5)
    ]
    for price, swap_pages in ((LinearPrice(swap=1e-7), 60), (LinearPrice(), 0)):
        engine = make_engine(pages=28, price=price, swap_pages=swap_pages)
        for request, answer in zip(batch, answers(engine, batch), strict=True):
            assert list(answer.ids) == alone(request.prompt, 30)
        modes = engine.stats().preemptions
        assert (modes["swap"] > 0, modes["recompute"] > 0) == (swap_pages > 0, not swap_pages)


def test_a_prompt_that_was_answered_before_is_found_in_the_cache() -> None:
    prompt = prompt_of(1, 23)
    with make_engine() as engine:
        first = engine.submit(GenerateRequest(prompt, most_tokens=6, ignores_end=True, tenant="a"))
        ids = first.result().ids
        again = engine.submit(GenerateRequest(prompt, most_tokens=6, ignores_end=True, tenant="a"))
        other = engine.submit(GenerateRequest(prompt, most_tokens=6, ignores_end=True, tenant="b"))
        longer = engine.submit(GenerateRequest((*prompt, *ids, 9), most_tokens=2, tenant="a"))
        assert again.result().ids == other.result().ids == ids
        assert list(longer.result().ids) == alone((*prompt, *ids, 9), 2)
    handles = first, again, other, longer
    # The last whole page but those with the last token; for the conversation, the answer's too.
    assert [handle.cached_tokens for handle in handles] == [0, 20, 0, 28]


def test_prompts_and_tokens_are_scored() -> None:
    prompt = prompt_of(3, 90)
    request = GenerateRequest(prompt, most_tokens=4, top=3, scores_prompt=True, ignores_end=True)
    silent = GenerateRequest(prompt, most_tokens=0, scores_prompt=True)
    scored, only = answers(make_engine(iteration_s=1e-3), [request, silent])
    text = [*prompt, *scored.ids]
    wanted = log_probabilities(whole_logits(small_decoder(), text))
    given = [*scored.prompt_scores, *scored.scores]
    assert [each.token for each in given] == text[1:]
    for at, each in enumerate(given):
        assert each.logprob == pytest.approx(float(wanted[at, text[at + 1]]), abs=1e-4)
        best = wanted[at].topk(3)
        assert [token for token, _ in each.top] == best.indices.tolist()
    assert [each.logprob for each in only.prompt_scores] == pytest.approx(
        [each.logprob for each in scored.prompt_scores], abs=1e-4
    )
    assert (only.ids, only.text, only.finish) == ((), "", "length")


def test_an_answer_ends_at_a_stop_string_and_does_not_show_it() -> None:
    prompt = prompt_of(2, 9)
    ids = alone(prompt, 24)
    text = byte_level().decode(ids)
    stop = text[8:11]
    request = GenerateRequest(prompt, most_tokens=24, stop=(stop, "never"), ignores_end=True)
    late = GenerateRequest(prompt, most_tokens=24, least_tokens=24, stop=(stop,), ignores_end=True)
    short, whole = answers(make_engine(), [request, late])
    assert (short.text, short.finish) == (text[: text.index(stop)], "stop")
    assert (whole.text, whole.finish) == (text, "length")


def test_no_end_token_comes_before_the_least_tokens() -> None:
    prompt = prompt_of(4, 9)
    first = alone(prompt, 1)[0]
    early = GenerateRequest(prompt, most_tokens=5, stop_ids=frozenset([first]))
    late = GenerateRequest(prompt, most_tokens=5, least_tokens=3, stop_ids=frozenset([first]))
    one, other = answers(make_engine(), [early, late])
    assert (one.ids, one.finish, one.text) == ((first,), "stop", "")
    assert len(other.ids) >= 3 and first not in other.ids[:3]


def test_an_aborted_request_ends_once_and_gives_its_pages_back() -> None:
    with make_engine(most_sequences=1) as engine:
        running = engine.submit(GenerateRequest(prompt_of(1, 9), ignores_end=True))
        waiting = engine.submit(GenerateRequest(prompt_of(2, 9), ignores_end=True))
        events = iter(running)
        assert isinstance(next(events), TokenEvent)
        waiting.abort()
        running.abort()
        running.abort()
        assert waiting.result().finish == "abort"
        last = [each.finish for each in events if isinstance(each, TokenEvent)]
        assert last[-1] == "abort" and last.count("abort") == 1
        after = engine.submit(GenerateRequest(prompt_of(3, 5), most_tokens=2)).result()
        assert list(after.ids) == alone(prompt_of(3, 5), 2)
    stats = engine.stats()
    assert stats.finished["abort"] == 2 and stats.used_pages == 0


def test_what_is_submitted_before_a_drain_is_answered_and_nothing_after() -> None:
    engine = make_engine()
    handle = engine.submit(GenerateRequest(prompt_of(1, 9), most_tokens=5, ignores_end=True))
    engine.start()
    assert engine.drain(30)
    assert list(handle.result().ids) == alone(prompt_of(1, 9), 5)
    with pytest.raises(QueueFullError, match=r"The server is shutting down\."):
        engine.submit(GenerateRequest((1,), most_tokens=1))


class _Torn(PagedDecoder):
    """Fails whenever a chunk of some prompt runs."""

    bad = 259

    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> torch.Tensor:
        if self.bad in tokens:
            raise ValueError("torn")
        return super().run(chunks, tokens)


def test_a_request_that_fails_inside_an_iteration_fails_alone() -> None:
    engine = make_engine()
    whole = engine._decoder
    engine._decoder = _Torn(whole.decoder, whole.pool)
    good = [prompt_of(at, 12) for at in (1, 2)]
    bad = (5, 259, *range(20))
    batch = [GenerateRequest(each, most_tokens=4) for each in (good[0], bad, good[1])]
    one, failed, two = answers(engine, batch)
    assert [list(one.ids), list(two.ids)] == [alone(each, 4) for each in good]
    assert (failed.finish, failed.error) == (
        "error",
        "The request failed inside the engine: ValueError.",
    )


class _NoSwap(PagedDecoder):
    """Fails outside of any request's chunk."""

    def swap(self, out: Sequence[Swap], back: Sequence[Swap]) -> None:
        raise ValueError("no swap")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_that_has_stopped() -> None:
    engine = make_engine()
    whole = engine._decoder
    engine._decoder = _NoSwap(whole.decoder, whole.pool)
    (failed,) = answers(engine, [GenerateRequest(prompt_of(1, 9), most_tokens=4)])
    assert (failed.finish, failed.error) == (
        "error",
        "The engine has stopped (ValueError). Start it again.",
    )
    assert not engine.is_alive
    with pytest.raises(FaultError, match=r"The engine is closed\. Start another one\."):
        engine.submit(GenerateRequest((1,), most_tokens=1))


def test_rows_of_a_failed_chunk_are_never_reused() -> None:
    bad = (5, 259, *range(20))
    engine = make_engine()
    whole = engine._decoder
    engine._decoder = _Torn(whole.decoder, whole.pool)
    with engine:
        failed = engine.submit(GenerateRequest(bad, most_tokens=4))
        assert failed.result().finish == "error"
        engine._decoder = whole
        again = engine.submit(GenerateRequest(bad, most_tokens=4))
        assert list(again.result().ids) == alone(bad, 4) and again.cached_tokens == 0


def test_logits_that_are_no_numbers_end_a_request_with_a_sentence() -> None:
    decoder = Decoder(small_decoder().model)
    decoder.load_state_dict(small_decoder().state_dict())
    decoder.requires_grad_(False)
    decoder.embed.weight[7] = torch.nan
    engine = make_engine(decoder=decoder)
    batch = [GenerateRequest((1, 7, 2), most_tokens=3), GenerateRequest((1, 6, 2), most_tokens=3)]
    bad, good = answers(engine, batch)
    assert bad.error == (
        "The model's largest logit is nan, so no token can be chosen. Check its weights, or serve "
        "it in fp32."
    )
    assert list(good.ids) == alone((1, 6, 2), 3)


def test_events_go_where_the_client_wants_them_on_the_engines_thread() -> None:
    events, threads = list[Event](), set[str]()

    def deliver(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread().name)

    def leave(event: Event) -> None:
        raise ConnectionError

    with make_engine() as engine:
        request = GenerateRequest(
            prompt_of(1, 9), most_tokens=5, scores_prompt=True, ignores_end=True
        )
        engine.submit(request, deliver=deliver)
        engine.submit(request, deliver=leave)
        assert engine.submit(request).result().finish == "length"
    assert isinstance(events[0], PromptScored) and len(events) == 6
    assert threads == {"engine"}
    assert engine.stats().finished == {"length": 2, "abort": 1}


@pytest.mark.parametrize(
    ("request_of", "error", "words"),
    [
        (
            lambda: GenerateRequest((1, 280), most_tokens=1),
            SpecError,
            "There is no token 280: the model's vocabulary has 280, counted from 0.",
        ),
        (
            lambda: GenerateRequest((1,), sampling=Sampling(logit_bias={-1: 1.0})),
            SpecError,
            "There is no token -1: the model's vocabulary has 280, counted from 0.",
        ),
        (
            lambda: GenerateRequest(prompt_of(1, 150), most_tokens=51),
            SpecError,
            "A prompt of 150 tokens and an answer of 51 exceeds the model's context of 200 "
            "tokens. Shorten one of them.",
        ),
        (
            lambda: GenerateRequest(prompt_of(1, 200)),
            SpecError,
            "A prompt of 200 tokens exceeds the model's context of 200 tokens. Shorten one of "
            "them.",
        ),
        (lambda: GenerateRequest(()), SpecError, "The prompt has no token. Give it at least one."),
        (
            lambda: GenerateRequest((1,), most_tokens=-1),
            SpecError,
            "most_tokens must be 0 or more; it is -1.",
        ),
        (
            lambda: GenerateRequest((1,), most_tokens=4, least_tokens=5),
            SpecError,
            "least_tokens must be from 0 to most_tokens; it is 5.",
        ),
        (lambda: GenerateRequest((1,), top=21), SpecError, "top must be from 0 to 20; it is 21."),
        (
            lambda: GenerateRequest((1,), stop="END"),  # type: ignore[arg-type]
            SpecError,
            'stop must be a tuple of strings; it is the string "END".',
        ),
        (
            lambda: GenerateRequest((1,), most_tokens=0),
            SpecError,
            "An answer of 0 tokens needs scores_prompt or embeds: there is nothing else to "
            "compute.",
        ),
    ],
)
def test_impossible_requests_are_refused(request_of, error, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        make_engine().submit(request_of())
    assert str(caught.value) == words


def test_a_request_that_no_pool_could_hold_is_refused() -> None:
    with pytest.raises(FitError):
        make_engine(pages=4).submit(GenerateRequest(prompt_of(1, 100), most_tokens=10))


def test_a_context_is_filled_if_no_length_is_given() -> None:
    (answer,) = answers(
        make_engine(context_tokens=40), [GenerateRequest(prompt_of(1, 30), ignores_end=True)]
    )
    assert len(answer.ids) == 10 and answer.finish == "length"


class _Lost(PagedDecoder):
    """Loses its ranks in the second iteration, in which the request ``given_up`` is given up."""

    engine: EngineLoop
    late: GenerateRequest
    given_up: str
    iterations = 0

    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> torch.Tensor:
        self.iterations += 1
        if self.iterations == 1:
            self.handle = self.engine.submit(self.late)
        if self.iterations == 2:
            assert [chunk.request for chunk in chunks] == [self.handle.name]
            assert self.engine.stats().running == 2
            self.engine.abort(self.given_up)
            raise RanksLostError("Rank 1 of 2 was lost. Ask again.", 5.0)
        return super().run(chunks, tokens)


def test_who_leaves_in_an_iteration_that_loses_its_ranks_stops_nobody_else() -> None:
    engine = make_engine(policy="user-fair", iteration_s=1e-9, prefill_iteration_s=1e-9)
    decoder = _Lost(engine._decoder.decoder, engine._decoder.pool)
    decoder.engine, engine._decoder = engine, decoder
    decoder.late = GenerateRequest(prompt_of(2, 20), most_tokens=2, tenant="b")
    # It holds a page, and the other tenant is served before it goes on.
    early = engine.submit(GenerateRequest(prompt_of(1, 20), most_tokens=2, tenant="a"))
    after = engine.submit(GenerateRequest(prompt_of(3, 5), most_tokens=2, tenant="a"))
    decoder.given_up = early.name
    with engine:
        assert early.result().finish == "abort"
        assert list(after.result().ids) == alone(prompt_of(3, 5), 2)
        lost = decoder.handle.result()
    assert (lost.finish, lost.error, lost.retry_after_s) == (
        "error",
        "Rank 1 of 2 was lost. Ask again.",
        5.0,
    )
    assert engine.stats().used_pages == 0
