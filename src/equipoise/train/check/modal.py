"""Cases with images and sound: encoders on all ranks beside a decoder in every layout.

What it decides
    Every ZeRO stage, windows that cut items, and every other axis that may share the decoder,
    alone and with others. Policies that divide documents over ranks are refused and have none.
"""

import dataclasses
from functools import partial
from typing import Any

from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.check.case import STAGES, Case, divisors, make_case

VISION = VisionSpec(layers=2, hidden=16, heads=2, patch=2)
AUDIO = AudioSpec(layers=1, hidden=8, heads=1)
"""Small encoders, which have every part of large ones."""


def modal_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Encoders beside a decoder on this many real ranks."""

    def make(**keys: Any) -> Case:
        return dataclasses.replace(made(**keys), vision=VISION, audio=AUDIO)

    made = partial(make_case, model, ranks)
    cases = [
        *(make(zero=zero) for zero in STAGES),
        make(policy="in-order", context_tokens=64, zero=2, recompute="full"),
    ]
    for degree in divisors(ranks):
        cases += [make(cp=degree), make(cp=degree, policy="in-order", context_tokens=96, zero=3)]
        if model.heads % degree == 0:
            cases += [make(tp=degree), make(tp=degree, zero=3, recompute="full")]
        piped = partial(make, pp=degree, policy="in-order", context_tokens=64)
        cases += [piped(), piped(schedule="zb-v")]
    if ranks == 4:
        pipelined = partial(make, pp=2, policy="in-order", context_tokens=64)
        cases += [make(cp=2, tp=2), pipelined(cp=2, schedule="zb-h1"), pipelined(tp=2)]
    return [dataclasses.replace(case, repeats=at == 0) for at, case in enumerate(cases)]
