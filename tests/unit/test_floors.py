"""Floors, the ban on torch and verbs apart, as import-linter reads them from pyproject.toml."""

import ast
import subprocess
import sys
from pathlib import Path

from equipoise.cli.main import VERBS

ROOT = Path(__file__).parents[2]


def test_imports_respect_the_floors(tmp_path: Path) -> None:
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", linter, "--config", "pyproject.toml", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken." in done.stdout


def test_no_verb_imports_another_verb() -> None:
    room = ROOT / "src" / "equipoise" / "cli"
    importers = [
        (file.relative_to(room).as_posix(), name)
        for verb in VERBS
        for file in sorted([*room.glob(f"{verb}.py"), *room.glob(f"{verb}/*.py")])
        for node in ast.walk(ast.parse(file.read_text()))
        for name in _imported(node)
        if name.startswith("equipoise.cli.") and name.split(".")[2] in {*VERBS} - {verb}
    ]
    assert importers == []


def test_no_bench_imports_the_command_line() -> None:
    importers = [
        file.relative_to(ROOT).as_posix()
        for file in sorted((ROOT / "bench").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if any(name.startswith("equipoise.cli") for name in _imported(node))
    ]
    assert importers == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{each.name}" for each in node.names]
    return []
