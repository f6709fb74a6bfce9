"""``equipoise train`` from outside: kills, Ctrl-C, faults of a rank, and what comes after them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.cli.main import main
from equipoise.observe.event import SCHEMA_VERSION
from support.launch.held import Held
from support.make_run import write_run
from support.read_run import EXACT, events, ranks_of
from support.verbs import DEADLINE_S, end_of, start, train_while, wait_until

STEPS, LAST = 24, 20
"""Steps of a run, and the one that it waits at until a test has done its deed."""
RESUME = "Run the same command again to resume from the last checkpoint."


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, texts, cache, steps=STEPS, every_steps=6, layout="dp = 2")


def train(*words: object, **env: str) -> tuple[int, str, str]:
    return end_of(start(*words, **env))


def losses(folder: Path) -> list[float]:
    """Loss of each step; of a step that was computed twice, the later one counts."""
    found = {e["step"]: e["loss"] for e in events(folder, "step")}
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[step] for step in sorted(found)]


def steps_done(folder: Path) -> int:
    return max((e["step"] for e in events(folder, "step")), default=0)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("*"))


def undisturbed(out: str) -> str:
    """What ``train`` says, whatever else the cores did while it measured."""
    lines = out.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("The price curve was measured"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, texts: Path, cache: Path) -> Path:
    """The folder of a run that nobody disturbed."""
    root = tmp_path_factory.mktemp("straight")
    path = write_run(root, texts, cache, steps=STEPS, every_steps=6, layout="dp = 2")
    code, out, err = train(path, "--out", root / "run", "--journal.tensorboard", "true")
    assert (code, err.count("Traceback")) == (0, 0), err
    assert undisturbed(out).startswith(f"{STEPS} steps, 24.6k tokens in ")
    return root / "run"


@pytest.fixture
def folder(straight: Path, tmp_path: Path) -> Path:
    """A run's folder that has the price curve of the undisturbed one, and measures none."""
    made = tmp_path / "run"
    made.mkdir()
    shutil.copytree(straight / "curves", made / "curves")
    return made


def test_a_run_leaves_journals_of_every_rank_and_its_last_checkpoints(straight: Path) -> None:
    assert checkpoints(straight) == ["step-000018", "step-000024"]
    assert not (straight / "stop").exists()
    for rank in (0, 1):
        found = events(straight, rank=rank)
        assert all(
            (e["v"], e["rank"]) == (SCHEMA_VERSION, rank) and e["t"] > 0 and e["name"]
            for e in found
        )
        kinds = {e["kind"] for e in found}
        assert kinds <= {"span", "scalar", "instant", "decision"}
        steps = [e for e in found if (e["kind"], e["name"]) == ("scalar", "step")]
        assert [e["step"] for e in steps] == list(range(1, STEPS + 1))
        assert {"loss", "grad_norm", "lr", "tokens", "step_s", "mfu", "busy_s", "wait_s"} <= set(
            steps[0]
        )
        spans = {e["name"] for e in found if e["kind"] == "span"}
        assert spans - {"garbage"} == {
            *("measure", "forward", "backward", "wait", "reduce", "optimizer", "save"),
        }
    zero = events(straight)
    packs = [e for e in zero if e["name"] == "pack"]
    assert len(packs) == STEPS
    assert all(sum(e["rank_tokens"]) == 1024 and len(e["predicted_s"]) == 2 for e in packs)
    (begun,) = [e for e in zero if e["name"] == "start"]
    assert (begun["world"], begun["resumed_step"], begun["curve"]["measured"]) == (2, 0, True)
    assert [e["reason"] for e in zero if e["name"] == "stop"] == ["done"]
    assert losses(straight)[-1] < losses(straight)[0]


def test_tensorboard_scalars_stand_beside_the_journal(straight: Path) -> None:
    (file,) = (straight / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert b"train/loss" in file.read_bytes()


def test_ctrl_c_saves_at_any_moment_and_the_same_command_goes_on(
    run_toml, straight, folder, held: type[Held], capsys
) -> None:
    words, orders = (run_toml, "--out", folder), held(folder)

    orders.hold(1)
    process = start(*words)  # before the first step, while what ranks need is imported
    wait_until((folder / "logs" / "agent.log").exists)
    process.send_signal(signal.SIGINT)
    wait_until((folder / "stop").exists)
    orders.go_on()
    code, out, err = end_of(process)
    assert code == 0, err
    assert "Stopping after this step and saving. Ctrl-C again to end at once.\n" in err
    assert checkpoints(folder) == ["step-000001"]
    assert [e["reason"] for e in events(folder, "stop")] == ["interrupted"]
    assert not (folder / "stop").exists()

    orders.hold(LAST)
    process = start(*words)  # in the middle
    wait_until(lambda: steps_done(folder) >= 8)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (folder / "stop").exists() or process.poll() is not None)
    orders.go_on()
    code, out, err = end_of(process)
    assert code == 0, err
    assert f"Resuming after step 1 from {folder}/checkpoint/step-000001.\n" in out
    middle = steps_done(folder)
    assert 8 <= middle < STEPS
    assert checkpoints(folder)[-1] == f"step-{middle:06d}"

    assert main(["train", *map(str, words), "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["run"], last["step"]) == (str(folder), STEPS)
    assert last["loss"] == pytest.approx(losses(straight)[-1], rel=EXACT)
    assert losses(folder) == pytest.approx(losses(straight), rel=EXACT)


def test_a_killed_rank_is_named_and_other_ranks_go_on_from_the_last_save(
    run_toml, straight, folder, held: type[Held], capsys
) -> None:
    killed, orders = list[int](), held(folder)
    orders.hold(LAST)

    def kill() -> None:
        wait_until(lambda: steps_done(folder) >= 8)
        killed.append(ranks_of(folder)[1])
        os.kill(killed[0], signal.SIGKILL)
        orders.go_on()

    assert train_while(kill, run_toml, "--out", folder, "--fault.restarts", 0) == 6
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"Rank 1 of 2 (pid {killed[0]}) was ended by SIGKILL; it left no traceback. {RESUME}"
    )
    assert ranks_of(folder) == {}
    assert [each["action"] for each in events(folder, "recovery")] == ["stop"]
    saved = checkpoints(folder)[-1]

    layout = ["--layout.dp", "3", "--layout.zero", "3"]
    assert main(["train", str(run_toml), "--out", str(folder), *layout]) == 0
    assert events(folder, "start")[-1]["resumed_step"] == int(saved[-6:])
    assert losses(folder) == pytest.approx(losses(straight), rel=EXACT)


def test_a_killed_parent_leaves_no_orphan_and_torchrun_goes_on(
    run_toml, straight, folder, held: type[Held]
) -> None:
    orders = held(folder)
    orders.hold(LAST)
    process = start(run_toml, "--out", folder, "--checkpoint.every_steps", 2)
    wait_until(lambda: any(find_checkpoints(folder / "checkpoint")))  # not one being written
    assert set(ranks_of(folder)) == {0, 1}
    process.kill()
    process.communicate(timeout=DEADLINE_S)  # ends when the last rank has closed its output
    wait_until(lambda: not ranks_of(folder))
    orders.go_on()

    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "equipoise.train.worker", str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Resuming after step " in done.stdout
    assert losses(folder) == pytest.approx(losses(straight), rel=EXACT)


def test_a_second_run_touches_nothing_and_a_second_ctrl_c_ends_at_once(run_toml, folder) -> None:
    words = (run_toml, "--out", folder, "--train.steps", 1_000_000)
    process = start(*words)
    wait_until(lambda: steps_done(folder) >= 1)
    resolved = (folder / "resolved.json").read_text()
    code, out, err = train(*words, "--train.lr", 0.5)
    assert (code, out) == (2, "")
    assert err == (
        f"Another run is writing to {folder}. Wait until it ends, stop it, or choose another "
        "folder with --out.\n"
    )
    assert (folder / "resolved.json").read_text() == resolved
    assert process.poll() is None

    # A rank that hangs in its step cannot save.
    os.kill(ranks_of(folder)[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    wait_until((folder / "stop").exists)  # before the second: two at once would count as one
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = end_of(process)
    assert code == 130
    assert err.splitlines()[-1] == "Interrupted."
    wait_until(lambda: not ranks_of(folder))
    assert not any(e["kind"] == "fault" for e in events(folder))


# Refused before any rank starts. ------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["train", *map(str, words), "--quiet"])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_a_port_that_is_taken(run_toml, tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert refused(capsys, run_toml, "--out", tmp_path / "run", "--port", port) == (
            2,
            f"Port {port} cannot be used (Address already in use). Choose another with --port, or "
            "omit --port to take any free one.\n",
        )
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(run_toml, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    assert refused(capsys, run_toml, "--out", folder) == (
        2,
        f"The run's folder {folder} cannot be written (Not a directory). Make it writable, or "
        "choose another with --out.\n",
    )


if os.geteuid() == 0:

    def test_a_folder_of_somebody_else(run_toml, tmp_path) -> None:
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            folder = Path(name) / "run"
            assert main(["train", str(run_toml), "--out", str(folder), "--prepare", "--quiet"]) == 0
            program = (
                "import os\n"
                "from pathlib import Path\n"
                "from equipoise.spec.run.resolved import read_resolved, write_resolved\n"
                f"folder = Path({str(folder)!r})\n"
                "resolved = read_resolved(folder)\n"
                "os.setuid(65534)\n"
                "write_resolved(folder, resolved)\n"
            )
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=False
            )
        assert done.stderr.endswith(
            f"equipoise.base.errors.SpecError: The run's folder {folder} cannot be written "
            "(Permission denied). Make it writable, or choose another with --out.\n"
        )


def test_a_tokenizer_that_does_not_fit_the_model(run_toml, cache, tmp_path, capsys) -> None:
    main(["train", str(run_toml), "--out", str(tmp_path / "run"), "--prepare"])
    (tokenizer, *_) = cache.glob("tokenizer-*/tokenizer.json")
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    capsys.readouterr()
    code, err = refused(
        *(capsys, run_toml, "--out", tmp_path / "other", "--model.vocab", 256),
        *("--data.tokenizer", "tokenizer.json"),
    )
    assert code == 2
    start_, _, rest = err.partition(" has 300 tokens, but the model has only 256. ")
    assert start_.startswith("The tokenizer ")
    assert start_.endswith("/tokenizer.json")
    assert rest == ("Set model.vocab = 320, or use the model's own tokenizer.\n")


def test_prepare_says_how_to_start_the_ranks(run_toml, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    assert main(["train", str(run_toml), "--out", str(folder), "--prepare", "--quiet"]) == 0
    assert capsys.readouterr().out == (
        f"Prepared {folder} for 2 ranks. Start them with: torchrun --nproc-per-node 2 -m "
        f"equipoise.train.worker {folder}\n"
    )
    assert main(["train", str(run_toml), "--out", str(folder), "--prepare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(folder), "ranks": 2}
