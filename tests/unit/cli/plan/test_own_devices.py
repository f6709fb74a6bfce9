"""equipoise plan run.toml where ranks compute on CUDA devices: their file prices it."""

from pathlib import Path

import pytest

from equipoise.base.digest import digest
from equipoise.base.errors import PlanError
from equipoise.plan.run import read_obeyed
from equipoise.spec.device.cuda import cuda_file
from equipoise.spec.device.file import write_device_file
from equipoise.spec.plan import read_plan
from equipoise.spec.run.load import read_run
from support.cuda.machine import PRODUCT, calibrated_machine, cuda_device_file, show_devices
from support.verbs import plan


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run on a machine with two measured devices."""
    calibrated_machine(monkeypatch, tmp_path / "home", 2)
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "small"\n[data]\nsource = "text"\npath = "{texts}"\nvocab = 300\n'
        f'cache = "{cache}"\n[model]\nlayers = 2\nhidden = 32\nheads = 2\nkv_heads = 1\nffn = 48\n'
        f"vocab = 320\nhead_width = 16\n[pack]\ncontext_tokens = 256\nstep_tokens = 1024\n"
    )
    return file


def test_a_rank_for_each_device_and_its_own_digest(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    code, _, err = plan(capsys, run_toml)
    assert code == 0
    assert "The parts of this run's steps were never timed here" in err
    lock = run_toml.parent / "plan.lock"
    kept = read_plan(lock)
    assert kept.asked["ranks"] == "2"
    assert kept.read["machine"] == digest([PRODUCT, 2])
    assert kept.sources["power_w"] == "the driver, 2026-01-02: the board's limit"
    run = read_run(run_toml, [])
    assert read_obeyed(lock, run)[0] == kept
    write_device_file(cuda_file(PRODUCT), cuda_device_file(8))
    with pytest.raises(PlanError, match="stale"):
        read_obeyed(lock, run)


def test_more_ranks_than_devices_are_refused(
    capsys: pytest.CaptureFixture[str], run_toml: Path
) -> None:
    assert plan(capsys, run_toml, "--ranks", 3) == (
        2,
        "",
        "A plan prices one rank a device: ranks must be 1 to 2 on this machine, not 3.\n",
    )


def test_a_plan_needs_measured_devices(capsys: pytest.CaptureFixture[str], run_toml: Path) -> None:
    file = cuda_file(PRODUCT)
    file.unlink()
    assert plan(capsys, run_toml) == (
        2,
        "",
        f"The CUDA devices of this machine (2 of {PRODUCT}) were never measured: {file} is not "
        'there. Measure them: "equipoise calibrate".\n',
    )


def test_without_devices_cores_are_priced(
    capsys: pytest.CaptureFixture[str], run_toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_devices(monkeypatch, ())
    code, _, err = plan(capsys, run_toml, "--ranks", 1)
    assert code == 0 and "this-cpu.json is not there" in err
