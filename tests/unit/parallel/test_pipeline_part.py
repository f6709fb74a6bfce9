"""Parts of a decoder: every weight once, by its name in the whole, with its value."""

import doctest
import importlib

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.nn.decoder import Decoder, initialize
from equipoise.parallel.pipeline.part import DecoderPart, make_part
from support.decoders import MODEL, TIED, batches_of, uneven_edges


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("held", [[(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)], [(0, 1, 2, 3)]])
def test_parts_have_the_weights_of_the_whole(model, held) -> None:
    whole = Decoder(model)
    initialize(whole, 5)
    weights, found = dict(whole.named_parameters()), []
    for stages in held:
        part = make_part(model, (0, 1, 1, 4, 6), stages, seed=5)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, weights[name]), name
            found.append(name)
    twice = ["embed.weight"] if model.tied and len(held) == 4 else []
    assert sorted(found) == sorted([*weights, *twice])


def test_stages_one_after_another_are_the_whole() -> None:
    whole = Decoder(TIED).double()
    initialize(whole, 0)
    (batch,) = batches_of([(6, 3)])
    logits = whole(batch.tokens_t, batch.pack)
    x = batch.tokens_t
    for stage in range(4):
        x = DecoderPart(whole, uneven_edges(6, 4), [stage])(x, batch.pack, stage=stage)
    assert torch.equal(x, logits)


def test_edges_and_stages_that_are_none() -> None:
    whole = Decoder(MODEL)
    for edges, named in (((0, 4), "0, 4"), ((0, 5, 4, 6), "0, 5, 4, 6"), ((), "(none)")):
        with pytest.raises(LayoutError) as told:
            DecoderPart(whole, edges, [0])
        assert str(told.value) == (
            f"Stage edges {named} do not fit 6 layers. Give them ascending, from 0 to 6."
        )
    for held, named in (([1, 2], "stage 2"), ([], "no stage")):
        with pytest.raises(LayoutError) as told:
            DecoderPart(whole, (0, 3, 6), held)
        assert str(told.value) == (
            f"A rank cannot hold {named} of 2 stages. Give it its stages of the schedule's rank_of."
        )


def test_examples() -> None:
    module = importlib.import_module("equipoise.parallel.pipeline.part")
    assert doctest.testmod(module).failed == 0
