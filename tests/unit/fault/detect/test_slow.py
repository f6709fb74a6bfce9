"""Slow ranks among even ones: made-up steps, and the noise of real ones."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.fault.detect.slow import PARTS, Part, SlowRank, SlowRanks, StepTimes

BEFORE, WITHIN = 40, 20
JITTER = np.loadtxt(Path(__file__).with_name("jitter.csv"), delimiter=",", skiprows=1)
"""Seconds with the core over those predicted, by step and rank of a real run of even ranks."""


def steps_of(
    ranks: int,
    steps: int,
    *,
    seed: int,
    slow: int | None = None,
    part: Part = "compute",
    by: float = 0.2,
    noise: float = 0.05,
    jitter: np.ndarray | None = None,
) -> list[StepTimes]:
    """Steps whose work differs from rank to rank by a factor of four; one rank becomes slow."""
    draws = np.random.default_rng(seed)
    made = []
    for step in range(steps):
        predicted_s = draws.uniform(0.05, 0.2, ranks)
        factor = np.exp(noise * draws.standard_normal(ranks))
        if jitter is not None:
            factor = jitter[draws.integers(len(jitter))]
        own_s = dict.fromkeys(PARTS, np.zeros(0)) | {
            "data": draws.uniform(0.001, 0.003, ranks),
            "compute": 1.3 * predicted_s * factor,
            "communication": draws.uniform(0.002, 0.003, ranks),
        }
        if slow is not None and step >= BEFORE:
            own_s[part][slow] += by * 1.3 * predicted_s[slow]
        made.append(
            StepTimes(
                predicted_s,
                own_s["data"],
                own_s["compute"],
                own_s["communication"],
                own_s["compute"].copy(),
            )
        )
    return made


def watched(steps: list[StepTimes]) -> list[SlowRank]:
    watch = SlowRanks(len(steps[0].predicted_s))
    return [
        verdict for at, times in enumerate(steps, start=1) for verdict in watch.learn(at, times)
    ]


def is_named(verdicts: list[SlowRank], rank: int, part: Part) -> bool:
    """Whether the first verdict names the rank and the part in time."""
    if not verdicts:
        return False
    first = verdicts[0]
    return (first.rank, first.part) == (rank, part) and 0 < first.step - BEFORE <= WITHIN


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_slower_by_a_fifth_is_named_with_its_part(ranks: int, part: Part) -> None:
    trials = 20
    named = [
        is_named(
            watched(steps_of(ranks, BEFORE + WITHIN, seed=seed, slow=ranks - 1, part=part)),
            ranks - 1,
            part,
        )
        for seed in range(trials)
    ]
    assert sum(named) >= 0.95 * trials


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_it_is_named_in_the_noise_of_a_real_run(part: Part) -> None:
    trials = 20
    named = [
        is_named(
            watched(steps_of(2, BEFORE + WITHIN, seed=seed, slow=0, part=part, jitter=JITTER)),
            0,
            part,
        )
        for seed in range(trials)
    ]
    assert sum(named) >= 0.95 * trials


@pytest.mark.long
def test_even_ranks_are_not_accused_in_ten_thousand_steps() -> None:
    """By the noise of a real run, drawn in stretches of 16 steps, as they followed each other."""
    draws = np.random.default_rng(0)
    starts = draws.integers(len(JITTER) - 16, size=625)
    steps = []
    for row in JITTER[(starts[:, None] + np.arange(16)).ravel()]:
        work, tiny = draws.uniform(0.05, 0.2, 2), np.full(2, 0.002)
        steps.append(StepTimes(work, tiny, work * row, tiny, work * row))
    assert len([each for each in watched(steps) if not each.is_over]) <= 1


def test_a_rank_that_works_as_predicted_is_not_slow_however_much_it_has() -> None:
    work = np.array([0.1, 0.4])
    even = StepTimes(work, np.full(2, 0.001), 1.2 * work, np.zeros(2), 1.2 * work)
    assert watched([even] * 200) == []


def test_a_few_long_steps_accuse_nobody() -> None:
    steps = steps_of(2, 100, seed=0, noise=0.02)
    for at in (50, 51, 52, 53, 54):
        steps[at].compute_s[1] *= 5
        steps[at].core_s[1] *= 5
    assert watched(steps) == []


def under_load(seed: int, steps: int) -> list[StepTimes]:
    """Even ranks whose cores other programs take for some 15 steps at a time, now and then."""
    draws, left, taken = np.random.default_rng(seed), np.zeros(2, int), np.zeros(2)
    made = []
    for _ in range(steps):
        for rank in np.flatnonzero((left == 0) & (draws.random(2) < 1 / 30)):
            left[rank], taken[rank] = draws.geometric(1 / 15), draws.uniform(0.15, 0.5)
        is_taken, left = left > 0, np.maximum(left - 1, 0)
        work = draws.uniform(0.05, 0.2, 2)
        core = 1.2 * work * np.exp(0.08 * draws.standard_normal(2)) * (1 + 0.08 * is_taken)
        whole = core * (1 + taken * is_taken * draws.uniform(0.5, 1.5, 2))
        made.append(StepTimes(work, np.full(2, 0.002), whole, np.full(2, 0.002), core))
    return made


def test_load_that_comes_and_goes_accuses_nobody() -> None:
    """Without noise that is measured over several steps, and as much proof of a host as of a rank,
    25 ranks were named in these steps."""
    verdicts = [each for seed in range(4) for each in watched(under_load(seed, 600))]
    assert len([each for each in verdicts if not each.is_over]) <= 8


def test_a_rank_whose_core_others_take_is_slow_by_its_host() -> None:
    steps = steps_of(2, 80, seed=0, noise=0.02)
    for times in steps[40:]:
        times.compute_s[1] *= 1.3
    (verdict,) = watched(steps)
    assert (verdict.rank, verdict.part, verdict.cause) == (1, "compute", "host")
    assert verdict.sentence == (
        f"Rank 1 is slow: since step {verdict.since} it has taken {verdict.excess:.0%} longer for "
        "its work than the other ranks take for theirs, most of it in forward and backward. Other "
        f"programs had its core for {verdict.host_share:.0%} of the extra time: look at what else "
        "runs on its host."
    )


def test_who_recovers_is_cleared() -> None:
    steps = steps_of(3, 80, seed=0, slow=1, noise=0.02) + steps_of(3, 80, seed=1, noise=0.02)
    named, cleared = watched(steps)
    assert (named.rank, named.cause, named.is_over) == (1, "rank", False)
    assert 0.15 < named.excess < 0.25 and 0.01 < named.extra_s < 0.06
    assert (cleared.rank, cleared.is_over) == (1, True)
    assert cleared.sentence == f"Rank 1 is as fast as the others again (step {cleared.step})."
    assert named.sentence == (
        f"Rank 1 is slow: since step {named.since} it has taken {named.excess:.0%} longer for its "
        "work than the other ranks take for theirs, most of it in forward and backward."
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000), st.booleans())
def test_any_steps_can_be_watched(ranks: int, seed: int, is_unknown: bool) -> None:
    """Also ranks without documents, and without anything that is known; alike in any run of it."""
    draws = np.random.default_rng(seed)
    steps = []
    for _ in range(30):
        times = [draws.choice([0.0, 0.1, np.nan if is_unknown else 0.2], ranks) for _ in range(5)]
        steps.append(StepTimes(*times))
    assert watched(steps) == watched(steps)
    if ranks == 1:
        assert watched(steps) == []
