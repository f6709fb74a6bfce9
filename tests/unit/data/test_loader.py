"""Packed batches: what is in them, and gradients that no packing and no rank changes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from equipoise.base.errors import DataError
from equipoise.cost.curve import break_even_curve
from equipoise.data.loader import (
    IGNORED,
    PackedDataset,
    PackedLoader,
    collate_for_transformers,
    collate_packed,
)
from equipoise.data.sampler import PackedBatchSampler
from equipoise.data.turn import PieceIndex, Turn
from equipoise.nn.decoder import Decoder, initialize
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(20.0)
VOCAB = 31
MODEL = ModelSpec(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=VOCAB, head_width=4)
TURN = Turn(epoch=2, step=5, micro_batch=1, micro_batches=3, step_labels=77)


def documents_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row} for row in rows]


def piece(document: int, start: int, stop: int, tokens: int) -> PieceIndex:
    return PieceIndex(document, start, stop, tokens, TURN)


def as_lists(batch: dict) -> dict:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in batch.items()}


DOCUMENTS = [{"input_ids": [11, 12, 13]}, {"input_ids": [20, 21, 22, 23]}, {"input_ids": [30]}]


def test_a_batch_by_hand():
    pieces = PackedDataset(DOCUMENTS)
    indices = [piece(0, 0, 3, 3), piece(1, 1, 3, 4), piece(2, 0, 1, 1)]
    batch = collate_packed([pieces[index] for index in indices])
    assert as_lists(batch) == {
        "input_ids": [[11, 12, 13, 21, 22, 30]],
        "labels": [[-100, 12, 13, -100, 22, -100]],
        "shift_labels": [[12, 13, -100, 22, 23, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "cu_seqlens": [0, 3, 5, 6],
        "max_seqlen": 3,
        "epoch": 2,
        "step": 5,
        "micro_batch": 1,
        "micro_batches": 3,
        "step_labels": 77,
    }
    for name in ("input_ids", "labels", "shift_labels", "position_ids"):
        assert batch[name].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32


def test_a_batch_for_transformers_by_hand():
    pieces = PackedDataset(DOCUMENTS)
    batch = collate_for_transformers([pieces[piece(1, 0, 4, 4)], pieces[piece(0, 0, 2, 3)]])
    assert as_lists(batch) == {
        "input_ids": [[20, 21, 22, 23, 11, 12]],
        "labels": [[-100, 21, 22, 23, -100, 12]],
        "shift_labels": [[21, 22, 23, -100, 12, 13]],
        "position_ids": [[0, 1, 2, 3, 0, 1]],
        "cu_seq_lens_q": [0, 4, 6],
        "cu_seq_lens_k": [0, 4, 6],
        "max_length_q": 4,
        "max_length_k": 4,
        "use_cache": False,
        "num_items_in_batch": 77,
    }
    assert batch["cu_seq_lens_q"].dtype == torch.int32


def test_an_empty_micro_batch_is_a_token_without_a_label():
    batch = collate_packed([PackedDataset(DOCUMENTS)[piece(1, 0, 0, 4)]])
    assert batch["input_ids"].tolist() == [[20]]
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [[IGNORED]]
    assert batch["cu_seqlens"].tolist() == [0, 1]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: np.array(ids, "u2")])
def test_documents_of_any_kind(kind):
    pieces = PackedDataset([{"input_ids": kind([5, 6, 7, 8]), "name": "a"}])
    found = pieces[piece(0, 1, 3, 4)]
    assert found["input_ids"].dtype == found["shift_labels"].dtype == torch.int64
    assert found["input_ids"].tolist() == [6, 7]
    assert found["shift_labels"].tolist() == [7, 8]
    assert len(pieces) == 1


def test_labels_of_the_dataset_are_kept_and_not_counted():
    document = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    pieces = PackedDataset([document])
    batch = collate_packed([pieces[piece(0, 0, 3, 4)], pieces[piece(0, 3, 4, 4)]])
    assert batch["shift_labels"].tolist() == [[-100, 7, 8, -100]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100]]
    assert "step_labels" not in batch
    assert "num_items_in_batch" not in collate_for_transformers([pieces[piece(0, 0, 3, 4)]])


def test_documents_of_other_lengths_than_the_sampler_was_told(message):
    pieces = PackedDataset([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2], "labels": [1]}])
    end = "Give PackedBatchSampler the lengths of this dataset, in its order."
    assert message(DataError, pieces.__getitem__, piece(0, 0, 2, 4)) == (
        f"Document 0 has 3 tokens, but the sampler packed it as 4 tokens. {end}"
    )
    assert message(DataError, pieces.__getitem__, piece(1, 0, 2, 2)) == (
        f"Document 1 has 1 labels, but the sampler packed it as 2 tokens. {end}"
    )
    raw = PackedDataset([{"text": "one", "id": 3}])
    assert message(DataError, raw.__getitem__, piece(0, 0, 2, 2)) == (
        "Document 0 has no input_ids among its columns (text, id). Give a tokenized dataset."
    )


def loaders(documents: list, pack: PackSpec, ranks: int) -> list[PackedLoader]:
    lengths = [len(document["input_ids"]) for document in documents]
    return [
        PackedLoader(
            documents, PackedBatchSampler(lengths, pack, ranks=ranks, rank=rank, curve=CURVE)
        )
        for rank in range(ranks)
    ]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.sampled_from(["in-order", "by-tokens", "by-work", "delayed"]),
    st.sampled_from(["documents", "windows"]),
    st.integers(1, 4),
)
def test_no_label_is_lost_wherever_documents_are_cut(lengths, policy, cut, ranks):
    documents = documents_of(lengths)
    pack = PackSpec(policy=policy, context_tokens=7, step_tokens=40, cut=cut)
    found, told = [], {}
    for loader in loaders(documents, pack, ranks):
        for batch in loader:
            labelled = batch["shift_labels"] != IGNORED
            told[batch["step"]] = batch["step_labels"]
            found += torch.stack((batch["input_ids"], batch["shift_labels"]), -1)[labelled].tolist()
            # The unshifted labels lose those across a cut, and nothing else.
            inside = batch["labels"][0, 1:]
            assert torch.equal(
                inside[inside != IGNORED], batch["input_ids"][0, 1:][inside != IGNORED]
            )
            bounds = batch["cu_seqlens"].tolist()
            positions = [at for a, b in itertools.pairwise(bounds) for at in range(b - a)]
            assert batch["position_ids"].tolist() == [positions]
            assert batch["max_seqlen"] == max(positions) + 1
    wanted = [
        [a, b] for each in documents for a, b in zip(*_shifted(each["input_ids"]), strict=True)
    ]
    assert sorted(found) == sorted(wanted)
    assert sum(told.values()) >= len(wanted)


def _shifted(ids: list[int]) -> tuple[list[int], list[int]]:
    return ids[:-1], ids[1:]


def decoder() -> Decoder:
    model = Decoder(MODEL)
    initialize(model, seed=0)
    return model.double()


def gradient(model: Decoder) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def step_gradients(documents: list, pack: PackSpec, ranks: int) -> dict[int, Tensor]:
    """Of each step, the sum over ranks of what their loops accumulate."""
    model, sums = decoder(), {}
    for loader in loaders(documents, pack, ranks):
        for batch in loader:
            model.zero_grad()
            sizes = batch["cu_seqlens"].diff().tolist()
            logits = model(batch["input_ids"][0], sizes)
            labels = batch["shift_labels"][0]
            loss = cross_entropy(logits, labels, reduction="sum") / batch["step_labels"]
            loss.backward()
            step = batch["step"]
            sums[step] = sums.get(step, 0) + gradient(model)
    return sums


def test_gradients_are_those_of_the_documents_one_by_one():
    lengths = [3, 40, 1, 17, 9, 9, 26, 2, 1, 33, 5, 12]
    documents = documents_of(lengths)
    shared = {"context_tokens": 16, "step_tokens": 80, "cut": "windows"}
    by_work = step_gradients(documents, PackSpec(policy="by-work", **shared), 2)
    in_order = step_gradients(documents, PackSpec(policy="in-order", **shared), 2)
    alone = step_gradients(documents, PackSpec(policy="by-work", **shared), 5)

    model, one_by_one = decoder(), {}
    pack = PackSpec(policy="in-order", **shared)
    sampler = PackedBatchSampler(lengths, pack, ranks=1, rank=0)
    steps = {index[4].step: [] for batch in sampler for index in batch}
    sampler.set_epoch(0)
    for batch in sampler:
        steps[batch[0].turn.step] += batch
    for step, pieces in steps.items():
        model.zero_grad()
        total, labels = torch.zeros((), dtype=torch.float64), 0
        for document, start, stop, *_ in pieces:
            ids = torch.tensor(documents[document]["input_ids"])
            wanted = ids[start + 1 : stop + 1]
            logits = model(ids[start:stop], [stop - start])[: len(wanted)]
            total = total + cross_entropy(logits, wanted, reduction="sum")
            labels += len(wanted)
        (total / labels).backward()
        one_by_one[step] = gradient(model)
    assert sorted(one_by_one) == [0, 1]
    for step, wanted in one_by_one.items():
        scale = float(wanted.abs().max())
        for found in (by_work, in_order, alone):
            assert float((found[step] - wanted).abs().max()) < 1e-12 * max(1.0, scale)


def test_an_empty_micro_batch_has_a_gradient_of_exactly_zero():
    model = decoder()
    pack = PackSpec(policy="by-work", context_tokens=16, step_tokens=80)
    *_, last = loaders(documents_of([9]), pack, 3)
    (batch,) = list(last)
    logits = model(batch["input_ids"][0], [1])
    (cross_entropy(logits, batch["shift_labels"][0], reduction="sum") / 8).backward()
    assert batch["step_labels"] == 8
    assert float(gradient(model).abs().max()) == 0.0


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_and_epochs_can_be_set(workers):
    documents = documents_of([3, 14, 1, 17, 9, 9, 26, 2])
    pack = PackSpec(policy="by-work", context_tokens=16, step_tokens=40)
    (plain,) = loaders(documents, pack, 1)
    wanted = [as_lists(batch) for batch in plain]
    sampler = PackedBatchSampler(
        [len(each["input_ids"]) for each in documents], pack, ranks=1, rank=0, curve=CURVE
    )
    loader = DataLoader(
        PackedDataset(documents),
        batch_sampler=sampler,
        collate_fn=collate_packed,
        num_workers=workers,
    )
    assert len(loader) == len(wanted)
    assert [as_lists(batch) for batch in loader] == wanted
    mine = PackedLoader(documents, sampler, num_workers=workers)
    mine.set_epoch(0)
    assert [as_lists(batch) for batch in mine] == wanted
    assert {batch["epoch"] for batch in mine} == {1}
