"""``equipoise doctor`` from its arguments to what it prints and returns."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli.doctor.table import print_rows
from equipoise.cli.main import main
from equipoise.cost.modality import encoder_params
from equipoise.launch.doctor.facts import Needs, Row
from equipoise.launch.doctor.needs import needs_of
from equipoise.launch.forms import Nodes
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.modality.sections import VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import CheckpointSpec, LayoutSpec, PackSpec, RunSpec, TrainSpec
from support.launch.ports import free_port


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["doctor", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_would_break_is_exit_code_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--folder", tmp_path / "run")
    code, out, err = doctor(capsys, *folder)
    assert (code, err) == (5 if "\nbreaks " in out else 0, "")
    assert " checks " in out.splitlines()[-1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out, _ = doctor(capsys, *folder, "--port", port)
        assert code == 5
        assert (
            f"breaks port             {port}: Address already in use\n"
            f"{' ' * 24}The first node's agent listens there, and all others dial it.\n"
            f"{' ' * 24}Fix: Stop the program that listens there, or choose another --port.\n"
        ) in out
        code, quiet, _ = doctor(capsys, *folder, "--port", port, "--quiet")
        assert code == 5
        assert quiet.startswith(("warn ", "breaks "))
        assert "\nok " not in quiet


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[pack]\ncontext_tokens = 1_000_000_000\nstep_tokens = 2_000_000_000\n")
    code, out, _ = doctor(capsys, path, "--layout.dp", 2, "--folder", tmp_path, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (5, "breaks")
    [memory] = [row for row in found["rows"] if row["what"] == "memory"]
    assert set(memory) == {"what", "found", "verdict", "why", "fix"}
    assert memory["verdict"] == "breaks"


def test_ranks_of_one_machine_have_one_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = doctor(capsys, "--folder", tmp_path, "--ranks", 2, "--json")
    rows = {row["what"]: row for row in json.loads(out)["rows"]}
    assert rows["clock offsets"]["verdict"] == "ok"
    assert rows["link latency"]["found"].endswith(" one way, one rank")
    assert rows["link bandwidth"]["found"].endswith("/s from rank 0, one rank")


@pytest.mark.long
def test_ranks_under_a_launcher_of_ones_own() -> None:
    port = str(free_port())
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "equipoise.cli.doctor.links"],
            stdout=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [line.split()[1:3] for line in told[0].splitlines()][:1] == [["link", "latency"]]
    assert "clock offsets" in told[0]
    assert told[1] == ""


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: object) -> str:
        code, out, err = doctor(capsys, *words)
        assert (code, out) == (2, "")
        return err

    assert refused("--ranks", 1) == (
        "--ranks 1: links are between two ranks or more. Give --ranks 2.\n"
    )
    assert refused("--port", 70_000) == ("--port must be between 1 and 65535, not 70000.\n")


def needs(
    layout: LayoutSpec, model: str, ranks: int, nodes: Nodes, cluster: ClusterSpec | None = None
) -> Needs:
    spec = RunSpec(
        layout=layout,
        pack=PackSpec(context_tokens=8192, step_tokens=65_536),
        checkpoint=CheckpointSpec(keep=3),
    )
    return needs_of(spec, preset(model), ranks, nodes, cluster)


def test_encoders_count_with_their_weights_and_moments() -> None:
    spec, model = RunSpec(vision=VisionSpec(layers=12, hidden=768)), preset("30m")
    plain, encoded = (needs_of(each, model, 2, Nodes(1, 2, "none")) for each in (RunSpec(), spec))
    weights = encoder_params(spec.vision.encoder, model.hidden)
    held = 8 * weights + 12 * weights // 2  # of the default, layout.zero = 1, on two ranks
    assert encoded.terms["encoders"] == held and "encoders" not in plain.terms
    assert encoded.checkpoint_bytes - plain.checkpoint_bytes == 12 * weights
    kept = (encoded.checkpoint_bytes - plain.checkpoint_bytes) // 2
    assert encoded.rank_bytes - plain.rank_bytes == pytest.approx(held + kept, abs=1)


def test_what_is_frozen_has_neither_gradients_nor_moments() -> None:
    vision, model = VisionSpec(layers=12, hidden=768), preset("30m")
    whole, frozen = (
        needs_of(
            RunSpec(vision=vision, train=TrainSpec(freeze=freeze)), model, 2, Nodes(1, 2, "none")
        )
        for freeze in ((), ("layers", "encoders"))
    )
    weights, layers = encoder_params(vision.encoder, model.hidden), 8 * model.layer_params
    assert 6 * weights < frozen.terms["encoders"] < 7 * weights < whole.terms["encoders"]
    left = 1 - layers / model.params
    for name in ("gradients", "optimizer"):
        assert frozen.terms[name] == pytest.approx(left * whole.terms[name], rel=1e-3)
    assert whole.checkpoint_bytes - frozen.checkpoint_bytes == 8 * (weights + layers)


def test_what_a_run_needs_here() -> None:
    found = needs(LayoutSpec(dp=2), "7m", 2, Nodes(1, 2, "none"))
    assert (found.ranks, found.nodes, found.device_bytes, found.kept_checkpoints) == (2, 1, 0, 3)
    assert found.checkpoint_bytes == 12 * preset("7m").params
    arena_bytes = found.checkpoint_bytes // 2
    assert found.rank_bytes - sum(found.terms.values()) == (300 << 20) + arena_bytes
    assert found.group_files == 2 * 5


def test_what_a_run_needs_of_a_device() -> None:
    cluster = find_cluster("h100-sxm:16")
    nodes = Nodes(2, 8, "nvidia")
    found = needs(LayoutSpec(dp=4, pp=2, tp=2), "llama3-8b", 16, nodes, cluster)
    assert found.device_bytes == cluster.device.usable_bytes
    assert found.rank_bytes == sum(found.terms.values())
    whole = needs(LayoutSpec(dp=16), "llama3-8b", 16, nodes, cluster)
    assert found.rank_bytes < whole.rank_bytes


def test_sentences_go_on_below_their_beginning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/{'a' * 70}"
    rows = [
        Row("torch", "2.13.0", "ok", "", ""),
        Row("cores", "2 usable", "warn", "a quota stops all ranks " * 4, "Start one rank here."),
        Row("folder", f"{path} is full", "breaks", "it is written there.", "Make room."),
    ]
    monkeypatch.setenv("COLUMNS", "60")
    print_rows(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "ok     torch   2.13.0",
        "warn   cores   2 usable",
        "               A quota stops all ranks a quota stops all",
        "               ranks a quota stops all ranks a quota stops",
        "               all ranks",
        "               Fix: Start one rank here.",
        f"breaks folder  {path}",  # a path is never broken
        "               is full",
        "               It is written there.",
        "               Fix: Make room.",
    ]
    monkeypatch.setenv("COLUMNS", "40")
    print_rows(rows[1:2])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "       A quota stops all ranks a quota",
        "       stops all ranks a quota stops all",
        "       ranks a quota stops all ranks",
        "       Fix: Start one rank here.",
    ]
    monkeypatch.delenv("COLUMNS")
    print_rows(rows)
    assert len(capsys.readouterr().out.splitlines()) == 7
