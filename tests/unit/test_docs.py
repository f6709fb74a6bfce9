"""The pages against the product: they build without a warning and leave no event unnamed."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "equipoise"


@pytest.mark.long
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html"]
    done = subprocess.run(
        [*build, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "html" / "start" / "run-toml.html").read_text()
    assert 'id="key-pack-max-tokens"' in keys
    assert 'id="key-journal-tensorboard"' in keys


def _journal_words() -> tuple[set[str], set[str]]:
    """Names of the events that ranks of a run write, and of their fields, as the code has them."""
    names, fields = set(), set()
    for path in [*(SOURCE / "train").rglob("*.py"), SOURCE / "fault" / "rank.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "figures":
                assert isinstance(node.value, ast.Dict)
                fields |= {ast.literal_eval(key) for key in node.value.keys if key is not None}
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            journaled = ("self.journal.", "journal.", "spans.")
            if path.name == "rank.py":
                journaled += ("self._note",)
            if called.endswith(".phase") or not called.startswith(journaled):
                continue
            names |= {
                word
                for each in node.args
                for leaf in ast.walk(each)
                if isinstance(leaf, ast.Constant) and isinstance(word := leaf.value, str)
            }
            fields |= {each.arg for each in node.keywords if each.arg}
    return names, fields


def test_the_journals_events_are_all_described() -> None:
    names, fields = _journal_words()
    assert {"pack", "overhead", "memory", "start", "stop", "step", "nan-loss", "wait"} <= names
    assert {"busy_s", "predicted_s", "in_order_skew", "micro_batch", "traceback"} <= fields
    page = (DOCS / "start" / "run-folder.md").read_text()
    missing = [word for word in sorted(names | fields) if f"`{word}`" not in page]
    assert not missing, f"docs/start/run-folder.md does not describe {missing}"


@pytest.mark.long
def test_the_map_is_that_of_the_tree() -> None:
    """``make map`` writes it."""
    spec = importlib.util.spec_from_file_location("house", DOCS / "_ext" / "house.py")
    assert spec is not None and spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    assert (DOCS / "map.md").read_text() == house.render_map()
    for files in house.QUESTIONS.values():
        assert len(files) <= 3
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_file_that_a_page_names_is_there() -> None:
    named = {
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(
            r"`((?:src|tests|docs|recipes|bench)/[\w./-]+\.\w+)`", page.read_text()
        )
    }
    assert named, "the pages name no file of the checkout"
    life = (DOCS / "life-of-a-step.md").read_text()
    named |= {f"src/equipoise/{name}" for name in re.findall(r"`([a-z_/]+\.py)`", life)}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("fragment", sorted((ROOT / "changes").glob("*.md")), ids=lambda p: p.name)
def test_a_fragment_is_named_by_its_issue_and_kind(fragment: Path) -> None:
    pattern = r"README\.md|\d+(-[a-z]+)?\.(added|changed|fixed|removed)\.md"
    assert re.fullmatch(pattern, fragment.name)
    assert fragment.read_text().strip()


def _imports() -> dict[str, set[str]]:
    """Names that pages import from each module of the package."""
    imported: dict[str, set[str]] = {}
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r"^\s*[>.]{3} |^\+", "", page.read_text(), flags=re.MULTILINE)
        for module, names in re.findall(r"from (equipoise[\w.]*) import (\([^)]*\)|[^\n#]+)", text):
            each = (name.split(" as ")[0].strip() for name in names.strip("()").split(","))
            imported.setdefault(module, set()).update(name for name in each if name)
    return imported


def test_every_import_of_a_page_has_an_entry_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    entries = set(re.findall(r"auto(?:module|function|class|data):: ([\w.]+)", text))
    missing = []
    for module, names in _imports().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            # A package passes on names, whose entry is their own module's.
            homes = {module, getattr(value, "__module__", module)}
            if not isinstance(value, ModuleType) and not any(
                {home, f"{home}.{name}"} & entries for home in homes
            ):
                missing.append(f"{module}.{name}")
    assert sorted(missing) == []
