"""What a start begins before it has imported anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.serve.early import compile_early

_KEPT = "kernel.attend_rows-48.py311.nbi"


def test_it_loads_no_torch() -> None:
    program = "import sys, equipoise.serve.early; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_nothing_is_compiled_where_kernels_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "engine_0a").mkdir()
    (tmp_path / "engine_0a" / _KEPT).touch()
    assert compile_early("fp32") is None


def test_where_none_are_kept_a_process_looks_for_what_is_missing(tmp_path: Path) -> None:
    program = (
        "import os, sys; from equipoise.serve.early import compile_early; "
        "child = compile_early('fp32'); child.kill(); sys.exit(child.wait() not in (-9, 0))"
    )
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, env=given, check=False).returncode == 0
