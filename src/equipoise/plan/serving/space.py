"""Every way to serve a model on a cluster: degrees of a replica, together or apart.

What it decides
    All devices are used. *Together*: every product of dp, pp, cp and tp that is their number, and
    for a model with experts every ep that serving knows. *Apart*: the same for two parts of the
    cluster; the first part computes prompts. Parts are of any size on up to 16 devices, and of
    sixteenths beyond.

Kept true (tests/unit/plan/serving/test_search.py)
    Each choice once; every one is legal; degrees that are given are those of every replica.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from equipoise.base.errors import EquipoiseError, SpecError
from equipoise.sim.machine import Machine
from equipoise.sim.serve.layout import served_layout
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.words import read_words

AXES = ("tp", "cp", "pp", "ep", "dp")
"""Degrees that are searched, as words write them."""

_PARTS = 16


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """Replicas that serve: all alike, or some that compute prompts and some that generate."""

    layout: Layout
    decode_layout: Layout | None = None

    def words(self) -> dict[str, str]:
        """As ``equipoise simulate`` takes it."""
        words = {"layout": words_of(self.layout)}
        if self.decode_layout is not None:
            words["decode-layout"] = words_of(self.decode_layout)
        return words

    @property
    def is_apart(self) -> bool:
        """Whether prompts are computed on devices of their own."""
        return self.decode_layout is not None


def words_of(layout: Layout) -> str:
    """Degrees above 1.

    >>> words_of(Layout(dp=2, tp=4)), words_of(Layout())
    ('tp=4,dp=2', 'dp=1')
    """
    given = [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    return ",".join(given) or "dp=1"


def read_fixed(text: str | None) -> dict[str, int]:
    """Degrees that are not searched.

    Raises:
        SpecError: a word is wrong, or a degree of training.
    """
    return {} if text is None else read_words("layout", text, AXES)


def list_layouts(
    model: ModelSpec, machine: Machine, devices: int, fixed: Mapping[str, int]
) -> list[Layout]:
    """Every legal layout of some devices."""
    layouts = []
    for tp, cp, pp, dp in _products(devices, 4):
        degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        for ep in _expert_degrees(model, tp * cp):
            mine = degrees | {"ep": ep}
            if any(mine[axis] != degree for axis, degree in fixed.items()):
                continue
            try:
                layout = Layout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep)
                served_layout(model, machine, layout)
            except EquipoiseError:
                continue
            layouts.append(layout)
    return layouts


def list_parts(devices: int) -> list[int]:
    """How many devices may compute prompts, where the others generate.

    >>> list_parts(4), list_parts(64)[:3]
    ([1, 2, 3], [4, 8, 12])
    """
    if devices <= _PARTS:
        return list(range(1, devices))
    return sorted({round(devices * part / _PARTS) for part in range(1, _PARTS)})


def require_some(layouts: int, fixed: Mapping[str, int], devices: int) -> None:
    """Refuse degrees that leave nothing to choose.

    Raises:
        SpecError: names them.
    """
    if layouts:
        return
    words = ",".join(f"{axis}={degree}" for axis, degree in fixed.items())
    given = f" with {words}" if words else ""
    raise SpecError(
        f"No layout of {devices} {'device' if devices == 1 else 'devices'}{given} divides this "
        "model's heads, layers and experts. Fix fewer degrees, or give another number of devices."
    )


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for each in range(1, number + 1):
        if number % each == 0:
            for rest in _products(number // each, factors - 1):
                yield (each, *rest)


def _expert_degrees(model: ModelSpec, ranks: int) -> list[int]:
    if not model.experts:
        return [1]
    return [each for each in range(1, ranks + 1) if ranks % each == 0 and model.experts % each == 0]
