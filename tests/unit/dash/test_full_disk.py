"""A report and a trace on a full disk: its name in the message, and the old file as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.dash.report import write_page
from equipoise.dash.trace import write_run_trace
from equipoise.observe.reader import read_run


@pytest.mark.parametrize("kind", ["report", "trace"])
def test_what_does_not_fit_leaves_what_was_there(
    mount: Callable[..., Path], runs: dict[str, Path], kind: str
) -> None:
    disk = mount(8)
    record, file = read_run(runs["by-work"]), disk / "out"
    file.write_text("the old one")
    with pytest.raises(SpecError) as caught:
        if kind == "report":
            write_page([record], file)
        else:
            write_run_trace([record], record.step.tolist(), file)
    reason = f"No space left on device; the disk at {disk} has "
    assert str(caught.value).startswith(f"The {kind} cannot be written to {file}: {reason}")
    assert str(caught.value).endswith(" free. Give another file with --out FILE.")
    assert [path.read_text() for path in disk.iterdir()] == ["the old one"]
