"""Compiled loops on CPU over what a step looks up: bags of ids, and gradients of their rows.

Why
    torch sorts ids, gathers states and weights, makes a tensor for each term of an update and
    scatters the result. A loop reads each row once while it is in the cache. NumPy holds Python's
    lock while it cuts a batch from the samples, which a thread does beside a step.

What it decides
    Ids are sorted by radix, stable, so a row's gradients are added in the order of the bags. All
    numbers are float32, as torch's; a mean over columns adds four partial sums.

Kept true (tests/unit/recsys/test_optimizer.py, tests/unit/recsys/test_samples.py)
    Bags are those of plain Python. Sums equal torch's to the bit; updates equal those by torch, and
    a second run to the bit.
"""

import functools
from typing import Any

import numpy as np

from equipoise.base.compiled import keep_compiled

_DIGIT = 11
"""Bits that one pass of the sort looks at: its counters stay in the first cache."""


def take_bags(offsets: Any, ids: Any, index: Any) -> Any:
    """Bags of some samples without ids of 0: lengths, int32 [B], and ids, int64.

    Args:
        offsets: Where each sample's bag begins, int64 [samples + 1].
        ids: Ids of all bags.
        index: The samples, int64 [B].
    """
    total = 0
    for sample in index:
        total += offsets[sample + 1] - offsets[sample]
    lengths, kept = np.empty(len(index), np.int32), np.empty(total, np.int64)
    end = 0
    for place in range(len(index)):
        sample = index[place]
        begin = end
        for at in range(offsets[sample], offsets[sample + 1]):
            if ids[at]:
                kept[end] = ids[at]
                end += 1
        lengths[place] = end - begin
    return lengths, kept[:end]


def sum_by_row(ids: Any, lengths: Any, pooled: Any) -> Any:
    """Distinct ids ascending, int64 [U], and the sums of their gradients, float32 [U, width].

    Args:
        ids: int64, bag by bag.
        lengths: Ids of each bag, int [bags].
        pooled: The gradient of each bag, float32 [bags, width].
    """
    count, width = len(ids), pooled.shape[1]
    keys, bags = ids.copy(), np.empty(count, np.int64)
    at = 0
    top = np.int64(0)
    for bag in range(len(lengths)):
        for _ in range(lengths[bag]):
            bags[at] = bag
            top = max(top, keys[at])
            at += 1
    other_keys, other_bags = np.empty_like(keys), np.empty_like(bags)
    shift = 0
    while top >> shift:
        begins = np.zeros((1 << _DIGIT) + 1, np.int64)
        for at in range(count):
            begins[((keys[at] >> shift) & ((1 << _DIGIT) - 1)) + 1] += 1
        for digit in range(1 << _DIGIT):
            begins[digit + 1] += begins[digit]
        for at in range(count):
            digit = (keys[at] >> shift) & ((1 << _DIGIT) - 1)
            place = begins[digit]
            begins[digit] = place + 1
            other_keys[place] = keys[at]
            other_bags[place] = bags[at]
        keys, other_keys = other_keys, keys
        bags, other_bags = other_bags, bags
        shift += _DIGIT
    distinct = 0
    for at in range(count):
        distinct += at == 0 or keys[at] != keys[at - 1]
    rows = np.empty(distinct, np.int64)
    sums = np.zeros((distinct, width), np.float32)
    row = -1
    for at in range(count):
        if at == 0 or keys[at] != keys[at - 1]:
            row += 1
            rows[row] = keys[at]
        bag = bags[at]
        for column in range(width):
            sums[row, column] += pooled[bag, column]
    return rows, sums


def mean_squares(grad: Any) -> Any:
    """The mean of each row's squares, float32 [U], of ``grad`` float32 [U, width]."""
    count, width = grad.shape
    means = np.empty(count, np.float32)
    whole = width // 4 * 4
    for row in range(count):
        a = b = c = d = np.float32(0)
        for column in range(0, whole, 4):
            a += grad[row, column] * grad[row, column]
            b += grad[row, column + 1] * grad[row, column + 1]
            c += grad[row, column + 2] * grad[row, column + 2]
            d += grad[row, column + 3] * grad[row, column + 3]
        for column in range(whole, width):
            a += grad[row, column] * grad[row, column]
        means[row] = ((a + b) + (c + d)) / np.float32(width)
    return means


def sgd(weight: Any, rows: Any, grad: Any, lr: Any) -> Any:
    """Apply ``grad`` float32 [U, width] to ``rows`` int64 [U] of ``weight``, in place."""
    rate = np.float32(lr)
    for at in range(len(rows)):
        row = rows[at]
        for column in range(weight.shape[1]):
            weight[row, column] -= rate * grad[at, column]


def adagrad(weight: Any, total: Any, rows: Any, grad: Any, lr: Any, eps: Any) -> Any:
    """As ``sgd``, with sums of squares ``total``, float32 as ``weight``."""
    rate, least = np.float32(lr), np.float32(eps)
    for at in range(len(rows)):
        row = rows[at]
        for column in range(weight.shape[1]):
            each = grad[at, column]
            own = total[row, column] + each * each
            total[row, column] = own
            weight[row, column] -= rate * (each / (np.sqrt(own) + least))


def row_wise_adagrad(
    weight: Any, total: Any, rows: Any, grad: Any, squares: Any, lr: Any, eps: Any
) -> Any:
    """As ``sgd``, with a sum for each row, ``total`` float32 [rows], of ``squares`` [U]."""
    rate, least = np.float32(lr), np.float32(eps)
    for at in range(len(rows)):
        row = rows[at]
        own = total[row] + squares[at]
        total[row] = own
        root = np.sqrt(own) + least
        for column in range(weight.shape[1]):
            weight[row, column] -= rate * (grad[at, column] / root)


def adam(
    weight: Any,
    mean: Any,
    square: Any,
    rows: Any,
    grad: Any,
    lr: Any,
    eps: Any,
    beta1: Any,
    beta2: Any,
    scale: Any,
) -> Any:
    """As ``sgd``, with moments as ``weight``; ``scale`` corrects their bias."""
    rate, least, gain = np.float32(lr), np.float32(eps), np.float32(scale)
    new_mean, new_square = np.float32(1 - beta1), np.float32(1 - beta2)
    for at in range(len(rows)):
        row = rows[at]
        for column in range(weight.shape[1]):
            each = grad[at, column]
            first = mean[row, column] + (each - mean[row, column]) * new_mean
            second = square[row, column] + (each * each - square[row, column]) * new_square
            mean[row, column], square[row, column] = first, second
            weight[row, column] -= rate * (gain * first / (np.sqrt(second) + least))


@functools.cache
def compiled(loop: Any) -> Any:
    """One of these loops as machine code, which other threads may run beside."""
    return keep_compiled(loop, nogil=True, error_model="numpy")
