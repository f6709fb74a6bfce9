"""DHEN's layers are an ensemble of different modules over a shortcut."""

import pytest
import torch

from equipoise.base.errors import ModelError
from equipoise.recsys.models.dhen import DHEN, DhenLayer
from equipoise.spec.tables.table import TableSpec

ALL = ("dot", "cross", "attention", "linear", "convolution")
TABLES = [TableSpec("a", 3, 4), TableSpec("b", 3, 4)]


@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted"])
def test_a_layer_puts_its_modules_together(ensemble: str) -> None:
    torch.manual_seed(0)
    layer = DhenLayer(5, 4, out=7, modules=ALL, ensemble=ensemble, low_rank=2)
    x = torch.randn(3, 5, 4)
    outs = [part(x) for part in layer.parts]
    if ensemble == "concat":
        assert [out.shape[1] for out in outs] == [1, 1, 2, 1, 2]
        mixed = torch.cat(outs, dim=1)
    else:
        mixed = sum(outs) / (len(outs) if ensemble == "weighted" else 1)
    expected = torch.nn.functional.layer_norm(mixed + layer.shortcut(x), (4,))
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_modules_read_every_vector_and_learn() -> None:
    model = DHEN(TABLES, 2, layers=2, modules=ALL, ensemble="weighted", vectors=3)
    pooled = torch.randn(4, 8, requires_grad=True)
    model(pooled, torch.randn(4, 2)).sum().backward()
    assert bool((pooled.grad != 0).all())
    assert all(each.grad is not None for each in model.parameters())


def test_what_leaves_a_layer_empty_is_refused() -> None:
    with pytest.raises(ModelError) as error:
        DHEN(TABLES, 0, modules=())
    assert str(error.value) == (
        'model.modules is empty, so a layer of DHEN has nothing to mix. Name one: "dot".'
    )
    with pytest.raises(ModelError) as error:
        DHEN(TABLES, 0, modules=("dot", "linear"), vectors=1)
    assert str(error.value) == (
        "model.vectors = 1 leaves none to some of 2 modules. Give 2 or more, or set "
        'model.ensemble to "sum".'
    )
