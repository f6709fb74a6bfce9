"""The price curve of a device beside micro-batches that it did not measure.

The curve is what a run measures before its first step. Micro-batches are packs of drawn documents,
from many short ones to a single long one; each is run forward and backward.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.lib.corpus import lognormal_step
from bench.lib.device import call_s, device_facts, run_here
from bench.lib.stamp import environment, spread
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.measure import measure_curve
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(layers=8, hidden=1024, heads=16, kv_heads=8, ffn=2816, vocab=32000, head_width=64)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    model: ModelSpec = MODEL
    context_tokens: int = 16384
    medians: tuple[float, ...] = (128.0, 512.0, 2048.0, 8192.0)
    shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    """Tokens of a micro-batch over the window."""
    samples: int = 3


def measure(device: torch.device, sizes: Sizes | None = None) -> dict[str, Any]:
    """Measure the curve, then what it prices."""
    sizes = sizes or Sizes()
    curve = measure_curve(
        sizes.model,
        context_tokens=sizes.context_tokens,
        device=device,
        dtype=torch.bfloat16,
        recompute="none",
    )
    decoder = Decoder(sizes.model)
    initialize(decoder, 0)
    decoder = decoder.to(device=device, dtype=torch.bfloat16)
    rows = []
    for number, median in enumerate(sizes.medians):
        for share in sizes.shares:
            tokens = int(share * sizes.context_tokens)
            lengths = lognormal_step(tokens, seed=number, median=median, sigma=1.0)
            predicted_s = (curve.fixed_ns + int(curve.document_ns(lengths).sum())) * 1e-9
            measured_s = spread(_run_s(decoder, lengths, device, sizes.samples))["median"]
            rows.append(
                {
                    "documents": len(lengths),
                    "tokens": tokens,
                    "predicted_s": predicted_s,
                    "measured_s": measured_s,
                    "error": predicted_s / measured_s - 1,
                }
            )
    errors = np.array([row["error"] for row in rows])
    return {
        "what": "seconds of micro-batches, forward and backward, by the price curve and measured",
        **device_facts(device),
        "mean_absolute_error": float(np.abs(errors).mean()),
        "largest_error": float(errors[np.abs(errors).argmax()]),
        "rows": rows,
        "environment": environment(),
    }


def _run_s(
    decoder: Decoder, lengths: np.ndarray, device: torch.device, samples: int
) -> list[float]:
    tokens = torch.arange(int(lengths.sum()), device=device) % decoder.model.vocab
    documents = lengths.tolist()

    def run() -> None:
        decoder(tokens, documents, labels_T=tokens).backward()
        decoder.zero_grad(set_to_none=True)

    return call_s(run, device, samples=samples)


if __name__ == "__main__":
    run_here(measure)
