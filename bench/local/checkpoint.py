"""What a save costs: blocked seconds beside ``torch.save`` and DCP, steps that save, 2,000 saves.

Two ranks each hold the state of a sharded decoder. In turn they write it with ``torch.save`` (each
rank its own part, to a file, without a flush), with DCP's ``async_save`` and in the background;
between saves each computes, and takes a step of the optimizer. Blocked is what the training's
thread waited.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver
from torch.distributed.tensor import DTensor

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.base.errors import FaultError
from equipoise.checkpoint.background import Saver
from equipoise.checkpoint.manifest import FORMAT, Manifest, newest_good
from equipoise.checkpoint.places import live_state
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.nn.decoder import Decoder, initialize
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.run.spec import TrainSpec

ROUNDS = 12
WINDOW_S = 0.4
"""What stands for the forward and backward of a step."""
SOAK, WARM = 2000, 200
KILLS, KILL_WITHIN_S, JUST_AFTER_S = 200, 0.15, 0.006
STEPS = 6
"""Steps of a run of the demo's model; the first is left out."""


def _build(
    ranks: Ranks, model: ModelSpec
) -> tuple[Decoder, torch.optim.Optimizer, Callable[[], None]]:
    decoder = Decoder(model)
    initialize(decoder, 0)
    ShardedDecoder(decoder, ranks, zero=1, precision="fp32")
    optimizer = make_adamw(decoder, TrainSpec())

    def step() -> None:
        for weight in decoder.parameters():
            weight.grad = torch.ones_like(weight) * 1e-3
        optimizer.step()

    step()
    return decoder, optimizer, step


def _manifest(model: ModelSpec, step: int, world: int) -> Manifest:
    sizes = dataclasses.asdict(model)
    return Manifest(FORMAT, "bench", step, 0, world, sizes, "c" * 32, 0, 256, {})


def _compute(seconds: float) -> None:
    """Matrix products for about as long as asked."""
    one, until = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < until:
        one = (one @ one).clamp_(max=1.0)


def _own(state: Any) -> Any:
    """This rank's part of a state."""
    if isinstance(state, dict):
        return {key: _own(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


def blocked(ranks: Ranks, root: Path, name: str) -> dict[str, list[float]]:
    """Blocked seconds of each way to save, in turn."""
    model = preset(name)
    decoder, optimizer, step = _build(ranks, model)
    seconds: dict[str, list[float]] = {"torch.save": [], "DCP async_save": [], "background": []}
    written: list[float] = []
    size = 0
    with Saver(root / "ours", decoder, optimizer, ranks, keep=2) as saver:
        for turn in range(ROUNDS + 1):
            ranks.barrier()
            began = time.perf_counter()
            state, _ = live_state(decoder, optimizer)
            torch.save(_own(state), root / f"torch-{ranks.rank}.pt")
            seconds["torch.save"].append(time.perf_counter() - began)
            _compute(WINDOW_S)
            step()

            ranks.barrier()
            folder = root / f"dcp-{turn}"
            began = time.perf_counter()
            state, _ = live_state(decoder, optimizer)
            future = state_dict_saver.async_save(state, storage_writer=FileSystemWriter(folder))
            seconds["DCP async_save"].append(time.perf_counter() - began)
            _compute(WINDOW_S)
            step()
            future.result()
            ranks.barrier()
            if ranks.rank == 0:
                shutil.rmtree(folder)

            ranks.barrier()
            saver.begin(_manifest(model, turn + 1, ranks.world), {})
            _compute(WINDOW_S)
            step()
            while not saver.has_news and ranks.rank == 0:
                time.sleep(0.01)  # later steps; ranks settle when the save has ended
            ranks.barrier()
            saved = saver.settle()
            assert saved is not None
            seconds["background"].append(saved.times.blocked_s)
            written.append(saved.times.written_s)
            size = saved.size_bytes
    return (
        {name: each[1:] for name, each in seconds.items()}
        | {  # the first allocates
            "written": written[1:],
            "bytes": [float(size)],
        }
    )


def soak(ranks: Ranks, root: Path, saves: int) -> dict[str, Any]:
    """What many saves of a small model leave behind in this process."""
    model = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)
    decoder, optimizer, step = _build(ranks, model)
    uses = []
    with Saver(root, decoder, optimizer, ranks, keep=2) as saver:
        for number in range(1, WARM + saves + 1):
            saver.begin(_manifest(model, number, ranks.world), {})
            step()
            saver.settle()
            if number in (WARM, WARM + saves):
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                uses.append(
                    {
                        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
                        "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm/"),
                        "threads": len(list(Path("/proc/self/task").iterdir())),
                        "resident_kib": pages * 4,
                    }
                )
    before, after = uses
    growth = (after["resident_kib"] - before["resident_kib"]) / (saves / 100)
    return {
        f"after {WARM:,}": before,
        f"after {WARM + saves:,}": after,
        "KiB per 100 saves (goal 1,024)": growth,
    }


def save_until_killed(ranks: Ranks, root: Path, first: int, stage: str, after_s: float) -> None:
    """Save every step twice, so that the second replaces the first; be killed during a save.

    Args:
        ranks: One of them.
        root: Folder of the checkpoints.
        first: The first step.
        stage: What the second step's first save has reached when the clock starts.
        after_s: How long after that the process is killed [s].
    """
    model = preset("2m")
    decoder, optimizer, step = _build(ranks, model)
    now, reached_by = 0, os.open(root / "reached", os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def reached(name: str) -> None:
        os.pwrite(reached_by, f"{name:16}".encode(), 0)
        if now == first + 1 and name == stage:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    with Saver(root, decoder, optimizer, ranks, keep=2, reached=reached) as saver:
        for number in range(first, first + 1000):
            for _ in range(2):
                now = number
                reached("begun")
                saver.begin(_manifest(model, number, ranks.world), {})
                step()
                saver.settle()
                (root / "last").write_text(str(number))


def kills(root: Path, count: int) -> dict[str, Any]:
    """Kill one run of saves again and again, each time going on where it was.

    Half of the kills come at any time of a save, the others just after a stage of it: before and
    while a checkpoint gets its name, or takes another one's, and while older ones are deleted.
    """
    root.mkdir()
    draw, whole, lost, newest = random.Random(0), 0, 0, 0
    places: Counter[str] = Counter()
    for number in range(count):
        stage = ("begun", "staged", "begun", "written", "begun", "collected", "begun", "published")[
            number % 8
        ]
        after_s = draw.uniform(0, KILL_WITHIN_S if stage == "begun" else JUST_AFTER_S)
        try:
            run_ranks(1, save_until_killed, root, newest + 1, stage, after_s)
        except FaultError as error:
            assert "SIGKILL" in str(error), error
        places[(root / "reached").read_text().strip()] += 1
        good = newest_good(root)
        assert good is not None
        _, manifest, torn = good
        whole += not torn
        said = (root / "last").read_text()  # torn itself if the kill came then
        lost += manifest.step < int(said or 0)
        newest = manifest.step
    return {
        "kills": count,
        "newest whole and verified": whole,
        "published and lost": lost,
        "the last stage reached before the kill": dict(places),
    }


def _step_s(folder: Path, every: int) -> list[float]:
    """Seconds from each step's end to the next one's, in a run of the demo's model."""
    command = [
        *(sys.executable, "-m", "equipoise.cli.main", "train", "--out", str(folder), "--quiet"),
        *("--model.preset", "2m", "--pack.context_tokens", "16384", "--layout.dp", "2"),
        *("--train.steps", str(STEPS), "--train.warmup_steps", "1"),
        *("--checkpoint.every_steps", str(every)),
    ]
    subprocess.run(command, check=True)
    ends = [
        event["t"]
        for line in (folder / "journal" / "rank-00000.jsonl").read_text().splitlines()
        if (event := json.loads(line))["kind"] == "scalar" and event["name"] == "step"
    ]
    return [later - earlier for earlier, later in itertools.pairwise(ends)]


def measure(saves: int, killed_saves: int, turns: int) -> dict[str, Any]:
    """All three.

    Args:
        saves: How many of the soak.
        killed_saves: How many saves are killed.
        turns: Of runs of the demo's model that save every step, and none.
    """
    open_corpus()
    stamp = LoadStamp()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        rows = run_ranks(2, blocked, root, "7m")
        slowest = {
            way: [max(each) for each in zip(*(row[way] for row in rows), strict=True)]
            for way in rows[0]
        }
        size = sum(row["bytes"][0] for row in rows)
        del slowest["bytes"]
        median = {way: statistics.median(each) for way, each in slowest.items()}
        killed = kills(root / "killed", killed_saves)
        (soaked,) = run_ranks(1, soak, root / "soak", saves)
        steps: dict[int, list[float]] = {1: [], 1000: []}
        for turn in range(turns):
            for every in (1, 1000) if turn % 2 else (1000, 1):
                steps[every] += _step_s(root / f"run-{turn}-{every}", every)
    own = median["background"]
    ratio = statistics.median(steps[1]) / statistics.median(steps[1000])
    return {
        "what": "saves of a 7M decoder by two ranks, slowest rank (measured)",
        "state_bytes": size,
        "blocked_s": {way: spread(each) for way, each in slowest.items() if way != "written"},
        "background: until written and verified": spread(slowest["written"]),
        "blocked over torch.save (goal 0.1)": own / median["torch.save"],
        "blocked over DCP async_save (goal 0.5)": own / median["DCP async_save"],
        "step_s, saving every step": spread(steps[1]),
        "step_s, saving none": spread(steps[1000]),
        "step that saves over one that does not (goal 1.05)": ratio,
        f"{saves:,} saves": soaked,
        "killed while saving": killed,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=SOAK)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    json.dump(measure(args.saves, args.kills, args.turns), sys.stdout, indent=1)
