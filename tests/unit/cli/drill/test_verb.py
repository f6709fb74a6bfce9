"""What the verb's help says is what it can do."""

import pytest

from equipoise.cli.drill.verb import EXAMPLES
from equipoise.cli.main import main
from equipoise.fault.drill.catalog import FAULTS


def test_help_lists_every_fault() -> None:
    widest = max(map(len, FAULTS))
    lines = "".join(f"  {name:<{widest}}  {fault.about}\n" for name, fault in FAULTS.items())
    assert f"faults:\n{lines}\n" in EXAMPLES


def test_no_name_of_a_fault_is_not_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--only", ","]) == 2
    assert capsys.readouterr().err == (
        "--only names no fault. Give names with commas between, or leave it out.\n"
    )
