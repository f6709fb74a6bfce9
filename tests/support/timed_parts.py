"""Parts of a small model's step, as if they had been timed: round numbers."""

from equipoise.spec.device.parts import (
    WAYS,
    ContextPoint,
    DocPoint,
    Measured,
    ModelParts,
    OncePoint,
    PartPasses,
    SizePoint,
    WayParts,
    parts_name,
)
from equipoise.spec.model.presets import ModelSpec, preset

MODEL = preset("2m")

NOTHING = Measured(0.0, 0.0, 0.0)


def about(value: float) -> Measured:
    return Measured(value, 0.98 * value, 1.03 * value)


def passes(tokens: int, us_per_token: float, *, halves: bool) -> PartPasses:
    """10 us plus ``us_per_token``; a backward takes twice that, and 40% of it can wait."""
    forward = 1e-5 + tokens * us_per_token * 1e-6
    if not halves:
        return PartPasses(about(forward), about(2 * forward), about(2 * forward), NOTHING)
    first, second = about(1.3 * forward), about(0.8 * forward)
    return PartPasses(about(forward), about(2 * forward), first, second)


def parts(model: ModelSpec = MODEL) -> ModelParts:
    ways = []
    free = PartPasses(NOTHING, NOTHING, NOTHING, NOTHING)
    for way in WAYS:
        halves = way == "pipeline"
        sizes = tuple(
            SizePoint(
                tokens,
                passes(tokens, 10.0, halves=halves),
                passes(tokens, 1.0, halves=halves) if halves else free,
                passes(tokens, 20.0, halves=halves),
            )
            for tokens in (128, 1024, 2048)
        )
        documents = tuple(
            DocPoint(tokens, about(1e-9 * tokens**2), about(3e-9 * tokens**2))
            for tokens in (16, 256, 2048)
        )
        layer = OncePoint(about(1e-3), about(2e-3), about(3e-3))
        first = layer if halves else OncePoint(NOTHING, NOTHING, NOTHING)
        ways.append(WayParts(way, sizes, documents, layer, first, layer, about(5e-3)))
    context = (ContextPoint("needed-kv", 1e-4, 1e-5, 2e-4, 2e-5),)
    return ModelParts(parts_name(model), "hidden 128", "fp32", 2, 2048, tuple(ways), context)
