"""What a plan changes in the model under torchrec 1.8, which ours leaves alone.

``TORCHREC_PYTHON`` names the interpreter of an environment with torch 2.13, ``torchrec==1.8.0`` and
``fbgemm-gpu-cpu==1.8.0``. Its two ranks run ``torchrec_leaks.py``: tables in the order of a plan,
divided by columns, and copied to both ranks. Ours: ``tests/multi/recsys/test_leaks.py``.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.lib.stamp import environment

RANK = Path(__file__).with_name("torchrec_leaks.py")


def main() -> None:
    """Print the order of outputs, distances from one process, and how far copies move."""
    python = os.environ.get("TORCHREC_PYTHON")
    if python is None:
        sys.exit("TORCHREC_PYTHON names no interpreter. Set it to one that has torchrec 1.8.")
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        port = str(at.getsockname()[1])
    ranks = [
        subprocess.Popen([python, str(RANK), str(rank), port], stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said, _ = ranks[0].communicate(timeout=240)
    ranks[1].communicate(timeout=60)
    if any(rank.returncode for rank in ranks):
        sys.exit(f"torchrec's ranks ended with {[rank.returncode for rank in ranks]}.")
    measured: dict[str, Any] = json.loads(said.splitlines()[-1])
    planned, alone = (measured[each]["order"] for each in ("table", "alone"))
    is_shown = {
        "outputs come in the plan's order": planned != alone,
        "columns of a row do not share its state": measured["column"]["off"] > 0.01,
        "copies ignore the optimizer of the tables": measured["data"]["moved"] == 0.0,
    }
    report = {
        "what": "torchrec 1.8 on two ranks",
        "environment": environment(),
        "leaks": is_shown,
        "measured": measured,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
