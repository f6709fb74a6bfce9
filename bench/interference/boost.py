"""Gradient boosting of least squares, and ridge: small, in NumPy, as arrays that are shipped."""

from dataclasses import dataclass

import numpy as np

from equipoise.fault.interference.predict import Trees

_BINS, _DEPTH, _LEAF = 24, 3, 10


def boost(x: np.ndarray, y: np.ndarray, *, trees: int = 120, rate: float = 0.08) -> Trees:
    """Fit the residuals again and again, on half of the rows and half of the features each."""
    generator = np.random.default_rng(0)
    edges = np.quantile(x, np.linspace(0, 1, _BINS + 1)[1:-1], axis=0).T
    binned = np.stack([np.searchsorted(e, column) for e, column in zip(edges, x.T, strict=True)], 1)
    fitted, parts = np.full(len(y), y.mean()), []
    for _ in range(trees):
        rows = generator.random(len(y)) < 0.6
        columns = generator.permutation(x.shape[1])[: -(-x.shape[1] // 2)]
        tree = _tree(binned, edges, y - fitted, rows, columns)
        features, thresholds, leaves = tree
        parts.append((features, thresholds, rate * leaves))
        one = Trees(0.0, features[None], thresholds[None], rate * leaves[None])
        fitted += one.predict(x)
    stacked = [np.stack(each) for each in zip(*parts, strict=True)]
    return Trees(float(y.mean()), *stacked)


def _tree(
    binned: np.ndarray, edges: np.ndarray, y: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    splits = 2**_DEPTH - 1
    features, thresholds = np.zeros(splits, dtype=np.int64), np.full(splits, np.inf)
    members = [np.flatnonzero(rows)]
    for node in range(splits):
        mine = members[node]
        best = _split(binned[np.ix_(mine, columns)], y[mine]) if len(mine) >= 2 * _LEAF else None
        if best is None:  # all go left
            members += [mine, mine[:0]]
            continue
        column, cut = int(columns[best[0]]), best[1]
        features[node], thresholds[node] = column, edges[column, cut]
        is_right = binned[mine, column] > cut
        members += [mine[~is_right], mine[is_right]]
    leaves = np.array([y[each].sum() / (len(each) + 1.0) for each in members[splits:]])
    return features, thresholds, leaves


def _split(binned: np.ndarray, y: np.ndarray) -> tuple[int, int] | None:
    """The column and the last bin on the left that leave the smallest squares."""
    flat = binned + _BINS * np.arange(binned.shape[1])
    size = _BINS * binned.shape[1]
    count = np.bincount(flat.ravel(), minlength=size).reshape(-1, _BINS)
    total = np.bincount(flat.ravel(), np.repeat(y, binned.shape[1]), size).reshape(-1, _BINS)
    left_n, left = count.cumsum(1)[:, :-1], total.cumsum(1)[:, :-1]
    right_n, right = len(y) - left_n, y.sum() - left
    gain = left**2 / np.maximum(left_n, 1) + right**2 / np.maximum(right_n, 1)
    gain[(left_n < _LEAF) | (right_n < _LEAF)] = -np.inf
    at = int(gain.argmax())
    if gain.flat[at] <= y.sum() ** 2 / len(y) + 1e-12:
        return None
    return at // (_BINS - 1), at % (_BINS - 1)


@dataclass(frozen=True, slots=True)
class Ridge:
    """A weight for each feature, and a constant."""

    base: float
    weights: np.ndarray

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.base + x @ self.weights


def ridge(x: np.ndarray, y: np.ndarray, *, penalty: float = 30.0) -> Ridge:
    """Least squares with a penalty on the squares of the weights; features are around zero."""
    mean, base = x.mean(0), float(y.mean())
    centred = x - mean
    square = centred.T @ centred + penalty * np.eye(x.shape[1])
    weights = np.linalg.solve(square, centred.T @ (y - base))
    return Ridge(base - float(mean @ weights), weights)
