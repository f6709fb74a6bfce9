"""Rows sorted by expert: each choice once, capacities kept, and the way back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.moe.route import capacity, choose, gather_back, sort_rows, spread

Choice = tuple[Tensor, Tensor, int]


@st.composite
def choices(draw) -> Choice:
    """Choices of distinct experts, with scores of which many are tied."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = draw(st.integers(1, 4))
    scores = torch.randint(1, levels + 1, (tokens, experts), generator=generator).double()
    chosen = choose(scores, top_k)
    return chosen, scores.gather(1, chosen), experts


def test_a_capacity_beyond_all_tokens_drops_nothing() -> None:
    chosen = torch.tensor([[0, 1], [0, 2]])
    for factor in (1e6, 1e300):
        rows = sort_rows(chosen, torch.ones(2, 2), experts=3, factor=factor)
        assert rows.is_whole and rows.counts_X.tolist() == [2, 1, 1]


@pytest.mark.parametrize(("expert", "identities"), [(3, 0), (4, 1), (-1, 0)])
def test_an_expert_that_does_not_exist_is_refused(expert: int, identities: int) -> None:
    chosen = torch.tensor([[0, 1], [2, expert]])
    with pytest.raises(ModelError) as caught:
        sort_rows(chosen, torch.ones(2, 2), experts=3, factor=0.0, identities=identities)
    assert str(caught.value) == (
        f"A token chose expert {expert}, and a layer has {3 + identities}, from 0 on."
    )


def test_ties_go_to_the_lower_expert() -> None:
    scores = torch.tensor([[0.2, 0.4, 0.4, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert choose(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert choose(scores[:0], 2).shape == (0, 2)


@given(choices(), st.sampled_from([0.0, 0.3, 1.0, 1.25]))
def test_each_choice_is_kept_or_dropped_once(choice: Choice, factor: float) -> None:
    chosen, scores, experts = choice
    tokens, top_k = chosen.shape
    rows = sort_rows(chosen, scores, experts=experts, factor=factor)
    flat = chosen.reshape(-1)
    demand = torch.bincount(flat, minlength=experts)
    most = capacity(tokens, top_k=top_k, experts=experts, factor=factor) if factor else tokens
    assert rows.counts_X.tolist() == demand.clamp_max(most).tolist()
    assert rows.is_whole == bool((demand <= most).all())
    kept = rows.slot_R.tolist()
    assert len(set(kept)) == len(kept) == int(rows.counts_X.sum())
    assert rows.token_R.tolist() == [slot // top_k for slot in kept]
    # Sorted by expert, then by token.
    keys = [(int(flat[slot]), slot) for slot in kept]
    assert keys == sorted(keys)
    places = rows.place_TK.reshape(-1).tolist()
    assert [places[slot] for slot in kept] == list(range(len(kept)))
    assert all(places[slot] == len(kept) for slot in set(range(len(flat))) - set(kept))
    # What an expert drops is no better than what it keeps, and of equals later.
    values = scores.reshape(-1).tolist()
    for expert in range(experts):
        mine = [slot for slot in range(len(flat)) if flat[slot] == expert]
        best = sorted(mine, key=lambda slot: (-values[slot], slot))[:most]
        assert {slot for slot in kept if flat[slot] == expert} == set(best)


@given(choices())
def test_spreading_and_gathering_back_is_the_identity(choice: Choice) -> None:
    chosen, scores, experts = choice
    tokens, top_k = chosen.shape
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    rows = sort_rows(chosen, scores, experts=experts, factor=0.0)
    weights = torch.full((tokens, top_k), 1 / top_k, dtype=torch.float64)
    out = gather_back(torch.zeros_like(x), spread(x, rows), weights, rows)
    torch.testing.assert_close(out, x, rtol=0, atol=1e-14)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.ones_like(x), rtol=0, atol=1e-14)


@given(choices(), st.sampled_from([0.0, 0.5]))
def test_gradients_are_autograds_also_where_rows_are_dropped(choice: Choice, factor: float) -> None:
    chosen, scores, experts = choice
    tokens, top_k = chosen.shape
    rows = sort_rows(chosen, scores, experts=experts, factor=factor)
    drawn = [
        torch.randn(tokens, 2, dtype=torch.float64, requires_grad=True),
        torch.randn(tokens, top_k, dtype=torch.float64, requires_grad=True),
    ]
    x, weights = drawn
    kept = torch.zeros(tokens * top_k, dtype=torch.float64)
    kept[rows.slot_R] = 1.0
    factor_T1 = (weights * kept.view(tokens, top_k)).sum(1, keepdim=True)
    expected = x + factor_T1 * x.square()
    found = gather_back(x, spread(x, rows).square(), weights, rows)
    torch.testing.assert_close(found, expected)
    pull = torch.arange(found.numel(), dtype=torch.float64).view_as(found)
    wanted = torch.autograd.grad((expected * pull).sum(), drawn)
    grads = torch.autograd.grad((found * pull).sum(), drawn)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_a_capacity_of_one_share_is_rounded_up(tokens: int) -> None:
    assert capacity(tokens, top_k=2, experts=8, factor=1.0) == math.ceil(tokens / 4)
