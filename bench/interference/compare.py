"""Who predicts best how much a neighbour slows a rank, for kinds of neighbours never seen?

Each kind is held out in turn, with every window in which it ran; then each workload. Printed are
mean absolute errors of the performance (1 is undisturbed), and how often the stressed resource is
named, of windows slowed by over 10%. ``--transformer`` trains the transformer as well (minutes);
``--ship`` writes the winner to the package.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.interference import former
from bench.interference.boost import boost, ridge
from bench.interference.windows import RESOURCE_OF, SLOWED, Windows, load
from bench.lib.stamp import environment
from equipoise.fault.interference import predict
from equipoise.fault.interference.features import Scale, flatten
from equipoise.fault.interference.metrics import METRICS, RESOURCES
from equipoise.fault.interference.predict import calm_of, stands_out

Predict = Callable[[np.ndarray], np.ndarray]
"""From scaled windows [n, seconds, metrics] to performance [n]."""

_EPOCHS = 30
_GROUPS = [[at for at, each in enumerate(METRICS.values()) if each == name] for name in RESOURCES]


def predictors(with_transformer: bool) -> dict[str, Callable[[np.ndarray, np.ndarray], Predict]]:
    """Every side: from training windows and performance to a function that predicts."""

    def mean(_: np.ndarray, y: np.ndarray) -> Predict:
        return lambda new: np.full(len(new), y.mean())

    def linear(x: np.ndarray, y: np.ndarray) -> Predict:
        model = ridge(flatten(x), y)
        return lambda new: model.predict(flatten(new))

    def boosted(x: np.ndarray, y: np.ndarray) -> Predict:
        model = boost(flatten(x), y)
        return lambda new: model.predict(flatten(new))

    def dual(branches: str) -> Callable[[np.ndarray, np.ndarray], Predict]:
        def train(x: np.ndarray, y: np.ndarray) -> Predict:
            model = former.fit(x, y, epochs=_EPOCHS, branches=branches)
            return lambda new: former.predict(model, new)

        return train

    sides = {"mean": mean, "ridge": linear, "boosting": boosted}
    return sides | ({"transformer": dual("both")} if with_transformer else {})


def occlude(model: Predict, x: np.ndarray, calm: np.ndarray) -> np.ndarray:
    """The resource whose metrics, set to calm ones, raise the prediction most."""
    before, gains = model(x), []
    for group in _GROUPS:
        hidden = x.copy()
        hidden[:, :, group] = calm[group]
        gains.append(model(hidden) - before)
    return np.argmax(gains, axis=0)


def name_resource(
    make: Callable[..., object], train: Windows, x: np.ndarray, new: np.ndarray
) -> np.ndarray:
    """The resource that one-against-all scores say is stressed."""
    which = train.resource >= 0
    scores = []
    for number in range(len(RESOURCES)):
        model = make(flatten(x[which]), (train.resource[which] == number).astype(float))
        scores.append(model.predict(flatten(new)))  # type: ignore[attr-defined]
    return np.argmax(scores, axis=0)


def evaluate(
    windows: Windows, folds: dict[str, tuple[np.ndarray, np.ndarray]], with_transformer: bool
) -> dict:
    """Errors by fold; a fold is what is trained on and what is judged."""
    answer: dict[str, dict] = {}
    for fold, (learn, judge) in folds.items():
        train, test = windows.take(learn), windows.take(judge)
        if not len(test):
            continue
        metrics = train.rows.shape[2]
        scale = Scale.learn(train.rows.reshape(-1, metrics))
        x, new = scale.apply(train.rows), scale.apply(test.rows)
        calm = x[train.performance > 0.9].reshape(-1, metrics).mean(0)
        slowed = (test.performance < SLOWED) & (test.resource >= 0)
        row: dict[str, object] = {
            "windows": len(test),
            "performance": float(test.performance.mean()),
        }
        for side, make in predictors(with_transformer).items():
            model = make(x, train.performance.astype(float))
            made = np.clip(model(new), 0.02, 1.0)
            row[side] = float(np.abs(made - test.performance).mean())
            if side != "mean" and slowed.any():
                named = occlude(model, new[slowed], calm) == test.resource[slowed]
                row[f"{side} occlusion"] = float(named.mean())
        if slowed.any():
            row["excess names"] = float(
                np.mean(stand_out(windows, scale, judge) == test.resource[slowed])
            )
            for side, fit in (("ridge", ridge), ("boosting", boost)):
                right = name_resource(fit, train, x, new[slowed]) == test.resource[slowed]
                row[f"{side} names"] = float(right.mean())
        answer[fold] = row
        sys.stderr.write(f"{fold}: {row}\n")
    return answer


def stand_out(windows: Windows, scale: Scale, judge: np.ndarray) -> np.ndarray:
    """The resource that stands highest above the calm of each window's own session."""
    named = np.zeros(len(windows), dtype=np.int64)
    for workload in set(windows.workload.tolist()):
        session = windows.workload == workload
        scaled = scale.apply(windows.rows[session])
        named[session] = stands_out(scaled, calm_of(scaled[:, -1])).argmax(1)
    return named[judge & (windows.performance < SLOWED) & (windows.resource >= 0)]


def ship(windows: Windows) -> None:
    """Train the trees on everything, and write them to the package."""
    scale = Scale.learn(windows.rows.reshape(-1, windows.rows.shape[2]))
    x = scale.apply(windows.rows)
    trees = boost(flatten(x), windows.performance.astype(float))
    np.savez_compressed(
        Path(predict.__file__).with_name("model.npz"),
        base=trees.base,
        features=trees.features.astype(np.int16),
        thresholds=trees.thresholds,
        leaves=trees.leaves,
        typical=scale.typical,
        mean=scale.mean,
        deviation=scale.deviation,
    )


def main() -> None:
    """Compare, and print."""
    torch.set_num_threads(1)
    windows = load()
    if "--ship" in sys.argv:
        ship(windows)
        return
    has = {kind: windows.has(kind) for kind in RESOURCE_OF}
    kinds = {kind: (~has[kind], windows.kind == kind) for kind in RESOURCE_OF}
    loads = {
        each: (windows.workload != each, windows.workload == each)
        for each in dict.fromkeys(windows.workload.tolist())
    }
    with_transformer = "--transformer" in sys.argv
    result = {}
    for what, folds in (("kinds", kinds), ("workloads", loads)):
        rows = evaluate(windows, folds, with_transformer and what == "kinds")
        sides = [
            name for name in next(iter(rows.values())) if name not in ("windows", "performance")
        ]
        result[what] = {
            "held_out": rows,
            "mean": {
                side: float(np.mean([row[side] for row in rows.values() if side in row]))
                for side in sides
            },
        }
    json.dump(
        {"environment": environment(), "windows": len(windows), **result}, sys.stdout, indent=1
    )


if __name__ == "__main__":
    main()
