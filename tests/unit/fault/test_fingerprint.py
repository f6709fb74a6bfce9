"""Fingerprints: whatever changes in a tensor's bytes changes them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.fault.fingerprint import HeldState, fingerprints, fold_sums, weighted_sum


def hashed(tensor: Tensor) -> int:
    """As a rank on a processor does it."""
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    state = HeldState(module, torch.optim.AdamW(module.parameters()), 0)
    (value,) = fingerprints(state.held())
    return value


def summed(tensor: Tensor) -> int:
    """As a rank on a device does it."""
    return int(weighted_sum(tensor))


KINDS = [hashed, summed]


@pytest.mark.parametrize("fingerprint", KINDS)
def test_every_bit_counts(fingerprint) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0))
    right = fingerprint(tensor)
    words = tensor.view(torch.int32)
    for place, bit in itertools.product(range(37), range(32)):
        flip = 1 << bit if bit < 31 else -(1 << 31)
        words[place] ^= flip
        assert fingerprint(tensor) != right, (place, bit)
        words[place] ^= flip
    assert fingerprint(tensor) == right


@pytest.mark.parametrize("fingerprint", KINDS)
def test_a_swap_and_two_equal_flips_are_seen(fingerprint) -> None:
    """What an XOR or a plain sum does not see."""
    tensor = torch.randn(70_000, generator=torch.Generator().manual_seed(2))
    words, right = tensor.view(torch.int32), fingerprint(tensor)
    swapped = tensor.clone()
    swapped[[3, 69_000]] = tensor[[69_000, 3]]
    assert fingerprint(swapped) != right
    one, other = (int(at) for at in torch.nonzero(words & 1 == 0)[:2])
    odd = int(torch.nonzero(words & 1)[0])
    for up, down in ((one, other), (one, odd)):
        flipped = words.clone()
        flipped[[up, down]] ^= 1
        assert fingerprint(flipped.view(torch.float32)) != right


@pytest.mark.parametrize("fingerprint", KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_plain_sums_do_not_see(fingerprint, data: st.DataObject) -> None:
    """Swaps, two equal flips anywhere, a pair that is negated, signs of zeros, payloads of NaN."""
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    words = tensor.view(torch.int32)
    one = data.draw(st.integers(0, 199_998))
    other = data.draw(st.integers(one + 1, 199_999))
    tensor[one], tensor[other] = 1.5, -1.5
    before = fingerprint(tensor)
    seen = [before]

    def note() -> None:
        seen.append(fingerprint(tensor))

    tensor[one], tensor[other] = -1.5, 1.5  # swapped, and negated
    note()
    tensor[one], tensor[other] = 1.5, -1.5
    bit = data.draw(st.integers(0, 30))
    words[one] ^= 1 << bit
    words[other] ^= 1 << bit
    note()
    tensor[one], tensor[other] = 0.0, 0.0
    note()
    tensor[one] = -0.0
    note()
    words[one] = 0x7FC00000
    note()
    words[one] = 0x7FC00001
    note()
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_dtype_shape_and_layout(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).to(dtype).view(5, 7)
    turned = tensor.t()
    assert summed(turned) == summed(turned.contiguous()) != summed(tensor)
    assert summed(torch.zeros(0, dtype=dtype)) == 0
    changed = tensor.clone()
    changed[4, 6] += 1
    assert summed(changed) != summed(tensor)


def test_the_order_of_tensors_counts() -> None:
    assert fold_sums([1, 2, -3]) != fold_sums([2, 1, -3])
    assert 0 <= fold_sums([2**64 - 1]) < 2**63


def test_a_tensor_that_is_replaced_is_found_again() -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    state = HeldState(module, optimizer, 0)
    names = [each.name for each in state.held()]
    assert names == ["weight", "bias"]
    before = fingerprints(state.held()[:1])
    module.weight.data = torch.ones(2, 3)
    assert fingerprints(state.held()[:1]) != before
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    assert [each.name for each in state.held()][:4] == [
        "weight",
        "step of weight",
        "exp_avg of weight",
        "exp_avg_sq of weight",
    ]


def test_a_tensor_whose_bytes_are_not_in_a_row_is_read_anew_each_time() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(6, 5).t())
    state = HeldState(module, torch.optim.AdamW(module.parameters()), 0)
    before = fingerprints(state.held())
    with torch.no_grad():
        module.weight[2, 3] += 1
    assert fingerprints(state.held()) != before
