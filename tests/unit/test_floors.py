"""Floors, the ban on torch and verbs apart, as import-linter reads them from pyproject.toml."""

import ast
import subprocess
import sys
import tomllib
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
    assert "4 kept, 0 broken." in done.stdout


def test_every_verb_is_kept_apart() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (apart,) = [each for each in contracts["contracts"] if each["type"] == "independence"]
    assert apart["modules"] == sorted(f"equipoise.cli.{verb}" for verb in VERBS)


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
