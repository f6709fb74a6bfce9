"""The benches of accelerators, run on a CPU with tiny sizes: the same code, and other figures."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.spec.model.presets import ModelSpec

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MODEL = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=128, head_width=8)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The benches of this checkout, which is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        import bench.gpu.curve
        import bench.gpu.kernels
        import bench.gpu.memory
        import bench.gpu.run
        import bench.gpu.step
        import bench.gpu.tiles

        yield bench.gpu
    for name in [each for each in sys.modules if each == "bench" or each.startswith("bench.")]:
        del sys.modules[name]


def test_a_step_stands_beside_those_of_others(gpu: Any) -> None:
    sizes = gpu.step.Sizes(model=MODEL, tokens=256, median_tokens=60.0, rounds=1, peak_size=64)
    figures = gpu.step.measure(CPU, sizes)
    assert figures["device"] == "cpu" and figures["environment"]["date"]
    sides = figures["sides"]
    assert {"ours", "transformers flattened, sdpa"} <= set(sides)
    assert set(figures["ours over"]) == set(sides) - {"ours"}
    for side in sides.values():
        assert side["tokens_per_s"] * side["step_s"]["median"] == pytest.approx(256)
        assert side["mfu"] > 0
    assert sum(figures["documents"]) == 256


def test_kernels_stand_beside_the_roofline(gpu: Any) -> None:
    sizes = gpu.kernels.Sizes(
        model=MODEL, doc_tokens=(32, 16), stream_elements=1 << 12, peak_size=64, samples=1, calls=1
    )
    figures = gpu.kernels.measure(CPU, sizes)
    rows = figures["kernels"]
    assert {"attention forward", "attention backward", "feed-forward", "norm"} <= set(rows)
    for row in rows.values():
        assert row["share_of_roofline"] == row["roofline_s"] / row["s"]["median"] > 0
    # The backward of attention has 2.5 times the products of its forward.
    parts = [rows[f"attention {way}"]["roofline_s"] for way in ("backward", "forward")]
    assert parts[0] / parts[1] == pytest.approx(2.5)
    assert figures["products predicted"] == {}  # a CPU is not in the table


def test_tiles_are_fewer_calls(gpu: Any) -> None:
    sizes = gpu.tiles.Sizes(
        ranks=2, heads=4, kv_heads=2, head_width=8, packs=((8,) * 8,), samples=1
    )
    figures = gpu.tiles.measure(CPU, sizes)
    assert [row["strategy"] for row in figures["rows"]] == list(sizes.strategies)
    for row in figures["rows"]:
        assert 0 < row["one call a round"]["calls"] < row["one call a tile"]["calls"]


def test_the_price_curve_stands_beside_micro_batches(gpu: Any) -> None:
    sizes = gpu.curve.Sizes(
        model=MODEL, context_tokens=64, medians=(16.0,), shares=(0.5, 1.0), samples=1
    )
    figures = gpu.curve.measure(CPU, sizes)
    assert [row["tokens"] for row in figures["rows"]] == [32, 64]
    for row in figures["rows"]:
        assert row["error"] == row["predicted_s"] / row["measured_s"] - 1


def test_memory_is_forecast_and_measured(gpu: Any) -> None:
    cases = (gpu.memory.Case(64), gpu.memory.Case(64, "fp32", "full", zero=3))
    figures = gpu.memory.measure(CPU, gpu.memory.Sizes(MODEL, 32, cases))
    for row in figures["rows"]:
        assert sum(row["terms"].values()) == row["forecast_bytes"]
        assert row["error"] == row["forecast_bytes"] / max(1, row["measured_bytes"]) - 1


def test_without_a_device_one_sentence_says_so(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.run.main(has_device=False, results=tmp_path) == 2
    said = "This machine has no CUDA device, so nothing was measured.\n"
    assert capsys.readouterr().err == said
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_bench_alone_says_so_too() -> None:
    command = [sys.executable, "-m", "bench.gpu.tiles"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = "This machine has no CUDA device, so nothing was measured.\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", said)


def test_out_of_time_every_part_is_named(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.run.main(has_device=True, results=tmp_path, limit_s=0.0) == 1
    parts = ["tests/gpu", *(f"bench.gpu.{name}" for name in gpu.run.BENCHES)]
    assert capsys.readouterr().err == f"Failed: {', '.join(parts)}\n"
