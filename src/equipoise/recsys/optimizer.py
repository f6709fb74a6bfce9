"""Sparse optimizers: the gradient of a row is one sum over the global batch, applied once.

Why
    Applying a row's occurrences one by one is another optimizer: AdaGrad then divides by a state
    that grows within a step, and two runs may differ in the order.

What it decides
    Only rows that a step looked up change. Their gradients are summed in the order of (rank,
    sample, position), so two runs are equal to the bit. Row-wise AdaGrad keeps one number for a
    row: the mean of its squared gradients over *all* columns, wherever these lie. Adam is lazy:
    moments of rows that a step did not touch stay, and the bias correction counts all steps.

Kept true (tests/unit/recsys/test_optimizer.py, tests/multi/recsys/test_tables.py)
    Steps equal torch's SGD, Adagrad and SparseAdam on sparse gradients, and row-wise AdaGrad's
    formula; every plan equals one process.

Sources
    Row-wise AdaGrad: FBGEMM, exact_rowwise_adagrad; Neo, arXiv:2104.05158, section 4.1.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from equipoise.base.errors import SpecError
from equipoise.numerics import sparse
from equipoise.numerics.sparse import compiled
from equipoise.spec.tables.table import SPARSE_OPTIMIZERS, SparseOptimizer

_STATES: dict[SparseOptimizer, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "row-wise-adagrad": ("sum",),
    "adam": ("mean", "square"),
}


@dataclass(frozen=True, slots=True)
class SparseStep:
    """An optimizer's name and numbers."""

    name: SparseOptimizer = "row-wise-adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.name not in SPARSE_OPTIMIZERS:
            raise SpecError(
                f'"{self.name}" is not a sparse optimizer. Choose from '
                f"{', '.join(SPARSE_OPTIMIZERS)}."
            )
        if not self.lr >= 0 or self.lr == float("inf"):
            raise SpecError(f"A learning rate of {self.lr} cannot be. Give 0 or more.")
        if not (self.eps > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise SpecError(
                f"eps must be more than 0, beta1 and beta2 from 0 to below 1; they are {self.eps}, "
                f"{self.beta1} and {self.beta2}. Give others."
            )


def make_state(step: SparseStep, weight: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of a shard, all zeros."""
    match step.name:
        case "adagrad":
            return {"sum": torch.zeros_like(weight)}
        case "row-wise-adagrad":
            return {"sum": weight.new_zeros(len(weight))}
        case "adam":
            return {"mean": torch.zeros_like(weight), "square": torch.zeros_like(weight)}
    return {}


def sum_rows(ids: Tensor, lengths: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each distinct row, from those of the bags that hold it.

    Args:
        ids: Rows of all bags, int64, bag by bag.
        lengths: Ids of each bag, int [bags].
        pooled: Gradient of each bag, float32 [bags, width].

    Returns:
        Distinct rows ascending, int64 [U]; their gradients, float32 [U, width], summed in the
        order of the bags.
    """
    if ids.is_cpu:
        given = (each.contiguous().numpy() for each in (ids, lengths, pooled))
        distinct, sums = compiled(sparse.sum_by_row)(*given)
        return torch.from_numpy(distinct), torch.from_numpy(sums)
    return sum_rows_by_torch(ids, lengths, pooled)


def sum_rows_by_torch(ids: Tensor, lengths: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """As ``sum_rows``, on any device."""
    bag_of = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
    order = torch.argsort(ids, stable=True)
    rows, counts = torch.unique_consecutive(ids[order], return_counts=True)
    return rows, pool(bag_of[order], counts, pooled)


def pool(ids: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    """The sum of each bag's rows in their order, float32 [bags, width]; zero for an empty bag."""
    if not len(ids) or not len(weight):
        return weight.new_zeros(len(lengths), weight.shape[1])
    ends = lengths.to(torch.int64).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    return embedding_bag(ids, weight, offsets, mode="sum", include_last_offset=True)


def update_rows(
    step: SparseStep,
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    grad: Tensor,
    *,
    number: int,
    squares: Tensor | None = None,
) -> None:
    """Apply one gradient to each row, in place.

    Args:
        step: The optimizer.
        weight: A shard, float32 [rows of it, width].
        state: What ``make_state`` made.
        rows: Distinct rows, int64 [U].
        grad: Their gradients, float32 [U, width].
        number: Which step this is, from 1; for Adam.
        squares: Mean of each row's squared gradient over all columns, float32 [U]; of these
            columns unless given.
    """
    if not len(rows):
        return
    if weight.is_cpu:
        _update_on_cpu(step, weight, state, rows, grad, number, squares)
    else:
        update_rows_by_torch(step, weight, state, rows, grad, number, squares)


def update_rows_by_torch(
    step: SparseStep,
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    grad: Tensor,
    number: int,
    squares: Tensor | None,
) -> None:
    """As ``update_rows``, on any device; there is a row."""
    match step.name:
        case "sgd":
            change = grad
        case "adagrad":
            total = state["sum"][rows] + grad * grad
            state["sum"][rows] = total
            change = grad / (total.sqrt() + step.eps)
        case "row-wise-adagrad":
            mean = (grad * grad).mean(dim=1) if squares is None else squares
            total = state["sum"][rows] + mean
            state["sum"][rows] = total
            change = grad / (total.sqrt() + step.eps).unsqueeze(1)
        case "adam":
            mean = torch.lerp(grad, state["mean"][rows], step.beta1)
            square = torch.lerp(grad * grad, state["square"][rows], step.beta2)
            state["mean"][rows], state["square"][rows] = mean, square
            change = _adam_scale(step, number) * mean / (square.sqrt() + step.eps)
    weight[rows] = weight[rows] - step.lr * change


def _adam_scale(step: SparseStep, number: int) -> float:
    """What corrects the bias of both moments after some steps."""
    return float((1 - step.beta2**number) ** 0.5 / (1 - step.beta1**number))


def _update_on_cpu(
    step: SparseStep,
    weight: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    grad: Tensor,
    number: int,
    squares: Tensor | None,
) -> None:
    """``update_rows`` by loops, which read arrays without gaps."""
    changed = [weight, *(state[name] for name in _STATES[step.name])]
    arrays = [each.contiguous() for each in changed]
    given = [each.contiguous().numpy() for each in (*arrays, rows, grad)]
    match step.name:
        case "sgd":
            compiled(sparse.sgd)(*given, float(step.lr))
        case "adagrad":
            compiled(sparse.adagrad)(*given, float(step.lr), float(step.eps))
        case "row-wise-adagrad":
            own = compiled(sparse.mean_squares)(given[-1]) if squares is None else squares.numpy()
            compiled(sparse.row_wise_adagrad)(*given, own, float(step.lr), float(step.eps))
        case "adam":
            rates = float(step.lr), step.eps, step.beta1, step.beta2, _adam_scale(step, number)
            compiled(sparse.adam)(*given, *map(float, rates))
    for each, array in zip(changed, arrays, strict=True):
        if array is not each:
            each.copy_(array)
