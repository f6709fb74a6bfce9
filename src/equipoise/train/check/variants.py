"""The same cases of another engine's model, or with other products."""

import dataclasses
from collections.abc import Sequence

from equipoise.train.check.case import FP8_TOLERANCE, TOLERANCE, Case


def of_theirs(cases: Sequence[Case], config: str) -> list[Case]:
    """The same cases of a model that transformers builds, in fp64 but for its own fp32 parts.

    Args:
        cases: Of a model of its sizes.
        config: As ``Case.theirs``.
    """
    return [
        dataclasses.replace(case, theirs=config, precision="fp64", tolerance=TOLERANCE)
        for case in cases
    ]


def of_fp8(cases: Sequence[Case]) -> list[Case]:
    """Those of the same cases that float8 products are proven in, with such products."""
    return [
        dataclasses.replace(case, precision="fp8", tolerance=FP8_TOLERANCE)
        for case in cases
        if case.layout.tp == case.layout.pp == case.layout.ep == case.layout.etp == 1
        and not case.lora.rank
    ]
