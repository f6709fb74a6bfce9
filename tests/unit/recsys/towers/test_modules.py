"""What a tower makes of its vectors, and how many weights that takes."""

import pytest
import torch

from equipoise.recsys.towers.modules import make_module
from equipoise.spec.towers import TowerSizes

X = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "sizes",
    [
        TowerSizes("identity", 6, 0, 0, 2),
        TowerSizes("linear", 6, 2, 0, 2),
        TowerSizes("linear", 6, 0, 3, 2),
        TowerSizes("cross", 6, 0, 0, 2),
        TowerSizes("cross", 6, 1, 5, 3),
    ],
)
def test_shapes_and_weights_are_those_that_are_planned(sizes: TowerSizes) -> None:
    module = make_module(sizes, 4, seed=0, tower=0)
    assert module(X).shape == (5, *sizes.leaving(4))
    assert sum(each.numel() for each in module.parameters()) == sizes.count_weights(4)


def test_a_linear_tower_mixes_vectors_then_cuts_each() -> None:
    module = make_module(TowerSizes("linear", 6, 2, 3, 2), 4, seed=0, tower=0)
    mix, cut = module.mix.linear.weight, module.cut
    expected = torch.einsum("vf,bfw,nw->bvn", mix, X, cut.weight) + cut.bias
    assert torch.allclose(module(X), expected, atol=1e-6)


def test_a_cross_tower_has_products_of_its_vectors() -> None:
    module = make_module(TowerSizes("cross", 6, 0, 0, 2), 4, seed=0, tower=0)
    flat = X.flatten(1)
    expected = flat * module.cross.up(module.cross.down(flat)) + flat
    assert torch.allclose(module(X).flatten(1), expected, atol=1e-6)


def test_weights_follow_from_the_seed_and_the_towers_number() -> None:
    sizes = TowerSizes("linear", 6, 2, 0, 2)
    drawn = [
        make_module(sizes, 4, seed=seed, tower=tower).mix.linear.weight
        for seed, tower in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])
