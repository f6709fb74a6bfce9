"""Packed (THD) batches: Megatron's own parameters, every token in its place."""

import pytest
import torch
from torch.utils.data import DataLoader

from equipoise.base.errors import DataError
from equipoise.data.adapters.megatron import collate_thd
from equipoise.data.adapters.sampler import BalancedBatchSampler

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


def test_every_token_has_its_label_and_its_place() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [8]},
        {"input_ids": [9, 10, 11, 12, 13]},
    ]
    batch, parameters = collate_thd(samples, context_ranks=2)
    assert batch["tokens"].tolist() == [[5, 6, 7, 0, 8, 0, 0, 0, 9, 10, 11, 12, 13, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 0, 0, 0, 0, 0, 0, 10, 11, 12, 13, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert parameters.qkv_format == "thd"
    assert parameters.cu_seqlens_q.tolist() == [0, 3, 4, 9]
    assert parameters.cu_seqlens_kv_padded.tolist() == [0, 4, 8, 16]
    assert parameters.max_seqlen_q == 8
    assert parameters.cu_seqlens_q.dtype == torch.int32


def test_without_context_ranks_nothing_is_padded() -> None:
    _, parameters = collate_thd([{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([4])}])
    assert parameters.cu_seqlens_q_padded.tolist() == parameters.cu_seqlens_q.tolist() == [0, 3, 4]


def test_the_loader_of_the_page_yields_every_sample() -> None:
    samples = [{"input_ids": list(range(length))} for length in (5, 90, 3, 40, 8, 8, 30, 2)]
    sampler = BalancedBatchSampler(
        [len(each["input_ids"]) for each in samples], 8, price="7m", max_tokens=100, ranks=1
    )
    seen = []
    for batch, parameters in DataLoader(samples, batch_sampler=sampler, collate_fn=collate_thd):
        assert batch["tokens"].shape[1] == parameters.cu_seqlens_q[-1] <= 100
        seen += parameters.cu_seqlens_q.diff().tolist()
    assert sorted(seen) == sorted(len(each["input_ids"]) for each in samples)


def test_labels_of_another_length_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        collate_thd([{"input_ids": [1, 2], "labels": [1]}])
    assert str(caught.value) == (
        "A sample has 2 tokens and 1 labels. Give one label for each token, -100 for none."
    )
    with pytest.raises(DataError, match="there are 0"):
        collate_thd([])
