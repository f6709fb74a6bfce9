"""Reasons: differences add up, a flip makes two equal, the size before a wall fits."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.explain import find_flip, find_walls, loses_by
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED

TERMS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1)


@given(TERMS, TERMS)
def test_differences_add_up_and_a_flip_makes_the_two_equal(best, other) -> None:
    if sum(best.values()) > sum(other.values()):
        best, other = other, best
    apart = loses_by(best, other)
    behind = sum(other.values()) - sum(best.values())
    assert abs(sum(apart.values()) - behind) < 1e-9
    flip = find_flip(best, other, "tp=2")
    if flip is None:
        assert all(best[name] <= other.get(name, 0.0) for name in best)
        return
    for terms in (best, other):
        terms[flip.term] = terms.get(flip.term, 0.0) * flip.times
    assert abs(sum(best.values()) - sum(other.values())) < 1e-6 * sum(best.values())


def test_the_size_before_a_wall_fits() -> None:
    model, machine = PLANNED["llama3-8b"], Machine(find_cluster("h100-sxm:8"))
    choice = Choice(Layout(dp=8, zero=3), StepOptions(8192, 8))
    walls = find_walls(model, machine, choice)
    assert [wall.grows for wall in walls] == sorted(
        (wall.grows for wall in walls),
        key=lambda name: next(w.after / w.before for w in walls if w.grows == name),
    )
    assert {wall.grows for wall in walls} == {"window", "micro-batch", "layers"}
    for wall in walls:
        assert wall.memory_gib > wall.capacity_gib
    window = next(wall for wall in walls if wall.grows == "window")
    assert window.before == 8192 and window.after == 12_288
    fits = dataclasses.replace(choice.options, context_tokens=10_240)
    assert price_step(model, machine, choice.layout, fits).fits
