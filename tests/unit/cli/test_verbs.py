"""config, init and systems, from their arguments to what they print."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.registry import systems
from equipoise.cli.main import main
from equipoise.cli.run_arguments import add_run_arguments, run_from
from equipoise.spec.run.load import read_run


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_config_prints_values_and_origins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 40\n")
    out = printed(capsys, "config", "--train.lr=1e-4", str(path), "--pack.policy", "in-order")
    assert "steps = 40                                    # run.toml:2\n" in out
    assert "lr = 0.0001                                   # --train.lr\n" in out
    assert 'policy = "in-order"                           # --pack.policy\n' in out


def test_config_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("")
    answer: dict[str, Any] = json.loads(
        printed(capsys, "config", "--json", str(path), "--name", "b", "--train.steps", "40")
    )
    run = read_run(path, [("train.steps", "40"), ("name", "b")])
    assert set(answer) == {"run", "model", "origins", "base", "digest"}
    assert answer["run"]["train"]["steps"] == 40
    assert answer["run"]["name"] == "b"
    assert answer["model"]["layers"] == run.model.layers
    assert answer["origins"] == run.origins
    assert (answer["base"], answer["digest"]) == (str(tmp_path), run.digest)


def test_config_quiet_says_only_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "config", "--quiet") == ""
    assert refused(capsys, "config", "--quiet", "--train.steps", "-1") == (
        "--train.steps: -1 is too small; it must be at least 0.\n"
    )


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "config", "--schema"))["title"] == "run.toml"


def test_run_arguments_serve_any_parser() -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    assert run_from(parser.parse_args([])) == read_run(None)


def test_init_writes_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "run.toml"
    assert printed(capsys, "init", str(file.parent)) == (
        f"Wrote {file}. See what it says: equipoise config {file}. Train: equipoise train {file}\n"
    )
    run = read_run(file)
    assert run.digest == read_run(None).digest
    assert not any(origin.startswith("run.toml") for origin in run.origins.values())


def test_init_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, "init", "--json") == '{"run_toml": "run.toml", "seen": []}\n'
    assert printed(capsys, "init", "b", "--quiet", "--name", "b", "--preset", "30m") == ""
    run = read_run(Path("b/run.toml"))
    assert (run.spec.name, run.spec.model.preset) == ("b", "30m")


def test_init_names_the_data_as_seen_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    printed(capsys, "init", "story", "--from", "text", "--path", "books")
    run = read_run(Path("story/run.toml"))
    assert (run.spec.data.source, run.spec.data.path) == ("text", "../books")
    assert (run.base / run.spec.data.path).resolve() == tmp_path / "books"
    printed(capsys, "init", "other", "--from", "text", "--path", str(tmp_path / "books"))
    assert read_run(Path("other/run.toml")).spec.data.path == str(tmp_path / "books")


def test_init_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("kept")
    assert refused(capsys, "init", str(tmp_path)) == (
        f"{file} already exists and was not changed. "
        "Give another folder (equipoise init DIR), or remove the file first.\n"
    )
    assert file.read_text() == "kept"
    assert refused(capsys, "init", str(file / "below")) == (
        f"Cannot write {file}/below/run.toml: not a directory. "
        "Give a folder that you may write to: equipoise init DIR.\n"
    )
    assert refused(capsys, "init", str(tmp_path / "a"), "--from", "text") == (
        "--from text needs --path, the file or folder to train on.\n"
    )
    assert refused(capsys, "init", str(tmp_path / "a"), "--path", str(file)) == (
        "--path needs --from, the kind of data: text, jsonl, parquet or datasets.\n"
    )
    missing = tmp_path / "missing"
    assert refused(capsys, "init", "--from", "text", "--path", str(missing)) == (
        f"No such file or folder: {missing}. Give --path one that exists.\n"
    )
    assert refused(capsys, "init", str(tmp_path / "a"), "--from", "txt", "--path", str(file)) == (
        "--from txt is not a kind of data. With --path give one of python-stdlib, "
        "python-functions, text, jsonl, parquet, datasets; without it --from looks at a path.\n"
    )
    assert not (tmp_path / "a").exists()


def test_init_in_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deny(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert refused(capsys, "init", str(tmp_path)) == (
        f"Cannot write {tmp_path}/run.toml: permission denied. "
        "Give a folder that you may write to: equipoise init DIR.\n"
    )


def test_systems_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "systems").splitlines()
    assert len(lines) == 1 + 72 + 2
    zero = systems()[33]
    assert lines[34].split()[:3] == ["34", zero.state.split()[0], "ZeRO"]
    assert lines[34].endswith(f"  {zero.command}")
    counts = Counter(each.state for each in systems())
    assert lines[-1] == (
        f"72 systems: {counts['works']} work, {counts['part']} work in part, "
        f"{counts['not yet']} do not yet."
    )
    assert printed(capsys, "systems", "--quiet") == f"{lines[-1]}\n"


def test_one_system(capsys: pytest.CaptureFixture[str]) -> None:
    one = systems()[70]
    assert one.state == "not yet"
    assert printed(capsys, "systems", "parallelbench") == (
        "71. ParallelBench\n"
        "  state         not yet\n"
        f"  what it does  {one.mechanism}\n"
        f"  home          {one.home}\n"
        "  tier          family\n"
    )
    assert refused(capsys, "systems", "tempo") == (
        'No system is called "tempo". Nearest: TEMPI. "equipoise systems" lists all.\n'
    )


def test_systems_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "systems", "--json"))
    assert [row["number"] for row in rows] == list(range(1, 73))
    one = json.loads(printed(capsys, "systems", "--json", "ZeRO"))
    assert one == rows[33]
    assert one["state"] == systems()[33].state


def test_train_refuses_what_only_pack_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("train", "--out", str(tmp_path / "run"), "--quiet", "--pack.policy", "divided-in-time")
    assert refused(capsys, *argv) == (
        'pack.policy = "divided-in-time" lets parts of one document attend to each other from '
        "different micro-batches, which only a pipeline of whole micro-batches runs; "
        "layout.pp = 1 and layout.cp = 1. Set layout.pp = 2 and layout.cp = "
        '1, or pack.policy = "divided", "by-work" or "delayed".\n'
    )


def test_train_refuses_a_context_that_does_not_divide_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("equipoise.train.request.own_ranks", lambda: 4)
    argv = ("train", "--out", str(tmp_path / "run"), "--quiet", "--layout.cp", "3")
    assert refused(capsys, *argv) == (
        'layout.cp = 3 does not divide the 4 ranks of layout.dp = "cores", one for each core '
        "of this machine. Set layout.cp = 2, or layout.dp = 1 for 3 ranks in all.\n"
    )
    assert not (tmp_path / "run").exists()


def test_train_refuses_to_divide_documents_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("train", "--out", str(tmp_path / "run"), "--layout.dp=1", "--layout.cp=2")
    assert refused(capsys, *argv, "--pack.policy=divided") == (
        'pack.policy = "divided" divides documents over ranks itself, and layout.cp = 2 would '
        'divide them again. Set layout.cp = 1, or pack.policy = "by-work".\n'
    )
