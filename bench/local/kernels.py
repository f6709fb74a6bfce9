"""Predicted kernels beside measured ones: sizes that the shipped curves lack, and other devices.

Products and attention of an H100, an H200 and an A100 between the curves' sizes; then each
device's products predicted from the other generation's curve, as for a device without its own.
"""

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.stamp import environment
from equipoise.cost.kernel import attention_s, gemm_s
from equipoise.spec.device.by_name import find_device

FOLDER = Path(__file__).parents[1] / "measured"
LARGE_S = 1e-3


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def _error(predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    def score(errors: np.ndarray) -> dict[str, float]:
        return {
            "mape": float(np.abs(errors).mean()),
            "bias": float(errors.mean()),
            "p95": float(np.quantile(np.abs(errors), 0.95)),
            "rows": len(errors),
        }

    errors = predicted / measured - 1
    return score(errors) | {"1 ms and more": score(errors[measured >= LARGE_S])}


def _products(rows: list[dict[str, str]]) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for name in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == name]
        m, n, k, us = (np.array([float(row[key]) for row in mine]) for key in ("m", "n", "k", "us"))
        device = find_device(name)
        errors[name] = _error(gemm_s(device, m, n, k, "bf16").s, us * 1e-6)
        # Under another name it has no curve, so the roofline scales the stand-in's.
        stands_in = {"h100-sxm": "v100-32", "h200": "h200", "a100-80": "h100-sxm-500w"}[name]
        if stands_in != name:
            other = dataclasses.replace(device, name=stands_in)
            key = f"{name} from the other generation's curve"
            errors[key] = _error(gemm_s(other, m, n, k, "bf16").s, us * 1e-6)
    return errors


def _attention(rows: list[dict[str, str]]) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    for name in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == name]
        predicted = [
            attention_s(
                find_device(name),
                [int(row["tokens"])] * int(row["sequences"]),
                heads=int(row["heads"]),
                kv_heads=int(row["kv_heads"]),
                head_width=128,
            ).total_s
            for row in mine
        ]
        measured = np.array([float(row["us"]) for row in mine]) * 1e-6
        errors[name] = _error(np.array(predicted), measured)
    return errors


def measure() -> dict[str, Any]:
    """Score all of it."""
    return {
        "what": "kernels at sizes between those of the shipped curves, predicted beside measured",
        "products, bf16": _products(_rows("gemm_between.csv")),
        "attention, forward, bf16": _attention(_rows("attention_between.csv")),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
