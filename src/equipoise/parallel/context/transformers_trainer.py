"""Evaluation by ``Trainer`` of a model whose packs lie on several ranks.

Why
    ``Trainer`` gives each rank documents of its own to evaluate, and its loss is the mean of means
    of batches. Ranks that share a pack must have the same documents, and hold unequal numbers of
    its labels.

What it decides
    All ranks evaluate the same documents, a batch is one pack, and the loss is the sum over all
    labels of all batches and ranks divided by their number.

Kept true (tests/oracle/test_trainer_evaluation.py)
    The loss is that of the documents one by one, over 1 to 3 ranks and for any batch size.

Sources
    transformers 5.23, ``trainer.py`` ``evaluation_loop`` and ``prediction_step``.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise.base.errors import LayoutError
from equipoise.parallel.context.batch import IGNORED, ContextCollator


class ContextEvaluation:
    """What to mix into a ``Trainer`` so that ``evaluate()`` is exact over ranks.

    ::

        class ContextTrainer(ContextEvaluation, Trainer): ...

    The trainer's ``data_collator`` must be a ``ContextCollator``. A batch has
    ``per_device_eval_batch_size`` documents, on all ranks together. Metrics see this rank's logits
    and its ``shift_labels``, gathered in the order of ranks.
    """

    args: Any
    data_collator: Any
    eval_dataset: Any
    _tally: Tensor

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same documents on every rank.

        Raises:
            LayoutError: the trainer's collator does not share packs.
        """
        if not isinstance(self.data_collator, ContextCollator):
            raise LayoutError(
                f"{type(self).__name__} evaluates packs over ranks, but its data_collator is "
                f"{type(self.data_collator).__name__}. Give it data_collator=ContextCollator()."
            )
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        size = self.args.per_device_eval_batch_size
        return DataLoader(dataset, batch_size=size, collate_fn=self.data_collator)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """As ``Trainer``'s, with the mean over all labels as its loss."""
        self._tally = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        out: Any = super().evaluation_loop(*args, **options)  # type: ignore[misc]
        group = getattr(self.data_collator, "group", None)
        if dist.is_initialized():
            dist.all_reduce(self._tally, group=group)
        total, labels = self._tally.tolist()
        for name in out.metrics:
            if name.endswith("_loss"):
                out.metrics[name] = total / max(labels, 1.0)
        return out

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's share of a pack: its loss, logits and labels."""
        del ignore_keys
        given: dict[str, Any] = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            out = model(**given)
        labels: Tensor = given["shift_labels"]
        total = out.loss.detach().double() * given["num_items_in_batch"]
        self._tally += torch.stack([total, (labels != IGNORED).sum().double()])
        ranks = dist.get_world_size(self.data_collator.group) if dist.is_initialized() else 1
        loss = out.loss.detach() * ranks  # Trainer's own mean, over ranks, is the pack's
        return (loss, None, None) if prediction_loss_only else (loss, out.logits, labels)
