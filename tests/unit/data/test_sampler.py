"""Hypothesis: an epoch has each token once over all ranks, equally many batches, any resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from equipoise.base.errors import CheckpointError, DataError, LayoutError, SpecError
from equipoise.cost.curve import break_even_curve
from equipoise.data.loader import PackedDataset, collate_packed
from equipoise.data.sampler import PackedBatchSampler
from equipoise.data.turn import PieceIndex
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(20.0)
POLICIES = ["in-order", "fixed", "by-tokens", "by-work", "delayed"]

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
packs = st.builds(
    PackSpec,
    policy=st.sampled_from(POLICIES),
    context_tokens=st.integers(2, 24),
    step_tokens=st.integers(2, 200),
    cut=st.sampled_from(["documents", "windows"]),
    max_delay_steps=st.integers(0, 4),
)
Batches = list[list[PieceIndex]]


def samplers(
    doc_tokens: list[int], pack: PackSpec, ranks: int, seed: int = 0
) -> list[PackedBatchSampler]:
    return [
        PackedBatchSampler(doc_tokens, pack, ranks=ranks, rank=rank, seed=seed, curve=CURVE)
        for rank in range(ranks)
    ]


def after(batch: list[PieceIndex]) -> dict[str, int]:
    """What the collator says of a batch's turn."""
    return batch[0].turn._asdict()


@settings(deadline=None)
@given(lengths, packs, st.integers(1, 5), st.integers(0, 2))
def test_an_epoch_has_every_token_once(doc_tokens, pack, ranks, epoch):
    spelled = []
    for sampler in samplers(doc_tokens, pack, ranks):
        sampler.set_epoch(epoch)
        for batch in sampler:
            assert batch
            assert sum(piece.stop - piece.start for piece in batch) <= pack.most_tokens
            for document, start, stop, tokens, turn in batch:
                assert tokens == doc_tokens[document]
                assert turn.epoch == epoch
                assert (start, stop) == (0, 0) or stop - start <= pack.context_tokens
                spelled += [(document, at) for at in range(start, stop)]
    assert sorted(spelled) == [(d, at) for d, n in enumerate(doc_tokens) for at in range(n)]


@settings(deadline=None)
@given(lengths, packs, st.integers(1, 5))
def test_ranks_have_equally_many_batches_and_agree_on_the_step(doc_tokens, pack, ranks):
    mine = samplers(doc_tokens, pack, ranks)
    counted = [len(sampler) for sampler in mine]
    every = [list(sampler) for sampler in mine]
    assert counted == [len(batches) for batches in every]
    assert len(set(counted)) == 1
    for turn in zip(*every, strict=True):
        assert len({piece.turn for batch in turn for piece in batch}) == 1
        # An empty micro-batch is one request for a token without a label, by itself.
        assert all(len(b) == 1 for b in turn if any(piece.stop == 0 for piece in b))


@settings(deadline=None)
@given(lengths, packs, st.integers(1, 4))
def test_the_labels_of_a_step_are_counted(doc_tokens, pack, ranks):
    labels: dict[int, int] = {}
    told: dict[int, int] = {}
    turns: dict[int, list[int]] = {}
    for sampler in samplers(doc_tokens, pack, ranks):
        for batch in sampler:
            turn = batch[0].turn
            told[turn.step] = turn.step_labels
            turns.setdefault(turn.step, []).append(turn.micro_batch)
            assert turn.micro_batch < turn.micro_batches
            labels[turn.step] = labels.get(turn.step, 0) + sum(
                min(stop, tokens - 1) - start for _, start, stop, tokens, _ in batch if stop
            )
    assert told == {step: max(1, count) for step, count in labels.items()}
    assert sum(labels.values()) == sum(doc_tokens) - len(doc_tokens)
    for seen in turns.values():
        assert sorted(seen) == sorted(list(range(max(seen) + 1)) * ranks)


@settings(deadline=None)
@given(lengths, packs)
def test_steps_of_an_epoch_are_equal_and_at_most_as_large_as_asked(doc_tokens, pack):
    (sampler,) = samplers(doc_tokens, pack, 1)
    if pack.policy == "delayed":
        return
    tokens = [0] * sampler.steps
    for batch in sampler:
        tokens[batch[0].turn.step] += sum(piece.stop - piece.start for piece in batch)
    assert max(tokens) <= pack.step_tokens
    assert max(tokens) - min(tokens) <= 1
    assert len(tokens) == -(-sum(doc_tokens) // pack.step_tokens)


@settings(deadline=None)
@given(lengths, packs, st.integers(1, 3), st.data())
def test_it_goes_on_from_any_batch(doc_tokens, pack, ranks, data):
    (whole, *_) = samplers(doc_tokens, pack, ranks)
    epochs = [list(whole), list(whole)]
    (used, *_) = samplers(doc_tokens, pack, ranks)
    place = data.draw(st.integers(0, len(epochs[0]) - 1))
    ahead = data.draw(st.integers(0, 3))
    run = iter(used)
    batches = [batch for _, batch in zip(range(place + 1 + ahead), run, strict=False)]
    state = json.loads(json.dumps(used.state_dict(after(batches[place]))))
    if data.draw(st.booleans()):
        state["packer"] = None  # as where it was forgotten: packed again from the epoch's start
    (new, *_) = samplers(doc_tokens, pack, ranks)
    new.load_state_dict(state)
    new.set_epoch(0)
    assert len(new) == len(epochs[0]) - place - 1
    assert list(new) == epochs[0][place + 1 :]
    assert list(new) == epochs[1]


@settings(deadline=None)
@given(lengths, packs)
def test_states_of_ranks_are_equal(doc_tokens, pack):
    states = []
    for sampler in samplers(doc_tokens, pack, 2):
        batch = next(iter(sampler))
        states.append(sampler.state_dict(after(batch)))
    assert states[0] == states[1]


def test_a_new_state_is_the_start_and_epochs_move_on_by_themselves():
    pack = PackSpec(policy="by-work", context_tokens=8, step_tokens=16)
    (sampler,) = samplers([5] * 20, pack, 1)
    assert sampler.state_dict() == {
        "epoch": 0,
        "step": 0,
        "micro_batch": 0,
        "packer": None,
        "seed": 0,
        "ranks": 1,
        "documents": 20,
        "tokens": 100,
        "step_tokens": 16,
    }
    first, second = list(sampler), list(sampler)
    assert sampler.state_dict()["epoch"] == 2
    assert [piece[:3] for batch in first for piece in batch] != [
        piece[:3] for batch in second for piece in batch
    ]
    sampler.set_epoch(1)
    assert list(sampler) == second
    next(iter(sampler))  # an iteration that is left early moves nothing
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_state_taken_at_the_end_of_an_epoch_leaves_the_next_one_whole():
    pack = PackSpec(policy="delayed", context_tokens=8, step_tokens=16, max_delay_steps=9)
    (sampler,) = samplers([8, 1, 2, 7, 8, 3, 3, 3] * 4, pack, 1)
    first, second = list(sampler), list(sampler)
    assert first[-1][0].turn.step >= sampler.steps  # packed what waited
    (new,) = samplers([8, 1, 2, 7, 8, 3, 3, 3] * 4, pack, 1)
    new.load_state_dict(sampler.state_dict(after(first[-1])))
    assert (len(new), list(new)) == (0, [])
    assert list(new) == second


def test_other_ranks_go_on_from_a_steps_end():
    pack = PackSpec(policy="by-work", context_tokens=8, step_tokens=48)
    doc_tokens = [3, 5, 8, 8, 2, 7, 1, 4] * 6
    (whole, *_) = samplers(doc_tokens, pack, 2)
    batches = [batch for batch in whole if batch[0].turn.step == 1]
    state = whole.state_dict(after(batches[-1]))
    assert (state["step"], state["micro_batch"]) == (2, 0)
    done = sum(doc_tokens) * 2 // whole.steps
    left = 0
    for sampler in samplers(doc_tokens, pack, 3):
        sampler.load_state_dict(state)
        left += sum(stop - start for batch in sampler for _, start, stop, *_ in batch)
    assert left == sum(doc_tokens) - done


def test_by_work_is_more_even_than_in_order_on_the_same_pieces():
    drawn = np.random.default_rng(0).pareto(1.2, 400)
    doc_tokens = np.clip(drawn * 40, 1, 512).astype(int).tolist()
    skews = {}
    for policy in ("in-order", "by-work"):
        pack = PackSpec(policy=policy, context_tokens=512, step_tokens=8192, cut="windows")
        every = samplers(doc_tokens, pack, 4)
        loads = np.zeros((every[0].steps, len(every)))
        for rank, sampler in enumerate(every):
            for batch in sampler:
                sizes = np.array([stop - start for _, start, stop, *_ in batch])
                loads[batch[0].turn.step, rank] += CURVE.document_ns(sizes).sum()
        skews[policy] = (loads.max(1) / loads.mean(1)).mean()
    assert skews["by-work"] - 1 < (skews["in-order"] - 1) / 5, skews


def test_ranks_that_meet_in_each_batch_have_even_turns_and_the_same_steps():
    drawn = np.random.default_rng(0).pareto(1.2, 2000)
    doc_tokens = np.clip(drawn * 40, 1, 512).astype(int).tolist()
    pack = PackSpec(policy="by-work", context_tokens=512, step_tokens=8192)
    skews, steps = {}, {}
    for meets in (False, True):
        every = [
            PackedBatchSampler(
                doc_tokens, pack, ranks=4, rank=rank, curve=CURVE, meets_each_turn=meets
            )
            for rank in range(4)
        ]
        loads = np.zeros((every[0].steps, 8, 4))
        steps[meets] = [set() for _ in range(every[0].steps)]
        for rank, sampler in enumerate(every):
            for batch in sampler:
                sizes = np.array([stop - start for _, start, stop, *_ in batch])
                turn = batch[0].turn
                loads[turn.step, turn.micro_batch, rank] += CURVE.document_ns(sizes).sum()
                steps[meets][turn.step] |= {piece[:3] for piece in batch if piece[1] < piece[2]}
        skews[meets] = (loads.max(2).sum(1) / loads.sum(1).mean(1)).mean()
    assert steps[False] == steps[True]
    assert skews[True] - 1 < (skews[False] - 1) / 2, skews


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_documents_than_ranks(policy):
    pack = PackSpec(policy=policy, context_tokens=8, step_tokens=64)
    every = [list(sampler) for sampler in samplers([6, 1, 3], pack, 5)]
    assert len({len(batches) for batches in every}) == 1
    empty = [batch for batches in every for batch in batches if batch[0].stop == 0]
    assert empty
    assert sum(p.stop - p.start for batches in every for b in batches for p in b) == 10


def test_one_document_of_one_token():
    pack = PackSpec(policy="by-work", context_tokens=8, step_tokens=64)
    first, second = (list(sampler) for sampler in samplers([1], pack, 2))
    assert [[piece[:4] for piece in batch] for batch in first + second] == [
        [(0, 0, 1, 1)],
        [(0, 0, 0, 1)],
    ]
    assert first[0][0].turn.step_labels == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_behind_a_loader_with_workers(workers):
    pack = PackSpec(policy="delayed", context_tokens=16, step_tokens=32, max_delay_steps=3)
    documents = [{"input_ids": [n % 7] * n} for n in [3, 16, 9, 1, 12, 16, 2, 5] * 3]
    doc_tokens = [len(document["input_ids"]) for document in documents]

    def loader(sampler: PackedBatchSampler) -> DataLoader:
        return DataLoader(
            PackedDataset(documents),
            batch_sampler=sampler,
            collate_fn=collate_packed,
            num_workers=workers,
        )

    (whole,) = samplers(doc_tokens, pack, 1)
    wanted = list(loader(whole))
    (sampler,) = samplers(doc_tokens, pack, 1)
    for number, batch in enumerate(loader(sampler)):
        if number == 4:
            state = sampler.state_dict(batch)
            break
    (new,) = samplers(doc_tokens, pack, 1)
    new.load_state_dict(state)
    found = list(loader(new))
    assert [batch["input_ids"].tolist() for batch in found] == [
        batch["input_ids"].tolist() for batch in wanted[5:]
    ]


BY_WORK = PackSpec(policy="by-work", context_tokens=8, step_tokens=16)


@pytest.mark.parametrize(
    ("kind", "doc_tokens", "changed", "text"),
    [
        (
            DataError,
            [3, 0],
            {},
            "Document 1 of 2 has 0 tokens, but each needs at least 1. Leave out empty documents.",
        ),
        (
            DataError,
            [3, -1],
            {},
            "Document 1 of 2 has -1 tokens, but each needs at least 1. Leave out empty documents.",
        ),
        (
            DataError,
            [3, float("nan")],
            {},
            "Document 1 of 2 has nan tokens, which is not a whole number. Count its tokens again.",
        ),
        (
            DataError,
            [3.5, 1],
            {},
            "Document 0 of 2 has 3.5 tokens, which is not a whole number. Count its tokens again.",
        ),
        (
            DataError,
            [[3, 5]],
            {},
            "Document lengths have shape (1, 2). Give one number per document, such as "
            '[len(each["input_ids"]) for each in dataset].',
        ),
        (
            DataError,
            ["3"],
            {},
            "Document lengths have type <U1. Give whole numbers of tokens, such as "
            '[len(each["input_ids"]) for each in dataset].',
        ),
        (
            DataError,
            [],
            {},
            "There are 0 documents to pack. Give the lengths of the dataset's documents, such as "
            '[len(each["input_ids"]) for each in dataset].',
        ),
        (
            LayoutError,
            [3],
            {"pack": PackSpec(policy="by-work", context_tokens=8, step_tokens=0)},
            "Steps of 0 tokens train nothing. Set step_tokens to the tokens of one optimizer step "
            "over all ranks.",
        ),
        (
            LayoutError,
            [3],
            {"rank": 2},
            "rank = 2 is not one of 2 ranks. Give a rank from 0 to ranks - 1, and at least 1 rank.",
        ),
        (
            SpecError,
            [3],
            {"pack": PackSpec(policy="by-work", context_tokens=8.0)},  # type: ignore[arg-type]
            "context_tokens is 8.0. Give a whole number.",
        ),
        (
            SpecError,
            [3],
            {"curve": "7m"},
            'curve is "7m". Give a LoadCurve, as counted_curve(preset("llama3-8b")) makes one.',
        ),
        (SpecError, [3], {"seed": -1}, "seed is -1. Give a whole number from 0 to 2**64 - 1."),
        (
            LayoutError,
            [3],
            {"rank": 0, "ranks": 0},
            "rank = 0 is not one of 0 ranks. Give a rank from 0 to ranks - 1, and at least 1 rank.",
        ),
        (
            LayoutError,
            [3, 7],
            {"pack": PackSpec(policy="by-work", context_tokens=8, max_tokens=6)},
            "Pieces of 7 tokens do not fit micro-batches of 6. Set max_tokens=7, or a smaller "
            "context_tokens.",
        ),
        (
            SpecError,
            [3],
            {"curve": None},
            'Policy "by-work" balances work, so it needs the model\'s cost of a document. Pass '
            'curve=counted_curve(preset("llama3-8b")), or the curve of your own model.',
        ),
        (
            SpecError,
            [3],
            {"pack": PackSpec(policy="divided")},
            'Under policy "divided" pieces read keys of other micro-batches, which a DataLoader '
            'does not send them. Use policy="by-work".',
        ),
        (
            SpecError,
            [3],
            {"pack": PackSpec(policy="bytescale")},
            'Under policy "bytescale" pieces read keys of other micro-batches, which a '
            'DataLoader does not send them. Use policy="by-work".',
        ),
        (
            SpecError,
            [3],
            {"pack": PackSpec(policy="by-wrok")},  # type: ignore[arg-type]
            'No such packing policy: "by-wrok". Nearest: by-work. All: in-order, fixed, '
            "fixed-exact, by-tokens, by-work, delayed, divided, divided-in-time, gangs, flexsp, "
            "bytescale.",
        ),
    ],
)
def test_wrong_samplers(message, kind, doc_tokens, changed, text):
    given = {"pack": BY_WORK, "ranks": 2, "rank": 0, "curve": CURVE, **changed}
    assert message(kind, PackedBatchSampler, doc_tokens, **given) == text


def test_whole_floats_are_lengths():
    sampler = PackedBatchSampler(np.array([3.0, 2.0]), BY_WORK, ranks=1, rank=0, curve=CURVE)
    assert len(sampler) == 1


def test_wrong_states(message):
    doc_tokens = [8] * 8
    sampler = PackedBatchSampler(doc_tokens, BY_WORK, ranks=1, rank=0, curve=CURVE)
    state = sampler.state_dict(after(next(iter(sampler))))
    assert state["micro_batch"] == 1
    other = PackedBatchSampler(doc_tokens, BY_WORK, ranks=2, rank=0, curve=CURVE)
    assert message(CheckpointError, other.load_state_dict, state) == (
        "The sampler's state was taken on 1 ranks after 1 micro-batches of a step, but there are "
        "2 now. Resume on 1 ranks, or from a state taken at a step's end."
    )
    longer = PackedBatchSampler([8] * 9, BY_WORK, ranks=1, rank=0, curve=CURVE)
    assert message(CheckpointError, longer.load_state_dict, state) == (
        "The sampler's state was taken with documents = 8, but here it is 9. Resume with the "
        "same value, or start anew."
    )
