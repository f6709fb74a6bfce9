"""A micro-batch's passes where some weights are not trained.

What it decides
    A frozen weight has no gradient: its product is not computed, nor is its sum over ranks. The
    gradient of a layer's input still is, as long as something before the layer is trained; before
    the first part that is, there is no backward at all, and nothing is computed again for one.
    Forwards are what they were.

Kept true (tests/unit/cost/step/test_trained.py)
    Nothing frozen changes nothing; more that is frozen never makes a pass longer.
"""

from equipoise.base.arrays import Floats
from equipoise.cost.step.request import TERMS, StepOptions, element_bytes

_INPUT, _WEIGHT = 1, 2
_PARAMETERS = TERMS.index("parameter traffic")


def cut_layers(parts: tuple[Floats, ...], options: StepOptions) -> tuple[Floats, ...]:
    """Every layer's seconds by pass and term, without passes that frozen weights do not have.

    Args:
        parts: Of each layer with every weight trained, float64 [PASSES, TERMS].
        options: What is trained.

    Returns:
        Likewise; layers that are alike stay one array.
    """
    trained = options.trained
    if trained is None:
        return parts
    known: dict[tuple[int, float, bool], Floats] = {}
    cut = []
    for at, (each, share) in enumerate(zip(parts, trained.layers, strict=True)):
        key = id(each), share, at >= trained.first_back
        if key not in known:
            known[key] = _cut(each, share, options, runs_back=key[2])
        cut.append(known[key])
    return tuple(cut)


def cut_ends(first: Floats, last: Floats, options: StepOptions) -> tuple[Floats, Floats]:
    """The same of the embedding, and of last norm, head and loss."""
    trained = options.trained
    if trained is None:
        return first, last
    first, last = first.copy(), last.copy()
    first[_WEIGHT] *= trained.first
    last[_WEIGHT] *= trained.last
    return first, last


def _cut(parts: Floats, share: float, options: StepOptions, *, runs_back: bool) -> Floats:
    parts = parts.copy()
    parts[_WEIGHT] *= share
    # Under ZeRO 3 the input's pass has both the gather of weights and the sum of gradients.
    width, grad_bytes = element_bytes(options.precision), options.stack.grad_bytes
    parts[_INPUT, _PARAMETERS] *= (width + share * grad_bytes) / (width + grad_bytes)
    if not runs_back:
        parts[_INPUT:] = 0.0
    return parts
