"""Packed micro-batches as the tensors that other trainers take, and a loader that makes them.

Why
    Models outside this package take packed documents under the names of ``transformers``. If a
    batch lacks one of them, training goes on silently and documents read each other.

What it decides
    How pieces become one row of tokens, without padding::

        pieces         [11 12 13]  [21 22]         document 1 whole, document 2 cut after 22
        input_ids       11  12  13  21  22
        labels         -100 12  13 -100 22         for models that shift labels themselves
        shift_labels    12  13 -100 22  23         the label of each token; 23 is in another
        position_ids     0   1   2   0   1         micro-batch, and no label is lost
        cu_seqlens      0           3       5

    Positions restart at 0 with each piece, even if it continues a document: transformers takes
    any position that is not its neighbour's plus one as the start of a document.

Kept true (tests/unit/data/test_loader.py, tests/oracle/test_trainer.py)
    ``DataCollatorWithFlattening`` makes the same tensors of the same documents; a step's gradient
    over any ranks equals that of its documents one by one; documents do not read each other.

Sources
    Names and types: transformers 5.23, ``data/data_collator.py`` DataCollatorWithFlattening,
    ``loss/loss_utils.py`` ForCausalLMLoss, ``masking_utils.py`` find_packed_sequence_indices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from equipoise.base.errors import DataError
from equipoise.base.shown import listed
from equipoise.data.sampler import PackedBatchSampler
from equipoise.data.turn import PieceIndex

IGNORED = -100
"""Label of a token without a next one, as in ``torch.nn.functional.cross_entropy``."""


class Documents(Protocol):
    """A dataset in which each sample holds the tokens of one document."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    def __len__(self) -> int: ...


class PackedDataset(Dataset[dict[str, Any]]):
    """Pieces of a dataset's documents, indexed by ``PackedBatchSampler``.

    Args:
        documents: Its samples hold ``input_ids`` (a list, array or tensor of whole numbers)
            and may hold ``labels`` of the same length, -100 for tokens without one.

    >>> from equipoise.data.turn import Turn
    >>> pieces = PackedDataset([{"input_ids": [7, 8, 9]}])
    >>> piece = pieces[PieceIndex(0, 0, 2, doc_tokens=3, turn=Turn(0, 0, 0, 1, 2))]
    >>> piece["input_ids"].tolist(), piece["shift_labels"].tolist()
    ([7, 8], [8, 9])
    """

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: PieceIndex) -> dict[str, Any]:
        """Tokens and labels of a piece.

        Raises:
            DataError: the document has no tokens, or another number than the sampler was given.
        """
        sample = self.documents[index.document]
        if "input_ids" not in sample:
            raise DataError(
                f"Document {index.document:,} has no input_ids among its columns "
                f"({listed(sample)}). Give a tokenized dataset."
            )
        tokens, labels = sample["input_ids"], sample.get("labels")
        for name, values in (("tokens", tokens), ("labels", labels)):
            if values is not None and len(values) != index.doc_tokens:
                raise DataError(
                    f"Document {index.document:,} has {len(values):,} {name}, but the sampler "
                    f"packed it as {index.doc_tokens:,} tokens. Give PackedBatchSampler the "
                    f"lengths of this dataset, in its order."
                )
        start, stop = index.start, max(index.stop, index.start + 1)
        wanted = _ids((tokens if labels is None else labels)[start + 1 : stop + 1])
        shifted = torch.full((stop - start,), IGNORED, dtype=torch.int64)
        if index.start < index.stop:
            shifted[: len(wanted)] = wanted
        return {
            "input_ids": _ids(tokens[start:stop]),
            "shift_labels": shifted,
            "turn": index.turn,
            "is_counted": labels is None,
        }


def _ids(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(torch.int64)
    return torch.from_numpy(np.array(values, dtype=np.int64))


def collate_packed(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One micro-batch as one row of tokens, for any loop.

    Args:
        pieces: Samples of ``PackedDataset``, in the order of the pack; at least one.

    Returns:
        ``input_ids``, ``labels``, ``shift_labels``, ``position_ids``: int64 [1, T].
        ``cu_seqlens``: int32 [pieces + 1], where pieces begin and end.
        ``max_seqlen``: tokens of the longest piece.
        ``step_labels``: labels of the step over all micro-batches and ranks. The sum of
        cross-entropies against ``shift_labels``, divided by this, is the micro-batch's share of
        the step's mean loss. Left out if the dataset has labels of its own, because counting them
        would mean reading them all.
        ``epoch``, ``step``, ``micro_batch``, ``micro_batches``: which turn this is.
    """
    lengths = [len(piece["input_ids"]) for piece in pieces]
    shifted = torch.cat([piece["shift_labels"] for piece in pieces])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    labels = shifted.roll(1)
    labels[torch.from_numpy(starts[:-1])] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])
    turn = pieces[0]["turn"]
    batch: dict[str, Any] = {
        "input_ids": torch.cat([piece["input_ids"] for piece in pieces]).unsqueeze(0),
        "labels": labels.unsqueeze(0),
        "shift_labels": shifted.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seqlens": torch.from_numpy(starts.astype(np.int32)),
        "max_seqlen": max(lengths),
    }
    counts = turn._asdict()
    if not all(piece["is_counted"] for piece in pieces):
        del counts["step_labels"]
    return {**batch, **counts}


def collate_for_transformers(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One micro-batch as the arguments of a causal language model of ``transformers``.

    ``model(**batch).loss`` is this micro-batch's share of the step's mean loss: summed over
    micro-batches and ranks it is the mean over all labels of the step. The same holds under
    ``Trainer``, which counts labels itself.

    Args:
        pieces: Samples of ``PackedDataset``, in the order of the pack; at least one.

    Returns:
        ``input_ids``, ``labels``, ``shift_labels``, ``position_ids``: int64 [1, T].
        ``cu_seq_lens_q``, ``cu_seq_lens_k``: int32 [pieces + 1].
        ``max_length_q``, ``max_length_k``: tokens of the longest piece.
        ``use_cache``: False. With a cache, transformers does not look for documents in
        ``position_ids``, and they read each other.
        ``num_items_in_batch``: labels of the step, if the sampler can count them.
    """
    batch = collate_packed(pieces)
    arguments = {name: batch[name] for name in _SHARED_NAMES}
    arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_k"] = batch["cu_seqlens"]
    arguments["max_length_q"] = arguments["max_length_k"] = batch["max_seqlen"]
    arguments["use_cache"] = False
    if "step_labels" in batch:
        arguments["num_items_in_batch"] = batch["step_labels"]
    return arguments


_SHARED_NAMES = ("input_ids", "labels", "shift_labels", "position_ids")


class PackedLoader(DataLoader[dict[str, Any]]):
    """A ``DataLoader`` of packed micro-batches with a settable epoch.

    The same as ``DataLoader(PackedDataset(documents), batch_sampler=sampler,
    collate_fn=collate)``, plus ``set_epoch``, which ``Trainer`` calls if it exists.

    Args:
        documents: As in ``PackedDataset``.
        sampler: Chooses the micro-batches.
        collate: Turns pieces into a batch.
        options: Passed to ``DataLoader``: ``num_workers``, ``pin_memory``, ...
    """

    def __init__(
        self,
        documents: Documents,
        sampler: PackedBatchSampler,
        *,
        collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = collate_packed,
        **options: Any,
    ) -> None:
        super().__init__(
            PackedDataset(documents), batch_sampler=sampler, collate_fn=collate, **options
        )
        self._packed_sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of an epoch."""
        self._packed_sampler.set_epoch(epoch)
