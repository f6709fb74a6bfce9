"""DLRM in one process and in float64, by torch's own operations: what both sides of a bench are
compared with.

Nothing of ours is in it but the samples, the first weights and the dense part: bags are summed by
``index_add_``, and row-wise AdaGrad is its formula.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.base.arrays import Floats, Ints
from equipoise.recsys.samples import Samples
from equipoise.spec.recommend import RecommendSpec

_EPS = 1e-8


def train_in_float64(
    spec: RecommendSpec,
    samples: Samples,
    tables: Sequence[Floats],
    dense: nn.Module,
    order: Sequence[Ints],
) -> dict[str, Floats]:
    """Train on a batch of each entry of ``order``; weights by the names that both sides use."""
    weights = [torch.from_numpy(each).double() for each in tables]
    sums = [torch.zeros(len(each), dtype=torch.float64) for each in weights]
    dense = dense.double()
    optimizer = torch.optim.Adam(dense.parameters(), lr=spec.train.lr)
    for index in order:
        bags = [_bags(samples, table, index) for table in range(len(weights))]
        pooled = [
            weight.new_zeros(len(index), weight.shape[1]).index_add_(0, bag, weight[ids])
            for weight, (ids, bag) in zip(weights, bags, strict=True)
        ]
        vectors = torch.cat(pooled, dim=1).requires_grad_()
        logits = dense(vectors, torch.from_numpy(samples.numbers[index]).double())
        labels = torch.from_numpy(samples.labels[index]).double()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        grads = vectors.grad.split([each.shape[1] for each in weights], dim=1)
        for weight, total, grad, (ids, bag) in zip(weights, sums, grads, bags, strict=True):
            rows, place = torch.unique(ids, return_inverse=True)
            whole = grad.new_zeros(len(rows), grad.shape[1]).index_add_(0, place, grad[bag])
            total[rows] += whole.square().mean(dim=1)
            weight[rows] -= spec.tables.lr * whole / (total[rows].sqrt() + _EPS)[:, None]
    named = {f"table {key}": each.numpy() for key, each in zip(samples.keys, weights, strict=True)}
    return named | {f"dense {key}": each.numpy() for key, each in dense.state_dict().items()}


def _bags(samples: Samples, table: int, index: Ints) -> tuple[Tensor, Tensor]:
    """Ids of some samples in a table, and the place in ``index`` of the sample of each."""
    offsets, ids = samples.offsets[table], samples.ids[table]
    parts = [ids[offsets[at] : offsets[at + 1]] for at in index]
    sizes = [len(part) for part in parts]
    return (
        torch.from_numpy(np.concatenate(parts)),
        torch.from_numpy(np.repeat(np.arange(len(index)), sizes)),
    )
