"""What the verb's help says is what it can do."""

from equipoise.cli.drill.verb import EXAMPLES
from equipoise.fault.drill.catalog import FAULTS


def test_help_lists_every_fault() -> None:
    widest = max(map(len, FAULTS))
    lines = "".join(f"  {name:<{widest}}  {fault.about}\n" for name, fault in FAULTS.items())
    assert f"faults:\n{lines}\n" in EXAMPLES
