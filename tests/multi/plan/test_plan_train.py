"""The whole way on this machine: init, calibrate, plan, train by the plan, report."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.observe.machine import usable_cores
from equipoise.spec.device.file import write_device_file
from equipoise.spec.device.here import device_file
from equipoise.spec.plan import read_plan
from equipoise.train.calibrate.measure import measure_machine
from support.devices.small_plan import SMALL
from support.progresses import CountedStages
from support.read_run import events

RANKS = min(2, len(usable_cores()))
SIZES = {
    "data.vocab": 300,
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 48,
    "model.head_width": 16,
    "pack.context_tokens": 256,
    "pack.step_tokens": 1024,
}
TRAIN = {"train.steps": 6, "train.warmup_steps": 2}


def verb(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    code = main([str(each) for each in argv])
    caught = capsys.readouterr()
    assert code == 0, caught.err
    return caught.out


def flags(keys: dict[str, object]) -> list[object]:
    return [part for name, value in keys.items() for part in (f"--{name}", value)]


def test_init_calibrate_plan_train_report(
    texts: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    verb(capsys, "init", tmp_path, "--from", "text", "--path", texts)
    run_toml, lock, folder = tmp_path / "run.toml", tmp_path / "plan.lock", tmp_path / "run"
    device_file().parent.mkdir(parents=True)
    write_device_file(device_file(), measure_machine(SMALL, device_file().parent, CountedStages()))
    keys = flags(SIZES | {"data.cache": cache})

    asked = ["plan", run_toml, "--ranks", RANKS, *keys, *flags({"layout.zero": 1})]
    code = main([str(each) for each in asked])
    caught = capsys.readouterr()
    assert code == 0 and "never measured" not in caught.err
    plan = read_plan(lock)
    assert plan.best.keys["layout.zero"] == 1

    train = ["train", run_toml, *keys, *flags(TRAIN), "--plan", lock, "--out", folder, "--quiet"]
    verb(capsys, *train)
    (start,) = events(folder, "start")
    for name, value in plan.best.keys.items():
        section, key = name.split(".")
        assert start["spec"][section][key] == value
        assert start["origins"][name] == "plan.lock"
    assert start["world"] == RANKS
    assert (folder / "plan.lock").read_bytes() == lock.read_bytes()
    assert len(events(folder, "step")) == 6

    found = json.loads(verb(capsys, "report", folder, "--json"))["runs"][0]["plan"]
    assert found["keys"] == plan.best.keys and found["steps"] == 5
    assert found["step_s"]["planned"] == plan.best.price["step_s"]
    assert found["step_s"]["measured"] > 0 and found["memory_bytes"]["measured"] > 0
    assert sum(each["planned"] for each in found["parts"]) == pytest.approx(
        found["step_s"]["planned"]
    )
    assert '"plan":{"keys"' in (folder / "report.html").read_text()

    # The lock of a run is a record: it is shown beside the run, whatever changed since.
    device_file().unlink()
    told = verb(capsys, "explain", "plan", folder / "plan.lock")
    assert "A step was planned to take" in told and "messages and waiting" in told
    beside = json.loads(verb(capsys, "explain", "plan", folder / "plan.lock", "--json"))
    assert beside["measured"] == found

    # The lock beside run.toml is stale without the curves that it was made from.
    assert main([str(each) for each in train]) == 4
    assert capsys.readouterr().err.startswith(f"{lock} is stale: curves changed since it was ")


@pytest.mark.skipif(RANKS < 2, reason="a pipeline has two ranks")
def test_a_run_obeys_the_stages_of_its_lock_and_keeps_them(
    texts: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Plans once and trains twice, in ranks that the command starts: 20 s, most of it imports."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    verb(capsys, "init", tmp_path, "--from", "text", "--path", texts)
    run_toml, lock, folder = tmp_path / "run.toml", tmp_path / "plan.lock", tmp_path / "run"
    keys = flags(SIZES | {"data.cache": cache, "model.layers": 4})
    asked = [
        "plan",
        run_toml,
        "--ranks",
        2,
        *keys,
        *flags({"layout.pp": 2, "layout.schedule": "1f1b"}),
    ]
    assert "Its stages: layers 0" in verb(capsys, *asked)
    row = json.loads(lock.read_text())
    assert row["best"]["stages"]["ranks"] == [0, 1]
    del row["digest"]  # an edited lock is refused with it

    def train(edges: list[int], steps: int) -> int:
        row["best"]["stages"] = {"edges": edges, "ranks": [0, 1]}
        lock.write_text(json.dumps(row))
        few = flags(TRAIN | {"train.steps": steps})
        words = ["train", run_toml, *keys, *few, "--plan", lock, "--out", folder, "--quiet"]
        return main([str(each) for each in words])

    assert train([0, 1, 3], 2) == 4
    assert capsys.readouterr().err == (
        f"{lock} splits layers at 0 1 3, and the model has 4. Edges ascend from 0 to 4. Correct "
        f"the file, or plan again: equipoise plan run.toml.\n"
    )
    assert train([0, 1, 4], 3) == 0
    assert train([0, 1, 4], 4) == 0
    capsys.readouterr()
    starts = events(folder, "start")
    assert [each["resumed_step"] for each in starts] == [0, 3]
    assert [each["stages"]["edges"] for each in starts] == [[0, 1, 4], [0, 1, 4]]
    assert "layers 0 on rank 0, 1-3 on rank 1" in verb(capsys, "inspect", folder)
    said = verb(capsys, "explain", "--plan", folder / "plan.lock")
    assert "Its stages: layers 0 on rank 0, 1-3 on rank 1." in said
