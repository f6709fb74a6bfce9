"""What the three forms are told, what they print, and what they refuse."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import EquipoiseError, FaultError, LayoutError, SpecError
from equipoise.launch.forms import Job, Nodes, place_on, submit
from equipoise.launch.kube import PodSpec, kube_name, write_kube
from equipoise.launch.slurm import write_slurm
from equipoise.launch.torchrun import run_torchrun, write_torchrun
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import find_cluster

FOLDER = Path("/runs/demo")
POD_PATHS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
        lambda text: text not in (".", "..")
    ),
    min_size=1,
    max_size=3,
)


def job(folder: Path = FOLDER, *, nodes: int = 2, **fields) -> Job:
    return Job("demo", folder, Nodes(nodes, 8, fields.pop("accelerator", "nvidia")), **fields)


def pods(mount: str = "/runs") -> PodSpec:
    return PodSpec("registry/equipoise:1", "data", Path(mount))


def cluster_of(tmp_path: Path, text: str):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(str(path))


SLURM = """\
#!/bin/bash
# run demo, 16 ranks on 2 nodes of 8.
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@180
#SBATCH --partition=gpu
#SBATCH -t 4:00
set -euo pipefail

run=/runs/demo
export OMP_NUM_THREADS=1
export GLIBC_TUNABLES=glibc.malloc.tcache_count=0
export PYTHONUNBUFFERED=1
export PYTHONFAULTHANDLER=1
export GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_IFNAME=ib0
rm -f -- "$run/stop"
trap 'touch -- "$run/stop"; again=1' TERM
read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

srun \\
    --ntasks-per-node=1 \\
    --cpu-bind=none \\
    --kill-on-bad-exit=1 \\
    python3 -m torch.distributed.run \\
    --nnodes=2 \\
    --nproc-per-node=8 \\
    --max-restarts=0 \\
    --shutdown-timeout=120 \\
    --rdzv-backend=c10d --rdzv-endpoint="$host:29400" \\
    --rdzv-id="$SLURM_JOB_ID" \\
    -m equipoise.train.worker "$run" &
ranks=$!
# A signal cuts a wait short, and the ranks are still at work.
again=1
while [ "$again" ]; do
    again=
    code=0
    wait "$ranks" || code=$?
done
exit "$code"
"""


def test_the_slurm_script_whole() -> None:
    assert write_slurm(job(interface="ib0"), more="--partition=gpu -t 4:00") == SLURM


def test_a_run_that_is_not_prepared_is_prepared_first() -> None:
    text = write_slurm(job(prepare=("train", "/a b/run.toml", "--prepare")))
    assert "\npython3 -m equipoise.cli.main train '/a b/run.toml' --prepare\nrm -f" in text


def test_ranks_on_cores_ask_for_cores() -> None:
    lines = write_slurm(job(accelerator="none")).splitlines()
    assert "#SBATCH --mincpus=8" in lines
    assert not [line for line in lines if "gpus" in line]


def test_the_torchrun_script_of_one_of_several_nodes() -> None:
    assert write_torchrun(job(), host="node-0") == (
        "#!/bin/bash\n"
        "# run demo, 16 ranks on 2 nodes of 8. Start it on each node; they meet at node-0.\n"
        "set -euo pipefail\n\n"
        "run=/runs/demo\n"
        "export OMP_NUM_THREADS=1\n"
        "export GLIBC_TUNABLES=glibc.malloc.tcache_count=0\n"
        "export PYTHONUNBUFFERED=1\n"
        "export PYTHONFAULTHANDLER=1\n"
        'rm -f -- "$run/stop"\n\n'
        "exec python3 -m torch.distributed.run \\\n"
        "    --nnodes=2 \\\n    --nproc-per-node=8 \\\n    --max-restarts=0 \\\n"
        "    --shutdown-timeout=120 \\\n    --rdzv-backend=c10d \\\n"
        "    --rdzv-endpoint=node-0:29400 \\\n    --rdzv-id=demo \\\n"
        '    -m equipoise.train.worker "$run"\n'
    )


@given(st.lists(POD_PATHS, min_size=8, max_size=12), st.sampled_from(["torchrun", "slurm"]))
@settings(max_examples=6)  # of some ten paths each, since a shell takes long to start
def test_any_path_survives_the_shell(paths: list[list[str]], form: str) -> None:
    texts = []
    for parts in paths:
        folder = Path("/", *parts)
        made = job(folder, nodes=1, python=f"/{parts[0]}/python")
        texts.append(write_slurm(made) if form == "slurm" else write_torchrun(made))
        words = shlex.split(texts[-1], comments=True)
        assert f"run={folder}" in words
        assert f"/{parts[0]}/python" in words
    whole = "\n".join(texts)
    assert subprocess.run(["bash", "-n"], input=whole, text=True, check=False).returncode == 0


@given(POD_PATHS)
def test_any_path_survives_yaml(parts: list[str]) -> None:
    folder = Path("/runs", *parts)
    _, found = yaml.safe_load_all(write_kube(job(folder), pods(), used=[folder / "x"]))
    command = found["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-1].replace("$$(", "$(") == str(folder)


def test_the_kubernetes_objects() -> None:
    service, found = yaml.safe_load_all(write_kube(job(interface="eth0"), pods()))
    assert service == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": "demo"},
        },
    }
    spec = found["spec"]
    pod = spec.pop("template")["spec"]
    assert (found["apiVersion"], found["kind"], found["metadata"]) == (
        "batch/v1",
        "Job",
        {"name": "demo"},
    )
    assert spec == {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
    }
    [container] = pod.pop("containers")
    assert pod == {
        "subdomain": "demo",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    assert container["command"] == [
        "python3",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=8",
        "--max-restarts=0",
        "--shutdown-timeout=120",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=demo-0.demo:29400",
        "--rdzv-id=demo",
        "-m",
        "equipoise.train.worker",
        "/runs/demo",
    ]
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["volumeMounts"] == [
        {"name": "runs", "mountPath": "/runs"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


# The fields we write, as the types of Kubernetes 1.32 declare them: a dict is an object, a list of
# one is a list of such objects, `...` is anything (a plain value, or a map of names to values).
# Source: the reference of the API, https://kubernetes.io/docs/reference/generated/kubernetes-api/v1.32
# (ServiceSpec v1, JobSpec batch/v1, PodSpec v1, Container v1, EnvVar v1, ResourceRequirements v1,
# VolumeMount v1, Volume v1, PersistentVolumeClaimVolumeSource v1, EmptyDirVolumeSource v1).
POD = {
    "subdomain": ...,
    "restartPolicy": ...,
    "terminationGracePeriodSeconds": ...,
    "containers": [
        {
            "name": ...,
            "image": ...,
            "command": ...,
            "env": [{"name": ..., "value": ...}],
            "resources": {"limits": ..., "requests": ...},
            "volumeMounts": [{"name": ..., "mountPath": ...}],
        }
    ],
    "volumes": [
        {
            "name": ...,
            "persistentVolumeClaim": {"claimName": ...},
            "emptyDir": {"medium": ...},
        }
    ],
}
JOB = {
    "completionMode": ...,
    "completions": ...,
    "parallelism": ...,
    "backoffLimit": ...,
    "template": {"spec": POD},
}
SERVICE = {"clusterIP": ..., "publishNotReadyAddresses": ..., "selector": ...}
KUBERNETES = {
    kind: {"apiVersion": ..., "kind": ..., "metadata": {"name": ...}, "spec": spec}
    for kind, spec in (("Service", SERVICE), ("Job", JOB))
}


def require_known(ours: object, declared: object) -> None:
    """Each of our fields is one that Kubernetes declares at that place."""
    if isinstance(declared, dict):
        assert isinstance(ours, dict)
        for key, value in ours.items():
            require_known(value, declared[key])
    elif isinstance(declared, list):
        assert isinstance(ours, list)
        for one in ours:
            require_known(one, declared[0])


@pytest.mark.parametrize("accelerator", ["none", "nvidia", "amd"])
def test_kubernetes_knows_every_field(accelerator: str) -> None:
    """An unknown field is dropped in silence where validation is lax, and refused elsewhere."""
    text = write_kube(job(interface="eth0", accelerator=accelerator), pods())
    for ours in yaml.safe_load_all(text):
        require_known(ours, KUBERNETES[ours["kind"]])


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True))
def test_names_are_labels_of_dns(name: str) -> None:
    label = kube_name(name)
    assert len(f"{label}-99999") <= 63
    assert label[0].isalpha()
    assert label[-1].isalnum()
    assert not set(label) - set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_nothing_of_this_environment_is_in_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [write_slurm(job()), write_torchrun(job(), host="a"), write_kube(job(), pods())]
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES", "GLOO_SOCKET_IFNAME", "HOME", "PATH"):
        monkeypatch.setenv(name, "/a/secret/place")
    again = [write_slurm(job()), write_torchrun(job(), host="a"), write_kube(job(), pods())]
    assert again == forms
    assert not [text for text in again if "secret" in text]


def test_where_ranks_stand(tmp_path: Path) -> None:
    assert place_on(None, 4, sharing=1) == Nodes(1, 4, "none")
    assert place_on(find_cluster("mi250x:16"), 16, sharing=1) == Nodes(2, 8, "amd")
    two = 'name = "two"\n[[nodes]]\ndevice = "this-cpu"\nnodes = 2\ndevices_per_node = 4\n'
    found = cluster_of(tmp_path, two + 'nic = "ethernet-25"\n')
    assert place_on(found, 8, sharing=1) == Nodes(2, 4, "none")


def test_ranks_that_are_not_the_devices() -> None:
    with pytest.raises(LayoutError) as caught:
        place_on(find_cluster("h100-sxm:16"), 4, sharing=2)
    assert str(caught.value) == (
        "The run has 4 ranks, but h100-sxm:16 has 16 devices. Use a cluster of 4 devices, or set "
        "layout.dp = 8."
    )
    with pytest.raises(LayoutError) as caught:
        place_on(find_cluster("h100-sxm:16"), 4, sharing=3)
    assert str(caught.value) == (
        "The run has 4 ranks, but h100-sxm:16 has 16 devices. Use a cluster of 4 devices."
    )


NODES = '[[nodes]]\ndevice = "{}"\nnodes = 1\ndevices_per_node = {}\n'


def test_nodes_that_differ(tmp_path: Path) -> None:
    between = 'name = "grown"\nbetween = "ethernet-25"\n'
    grown = between + NODES.format("h100-sxm", 8) + NODES.format("h100-sxm", 4)
    with pytest.raises(LayoutError) as caught:
        place_on(cluster_of(tmp_path, grown), 12, sharing=1)
    assert str(caught.value) == (
        "grown has nodes of 8 and 4 devices, but a form starts equally many ranks on each. Use a "
        "cluster of equal nodes: the same file with devices_per_node = 4 for each."
    )
    mixed = between + NODES.format("h100-sxm", 8) + NODES.format("mi250x", 8)
    with pytest.raises(LayoutError) as caught:
        place_on(cluster_of(tmp_path, mixed), 16, sharing=1)
    assert str(caught.value) == (
        "grown has devices of different makers (h100-sxm, mi250x), which no message library "
        "connects. Use a cluster with devices of one maker."
    )


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(LayoutError) as caught:
        job(port=port)
    assert str(caught.value) == f"--port {port} is not a port. Choose one from 1 to 65535."


def test_several_nodes_without_a_meeting_place() -> None:
    with pytest.raises(LayoutError) as caught:
        write_torchrun(job())
    assert str(caught.value) == (
        "2 nodes must know where to meet. Give the name or address of one of them: --host NAME."
    )


def test_several_nodes_cannot_each_prepare() -> None:
    with pytest.raises(LayoutError) as caught:
        write_torchrun(job(prepare=("train", "a b.toml", "--prepare")), host="a")
    assert str(caught.value) == (
        "The torchrun form of 2 nodes starts a prepared run, but /runs/demo is not prepared. "
        "First run this where every node sees the folder: equipoise train 'a b.toml' --prepare"
    )
    with pytest.raises(LayoutError) as caught:
        write_kube(job(nodes=1, prepare=("train", "--prepare")), pods())
    assert str(caught.value) == (
        "The Kubernetes form of 1 node starts a prepared run, but /runs/demo is not prepared. "
        "First run this where every node sees the folder: equipoise train --prepare"
    )


def test_a_pod_without_its_image() -> None:
    with pytest.raises(SpecError) as caught:
        write_kube(job(), PodSpec("", "data", None))
    assert str(caught.value) == (
        "The Kubernetes form lacks --image, --mount. Give --image IMAGE, which has equipoise and "
        "torch in it, --claim NAME, the volume claim that holds the run, and --mount DIR, the "
        "folder that it is mounted at."
    )


def test_tokens_that_no_pod_would_see() -> None:
    with pytest.raises(LayoutError) as caught:
        write_kube(job(), pods(), used=[Path("/home/a/cache")])
    assert str(caught.value) == (
        "/home/a/cache is not below /runs, where the claim data is mounted, so pods would not "
        "see it. Prepare the run with --out and --data.cache below /runs, or give another "
        "--mount."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "--partition='gpu",
            '--sbatch: "--partition=\'gpu" is not a list of options (No closing quotation). Give '
            'them as on sbatch\'s command line: --sbatch="--partition=gpu --time=04:00:00".',
        ),
        (
            "gpu",
            '--sbatch: "gpu" belongs to no option. Give options as on sbatch\'s command line: '
            '--sbatch="--partition=gpu --time=04:00:00".',
        ),
        (
            "--time=1 gpu",
            '--sbatch: "gpu" belongs to no option. Give options as on sbatch\'s command line: '
            '--sbatch="--partition=gpu --time=04:00:00".',
        ),
    ],
)
def test_options_that_are_none(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        write_slurm(job(), more=text)
    assert str(caught.value) == message


def test_a_scheduler_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EquipoiseError) as caught:
        submit(["kubectl", "apply", "-f", "-"], "")
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        "There is no kubectl on this machine. Print the form without --submit, and hand it to "
        "kubectl apply -f - where kubectl is."
    )
    with pytest.raises(EquipoiseError) as caught:
        run_torchrun(job(nodes=1), "")
    assert str(caught.value) == (
        "There is no bash on this machine. Name an interpreter that has equipoise with --python, "
        "or print the form without --submit."
    )


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def test_what_a_scheduler_is_given_and_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(tmp_path, "sbatch", 'cat > "$(dirname "$0")/given"; echo Submitted batch job 17')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert submit(["sbatch"], SLURM) == "Submitted batch job 17"
    assert (tmp_path / "given").read_text() == SLURM
    fake(tmp_path, "sbatch", "cat > /dev/null; echo sbatch: error: no such partition >&2; exit 1")
    with pytest.raises(SpecError) as caught:
        submit(["sbatch"], SLURM)
    assert str(caught.value) == (
        "sbatch refused the form (exit code 1): sbatch: error: no such partition. Correct that, "
        "or print the form without --submit and submit it yourself."
    )


def test_ranks_that_failed() -> None:
    with pytest.raises(FaultError) as caught:
        run_torchrun(job(nodes=1, python="bash"), "exit 3")
    assert str(caught.value) == (
        "The ranks of /runs/demo ended with exit code 3; what happened is in its journal. Run the "
        "same command again to resume from the last checkpoint."
    )


BREAKS = ("a\nrm -rf b", "a\r\ntouch b", "a\u2028b", "a\x85b")


@pytest.mark.parametrize("text", BREAKS)
def test_no_name_ends_the_line_that_it_stands_on(text: str) -> None:
    named = Job(text, FOLDER, Nodes(1, 8, "nvidia"))
    quiet = Job("demo", FOLDER, Nodes(1, 8, "nvidia"))
    kube = [write_kube(each, pods()) for each in (named, quiet)]
    for changed, plain in (
        (write_torchrun(named), write_torchrun(quiet)),
        (write_slurm(named), write_slurm(quiet)),
        (kube[0], kube[1]),
    ):
        assert len(changed.splitlines()) == len(plain.splitlines())


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("host", [*BREAKS, "a b", "$(id)", "a'b"])
def test_a_host_that_is_none(host: str, nodes: int) -> None:
    with pytest.raises(LayoutError) as caught:
        write_torchrun(job(nodes=nodes), host=host)
    shown = json.dumps(host, ensure_ascii=False)
    shown = shown.replace("\u2028", "\\u2028").replace("\x85", "\\x85")
    assert str(caught.value) == (
        f"--host {shown} is not a name or address of a node. Give one as every node resolves it: "
        "--host node-0."
    )


@pytest.mark.parametrize("host", ["node-0", "10.0.0.1", "[fe80::1%eth0]", "a.b.c"])
def test_a_host_that_is_one(host: str) -> None:
    assert f"    --rdzv-endpoint={host}:29400" in write_torchrun(job(), host=host).replace("'", "")


def test_no_option_of_sbatch_ends_its_directive() -> None:
    with pytest.raises(SpecError) as caught:
        write_slurm(job(), more="--comment='a\ntouch b'")
    assert str(caught.value) == (
        "--sbatch \"--comment='a\\ntouch b'\" has a character that no directive can hold, a line "
        "break or another that is not printed. Give the options on one line."
    )


def test_forms_recover_as_often_as_the_run_says() -> None:
    job = Job("run", Path("/runs/run"), Nodes(2, 4, "none"), restarts=5)
    slurm = write_slurm(job)
    assert "--max-restarts=5" in slurm and "\n#SBATCH --requeue\n" in slurm
    pods = PodSpec("image", "claim", Path("/runs"))
    _, found = yaml.safe_load_all(write_kube(job, pods))
    [container] = found["spec"]["template"]["spec"]["containers"]
    assert found["spec"]["backoffLimit"] == 5 and "--max-restarts=5" in container["command"]
