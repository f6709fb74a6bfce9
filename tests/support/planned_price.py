"""A price as a plan.lock has it, whole."""

from typing import Any

PRICE: dict[str, Any] = {
    "step_s": 1.5,
    "tokens_per_s_per_device": 1000.0,
    "tflops_per_device": 1.0,
    "mfu": 0.5,
    "useful_mfu": 0.4,
    "memory_gib_max": 0.75,
    "capacity_gib": 80.0,
    "host_memory_gib_max": 0.0,
    "host_capacity_gib": 100.0,
    "memory": {"parameters": 0.75},
    "terms": {"a": 1.5},
    "stages": {"nodes": ["this-cpu"]},
    "energy_j_per_token": 0.5,
    "usd_per_million_tokens": None,
    "extrapolated": [],
}
