"""The plans that ``bench.planner.real`` trains, as keys of run.toml."""

from equipoise.spec.device.parts import Way

STEPS = 7

CALIBRATED = {"model.preset": "2m", "pack.context_tokens": "2048"}
COMMON = CALIBRATED | {
    "train.steps": str(STEPS),
    "train.warmup_steps": "1",
    "pack.step_tokens": "8192",
    "pack.context_tokens": "1024",
    "layout.pin": "true",
    "layout.dp": "2",
}
_ONE = {"layout.dp": "1"}
CASES: dict[str, dict[str, str]] = {
    "dp 2, ZeRO 0": {"layout.zero": "0"},
    "dp 2, ZeRO 1": {},
    "dp 2, ZeRO 2": {"layout.zero": "2"},
    "dp 2, ZeRO 3": {"layout.zero": "3"},
    "tp 2": _ONE | {"layout.tp": "2"},
    "cp 2, needed-kv": _ONE | {"layout.cp": "2"},
    "cp 2, ulysses": _ONE | {"layout.cp": "2", "layout.strategy": "ulysses"},
    "pp 2, gpipe": _ONE | {"layout.pp": "2", "layout.schedule": "gpipe"},
    "pp 2, 1f1b": _ONE | {"layout.pp": "2"},
    "pp 2, zb-h1": _ONE | {"layout.pp": "2", "layout.schedule": "zb-h1"},
    "dp 2, in order": {"pack.policy": "in-order"},
    "dp 2, window 2,048": {"pack.context_tokens": "2048"},
    "dp 2, recompute full": {"train.recompute": "full"},
    "dp 2, recompute selective": {"train.recompute": "selective"},
    "dp 2, recompute attention, window 2,048": {
        "train.recompute": "attention",
        "pack.context_tokens": "2048",
    },
    "dp 2, 6 layers": {"model.layers": "6"},
    "tp 2, window 2,048, in order": _ONE
    | {"layout.tp": "2", "pack.context_tokens": "2048", "pack.policy": "in-order"},
    "pp 2, 1f1b, 6 layers": _ONE | {"layout.pp": "2", "model.layers": "6"},
}


GROUPS: tuple[tuple[tuple[Way, ...], tuple[str, ...]], ...] = (
    (("zero-0",), ("dp 2, ZeRO 0",)),
    (("zero-1",), ("dp 2, ZeRO 1", "dp 2, in order", "dp 2, window 2,048")),
    (("tensor",), ("tp 2", "tp 2, window 2,048, in order")),
    (("zero-1",), ("dp 2, recompute full", "dp 2, recompute selective")),
    (("pipeline",), ("pp 2, gpipe", "pp 2, 1f1b")),
    (("zero-2", "zero-1"), ("dp 2, ZeRO 2", "cp 2, needed-kv", "cp 2, ulysses")),
    (("zero-3",), ("dp 2, ZeRO 3",)),
    (("pipeline",), ("pp 2, zb-h1", "pp 2, 1f1b, 6 layers")),
    (("zero-1",), ("dp 2, recompute attention, window 2,048", "dp 2, 6 layers")),
)
"""The ways of sharing a step that are timed, and the plans that are trained right after.

Attention over context ranks is timed beside steps of ZeRO 2.
"""


def flags(keys: dict[str, str]) -> list[str]:
    """Keys as the command line takes them."""
    return [word for key, value in keys.items() for word in (f"--{key}", value)]
