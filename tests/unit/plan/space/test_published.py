"""Published recipes stand in the lattices of their own models."""

import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.space.listing import list_lattice
from equipoise.plan.space.published import PublishedRecipe, recipes
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.model.presets import PLANNED


@pytest.mark.parametrize("recipe", recipes(), ids=lambda each: f"{each.models[0]}:{each.devices}")
def test_a_recipe_is_a_choice_of_its_lattice(recipe: PublishedRecipe) -> None:
    assert recipe.source
    find_cluster(f"{recipe.device}:{recipe.devices}")
    base = StepOptions(recipe.context_tokens, recipe.step_sequences, precision=recipe.precision)
    for model in recipe.models:
        lattice = list_lattice(PLANNED[model], recipe.devices, base)
        rows = recipe.rows(lattice).tolist()
        assert 1 <= len(rows) <= 64
        for row in rows:
            choice = lattice.choice(row)
            assert choice.layout.world == recipe.devices
            for name, value in recipe.said:
                of = choice.layout if hasattr(choice.layout, name) else choice.options
                assert getattr(of, name) == value
