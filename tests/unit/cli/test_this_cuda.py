"""``this-cuda`` on the command line: refused if nothing was measured, else a device like others."""

import json
from pathlib import Path

import pytest

from equipoise.spec.device.by_name import DEVICES
from equipoise.spec.model.presets import preset
from equipoise.spec.plan import read_plan
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import LayoutSpec, RunSpec
from support.cuda.machine import calibrated_machine, devices, show_devices
from support.verbs import run

NONE = (
    "this-cuda names the CUDA devices of this machine, which has none that ranks would compute on. "
    f"Name a device of the table ({', '.join(DEVICES)}), or this-cpu."
)
STEP = ("--model", "llama3-8b", "--context-tokens", "8192", "--step-sequences", "16")
TWO_NODES = """\
name = "two"
[[nodes]]
device = "this-cuda"
nodes = 2
nic = "ib-ndr"
nics = 8
"""


@pytest.mark.parametrize("verb", [("simulate", "--layout", "dp=2"), ("plan",)])
def test_without_devices_it_is_refused(
    verb: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    show_devices(monkeypatch, ())
    asked = (*verb, *STEP, "--cluster")
    assert run(capsys, *asked, "this-cuda:2") == (2, "", f"{NONE}\n")
    file = tmp_path / "two.toml"
    file.write_text(TWO_NODES)
    assert run(capsys, *asked, file) == (2, "", f"two.toml:3  nodes.device: {NONE}\n")


def test_devices_that_were_not_measured_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    show_devices(monkeypatch, devices(8))
    code, out, err = run(capsys, "simulate", *STEP, "--layout", "dp=8", "--cluster", "this-cuda:8")
    assert (code, out) == (2, "")
    assert err == (
        "The CUDA devices of this machine (8 of NVIDIA H200) were never measured: "
        f"{tmp_path}/.cache/equipoise/this-cuda-nvidia-h200.json is not there. Measure them: "
        '"equipoise calibrate".\n'
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with eight measured devices; its home."""
    calibrated_machine(monkeypatch, tmp_path, 8)
    return tmp_path


def test_a_step_and_a_plan_are_priced_on_it(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("simulate", *STEP, "--layout", "dp=8,zero=3", "--json", "--cluster")
    code, out, err = run(capsys, *asked, "this-cuda:8")
    assert (code, err) == (0, "")
    here = json.loads(out)
    assert here["step_s"] > 0 and here["usd_per_step"] > 0
    assert "attention" not in here["extrapolated"]
    narrow = json.loads(run(capsys, *asked, "this-cuda:8", "--precision", "fp8")[1])
    assert narrow["step_s"] < here["step_s"]
    code, out, _ = run(
        *(capsys, "plan", *STEP, "--cluster", "this-cuda:8", "--seconds", "5"),
        *("--out", machine, "--json"),
    )
    assert code == 0
    lock = read_plan(machine / "plan.lock")
    assert lock.asked["cluster"] == "this-cuda:8"
    assert run(capsys, "explain", "plan", machine / "plan.lock")[0] == 0


def test_more_devices_than_were_measured_need_a_cluster_file(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("simulate", *STEP, "--layout", "dp=16", "--cluster")
    code, out, err = run(capsys, *asked, "this-cuda:16")
    assert (code, out) == (2, "")
    assert err == (
        "16 devices of this-cuda are more than the 8 that were measured here. Give 8 or fewer, or "
        'a cluster.toml of several nodes with device = "this-cuda" and the network card between '
        "them.\n"
    )
    file = machine / "two.toml"
    file.write_text(TWO_NODES)
    code, out, _ = run(capsys, *asked, file, "--json")
    assert code == 0 and json.loads(out)["step_s"] > 0


def test_a_form_asks_for_devices(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = machine / "two.toml"
    file.write_text(TWO_NODES)
    folder = machine / "run"
    spec = RunSpec(name="demo", layout=LayoutSpec(dp=16))
    write_resolved(folder, ResolvedFile(spec, preset("2m"), {}, 16, str(machine / "tokens"), ""))
    code, out, err = run(capsys, "launch", folder, "--form", "slurm", "--cluster", file)
    assert (code, err) == (0, "") and "--gpus-per-node=8\n" in out


def test_a_run_has_a_rank_for_each_device(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "config")
    assert code == 0
    assert "8 data-parallel ranks" in out
