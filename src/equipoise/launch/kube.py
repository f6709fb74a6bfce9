"""A run under Kubernetes: an Indexed Job and a headless Service, which need no operator.

What it decides
    A pod is a node. The Service gives pod 0, where the agents meet, a name before the pods are
    ready. The run's folder and its tokens are in one claim, which all pods mount at the path where
    they were prepared. Shared memory is the node's, because a container has 64 MiB by default,
    with which NCCL does not start. Where faults are recovered, the agents start ranks again, and
    the Job makes a pod that was lost anew.

Kept true (tests/unit/launch/test_forms.py, tests/multi/launch/test_forms.py)
    The output is YAML of these fields, whatever a path contains; the containers' command, run
    twice on this machine, trains a run to its end.

Sources
    Kubernetes 1.31: "Job with Pod-to-Pod Communication"; "Headless Services". Shared memory: NCCL
    user guide 2.27, "Troubleshooting, Docker".
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import LayoutError, SpecError
from equipoise.launch.agent import WORKER
from equipoise.launch.forms import (
    Job,
    agent_words,
    comment,
    environment,
    require_prepared,
    summary,
)

_RESOURCES = {"none": "cpu", "nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}

_LONGEST_NAME = 52
"""Longest name of a job: a pod's name adds its index, and a label holds 63 characters."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """What the cluster provides for a run."""

    image: str
    """An image with equipoise and torch."""
    claim: str
    """Name of the PersistentVolumeClaim that holds the run and its tokens; many may mount it."""
    mount: Path | None
    """Where the claim is mounted."""


def kube_name(name: str) -> str:
    """A run's name as Kubernetes allows it.

    >>> kube_name("Llama_8B.v2"), kube_name("9")
    ('llama-8b-v2', 'run-9')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")


def write_kube(job: Job, pods: PodSpec, *, used: Iterable[Path] = ()) -> str:
    """The two objects as YAML.

    Args:
        job: The run.
        pods: Image, claim and mount.
        used: What the ranks read beside the run's folder.

    Raises:
        SpecError: image, claim or mount is missing.
        LayoutError: the folder is not prepared, or something lies outside the mount.
    """
    require_prepared(job, "Kubernetes")
    mount = pods.mount
    needed = {"--image": pods.image, "--claim": pods.claim, "--mount": mount}
    missing = [flag for flag, value in needed.items() if not value]
    if missing or mount is None:
        raise SpecError(
            f"The Kubernetes form lacks {', '.join(missing)}. Give --image IMAGE, which has "
            f"equipoise and torch in it, --claim NAME, the volume claim that holds the run, and "
            f"--mount DIR, the folder that it is mounted at."
        )
    for path in (job.folder, *used):
        if not path.is_relative_to(mount):
            raise LayoutError(
                f"{path} is not below {mount}, where the claim {pods.claim} is mounted, so pods "
                f"would not see it. Prepare the run with --out and --data.cache below {mount}, or "
                f"give another --mount."
            )
    name = kube_name(job.name)
    return f"{comment(f'{summary(job)}.')}\n{_service(name)}---\n{_job(name, job, pods, mount)}"


def _service(name: str) -> str:
    return f"""\
apiVersion: v1
kind: Service
metadata:
  name: {_text(name)}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {_text(name)}
"""


def _job(name: str, job: Job, pods: PodSpec, mount: Path) -> str:
    nodes = job.nodes
    command = [
        *agent_words(job),
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={name}-0.{name}:{job.port}",
        f"--rdzv-id={name}",
        *WORKER,
        str(job.folder),
    ]
    resource = f"{_RESOURCES[nodes.accelerator]}: {nodes.ranks}"
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {_text(name)}
spec:
  completionMode: Indexed
  completions: {nodes.count}
  parallelism: {nodes.count}
  backoffLimit: {job.restarts}
  template:
    spec:
      subdomain: {_text(name)}
      restartPolicy: Never
      terminationGracePeriodSeconds: 180
      containers:
        - name: ranks
          image: {_text(pods.image)}
          command:
{_list(command, 12)}
          env:
{_variables(environment(job), 12)}
          resources:
            requests:
              {resource}
            limits:
              {resource}
          volumeMounts:
            - name: runs
              mountPath: {_text(str(mount))}
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: runs
          persistentVolumeClaim:
            claimName: {_text(pods.claim)}
        - name: shared-memory
          emptyDir:
            medium: Memory
"""


def _text(value: str) -> str:
    """Quote a string, so that YAML reads ``1e3`` and ``no`` as text."""
    escaped = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda match: f"\\U{ord(match[0]):08x}", escaped)


def _list(words: Iterable[str], indent: int) -> str:
    # Kubernetes replaces $(NAME) in commands; $$( is a literal dollar and bracket.
    return "\n".join(f"{' ' * indent}- {_text(word.replace('$(', '$$('))}" for word in words)


def _variables(values: Mapping[str, str], indent: int) -> str:
    pad = " " * indent
    return "\n".join(
        f"{pad}- name: {_text(name)}\n{pad}  value: {_text(value.replace('$(', '$$('))}"
        for name, value in values.items()
    )
