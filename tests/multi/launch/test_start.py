"""Ranks that are started by hand and do not go together: what every one of them says."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from equipoise.spec.run.resolved import write_resolved
from support.launch.ports import free_port
from support.verbs import DEADLINE_S

OTHER_VERSION = """
import os
if os.environ.get("RANK") == "1":
    import equipoise
    equipoise.__version__ = "9.9"
"""


def start(folder: Path, rank: int, world: int, port: int, path: Path) -> "subprocess.Popen[str]":
    place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    modules = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise.train.worker", str(folder), "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **{key: str(value) for key, value in place.items()}}
        | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"},
    )


def last_line(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, text = process.communicate(timeout=DEADLINE_S)
    return process.returncode, text.splitlines()[-1]


def test_ranks_that_differ_and_ranks_that_are_missing(make_run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    write_resolved(tmp_path / "seven", make_run(seed=7))
    write_resolved(tmp_path / "eight", make_run(seed=8))
    write_resolved(tmp_path / "alone", make_run(deadline_s=2.0))
    together, alone, nowhere = free_port(), free_port(), free_port()
    started = [
        start(tmp_path / "seven", 0, 2, together, tmp_path),
        start(tmp_path / "eight", 1, 2, together, tmp_path),
        start(tmp_path / "alone", 0, 2, alone, tmp_path),
        start(tmp_path / "alone", 1, 2, nowhere, tmp_path),
    ]
    first, second, waiting, lost = map(last_line, started)
    assert first == second
    code, text = first
    assert code == 2
    assert re.fullmatch(
        "Not all ranks run the same: equipoise is 9\\.9 on rank 1 and [0-9.a-z]+ on rank 0; "
        "train\\.seed is 8 on rank 1 and 7 on rank 0\\. Start every rank from one prepared folder "
        "and in one environment\\.",
        text,
    )
    assert waiting == (
        6,
        "Rank 1 of 2 has not come within 2 s of rank 0. Start it, or look into its log; where "
        "starting takes longer, raise layout.deadline_s.",
    )
    assert lost == (
        6,
        f"Rank 1 found nobody at 127.0.0.1:{nowhere} within 2 s. Start rank 0 there, or set "
        "MASTER_ADDR and MASTER_PORT to where it runs.",
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert last_line(start(tmp_path / "alone", 0, 2, port, tmp_path)) == (
            6,
            f"Rank 0 cannot listen at 127.0.0.1:{port}, where the other ranks look for it. Set "
            "MASTER_ADDR to its host and MASTER_PORT to a port that is free.",
        )
