"""Wukong's factorization machine is the pairwise form, and a layer's output is a polynomial."""

import torch

from equipoise.recsys.models.wukong import Wukong, WukongLayer, compress_products
from equipoise.spec.tables.table import TableSpec


def test_the_machine_equals_the_pairwise_form() -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 4, generator=source, dtype=torch.float64)
    y = torch.randn(7, 3, generator=source, dtype=torch.float64)
    pairwise = torch.zeros(5, 7, 3, dtype=torch.float64)
    for one in range(7):
        for other in range(7):
            product = (x[:, one] * x[:, other]).sum(dim=1)
            pairwise[:, one] += product[:, None] * y[other]
    assert torch.allclose(compress_products(x, y), pairwise, atol=1e-12)


def test_layers_have_products_of_two_to_the_power_of_their_number() -> None:
    """A polynomial's differences of one order more than its degree vanish; of its degree, not."""
    torch.manual_seed(0)
    sizes = {"fm_vectors": 3, "linear_vectors": 2, "compressed": 2, "hidden": (), "norm": False}
    layers = [WukongLayer(5, 4, **sizes).double(), WukongLayer(5, 4, **sizes).double()]
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    points = torch.arange(8, dtype=torch.float64)
    rows = points.view(-1, 1, 1) * x
    for depth, layer in enumerate(layers, start=1):
        rows = layer(rows)
        differences = rows.flatten(1).detach()
        size = differences.abs().max()
        for order in range(2**depth + 1):
            assert order > 2**depth or differences.abs().max() > 1e-6 * size
            differences = differences[1:] - differences[:-1]
        assert differences.abs().max() < 1e-9 * size


def test_vectors_from_one_layer_enter_the_next() -> None:
    tables = [TableSpec("a", 3, 4), TableSpec("b", 3, 4)]
    model = Wukong(tables, 2, layers=3, fm_vectors=2, linear_vectors=1, compressed=2, hidden=(5,))
    assert [type(layer.shortcut).__name__ for layer in model.layers] == ["Identity"] * 3
    assert model(torch.randn(6, 8), torch.randn(6, 2)).shape == (6,)
