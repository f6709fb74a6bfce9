"""Cross layers are their formula, and raise the degree by one."""

import torch

from equipoise.recsys.models.dcn import DCN, CrossLayer
from equipoise.spec.tables.table import TableSpec


def test_a_layer_is_its_formula() -> None:
    layer = CrossLayer(6, 2)
    first, x = torch.randn(3, 6), torch.randn(3, 6)
    matrix = layer.up.weight @ layer.down.weight
    assert torch.linalg.matrix_rank(matrix) == 2
    expected = first * (x @ matrix.T + layer.up.bias) + x
    assert torch.allclose(layer(first, x), expected, atol=1e-6)


def test_layers_raise_the_degree_by_one_each() -> None:
    torch.manual_seed(0)
    model = DCN([TableSpec("a", 3, 4), TableSpec("b", 3, 4)], 0, layers=3, top=()).double()
    rows = torch.arange(7, dtype=torch.float64)[:, None] * torch.randn(1, 8, dtype=torch.float64)
    values = model(rows, torch.zeros(7, 0)).detach()
    size = values.abs().max()
    for _ in range(4):
        assert values.abs().max() > 1e-6 * size
        values = values.diff()
    assert values.diff().abs().max() < 1e-9 * size
