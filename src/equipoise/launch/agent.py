"""The agent that starts a node's ranks: its command, and what is set for each of them.

Why
    A run is started on this machine, by a script, by Slurm or by Kubernetes, and its ranks must be
    the same.

What it decides
    One agent of ``torch.distributed.run`` a node, which restarts nothing: a run resumes when it is
    started again.

Kept true (tests/unit/launch/test_local.py, tests/unit/launch/test_forms.py)
    This machine's agent and those of all forms have these words, and their ranks these variables.
"""

import os

WORKER = ("-m", "equipoise.train.worker")
"""What each rank runs; the run's folder follows."""

ALLOCATOR = "glibc.malloc.tcache_count=0"
"""Keeps glibc's per-thread lists of small chunks from pinning the holes between tensors.

A 7M decoder's rank holds 256 MiB with it and 351 without (glibc 2.36, recompute "full").
"""

_GRACE_S = 120
"""What ranks that are told to stop have for their step and their checkpoint."""


def rank_environment() -> dict[str, str]:
    """Variables of every rank, whoever starts it."""
    return {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": ALLOCATOR, "PYTHONUNBUFFERED": "1"}


def whole_environment() -> dict[str, str]:
    """The reader's own, and over it that of ranks; glibc's tunables are both."""
    ours, tunables = rank_environment(), "GLIBC_TUNABLES"
    both = filter(None, (os.environ.get(tunables), ours[tunables]))
    return {**os.environ, **ours, tunables: ":".join(both)}


def agent_command(python: str, ranks: int, *where: str) -> list[str]:
    """A node's agent; what else it is told, ``WORKER`` and the folder follow.

    Args:
        python: The interpreter.
        ranks: On the node.
        where: Options that say which nodes there are.

    >>> " ".join(agent_command("python3", 2, "--standalone"))[:62]
    'python3 -m torch.distributed.run --standalone --nproc-per-node'
    """
    return [
        python,
        "-m",
        "torch.distributed.run",
        *where,
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        f"--shutdown-timeout={_GRACE_S}",
    ]
