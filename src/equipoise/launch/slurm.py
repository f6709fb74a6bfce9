"""A run under Slurm: a batch script whose nodes find each other through the job's own list.

What it decides
    ``srun`` starts one agent per node, unbound and on the whole node: by default a task gets one
    core, which all ranks of the node would share. Three minutes before the time limit the batch
    shell writes the file ``stop`` to the run's folder, so that the ranks finish their step, save
    and exit; the same script resumes. Where faults are recovered, the agents start ranks again, and
    Slurm may start the whole job again when it has lost a node.

Kept true (tests/unit/launch/test_forms.py, tests/multi/launch/test_forms.py)
    bash accepts it; with ``srun`` and ``scontrol`` that start processes of this machine, two nodes
    train to the end, and a TERM saves and ends with 0.

Sources
    Slurm 24.05, sbatch(1): ``--signal=B:``, ``--mem=0``, ``--requeue``; srun(1): ``--cpu-bind``,
    ``--kill-on-bad-exit``.
"""

import shlex

from equipoise.base.errors import SpecError
from equipoise.base.shown import printable, shown
from equipoise.launch.agent import WORKER
from equipoise.launch.forms import Job, agent_words, comment, shell_head, summary, wrap

_NOTICE_S = 180

_WAIT = """\
# A signal cuts a wait short, and the ranks are still at work.
again=1
while [ "$again" ]; do
    again=
    code=0
    wait "$ranks" || code=$?
done
exit "$code"
"""


def write_slurm(job: Job, *, more: str = "") -> str:
    """A script for ``sbatch``.

    Args:
        job: The run.
        more: Further options of sbatch, as on its command line.

    Raises:
        SpecError: ``more`` does not consist of options.
    """
    step = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    return "\n".join(
        [
            "#!/bin/bash",
            comment(f"{summary(job)}."),
            *(f"#SBATCH {option}" for option in [*_options(job), *_more(more)]),
            *shell_head(job),
            "trap 'touch -- \"$run/stop\"; again=1' TERM",
            'read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "",
            f"{wrap(step)} \\",
            f"    {wrap(agent_words(job))} \\",
            f'    --rdzv-backend=c10d --rdzv-endpoint="$host:{job.port}" \\',
            '    --rdzv-id="$SLURM_JOB_ID" \\',
            f'    {shlex.join(WORKER)} "$run" &',
            "ranks=$!",
            _WAIT,
        ]
    )


def _options(job: Job) -> list[str]:
    nodes = job.nodes
    devices = (
        f"--mincpus={nodes.ranks}"
        if nodes.accelerator == "none"
        else f"--gpus-per-node={nodes.ranks}"
    )
    return [
        f"--job-name={shlex.quote(printable(job.name))}",
        f"--nodes={nodes.count}",
        "--ntasks-per-node=1",
        devices,
        "--exclusive",
        "--mem=0",
        f"--signal=B:TERM@{_NOTICE_S}",
        *(["--requeue"] if job.restarts else []),
    ]


def _more(text: str) -> list[str]:
    """One directive per option: ``--partition=gpu --time 4:00:00`` is two."""
    # A directive is a comment to bash: a line break would end it, and bash would run the rest.
    if not text.isprintable():
        raise SpecError(
            f"--sbatch {shown(text)} has a character that no directive can hold, a line break or "
            f"another that is not printed. Give the options on one line."
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(
            f'--sbatch: "{text}" is not a list of options ({error}). Give them as on sbatch\'s '
            f'command line: --sbatch="--partition=gpu --time=04:00:00".'
        ) from error
    options: list[str] = []
    for word in words:
        if word.startswith("-"):
            options.append(shlex.quote(word))
        elif options and "=" not in options[-1] and " " not in options[-1]:
            options[-1] += f" {shlex.quote(word)}"
        else:
            raise SpecError(
                f'--sbatch: "{word}" belongs to no option. Give options as on sbatch\'s command '
                f'line: --sbatch="--partition=gpu --time=04:00:00".'
            )
    return options
