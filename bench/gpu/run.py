"""Test and measure this machine's first accelerator: ``python -m bench.gpu.run``, in ten minutes.

``tests/gpu`` first, for figures of kernels that compute something else mean nothing; then every
bench of this room in a process of its own, into ``bench/results/gpu-NAME.json``. A bench that fails
or takes too long leaves no file, and the others run all the same.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.lib.device import NO_DEVICE

BENCHES = ("kernels", "tiles", "step", "memory", "curve")
LIMIT_S = 570.0
_ROOT = Path(__file__).parents[2]


def main(*, has_device: bool, results: Path, limit_s: float = LIMIT_S) -> int:
    """Run all of it; 0, 1 where something failed, 2 where there is no device.

    Args:
        has_device: Whether this machine has one.
        results: The folder for the figures.
        limit_s: Seconds after which no process goes on.
    """
    if not has_device:
        sys.stderr.write(f"{NO_DEVICE}\n")
        return 2
    ends = time.monotonic() + limit_s
    failed = []
    if not _run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], ends, None):
        failed.append("tests/gpu")
    for name in BENCHES:
        file = results / f"gpu-{name}.json"
        if _run([sys.executable, "-m", f"bench.gpu.{name}"], ends, file):
            sys.stdout.write(f"{file}\n")
        else:
            failed.append(f"bench.gpu.{name}")
    if failed:
        sys.stderr.write(f"Failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _run(command: Sequence[str], ends: float, out: Path | None) -> bool:
    """Whether a command ended well in time; its output is in the file then, and only then."""
    left_s = ends - time.monotonic()
    if left_s <= 0:
        return False
    try:
        ran = subprocess.run(
            command,
            cwd=_ROOT,
            stdout=None if out is None else subprocess.PIPE,
            check=False,
            timeout=left_s,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except subprocess.TimeoutExpired:
        return False
    if ran.returncode == 0 and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(ran.stdout)
    return ran.returncode == 0


if __name__ == "__main__":
    import torch

    sys.exit(main(has_device=torch.cuda.is_available(), results=_ROOT / "bench" / "results"))
