"""``equipoise launch`` from its arguments to what it prints, and what it hands over."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import LayoutSpec, RunSpec

CLUSTER = """\
name = "two"
[[nodes]]
device = "this-cpu"
nodes = 2
devices_per_node = 2
nic = "ethernet-25"
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo"
    spec = RunSpec(name="demo", layout=LayoutSpec(dp=4))
    corpus = str(tmp_path / "cache" / "tokens")
    write_resolved(folder, ResolvedFile(spec, preset("2m"), {}, 4, corpus, ""))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return folder


def launch(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["launch", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_prepared_run_is_printed_and_nothing_is_run(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = launch(capsys, prepared)
    assert (code, err) == (0, "")
    assert out.startswith("#!/bin/bash\n# run demo, 4 ranks on one node. Start it on the node.\n")
    assert f"\nrun={prepared}\n" in out
    assert "--prepare" not in out
    assert [path.name for path in prepared.iterdir()] == ["resolved.json"]


def test_a_run_toml_is_prepared_by_the_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my run.toml"
    path.write_text('name = "mine"\n')
    words = ("--form", "slurm", "--cluster", "h100-sxm:16", "--name", "b", "--train.steps", 40)
    code, out, _ = launch(capsys, path, "--out", tmp_path / "b", *words)
    assert code == 0
    assert "\n# run b, 16 ranks on 2 nodes of 8.\n" in out
    assert (
        f"\npython3 -m equipoise.cli.main train '{path}' --train.steps=40 --name b "
        f"--layout.dp=16 --out {tmp_path}/b --prepare\n"
    ) in out


def test_as_json(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.toml"
    words = ("--cluster", cluster, "--host", "a", "--json")
    found = json.loads(launch(capsys, prepared, *words)[1])
    text = launch(capsys, prepared, *words[:-1])[1]
    assert found == {
        "form": "torchrun",
        "nodes": 2,
        "ranks_per_node": 2,
        "text": text,
        "submitted": None,
        "answer": None,
    }


def test_what_was_submitted_is_said(
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts = {
        "kubectl": 'echo "$@"; cat > "$0.given"; echo job created',
        "sbatch": "cat > /dev/null; echo Submitted batch job 17",
        "python": 'echo "$@" > "$0.given"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pod = ("--form", "kubernetes", "--image", "i", "--claim", "c", "--mount", tmp_path)
    code, out, _ = launch(capsys, prepared, *pod, "--submit")
    assert (code, out) == (0, "Ran kubectl apply -f -: apply -f -\njob created\n")
    assert (tmp_path / "kubectl.given").read_text() == launch(capsys, prepared, *pod)[1]
    slurm = (prepared, "--form", "slurm", "--submit")
    assert launch(capsys, *slurm)[1] == "Ran sbatch: Submitted batch job 17\n"
    assert launch(capsys, *slurm, "--quiet")[1] == ""
    found = json.loads(launch(capsys, *slurm, "--json")[1])
    assert (found["submitted"], found["answer"]) == ("sbatch", "Submitted batch job 17")
    code, out, _ = launch(capsys, prepared, "--python", tmp_path / "python", "--submit")
    assert (code, out) == (0, "Ran the script with bash.\n")
    assert (tmp_path / "python.given").read_text() == (
        "-m torch.distributed.run --nnodes=1 --nproc-per-node=4 --max-restarts=8 "
        f"--shutdown-timeout=120 --standalone -m equipoise.train.worker {prepared}\n"
    )


def test_refusals(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        code, out, err = launch(capsys, *words)
        assert (code, out) == (2, "")
        return err

    assert refused(prepared, "--sbatch=-p gpu") == (
        "--sbatch needs --form slurm; the form is torchrun. Give --form slurm, or leave --sbatch "
        "out.\n"
    )
    assert refused(prepared, "--train.steps", "5", "--out", "x") == (
        f"{prepared} is prepared, and --train.steps, --out would change it. Give its run.toml "
        "instead of the folder, or leave --train.steps out.\n"
    )
    assert refused(prepared, "--cluster", "h100-sxm:8") == (
        "The run has 4 ranks, but h100-sxm:8 has 8 devices. Use a cluster of 4 devices, or set "
        "layout.dp = 8.\n"
    )
    assert refused(tmp_path) == (
        f"{tmp_path} holds no readable resolved.json: it is not the folder of a run of this "
        "version. Start it with `equipoise train run.toml`.\n"
    )
    assert refused("--form", "slrm").startswith(
        'equipoise launch: --form: "slrm" is not one of torchrun'
    )
