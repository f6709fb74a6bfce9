"""The agent that starts a node's ranks: its command, and the ranks' environment.

Why
    A run may be started on this machine, by a script, by Slurm or by Kubernetes, and its ranks
    must be the same each time.

What it decides
    One agent of ``torch.distributed.run`` per node. On this machine it restarts nothing, since
    ``fault.recover`` does; elsewhere it starts ranks again as often as ``[fault]`` says.

Kept true (tests/unit/launch/test_local.py, tests/unit/launch/test_forms.py)
    The agents of this machine and of all forms have this command, and their ranks these variables.
"""

import ctypes
import os
import signal

PROGRAM = "equipoise.train.worker"
"""The program of a rank, a module."""

WORKER = ("-m", PROGRAM)
"""The command of each rank; the run's folder follows."""

SPARE = ("-m", "equipoise.launch.spare")
"""The command of a rank that is kept ready for the next start; its program and the run's folder
follow."""

ALLOCATOR = "glibc.malloc.tcache_count=0"
"""Keeps glibc's per-thread lists of small chunks from pinning the holes between tensors.

A 7M decoder's rank holds 256 MiB with it and 351 without (glibc 2.36, recompute "full").
"""

STEM = ("-m", "equipoise.fault.stem")
"""The command of the process that this machine's agents are forked from; the ranks' program
follows."""

GRACE_S = 120
"""Time for ranks to finish their step and save after a request to stop [s]."""

_PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that a process gets when its parent ends."""


def end_with_parent() -> None:
    """Let a killed parent end this process at once: an agent, and so its ranks.

    With a signal that they may handle, ranks would finish and save a step while the same command,
    started again, finds the folder taken.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_agent() -> None:
    """End this rank when the torchrun agent that started it is killed.

    The agent gives each rank a session of its own; without this, ranks of a killed agent go
    on unseen and hold the run's folder.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if os.getppid() == 1:  # it was killed while this rank imported torch
            os._exit(signal.SIGKILL)


def rank_environment() -> dict[str, str]:
    """Environment variables of every rank, whatever starts it."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": ALLOCATOR,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes, or is aborted, leaves its stack
    }


def whole_environment() -> dict[str, str]:
    """This process's environment, overridden by the ranks'; glibc's tunables are joined."""
    ours, tunables = rank_environment(), "GLIBC_TUNABLES"
    both = filter(None, (os.environ.get(tunables), ours[tunables]))
    return {**os.environ, **ours, tunables: ":".join(both)}


def agent_command(python: str, ranks: int, *where: str, restarts: int = 0) -> list[str]:
    """The command of a node's agent; further options, ``WORKER`` and the folder follow.

    Args:
        python: The interpreter.
        ranks: Ranks on the node.
        where: Options that describe the nodes.
        restarts: How often the agent starts all ranks again after one has failed.

    >>> " ".join(agent_command("python3", 2, "--standalone"))[:62]
    'python3 -m torch.distributed.run --standalone --nproc-per-node'
    """
    return [
        python,
        "-m",
        "torch.distributed.run",
        *where,
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        f"--shutdown-timeout={GRACE_S}",
    ]
