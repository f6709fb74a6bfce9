"""Numbers of two bytes that are widened where a processor is faster so, on either kind of it."""

from pathlib import Path

import pytest
import torch

from equipoise.nn.device import halves
from equipoise.nn.device.halves import widens
from equipoise.nn.tile import attend_tile, attend_tile_backward
from equipoise.serve.engine import fused
from equipoise.serve.engine.fused import FusedDecoder
from support.serving.paged import PLAIN, built

KINDS = {"avx2": (False, False), "avx512": (False, True), "amx": (True, True)}


@pytest.fixture(params=[(kind, vendor) for kind in KINDS for vendor in ("Intel", "AMD")], ids=str)
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A processor of each kind; whether its products of bf16 are faster than those of fp32."""
    kind, vendor = request.param
    has_amx, has_bf16 = KINDS[kind]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    gains = fused._gains
    monkeypatch.setattr(fused, "_gains", lambda weight: has_bf16 and gains(weight))
    monkeypatch.setattr(halves, "_is_amd", lambda: vendor == "AMD")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return has_amx or (has_bf16 and vendor == "AMD")


def test_halves_alone_are_widened(is_fast: bool) -> None:
    assert widens(torch.zeros(1, dtype=torch.bfloat16)) is not is_fast
    has_amx = torch.cpu._is_amx_tile_supported()
    assert widens(torch.zeros(1, dtype=torch.float16)) is not has_amx
    assert not widens(torch.zeros(1))
    assert not widens(torch.zeros(1, dtype=torch.bfloat16, device="meta"))


def test_the_maker_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nvendor_id : AuthenticAMD\n")
    assert halves._is_amd(tmp_path / "cpuinfo")
    assert not halves._is_amd(tmp_path / "none")


@pytest.mark.usefixtures("is_fast")
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
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
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
    product = decoder.layers[0].attention.query
    wanted = x.double() @ product.weight.double().T
    ours = FusedDecoder(decoder, keeps_plain=True).layers[0]._qkv(x)
    torch.testing.assert_close(ours[:, : wanted.shape[1]].double(), wanted, rtol=0.02, atol=0.02)
    assert count == (0 if is_fast else 1)
