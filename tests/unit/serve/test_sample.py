"""The next token: the likeliest, or one drawn from what the filters leave."""

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from equipoise.base.errors import SpecError
from equipoise.serve.sample import Sampling, choose_token, probabilities

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
    ],
)
def test_settings_out_of_range(settings: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        Sampling(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == words
