"""The pages against the product: they build without a warning and name every event and file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "equipoise"

_WRITE = re.compile(r"\.write\(\s*\"(scalar|instant|decision|fault)\",\s*\"([\w-]+)\"")
_SPAN = re.compile(r"\.span\(\"([\w-]+)\"")


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html"]
    done = subprocess.run(
        [*build, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "html" / "run-toml.html").read_text()
    assert 'id="key-pack-max-tokens"' in keys
    assert 'id="key-journal-tensorboard"' in keys


def _events() -> set[str]:
    text = "\n".join(path.read_text() for path in (SOURCE / "train").glob("*.py"))
    return {name for _, name in _WRITE.findall(text)} | set(_SPAN.findall(text))


def test_the_journals_events_are_all_described() -> None:
    events = _events()
    assert {"pack", "overhead", "memory", "start", "stop", "step", "nan-loss", "wait"} <= events
    page = (DOCS / "run-folder.md").read_text()
    missing = [name for name in sorted(events) if f"`{name}`" not in page]
    assert not missing, f"docs/run-folder.md does not describe {missing}"


def test_every_file_that_a_page_names_is_there() -> None:
    named = {
        name
        for page in DOCS.glob("*.md")
        for name in re.findall(
            r"`((?:src|tests|docs|recipes|bench)/[\w./-]+\.\w+)`", page.read_text()
        )
    }
    assert named, "the pages name no file of the checkout"
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("fragment", sorted((ROOT / "changes").glob("*.md")), ids=lambda p: p.name)
def test_a_fragment_is_named_by_its_issue_and_kind(fragment: Path) -> None:
    pattern = r"README\.md|\d+\.(added|changed|fixed|removed)\.md"
    assert re.fullmatch(pattern, fragment.name)
    assert fragment.read_text().strip()
