"""What ``equipoise convert --cluster-experts`` says: which share of held-out rows stays at home."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.serve.routes import Clustered


def facts(clustered: "Clustered") -> dict[str, Any]:
    """The numbers, as JSON has them."""
    return {
        "ranks": clustered.ranks,
        "fitted_tokens": clustered.fitted_tokens,
        "held_tokens": clustered.held_tokens,
        "left_out": clustered.left_out,
    } | dataclasses.asdict(clustered.rates)


def describe(clustered: "Clustered") -> str:
    """The numbers in sentences."""
    rates, ranks = clustered.rates, clustered.ranks
    saved = 1 - (1 - rates.predicted) / (1 - rates.in_order) if rates.in_order < 1 else 0.0
    left_out = ""
    if clustered.left_out:
        plural = "s" if clustered.left_out > 1 else ""
        left_out = f" {clustered.left_out:,} held-out document{plural} left out: also trained."
    return (
        f"Experts are clustered for {ranks} ranks by {clustered.fitted_tokens:,} tokens of the "
        f"corpus. On {clustered.held_tokens:,} held-out tokens {rates.predicted:.1%} of the rows "
        f"stay on their rank, and {rates.in_order:.1%} with experts placed round-robin: "
        f"{saved:.0%} of the bytes between experts' ranks are saved. Knowing every choice "
        f"beforehand would keep {rates.known:.1%}. The fullest rank has {rates.skew:.2f} times the "
        f"mean.{left_out}\n"
    )
