"""Packed (THD) batches as Megatron-Core's attention takes them.

What it decides
    Samples lie end to end. Under context parallelism each is padded to a multiple of twice the
    ranks, as Transformer Engine demands; padding has no label, and ``cu_seqlens_*_padded`` say
    where samples begin, ``cu_seqlens_*`` how long they are.

Kept true (tests/oracle/adapters/test_megatron.py)
    Every token has its own label, position and place; ``PackedSeqParams`` is Megatron's own.

Sources
    megatron-core 0.16, ``packed_seq_params.PackedSeqParams``; the batch of
    ``pretrain_gpt.get_batch``: tokens, labels, loss_mask, position_ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import DataError

IGNORED = -100


def collate_thd(
    samples: Sequence[Mapping[str, Any]], *, context_ranks: int = 1
) -> tuple[dict[str, Tensor], Any]:
    """One micro-batch for Megatron's attention over packed samples.

    Args:
        samples: Each holds ``input_ids`` and may hold ``labels`` of the same length, not shifted,
            -100 for tokens without one.
        context_ranks: Context-parallel ranks that will share the micro-batch.

    Returns:
        ``tokens``, ``labels``, ``position_ids``: int64 [1, T]; ``loss_mask``: float32 [1, T]. And
        Megatron's ``PackedSeqParams`` of them.

    Raises:
        DataError: there are no samples, or labels of another length.
        ModuleNotFoundError: megatron-core is not installed.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    if not samples:
        raise DataError("A packed batch needs samples, and there are 0. Give one or more.")
    multiple = 2 * context_ranks if context_ranks > 1 else 1
    lengths = np.array([len(each["input_ids"]) for each in samples])
    padded = -(-lengths // multiple) * multiple
    begins = np.concatenate(([0], np.cumsum(padded)))
    total = int(begins[-1])
    tokens = torch.zeros(total, dtype=torch.int64)
    labels = torch.full((total,), IGNORED, dtype=torch.int64)
    positions = torch.zeros(total, dtype=torch.int64)
    for sample, begin, room in zip(samples, begins.tolist(), padded.tolist(), strict=False):
        ids = torch.as_tensor(sample["input_ids"], dtype=torch.int64)
        own = torch.as_tensor(sample.get("labels", ids), dtype=torch.int64)
        if len(own) != len(ids):
            raise DataError(
                f"A sample has {len(ids):,} tokens and {len(own):,} labels. Give one label for "
                f"each token, -100 for none."
            )
        tokens[begin : begin + len(ids)] = ids
        labels[begin : begin + len(ids) - 1] = own[1:]
        positions[begin : begin + room] = torch.arange(room)
    mask = labels != IGNORED
    ends = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    ends_padded = torch.from_numpy(begins.astype(np.int32))
    longest = int(padded.max())
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends_padded,
        cu_seqlens_kv_padded=ends_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {
        "tokens": tokens[None],
        "labels": labels.masked_fill(~mask, 0)[None],
        "loss_mask": mask.to(torch.float32)[None],
        "position_ids": positions[None],
    }, parameters
