"""The next token: the likeliest, or one drawn from what the filters leave."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from equipoise.base.errors import SpecError
from equipoise.serve.sample import (
    Sampling,
    TokenCounts,
    adjust,
    choose_token,
    log_probabilities,
    probabilities,
)

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3


def test_without_a_temperature_the_likeliest_is_taken() -> None:
    assert choose_token(LOGITS, Sampling(), 3) == int(LOGITS.argmax())
    assert choose_token(torch.tensor([1.0, 4.0, 4.0]), Sampling(), 0) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 80])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_the_filters_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    theirs = TemperatureLogitsWarper(temperature)(None, LOGITS[None].double())
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = probabilities(LOGITS, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(ours, torch.softmax(theirs[0], dim=0))


def test_draws_follow_the_probabilities_and_the_counter() -> None:
    sampling = Sampling(1.0, top_k=5, seed=4)
    shares = probabilities(LOGITS, sampling)
    drawn = [choose_token(LOGITS, sampling, position) for position in range(4000)]
    again = [choose_token(LOGITS, sampling, position) for position in reversed(range(4000))]
    assert drawn == again[::-1]
    other = Sampling(1.0, top_k=5, seed=5)
    assert drawn != [choose_token(LOGITS, other, position) for position in range(4000)]
    measured = torch.bincount(torch.tensor(drawn), minlength=50) / 4000
    assert set(drawn) <= set(torch.nonzero(shares).flatten().tolist())
    assert float((measured - shares).abs().max()) < 0.03


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    drawn = {choose_token(logits, Sampling(1.0), position) for position in range(200)}
    assert drawn == {1, 3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more; it is -1.0."),
        ({"temperature": float("nan")}, "temperature must be 0 or more; it is nan."),
        ({"top_k": -1}, "top_k must be 0 or more; it is -1."),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; it is 0.0."),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1; it is 1.5."),
        ({"seed": -3}, "seed must be from 0 to 2**63 - 1; it is -3."),
        ({"min_p": 1.5}, "min_p must be from 0 to 1; it is 1.5."),
        (
            {"repetition_penalty": 1e-300},
            "repetition_penalty must be from 0.01 to 100; it is 1e-300.",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2; it is 2.5."),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be from -2 to 2; it is -3.0."),
        ({"logit_bias": {3: 1.0, 4: 101.0}}, "logit_bias must be from -100 to 100; it is 101.0."),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Sampling(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == words


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_is_that_of_transformers(min_p: float) -> None:
    theirs = TemperatureLogitsWarper(0.7)(None, LOGITS[None].double())
    theirs = MinPLogitsWarper(min_p)(None, theirs)
    ours = probabilities(LOGITS, Sampling(0.7, min_p=min_p))
    torch.testing.assert_close(ours, torch.softmax(theirs[0], dim=0))


def test_a_nucleus_among_many_tokens_is_that_of_transformers() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    for top_p in (0.001, 0.05, 0.5, 0.99):
        theirs = TopPLogitsWarper(top_p)(None, logits[None].double())
        ours = probabilities(logits, Sampling(1.0, top_p=top_p))
        assert int((ours > 0).sum()) == int(torch.isfinite(theirs).sum())
        torch.testing.assert_close(
            ours.sort().values, torch.softmax(theirs[0], dim=0).sort().values
        )


def counts_of(prompt: list[int], answer: list[int]) -> TokenCounts:
    return TokenCounts(prompt, answer, len(LOGITS), LOGITS.device)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    prompt, answer = [3, 7, 7], [1, 3]
    ids = torch.tensor([prompt + answer])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, LOGITS[None].clone())[0]
    sampling, counts = Sampling(repetition_penalty=1.3), counts_of(prompt, answer[:1])
    counts.add(answer[1])
    assert torch.equal(adjust(LOGITS, sampling, counts), theirs)


def test_penalties_count_the_answer_and_biases_are_added() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 100, 0: -1})
    counts = counts_of([9, 9], [4])
    for token in (4, 5):
        counts.add(token)
    changed = adjust(LOGITS, sampling, counts) - LOGITS
    expected = torch.zeros(50)
    expected[[4, 5, 7, 0]] = torch.tensor([-1.0, -0.75, 100.0, -1.0])
    torch.testing.assert_close(changed, expected, atol=1e-5, rtol=0)
    assert sampling.changes_logits and not Sampling(0.5, top_k=3).changes_logits
    assert choose_token(adjust(LOGITS, sampling, counts_of([], [])), sampling, 3) == 7


def test_log_probabilities_of_a_row_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(33, 4099, generator=torch.Generator().manual_seed(3))
    together = log_probabilities(logits)
    assert torch.equal(torch.stack([log_probabilities(row[None])[0] for row in logits]), together)
    assert float(together.exp().sum(1).sub(1).abs().max()) < 1e-5


def test_the_smallest_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -torch.inf])
    for temperature in (5e-324, 1e-308, 1e-9):
        sampling = Sampling(temperature=temperature)
        assert probabilities(logits, sampling).tolist() == [0.0, 1.0, 0.0, 0.0]
        assert {choose_token(logits, sampling, at) for at in range(20)} == {1}


class _Calls(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_penalties_take_as_many_operators_however_long_the_text_is() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3)
    numbers = set[int]()
    for tokens in (2, 2_000):
        counts = counts_of([*range(9)] * tokens, [3] * tokens)
        with _Calls() as calls:
            counts.add(3)
            adjust(LOGITS, sampling, counts)
        numbers.add(calls.count)
        assert (int(counts.is_used_V.sum()), float(counts.answer_V[3])) == (9, tokens + 1)
    assert len(numbers) == 1


def test_many_biases_take_as_many_operators_as_two() -> None:
    counts = set[int]()
    for biases in ({3: 1.0, 7: -2.0}, {at: at / 7 - 3 for at in range(0, 50, 3)}):
        with _Calls() as calls:
            biased = adjust(LOGITS, Sampling(logit_bias=biases), None)
        counts.add(calls.count)
        for at, logit in enumerate(LOGITS.tolist()):
            assert float(biased[at]) == pytest.approx(logit + biases.get(at, 0), abs=1e-6)
    assert len(counts) == 1
