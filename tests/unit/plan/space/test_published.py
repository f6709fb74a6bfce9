"""Published recipes stand in the lattices of their own models."""

import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.listing import list_lattice
from equipoise.plan.space.published import PublishedRecipe, recipes
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.recompute import planned_modules


@pytest.mark.parametrize("recipe", recipes(), ids=lambda each: f"{each.models[0]}:{each.devices}")
def test_a_recipe_is_a_choice_of_its_lattice(recipe: PublishedRecipe) -> None:
    assert recipe.source
    find_cluster(f"{recipe.device}:{recipe.devices}")
    base = StepOptions(recipe.context_tokens, recipe.step_sequences, precision=recipe.precision)
    for model in recipe.models:
        modules = planned_modules(PLANNED[model], None)
        lattice = list_lattice(PLANNED[model], recipe.devices, base, modules=modules)
        rows = recipe.rows(lattice).tolist()
        assert 1 <= len(rows) <= 64
        for row in rows:
            choice = lattice.choice(row)
            assert choice.layout.world == recipe.devices
            for name, value in recipe.said:
                of = choice.layout if hasattr(choice.layout, name) else choice.options
                assert getattr(of, name) == value


def test_modules_that_nobody_here_recomputes_are_left_open() -> None:
    recipe = next(each for each in recipes() if ("recompute", "mla_up_proj+mlp") in each.said)
    base = StepOptions(recipe.context_tokens, recipe.step_sequences, precision="fp8")
    lattice = list_lattice(PLANNED["deepseek-v3"], recipe.devices, base)
    chosen = [lattice.choice(row).options.recompute for row in recipe.rows(lattice).tolist()]
    assert set(chosen) == {"none", "selective", "full"}
