"""What no ranks can run is refused before any is started: the whole sentence."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.errors import LayoutError
from equipoise.plan.space.accepted import require_accepted, require_step
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec

MODEL = dataclasses.replace(preset("2m"), layers=6)
LENGTHS = np.full(200, 300)


def refused(lengths=None, *, policy: str = "by-work", window: int = 256, **layout) -> str:
    """What is said to a run of steps of 2,048 tokens."""
    spec = RunSpec(
        pack=PackSpec(policy=policy, context_tokens=window, step_tokens=2048),
        layout=LayoutSpec(**{"dp": 1} | layout),
    )
    ranks = spec.layout.count_ranks(1)
    with pytest.raises(LayoutError) as caught:
        require_accepted(spec, MODEL, ranks)
        if lengths is not None:
            require_step(spec, MODEL, ranks, lengths)
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_a_schedule_of_one_stage_a_rank(schedule: str) -> None:
    assert refused(pp=2, schedule=schedule, virtual=2) == (
        f'layout.schedule = "{schedule}", layout.pp = 2, layout.virtual = 2: {schedule} '
        "needs 2 stages on 2 ranks; there are 4. Split the layers that way, or take interleaved, "
        "which runs any whole number of stages per rank."
    )


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "v-half", "v-min"])
@pytest.mark.parametrize("virtual", [1, 3])
def test_a_schedule_in_a_v_has_two_stages_a_rank(schedule: str, virtual: int) -> None:
    assert refused(pp=2, schedule=schedule, virtual=virtual) == (
        f'layout.schedule = "{schedule}" goes down the ranks and back up, so it has 2 stages a '
        f"rank, and layout.virtual = {virtual}. Leave layout.virtual out."
    )


def test_documents_divided_over_time_under_a_schedule_that_does_not_turn_back() -> None:
    assert refused(pp=2, schedule="zb-h1", policy="divided-in-time") == (
        'layout.schedule = "zb-h1", layout.pp = 2: zb-h1 runs backwards in the order of '
        "forwards, but 2 micro-batches share a document over time, which needs the reverse. Take "
        "gpipe, 1f1b or auto, or pack with a policy that divides nothing over time."
    )


def test_a_share_that_skips_no_stage() -> None:
    assert refused(pp=2, schedule="skip-partial", skip=0.3) == (
        'layout.schedule = "skip-partial", layout.pp = 2: skip = 0.3 of the 0 stages '
        "between the first and the last skips none. Give skip-partial more stages or a larger "
        "share."
    )


def test_fewer_micro_batches_than_the_schedule_wants() -> None:
    assert refused(LENGTHS, pp=2, schedule="dualpipe-v", window=1024) == (
        'layout.schedule = "dualpipe-v", layout.pp = 2: dualpipe-v needs 4 micro-batches on '
        "2 ranks; there are 2. Take zb-v, which runs any number."
    )


def test_fewer_documents_than_ranks() -> None:
    assert refused(np.array([5000, 5000]), dp=4, window=2048) == (
        "A step of 2,048 tokens holds 1 documents for 4 ranks, and by-work packs whole documents. "
        "Smallest changes that fit: layout.dp = 1, or a larger pack.step_tokens."
    )


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_runs_as_it_is_meant(schedule: str) -> None:
    skips = schedule.startswith("skip")
    layout = LayoutSpec(
        dp=2, pp=2, schedule=schedule, skip=0.5 * skips, virtual=2 if skips else None
    )
    spec = RunSpec(pack=PackSpec(context_tokens=256, step_tokens=4096), layout=layout)
    require_accepted(spec, MODEL, 4)
    require_step(spec, MODEL, 4, LENGTHS)
