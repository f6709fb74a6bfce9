"""What every launcher must know about a run: how many nodes, ranks per node, and the command.

Why
    One run is started by hand on this machine, by Slurm on one cluster and by Kubernetes on
    another. They differ in how nodes find each other; the ranks must be the same.

What it decides
    A node runs one agent of ``torch.distributed.run``, and the agents meet by c10d at the first
    node. The agents start all ranks again after a fault, as often as ``[fault]`` allows, and each
    start resumes. A form contains nothing of the machine that wrote it: no environment variable, no
    path of its interpreter.

Kept true (tests/unit/launch/test_forms.py, tests/multi/launch/test_forms.py)
    Every path survives a shell; two agents that a form starts train a run to its end.

Sources
    torchrun: torch 2.13, ``torch/distributed/run.py``. It numbers nodes by host name
    (``dynamic_rendezvous.py``, ``sorted(state.participants)``), ranks of a node one after another.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.base.errors import EquipoiseError, LayoutError, SpecError
from equipoise.base.shown import printable
from equipoise.launch.agent import agent_command, rank_environment
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.by_name import THIS_CPU

Accelerator = Literal["none", "nvidia", "amd"]

_AMD = ("mi250x", "mi300x", "mi355x")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes, and what a rank computes on."""

    count: int
    ranks: int
    """Ranks on each node."""
    accelerator: Accelerator


@dataclass(frozen=True, slots=True)
class Job:
    """A run as launchers see it."""

    name: str
    folder: Path
    """The prepared run's folder, by its path on every node."""
    nodes: Nodes
    python: str = "python3"
    """The interpreter, by its path on every node."""
    port: int = 29_400
    """Where the agents meet, on the first node."""
    interface: str = ""
    """Network interface of the ranks' messages; empty leaves it to gloo and NCCL."""
    prepare: tuple[str, ...] = ()
    """Arguments of ``equipoise`` that prepare the folder; none if it is prepared."""
    restarts: int = 0
    """How often all ranks start again after a fault."""
    wait_s: float | None = None
    """How long agents wait for a node that comes back; torchrun's 600 s unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65_536:
            raise LayoutError(f"--port {self.port} is not a port. Choose one from 1 to 65535.")

    @property
    def ranks(self) -> int:
        """Ranks on all nodes together."""
        return self.nodes.count * self.nodes.ranks


def place_on(cluster: ClusterSpec | None, ranks: int, *, sharing: int) -> Nodes:
    """The nodes for ``ranks`` ranks; without a cluster, one node of CPU ranks.

    Args:
        cluster: The cluster to use.
        ranks: All ranks of the run.
        sharing: Ranks that compute each micro-batch together.

    Raises:
        LayoutError: ranks and devices differ in number, or nodes have different numbers of devices.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> place_on(find_cluster("h100-sxm:16"), 16, sharing=1)
    Nodes(count=2, ranks=8, accelerator='nvidia')
    """
    if cluster is None:
        return Nodes(1, ranks, "none")
    if cluster.devices != ranks:
        data_ranks, left = divmod(cluster.devices, sharing)
        other = "" if left else f", or set layout.dp = {data_ranks}"
        raise LayoutError(
            f"The run has {ranks:,} ranks, but {cluster.name} has {cluster.devices:,} devices. Use "
            f"a cluster of {ranks:,} devices{other}."
        )
    sizes = sorted({each.devices_per_node for each in cluster.classes}, reverse=True)
    if len(sizes) > 1:
        raise LayoutError(
            f"{cluster.name} has nodes of {' and '.join(map(str, sizes))} devices, but a form "
            f"starts equally many ranks on each. Use a cluster of equal nodes: the same file with "
            f"devices_per_node = {sizes[-1]} for each."
        )
    names = {each.device.name for each in cluster.classes}
    kinds: set[Accelerator] = {
        "none" if name == THIS_CPU else "amd" if name in _AMD else "nvidia" for name in names
    }
    if len(kinds) > 1:
        raise LayoutError(
            f"{cluster.name} has devices of different makers ({', '.join(sorted(names))}), which "
            f"no message library connects. Use a cluster with devices of one maker."
        )
    return Nodes(cluster.nodes, sizes[0], kinds.pop())


def environment(job: Job) -> dict[str, str]:
    """Environment variables of every rank, whatever starts it."""
    variables = rank_environment()
    if job.interface:
        variables |= {"GLOO_SOCKET_IFNAME": job.interface, "NCCL_SOCKET_IFNAME": job.interface}
    return variables


def agent_words(job: Job) -> list[str]:
    """A node's agent; the options of the meeting place, ``WORKER`` and the folder follow."""
    where = [f"--nnodes={job.nodes.count}"]
    if job.wait_s is not None and job.nodes.count > 1:
        where.append(f"--rdzv-conf=join_timeout={max(1, round(job.wait_s))}")
    return agent_command(job.python, job.nodes.ranks, *where, restarts=job.restarts)


def shell_head(job: Job) -> list[str]:
    """Lines of bash that come before the ranks: the run, its environment, its preparation."""
    exports = [f"export {name}={shlex.quote(text)}" for name, text in environment(job).items()]
    lines = ["set -euo pipefail", "", f"run={shlex.quote(str(job.folder))}", *exports]
    if job.prepare:
        lines.append(shlex.join([job.python, "-m", "equipoise.cli.main", *job.prepare]))
    # A stop file left from a request when nothing ran would stop this run at its first step.
    return [*lines, 'rm -f -- "$run/stop"']


def summary(job: Job) -> str:
    """The run and its size in a few words.

    >>> summary(Job("demo", Path("/runs/demo"), Nodes(2, 8, "nvidia")))
    'run demo, 16 ranks on 2 nodes of 8'
    """
    count = job.nodes.count
    where = f"{count} nodes of {job.nodes.ranks}" if count > 1 else "one node"
    return f"run {job.name}, {job.ranks} rank{'s' if job.ranks > 1 else ''} on {where}"


def comment(text: str) -> str:
    r"""A comment in bash or YAML, whose text cannot break out of it.

    >>> comment("they meet at a\nrm -rf b")
    '# they meet at a\\nrm -rf b'
    """
    return f"# {printable(text)}"


def wrap(words: Sequence[str]) -> str:
    r"""A command over several lines of bash, each word quoted.

    >>> print(wrap(["python3", "-m", "a b", "--x=1"]))
    python3 -m 'a b' \
        --x=1
    """
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    head, options = shlex.join(words[:first]), [shlex.quote(word) for word in words[first:]]
    return " \\\n    ".join([head, *options])


def require_prepared(job: Job, form: str) -> None:
    """Refuse a run that has not been prepared, since no single node could do so for all.

    Raises:
        LayoutError: says how to prepare it.
    """
    if job.prepare:
        raise LayoutError(
            f"The {form} form of {job.nodes.count} node{'s' if job.nodes.count > 1 else ''} starts "
            f"a prepared run, but {job.folder} is not prepared. First run this where every node "
            f"sees the folder: {shlex.join(['equipoise', *job.prepare])}"
        )


def submit(words: Sequence[str], text: str) -> str:
    """Pass a form to a scheduler's program on standard input; returns the program's answer.

    Raises:
        EquipoiseError: the program is not on this machine.
        SpecError: it refused; quotes its message.
    """
    program = words[0]
    if shutil.which(program) is None:
        raise EquipoiseError(
            f"There is no {program} on this machine. Print the form without --submit, and hand it "
            f"to {shlex.join(words)} where {program} is."
        )
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise SpecError(
            f"{shlex.join(words)} refused the form (exit code {done.returncode}): "
            f"{said.rstrip('.')}. Correct that, or print the form without --submit and submit it "
            f"yourself."
        )
    return done.stdout.strip()
