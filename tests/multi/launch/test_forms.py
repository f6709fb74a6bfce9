"""Forms of two nodes, run on this machine: two agents that meet and train to the last step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from equipoise.cli.main import main
from support.launch.held import Held
from support.launch.ports import free_port
from support.make_run import share_curve, write_run
from support.read_run import events
from support.verbs import wait_until

STEPS = 12
LIMIT_S = 240

SRUN = """\
#!/bin/bash
# Starts a task for each node, as srun does, and ends with the worst of their codes.
while [[ "$1" == --* ]]; do shift; done
tasks=()
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" & tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = '#!/bin/bash\n[ "$3" = "here[0-1]" ] && printf "127.0.0.1\\n127.0.0.1\\n"\n'
CLUSTER = """\
name = "two"
[[nodes]]
device = "this-cpu"
nodes = 2
devices_per_node = 1
nic = "ethernet-25"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name a careless script would fall over."""
    folder = tmp_path_factory.mktemp("forms") / "it's $(here) *"
    (folder / "bin").mkdir(parents=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "cluster.toml").write_text(CLUSTER)
    return folder


@pytest.fixture
def run_toml(home: Path, texts: Path, cache: Path) -> Path:
    return write_run(home, texts, cache, steps=STEPS, every_steps=100)


def form(capsys: pytest.CaptureFixture[str], home: Path, *words: object) -> str:
    shared = ("--cluster", home / "cluster.toml", "--port", free_port(), "--python", sys.executable)
    assert main(["launch", *map(str, (*words, *shared))]) == 0
    return capsys.readouterr().out


def prepare(capsys: pytest.CaptureFixture[str], run_toml: Path, folder: Path) -> None:
    words = ["train", str(run_toml), "--out", str(folder), "--layout.dp", "2", "--prepare"]
    assert main([*words, "--quiet"]) == 0
    capsys.readouterr()


def require_trained(folder: Path) -> None:
    """Both ranks were there to the end."""
    assert [event["step"] for event in events(folder, "step")] == list(range(1, STEPS + 1))
    assert events(folder, "memory", rank=1)
    assert (folder / "checkpoint" / f"step-{STEPS:06d}").is_dir()


def require_ended(process: "subprocess.Popen[str]") -> None:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out


def start(*words: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )


def test_slurm_stops_before_its_limit_and_the_same_script_resumes(
    home: Path,
    run_toml: Path,
    priced: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = share_curve(priced, home / "slurm")
    orders = held(folder)
    orders.hold(STEPS)
    script = home / "slurm.sh"
    script.write_text(form(capsys, home, run_toml, "--out", folder, "--form", "slurm"))
    job = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "here[0-1]",
        "SLURM_NNODES": "2",
    }
    first = start("bash", str(script), **job)
    wait_until(lambda: events(folder, "step") or first.poll() is not None)
    assert first.poll() is None, first.communicate()[0]
    first.send_signal(signal.SIGTERM)
    wait_until(lambda: (folder / "stop").exists() or first.poll() is not None)
    orders.go_on()
    require_ended(first)
    assert not (folder / "stop").exists()
    (folder / "stop").touch()  # asked for when nothing ran
    require_ended(start("bash", str(script), **job))
    require_trained(folder)


def test_the_command_of_two_pods(
    home: Path,
    run_toml: Path,
    texts: Path,
    cache: Path,
    priced: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = share_curve(priced, home / "pods")
    prepare(capsys, run_toml, folder)
    mount = os.path.commonpath([home, cache, texts])
    words = ("--form", "kubernetes", "--image", "i", "--claim", "c", "--mount", mount)
    _, found = yaml.safe_load_all(form(capsys, home, folder, *words))
    [container] = found["spec"]["template"]["spec"]["containers"]
    # As the kubelet reads a command; the name of pod 0 is known in a cluster alone.
    command = [word.replace("$$(", "$(") for word in container["command"]]
    command = [word.replace("=run-0.run:", "=127.0.0.1:") for word in command]
    env = {each["name"]: each["value"] for each in container["env"]}
    pods = [start(*command, **env, JOB_COMPLETION_INDEX=str(pod)) for pod in range(2)]
    for pod in pods:
        require_ended(pod)
    require_trained(folder)


def test_two_agents_start_their_ranks_again_when_one_is_killed(
    home: Path,
    run_toml: Path,
    priced: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = share_curve(priced, home / "again")
    orders = held(folder)
    orders.hold(1)
    prepare(capsys, run_toml, folder)
    script = home / "again.sh"
    script.write_text(form(capsys, home, folder, "--host", "127.0.0.1"))
    agents = [start("bash", str(script)) for _ in range(2)]
    wait_until(lambda: events(folder, "start") or any(agent.poll() is not None for agent in agents))
    assert all(agent.poll() is None for agent in agents)
    os.kill(process_of(folder, rank=1), signal.SIGKILL)
    orders.go_on()
    for agent in agents:
        require_ended(agent)
    assert [event["epoch"] for event in events(folder, "start")] == [1, 2]
    require_trained(folder)


def process_of(folder: Path, *, rank: int) -> int:
    """The process of a rank that trains in a folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder).encode() in words and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    raise AssertionError(f"rank {rank} does not run")
