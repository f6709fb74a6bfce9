"""DLRM's products are those of each pair once."""

import pytest
import torch

from equipoise.base.errors import ModelError
from equipoise.recsys.models.dlrm import DLRM
from equipoise.spec.tables.table import TableSpec


def test_the_top_gets_each_pair_once() -> None:
    model = DLRM([TableSpec("a", 3, 4), TableSpec("b", 3, 4)], 2, bottom=(5,), top=(6,))
    seen: list[torch.Tensor] = []
    model.top.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    pooled, numbers = torch.randn(3, 8), torch.randn(3, 2)
    assert model(pooled, numbers).shape == (3,)
    own = torch.relu(model.vectors.mlp(numbers))
    vectors = (own, pooled[:, :4], pooled[:, 4:])
    pairs = [(vectors[i] * vectors[j]).sum(1) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert torch.allclose(seen[0][:, :3], torch.stack(pairs, 1), atol=1e-6)
    assert torch.allclose(seen[0][:, 3:], torch.cat(vectors, 1))


def test_tables_of_another_width_are_refused() -> None:
    with pytest.raises(ModelError) as error:
        DLRM([TableSpec("a", 3, 4), TableSpec("b", 3, 8)], 0)
    assert str(error.value) == (
        "DLRM multiplies embeddings of one width, and its tables have 4, 8. Give all tables one "
        "width."
    )
