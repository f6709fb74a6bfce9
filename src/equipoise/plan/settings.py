"""What a run.toml leaves open, as a list of choices that can be trained one after another.

Why
    Who writes a key means it. So a measured search varies only what nobody has written, and what
    it may vary is short: a trial costs seconds, not microseconds.

What it decides
    Degrees whose product is the ranks, ZeRO 1 and 3 where there is anything to shard, no,
    selective and full recomputation, and documents packed by work or by tokens: nothing that
    changes what is learnt from. Each choice is a set of keys of run.toml.

Kept true (tests/unit/plan/test_settings.py)
    No two choices are alike, each is a legal layout of the same ranks, and no given key varies.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.errors import LayoutError, SpecError
from equipoise.plan.run_steps import POLICIES
from equipoise.spec.model import ModelSpec
from equipoise.spec.obey import is_given
from equipoise.spec.resolve import ResolvedRun
from equipoise.spec.run import LayoutSpec, Recompute

DEGREES = ("layout.dp", "layout.context", "layout.tensor", "layout.pipeline")
DIMENSIONS = (*DEGREES, "layout.zero", "train.recompute", "pack.policy")
"""Keys that are searched where they are not given."""

_ZERO = (1, 3)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Everything that a run leaves open."""

    keys: tuple[dict[str, str], ...]
    """Of each choice, the keys that are not given and their values, as flags take them."""
    settings: npt.NDArray[np.int64]
    """Which value each has of each of ``DIMENSIONS``, int64[choices, dimensions]."""


def list_choices(run: ResolvedRun, ranks: int) -> Choices:
    """Every choice of a run on so many ranks.

    Args:
        run: What is given, and where it comes from.
        ranks: All of them are used.

    Raises:
        SpecError: at most one choice is left.

    >>> from equipoise.spec.load import read_run
    >>> found = list_choices(read_run(None, [("train.recompute", "none")]), 2)
    >>> len(found.keys), found.keys[0]["layout.pipeline"], "train.recompute" in found.keys[0]
    (12, '2', False)
    """
    given = {name for name in DIMENSIONS if is_given(run, name)}
    spec = run.spec
    recomputes = [spec.train.recompute] if "train.recompute" in given else list(_RECOMPUTE)
    policies = [spec.pack.policy] if "pack.policy" in given else list(POLICIES)
    rows = [
        (*degrees, zero, recompute, policy)
        for degrees in _degrees(run, ranks, given)
        for zero in ([spec.layout.zero] if "layout.zero" in given else _zeros(degrees))
        for recompute, policy in itertools.product(recomputes, policies)
    ]
    if len(rows) < 2:
        said = ", ".join(f"{name} ({run.origins[name]})" for name in DIMENSIONS if name in given)
        raise SpecError(
            f"--measure finds {len(rows)} choices on {ranks} ranks where it needs two or more: "
            f"given are {said or 'no keys'}. Take one of these away, and it is searched."
        )
    free = [at for at, name in enumerate(DIMENSIONS) if name not in given]
    codes = np.zeros((len(rows), len(DIMENSIONS)), dtype=np.int64)
    for at in range(len(DIMENSIONS)):
        values = list(dict.fromkeys(row[at] for row in rows))
        codes[:, at] = [values.index(row[at]) for row in rows]
    keys = tuple({DIMENSIONS[at]: str(row[at]) for at in free} for row in rows)
    return Choices(keys, codes)


def _degrees(run: ResolvedRun, ranks: int, given: set[str]) -> list[tuple[int, ...]]:
    layout = run.spec.layout
    known = (layout.dp, layout.context, layout.tensor, layout.pipeline)
    parts = [each for each in range(1, ranks + 1) if ranks % each == 0]
    sizes = [
        [size] if name in given and size != "cores" else parts
        for name, size in zip(DEGREES, known, strict=True)
    ]
    return [
        (int(dp), int(context), int(tensor), int(pipeline))
        for dp, context, tensor, pipeline in itertools.product(*sizes)
        if int(dp) * int(context) * int(tensor) * int(pipeline) == ranks
        and _is_legal(
            dataclasses.replace(
                layout, dp=dp, context=int(context), tensor=int(tensor), pipeline=int(pipeline)
            ),
            run.model,
            ranks,
        )
    ]


def _is_legal(layout: LayoutSpec, model: ModelSpec, ranks: int) -> bool:
    try:
        layout.of_ranks(ranks).require_model(model)
    except LayoutError:
        return False
    return layout.stages <= model.layers


def _zeros(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Stages that differ: where one rank holds all of a weight there is nothing to shard."""
    dp, context, *_ = degrees
    return _ZERO if dp * context > 1 else _ZERO[:1]
