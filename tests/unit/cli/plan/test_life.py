"""docs/life-of-a-plan.md names the files of cli and plan that a plan calls: fewer than 30."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
SOURCE = ROOT / "src" / "equipoise"

CALLS = """
import sys

OPTIMIZED = 1  # functions, not modules and classes
files = set()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & OPTIMIZED and code.co_name not in EXPRESSIONS:
        if code.co_filename not in files and not is_importing(frame):
            files.add(code.co_filename)

EXPRESSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")

def is_importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename != "<string>":
            return True
        frame = frame.f_back
    return False

from equipoise.cli.main import main
sys.setprofile(note)
code = main(sys.argv[1:])
sys.setprofile(None)
sys.stderr.write("\\n".join(sorted(files)))
sys.exit(code)
"""


def test_the_page_names_the_files_that_a_plan_calls() -> None:
    words = ["plan", "--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--quiet"]
    words += ["--cluster", "h100-sxm:4", "--context-tokens", "4096", "--step-sequences", "16"]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *words], capture_output=True, text=True, check=True
    )
    below = [Path(line) for line in done.stderr.splitlines() if Path(line).is_relative_to(SOURCE)]
    called = {file.relative_to(SOURCE).as_posix() for file in below}
    called = {file for file in called if file.startswith(("cli/", "plan/"))}
    page = (ROOT / "docs" / "life-of-a-plan.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    named = {
        file for file in re.findall(r"`(\S+\.py)`", table) if file.startswith(("cli/", "plan/"))
    }
    assert all((SOURCE / file).is_file() for file in named)
    assert called <= named, called - named
    assert len(named) < 30
