"""The invariant mode: the same bits alone, in a batch, in chunks, from the cache, preempted."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import Decoder
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.request import Answered, GenerateRequest, Score
from equipoise.serve.engine.tiles import find_rows
from equipoise.serve.sample import Sampling
from equipoise.spec.model.presets import ModelSpec
from support.serving.engine import SMALL, make_engine, small_decoder
from support.serving.loop import LinearPrice

MODELS = {
    "plain": SMALL,
    "odd widths": dataclasses.replace(
        SMALL, hidden=36, heads=9, kv_heads=3, head_width=4, ffn=41, qkv_bias=True
    ),
    "experts": dataclasses.replace(SMALL, experts=4, top_k=2, expert_ffn=24, shared_ffn=16),
}
CASES = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple((7 * at * at + 31 * seed + 5) % 280 for at in range(tokens))


REQUESTS = [
    GenerateRequest(
        prompt_of(at % 5, 9 + 23 * (at % 5)),
        most_tokens=3 + 5 * (at % 4),
        ignores_end=True,
        top=2,
        sampling=Sampling(1.0, top_p=0.9, seed=at) if at % 3 == 1 else Sampling(),
    )
    for at in range(12)
]


@functools.cache
def alone(name: str, dtype: torch.dtype, at: int) -> Answered:
    with make_engine(MODELS[name], dtype=dtype, is_invariant=True) as engine:
        return engine.submit(REQUESTS[at]).result()


def bits(scores: tuple[Score, ...]) -> list[tuple[int, str, tuple[tuple[int, str], ...]]]:
    return [
        (each.token, each.logprob.hex(), tuple((token, share.hex()) for token, share in each.top))
        for each in scores
    ]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), CASES)
@settings(max_examples=3)
@given(
    order=st.permutations(range(len(REQUESTS))),
    count=st.integers(1, len(REQUESTS)),
    pages=st.integers(40, 130),
    page_tokens=st.sampled_from([4, 16]),
    iteration_s=st.sampled_from([1e-4, 2e-3, 1.0]),
    swap=st.sampled_from([1e-7, 1.0]),
)
def test_tokens_and_log_probabilities_are_those_of_a_request_alone(
    name: str,
    dtype: torch.dtype,
    order: list[int],
    count: int,
    pages: int,
    page_tokens: int,
    iteration_s: float,
    swap: float,
) -> None:
    engine = make_engine(
        MODELS[name],
        dtype=dtype,
        is_invariant=True,
        pages=pages,
        page_tokens=page_tokens,
        iteration_s=iteration_s,
        prefill_iteration_s=iteration_s,
        price=LinearPrice(swap=swap),
        swap_pages=pages,
    )
    handles = [(at, engine.submit(REQUESTS[at])) for at in order[:count]]
    with engine:
        for at, handle in handles:
            answer, wanted = handle.result(), alone(name, dtype, at)
            assert (answer.ids, answer.finish) == (wanted.ids, wanted.finish)
            assert bits(answer.scores) == bits(wanted.scores)


def test_scores_of_a_prompt_have_the_same_bits_in_any_chunks() -> None:
    prompt = prompt_of(3, 150)
    request = GenerateRequest(prompt, most_tokens=0, scores_prompt=True, top=3)
    seen = set()
    for iteration_s in (1e-4, 4e-3, 1.0):
        engine = make_engine(
            dtype=torch.bfloat16,
            is_invariant=True,
            iteration_s=iteration_s,
            prefill_iteration_s=iteration_s,
        )
        with engine:
            beside = engine.submit(GenerateRequest(prompt[::-1], most_tokens=9))
            seen.add(repr(bits(engine.submit(request).result().prompt_scores)))
            beside.result()
    assert len(seen) == 1


def test_the_mode_is_invariant_with_two_threads() -> None:
    threads = torch.get_num_threads()
    model = dataclasses.replace(SMALL, hidden=96, ffn=1100)
    try:
        torch.set_num_threads(2)
        decoder = small_decoder(model, torch.bfloat16)
        seen = set()
        for count in (1, 7):
            engine = make_engine(model, decoder=decoder, is_invariant=True)
            handles = [engine.submit(each) for each in REQUESTS[:count]]
            with engine:
                seen.add(repr(bits(handles[0].result().scores)))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


class _Neighbourly(Decoder):
    """A decoder whose rows look at each other."""

    def finish(self, x_tD: torch.Tensor, labels_T: torch.Tensor | None) -> torch.Tensor:
        return super().finish(x_tD, labels_T) + x_tD.sum()


def test_a_machine_without_invariant_products_is_refused() -> None:
    model: ModelSpec = SMALL
    decoder = _Neighbourly(model).requires_grad_(False)
    with pytest.raises(ModelError) as caught:
        find_rows(decoder)
    assert str(caught.value) == (
        "On this machine a row's bits depend on the other rows, whatever the tile: 32, 64, 16, 8 "
        "rows were tried. Serve without the invariant mode."
    )


def test_the_mode_is_refused_on_other_devices() -> None:
    decoder, meta = small_decoder(), torch.device("meta")
    pool = KvPool(SMALL, pages=2, page_tokens=4, dtype=torch.float32, device=meta)
    with pytest.raises(ModelError) as caught:
        PagedDecoder(decoder, pool, is_invariant=True)
    assert str(caught.value) == (
        "The invariant mode runs on CPU alone; the model is on meta. Serve it there without."
    )
