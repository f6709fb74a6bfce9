"""Numbers of two bytes that are widened where a processor is faster so, on either kind of it."""

import pytest
import torch

from equipoise.nn.device.halves import widens
from equipoise.nn.tile import attend_tile, attend_tile_backward
from equipoise.serve.engine import fused
from equipoise.serve.engine.fused import FusedDecoder
from support.serving.paged import PLAIN, built


@pytest.fixture(params=[False, True], ids=["without matrix units", "with them"])
def has_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return bool(request.param)


def test_halves_alone_are_widened(has_units: bool) -> None:
    assert widens(torch.zeros(1, dtype=torch.bfloat16)) is not has_units
    assert widens(torch.zeros(1, dtype=torch.float16)) is not has_units
    assert not widens(torch.zeros(1))
    assert not widens(torch.zeros(1, dtype=torch.bfloat16, device="meta"))


@pytest.mark.usefixtures("has_units")
@pytest.mark.parametrize("kind", ["full", "causal", "anticausal"])
def test_attention_and_its_gradients_are_those_of_float64(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(24, h, 16, generator=random).bfloat16() for h in (4, 2, 2, 4)]
    q, k, v, grad = given
    o, lse = attend_tile(q, k, v, kind)
    gradients = attend_tile_backward(grad, q, k, v, o, lse, kind)
    wide = [x.double() for x in given]
    wanted, wanted_lse = attend_tile(*wide[:3], kind)
    exact = attend_tile_backward(wide[3], *wide[:3], wanted, wanted_lse, kind)
    assert {each.dtype for each in (o, *gradients)} <= {torch.bfloat16, torch.float32}
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0.01, atol=0.01)
    for ours, theirs in zip((o, *gradients), (wanted, *exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.03, atol=0.03)


def test_many_rows_are_widened_where_the_plain_weights_were_kept(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    widened = fused._widened

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return widened(*args)

    monkeypatch.setattr(fused, "_widened", counted)
    decoder = built(PLAIN).bfloat16()
    x = torch.randn(130, PLAIN.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    product = decoder.layers[0].feed_forward.gate
    wanted = x.double() @ product.weight.double().T
    ours = FusedDecoder(decoder, keeps_plain=True).layers[0]._gate_up(x)
    torch.testing.assert_close(ours[:, : wanted.shape[1]].double(), wanted, rtol=0.02, atol=0.02)
    assert count == (0 if has_units else 1)
