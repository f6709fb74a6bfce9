"""Recipes of the documentation, as they stand there: applied to a copy of this tree, and run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))


def block(text: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


def test_there_is_one_for_each_thing_that_is_added() -> None:
    things = ["a packing policy", "a pipeline schedule", "a device", "a verb"]
    assert list(RECIPES) == [f"Add {thing}" for thing in things]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_changes_three_files_and_works(title: str, tmp_path: Path) -> None:
    """Takes 10 to 20 s: it starts what a reader would start, on a whole copy."""
    change = block(RECIPES[title], "diff")
    files = re.findall(r"^\+\+\+ b/(.+)$", change, re.MULTILINE)
    assert 1 <= len(files) <= 3
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(
        ["git", "apply", "-"], input=change, text=True, cwd=tmp_path, env=git, check=True
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "src"),
        "HOME": str(tmp_path),
    }
    for command in block(RECIPES[title], "sh").splitlines():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
