"""Every architecture that a run.toml may name is built from the keys that its row names."""

import inspect
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from equipoise.base.errors import ModelError
from equipoise.recsys.models.catalog import MODELS, build_model
from equipoise.spec.architectures import ARCHITECTURES, Architecture, DhenModule, readers_of
from equipoise.spec.recommend import RankModelSpec
from equipoise.spec.tables.table import TableSpec


@pytest.mark.parametrize("name", get_args(Architecture))
def test_every_architecture_is_built_of_its_keys(name: Architecture) -> None:
    row = ARCHITECTURES[name]
    own = set(inspect.signature(MODELS[name]).parameters) - {"tables", "numbers", "seed"}
    assert own == {"bottom", "top", *row.keys}
    assert own <= {each.name for each in fields(RankModelSpec)}
    spec = replace(RankModelSpec(), architecture=name)
    tables = [TableSpec("a", 3, spec.width), TableSpec("b", 3, spec.width)]
    model = build_model(spec, tables, 2, seed=1)
    same = build_model(spec, tables, 2, seed=1)
    for ours, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert model(torch.randn(5, 2 * spec.width), torch.randn(5, 2)).shape == (5,)


@pytest.mark.parametrize("name", get_args(Architecture))
def test_a_rank_without_samples_has_gradients_of_zero(name: Architecture) -> None:
    """Whose sum over ranks is that of the others."""
    spec = replace(RankModelSpec(), architecture=name, modules=get_args(DhenModule))
    tables = [TableSpec("a", 3, spec.width), TableSpec("b", 3, spec.width)]
    model = build_model(spec, tables, 2, seed=1)
    logits = model(torch.zeros(0, 2 * spec.width), torch.zeros(0, 2))
    assert logits.shape == (0,)
    logits.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in model.parameters())


@pytest.mark.parametrize(("name", "shown"), [("dhen", "DHEN"), ("wukong", "Wukong")])
def test_a_norm_of_one_float_leaves_nothing(name: Architecture, shown: str) -> None:
    """All samples would have one score."""
    spec = RankModelSpec(architecture=name, width=1)
    with pytest.raises(ModelError) as error:
        build_model(spec, [TableSpec("a", 3, 1)], 0, seed=1)
    assert str(error.value) == (
        f"{shown} norms each vector, which leaves nothing of one float. Give model.width, or "
        "model.tower_width, of 2 or more."
    )


def test_a_norm_of_one_product_leaves_nothing() -> None:
    spec = RankModelSpec(architecture="wukong", compressed=1)
    with pytest.raises(ModelError) as error:
        build_model(spec, [TableSpec("a", 3, spec.width)], 0, seed=1)
    assert str(error.value) == (
        "Wukong norms the products of its vectors, which leaves nothing of one. Give "
        "model.compressed of 2 or more."
    )
    build_model(spec, [TableSpec("a", 3, spec.width)], 1, seed=1)


def test_all_read_what_no_row_names() -> None:
    assert readers_of("top") == ()
    assert readers_of("modules") == ("dhen",)
