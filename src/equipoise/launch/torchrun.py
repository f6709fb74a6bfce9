"""A run under torchrun: a script for this machine, or one to start on each of several nodes.

Kept true (tests/unit/launch/test_forms.py, tests/multi/launch/test_forms.py)
    Two copies with the same host train a run to its end.
"""

import re
import shlex
import shutil
import subprocess

from equipoise.base.errors import EquipoiseError, FaultError, LayoutError
from equipoise.base.shown import shown
from equipoise.launch.agent import WORKER
from equipoise.launch.forms import (
    Job,
    agent_words,
    comment,
    require_prepared,
    shell_head,
    summary,
    wrap,
)

_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]+")
"""A name, or an address of IPv4 or IPv6."""


def write_torchrun(job: Job, *, host: str = "") -> str:
    """A bash script that starts the ranks of one node and ends when they do.

    Args:
        job: The run.
        host: The first node, by its name on all nodes; required if there are several.

    Raises:
        LayoutError: the host is malformed; or there are several nodes, but no host or no prepared
            folder.
    """
    if host and not _HOST.fullmatch(host):
        raise LayoutError(
            f"--host {shown(host)} is not a name or address of a node. Give one as every node "
            f"resolves it: --host node-0."
        )
    words = agent_words(job)
    if job.nodes.count == 1:
        where = "Start it on the node."
        words.append("--standalone")
    else:
        require_prepared(job, "torchrun")
        if not host:
            raise LayoutError(
                f"{job.nodes.count} nodes must know where to meet. Give the name or address of "
                f"one of them: --host NAME."
            )
        where = f"Start it on each node; they meet at {host}."
        words += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{job.port}",
            f"--rdzv-id={job.name}",
        ]
    return "\n".join(
        [
            "#!/bin/bash",
            comment(f"{summary(job)}. {where}"),
            *shell_head(job),
            "",
            f"exec {wrap(words)} \\",
            f'    {shlex.join(WORKER)} "$run"',
            "",
        ]
    )


def run_torchrun(job: Job, text: str) -> None:
    """Run the script here, and wait for its end.

    Raises:
        EquipoiseError: there is no bash or no such interpreter.
        FaultError: the ranks failed.
    """
    for program in ("bash", job.python):
        if shutil.which(program) is None:
            raise EquipoiseError(
                f"There is no {program} on this machine. Name an interpreter that has equipoise "
                f"with --python, or print the form without --submit."
            )
    code = subprocess.run(["bash", "-c", text], check=False).returncode
    if code:
        raise FaultError(
            f"The ranks of {job.folder} ended with exit code {code}; what happened is in its "
            f"journal. Run the same command again to resume from the last checkpoint."
        )
