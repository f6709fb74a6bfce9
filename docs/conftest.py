"""Run the code of these pages: what a reader can copy works.

    python    Executed; the blocks of a page share their names. ``>>>`` blocks are doctests.
    console   Each line ``$ command`` runs: ``equipoise`` alone in this process, which has
              imported what it needs, and all else in bash. Anything but exit code 0 fails.
              Output that is shown is not compared.
    toml      A block with a caption is written to the file of that name.
    sh, text  Left alone: commands that take long or need more than this checkout, and output.

A page has one temporary folder, which is also its home: token caches and curves stay in it.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sybil import Document, Example, Sybil
from sybil.parsers.abstract.lexers import BlockLexer
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser
from sybil.region import Region

from equipoise.cli.main import main
from support.launch.stems import keep_stems

_LIMIT_S = 120
_OF_BASH = frozenset("|&;<>$`*?~(){}")


def _environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    return {**kept, "PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1"}


def _commands(block: str) -> list[str]:
    """The commands of a console block; a line that ends in a backslash goes on."""
    joined = block.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def run_console(example: Example) -> None:
    folder: Path = example.namespace["page_folder"]
    for command in _commands(example.parsed):
        if command.startswith("equipoise ") and _OF_BASH.isdisjoint(command):
            _run_here(command, folder)
        else:
            _run_in_bash(command, folder)


def _run_here(command: str, folder: Path) -> None:
    environment = _environment(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        code = main(shlex.split(command, comments=True)[1:])
    assert code == 0, f"`{command}` ended with {code}."


def _run_in_bash(command: str, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        raise AssertionError(
            f"`{command}` ended with {done.returncode}.\n{done.stdout}{done.stderr}"
        )


def write_file(example: Example) -> None:
    (example.namespace["page_folder"] / example.region.lexemes["name"]).write_text(example.parsed)


class CaptionedToml:
    """Blocks ``{code-block} toml`` with ``:caption:``."""

    _lexer = BlockLexer(
        start_pattern=re.compile(
            r"^(?P<prefix>[ \t]*)```\{code-block\} toml\n:caption: (?P<name>\S+)\n",
            re.MULTILINE,
        ),
        end_pattern_template=r"(?<=\n){prefix}```(:?\n|\Z)",
    )

    def __call__(self, document: Document) -> Iterator[Region]:
        for region in self._lexer(document):
            region.parsed = region.lexemes["source"]
            region.evaluator = write_file
            yield region


@pytest.fixture(scope="session")
def _stems() -> Iterator[None]:
    """Runs of all pages import once."""
    with keep_stems():
        yield


@pytest.fixture(scope="module")
def page_folder(_stems: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a page's commands run, and where its code writes."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("page")
    os.chdir(folder)
    yield folder
    os.chdir(before)


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language="console", evaluator=run_console),
        CaptionedToml(),
    ],
    pattern="*.md",
    excludes=["_build/*"],
    fixtures=["page_folder"],
).pytest()
