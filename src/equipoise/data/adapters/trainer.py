"""Even micro-batches in Hugging Face's ``Trainer`` and in TRL's ``SFTTrainer``.

What it decides
    Nothing: the trainer's own dataset, collator and arguments go into a ``BalancedBatchSampler``.

Kept true (tests/oracle/adapters/test_trainer.py)
    Both trainers train on every sample once an epoch; two ranks have the weights of one.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from equipoise.balance.batches.prices import Price
from equipoise.base.errors import DataError
from equipoise.data.adapters.sampler import BalancedBatchSampler


class _BalancedLoader(DataLoader[Any]):
    """A ``DataLoader`` with a settable epoch, which ``Trainer`` sets."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, BalancedBatchSampler):
            self.batch_sampler.set_epoch(epoch)


def balance_trainer(
    trainer: Any, *, price: Price | None = None, max_tokens: int | None = None
) -> BalancedBatchSampler:
    """Have a trainer load micro-batches that take all ranks equally long.

    A step still has ``per_device_train_batch_size x gradient_accumulation_steps`` samples per rank
    on average; which rank gets how many follows from their work. Use a collator that lays samples
    end to end: ``padding_free=True`` of ``SFTConfig``, ``DataCollatorWithFlattening`` of
    transformers. One that pads makes short samples cost what the longest of a micro-batch does.

    Args:
        trainer: A ``Trainer`` or an ``SFTTrainer``, before ``train``.
        price: What a sample costs, as in ``balance.batch``; the model's configuration unless
            given.
        max_tokens: Most tokens of a micro-batch; no limit unless given.

    Returns:
        The sampler that the trainer now uses.

    Raises:
        DataError: the dataset has no length, or no ``input_ids``.
        LayoutError: a step has fewer samples than micro-batches, or a sample does not fit one.
    """
    arguments = trainer.args
    turns = arguments.gradient_accumulation_steps
    sampler = BalancedBatchSampler(
        _lengths(trainer.train_dataset),
        arguments.train_batch_size * turns * arguments.world_size,
        price=trainer.model.config if price is None else price,
        max_tokens=max_tokens,
        micro_batches=turns,
        ranks=arguments.world_size,
        rank=arguments.process_index,
        seed=arguments.seed if arguments.data_seed is None else arguments.data_seed,
    )

    def get_train_dataloader() -> DataLoader[Any]:
        dataset = trainer.train_dataset
        if hasattr(dataset, "column_names"):  # Trainer drops what the model does not take
            dataset = trainer._remove_unused_columns(dataset, description="training")
        return _BalancedLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=trainer.data_collator,
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory,
        )

    trainer.get_train_dataloader = get_train_dataloader
    return sampler


def _lengths(dataset: Any) -> Sequence[int]:
    columns = getattr(dataset, "column_names", None)
    is_sized = hasattr(dataset, "__len__") and len(dataset) > 0
    if not is_sized or "input_ids" not in (columns or dataset[0]):
        raise DataError(
            "The trainer's dataset has no input_ids whose lengths could be balanced. Give it a "
            "tokenized dataset with a length, not a stream."
        )
    rows = dataset["input_ids"] if columns else [each["input_ids"] for each in dataset]
    return [len(row) for row in rows]
