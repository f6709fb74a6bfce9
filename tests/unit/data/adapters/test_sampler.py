"""The balanced sampler: every sample once an epoch, equal counts, resumable anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import CheckpointError, EquipoiseError, LayoutError
from equipoise.data.adapters.sampler import BalancedBatchSampler
from equipoise.spec.workload import draw_lengths

LENGTHS = st.lists(st.integers(1, 500), min_size=12, max_size=50)


def make(lengths, step_samples, **changed) -> BalancedBatchSampler:
    given_arguments = {"price": "7m", "ranks": 1, "rank": 0, **changed}
    return BalancedBatchSampler(lengths, step_samples, **given_arguments)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 2), st.integers(6, 60), st.booleans())
def test_every_sample_once_and_as_many_micro_batches_on_each_rank(
    lengths, ranks, turns, step_samples, shuffles
) -> None:
    given_arguments = {"ranks": ranks, "micro_batches": turns, "shuffles": shuffles}
    try:
        samplers = [make(lengths, step_samples, rank=r, **given_arguments) for r in range(ranks)]
    except LayoutError as error:
        assert "cannot fill" in str(error)
        return
    for _ in range(2):  # epochs
        every = [list(sampler) for sampler in samplers]
        assert all(batch for mine in every for batch in mine)
        assert {len(mine) for mine in every} == {samplers[0].steps * turns}
        flat = sorted(sample for mine in every for batch in mine for sample in batch)
        assert flat == list(range(len(lengths)))
    if shuffles and len(lengths) > 30:
        assert [*samplers[0]] != [*make(lengths, step_samples, **given_arguments)]


@given(LENGTHS, st.integers(500, 2000), st.integers(0, 10**6))
def test_a_resumed_sampler_yields_what_would_have_come(lengths, cap, stop) -> None:
    sampler = make(lengths, 8, max_tokens=cap, seed=3)
    length = len(sampler)
    state = sampler.state_dict(stop % (length + 1))
    whole = list(sampler)
    assert len(whole) == length
    again = make(lengths, 8, max_tokens=cap, seed=3)
    again.load_state_dict(state)
    assert len(again) == length - state["micro_batches"]
    half = again.state_dict(1)
    assert list(again) == whole[state["micro_batches"] :]
    if state["micro_batches"] < length:
        again.load_state_dict(half)
        assert list(again) == whole[state["micro_batches"] + 1 :]
    assert list(again) == list(sampler), "the next epoch"


def test_ranks_are_even_where_equal_counts_are_not() -> None:
    lengths = np.minimum(draw_lengths("pretrain-128k", 512, seed=0), 65_536)
    sampler = make(lengths, 512, price="llama3-8b", ranks=8, micro_batches=2, shuffles=False)
    curve = sampler._curve
    work = [
        sum(int(curve.document_ns(lengths[batch]).sum()) for batch in rank)
        for rank in sampler.plan(0)
    ]
    in_order = curve.document_ns(lengths).reshape(8, -1).sum(1)
    assert max(work) / np.mean(work) < 1.05 < in_order.max() / in_order.mean()


def test_epochs_can_be_set() -> None:
    lengths = list(range(1, 40))
    sampler, other = make(lengths, 8), make(lengths, 8)
    first = list(sampler)
    second = list(sampler)
    assert first != second
    other.set_epoch(1)
    other.set_epoch(1)
    assert list(other) == second
    other.set_epoch(0)
    assert list(other) == first


REFUSED = [
    ({"lengths": []}, "There are 0 documents to pack. Give the lengths of the dataset's"),
    ({"lengths": [3, 0]}, "There are 2 samples, and each needs 1 token or more. Leave empty ones"),
    ({"rank": 2, "ranks": 2}, "Rank 2 is not one of 2 ranks. Give ranks from 0 to 1."),
    ({"step_samples": 0}, "step_samples is 0. Give 1 or more."),
    ({"ranks": 0}, "ranks is 0. Give 1 or more."),
    ({"micro_batches": 0}, "micro_batches is 0. Give 1 or more."),
    ({"step_samples": 4.0}, "step_samples is 4.0. Give a whole number."),
    ({"seed": -1}, "seed is -1. Give a whole number from 0 to 2**64 - 1."),
    (
        {"lengths": [[5, 6], [7]]},
        "Document lengths are ragged. Give one number per sample, such as [412, 96, 2048], or rows "
        "that are all as long.",
    ),
    (
        {"step_samples": 2, "ranks": 2, "micro_batches": 2},
        "A step of 2 samples cannot fill 2 micro-batches on each of 2 ranks: the epoch has 4 "
        "samples in 2 steps. Give step_samples=4 or more, or fewer micro-batches.",
    ),
    (
        {"max_tokens": 8},
        "Sample 3 has 9 tokens, but a micro-batch holds 8. Give max_tokens=9, or shorten the "
        "sample.",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_cannot_run_is_refused_at_once(wrong, message) -> None:
    arguments = {"lengths": [5, 6, 7, 9], "step_samples": 4, **wrong}
    with pytest.raises(EquipoiseError) as caught:
        make(**arguments)
    assert str(caught.value).startswith(message)


def test_a_step_that_needs_more_micro_batches_than_are_counted_says_so() -> None:
    with pytest.raises(LayoutError) as caught:
        list(make([5, 6, 7, 9], 4, max_tokens=9, micro_batches=2, shuffles=False))
    assert str(caught.value) == (
        "Step 0 of epoch 0 has 27 tokens and needs 4 micro-batches on each rank, but there are 2. "
        "Give a larger max_tokens, more micro-batches or fewer samples in a step."
    )


def test_states_of_other_data_are_refused() -> None:
    state = make([5, 6, 7, 9], 4).state_dict()
    with pytest.raises(CheckpointError) as caught:
        make([5, 6, 7], 4).load_state_dict(state)
    assert str(caught.value) == (
        "The sampler's state was taken with samples = 4, but here it is 3. Resume with the same "
        "value, or start anew."
    )
    for wrong, lacks in (({"epoch": 1}, "micro_batches, samples"), (None, "epoch, micro_batches")):
        with pytest.raises(CheckpointError) as caught:
            make([5, 6, 7], 4).load_state_dict(wrong)
        assert str(caught.value).startswith(f"The sampler's state lacks {lacks}, ")
        assert str(caught.value).endswith(" Give what its state_dict returned.")
