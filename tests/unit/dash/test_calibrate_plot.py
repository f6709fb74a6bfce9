"""Device files as pictures."""

from pathlib import Path

import pytest

from support.device_files import A_FILE


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_a_device_file_is_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from equipoise.dash.calibrate_plot import plot_device_file

    plot_device_file(tmp_path / name, A_FILE)
    assert (tmp_path / name).stat().st_size > 5000
