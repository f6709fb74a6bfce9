"""ZeRO-3 on two ranks, one core each, fp32: ours beside DeepSpeed's, over the same decoder.

Sides run in one process a rank and alternate step by step, from the same weights over the same
pieces: the same number of micro-batches, AdamW with the same groups, the same clip.

- equal: every micro-batch has the same tokens in documents of the same lengths.
- uneven: documents of Wikipedia's lengths. Ours packs by work; DeepSpeed has no packer and gets
  windows of equal tokens in order, as its data loaders make them.
- large: as equal, with a decoder whose weights are all but a few beyond DeepSpeed's threshold.

DeepSpeed keeps every weight of fewer than 100,000 numbers whole on each rank (its default of
``stage3_param_persistence_threshold``): all of the small decoder but its tables. It also runs
with a threshold of 0, and with one above every weight. The last keeps what ZeRO 2 keeps, so it is
also compared with our ``zero = 2``. Ours keeps what ``cost.memory.weights.is_kept_whole`` picks:
every layer of the small decoder, and none of the large one's.

DeepSpeed is not a dependency. To get it (its first start also compiles, for a minute or more)::

    DS_BUILD_OPS=0 pip install --target PEERS --no-deps --no-build-isolation \\
        deepspeed==0.19.8 hjson ninja py-cpuinfo einops msgpack
    PYTHONPATH=PEERS python -m bench.run peers.zero
"""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.corpus import open_corpus, recut
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.packing.pack import pack_step, rank_seconds, skew
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.data.batch import count_labels, make_batch
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import Journal
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec, RunSpec, TrainSpec
from equipoise.spec.workload import draw_lengths
from equipoise.train.curves import obtain_curve
from equipoise.train.process import settle
from equipoise.train.step import StepRunner

WARM, MICRO_BATCHES = 1, 2
TRAIN = TrainSpec(lr=1e-3, eps=1e-5)  # above rounding, which AdamW with 1e-8 would turn into steps
WHOLE = {
    "deepspeed": 0,
    "deepspeed by default": 100_000,
    "deepspeed, all whole": 10**12,
}
"""``stage3_param_persistence_threshold``: the largest weight that is kept whole."""
OURS = {"ours": 3, "ours, ZeRO 2": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """The case that both sides run."""

    model: ModelSpec
    window_tokens: int
    steps: int
    sides: tuple[str, ...]
    even: bool = True


CASES = {
    "equal": Case(preset("2m"), 2048, 9, (*OURS, *WHOLE)),
    "uneven": Case(preset("2m"), 8192, 4, ("ours", "deepspeed by default"), even=False),
    "large": Case(preset("30m"), 1024, 3, (*OURS, "deepspeed by default", "deepspeed, all whole")),
}

Run = Callable[[PackedStep], float]
"""Runs a step and returns its loss."""


def ours(ranks: Ranks, store: TokenStore, folder: Path, model: ModelSpec, *, zero: int) -> Run:
    """The product's own step."""
    decoder = Decoder(model)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    journal = Journal(folder / str(zero), ranks.rank)
    runner = StepRunner(sharded, make_adamw(decoder, TRAIN), store, ranks, journal)

    def run(packed: PackedStep) -> float:
        done = runner.run(
            packed,
            step=1,
            rate=TRAIN.lr,
            clip_norm=TRAIN.clip_norm,
            last_good=lambda: None,
            stop_asked=False,
        )
        return done.loss

    return run


def theirs(ranks: Ranks, store: TokenStore, port: int, model: ModelSpec, *, most_whole: int) -> Run:
    """DeepSpeed's engine around the same decoder and optimizer."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import deepspeed

    decoder = Decoder(model)
    initialize(decoder, 0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": TRAIN.clip_norm,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": most_whole},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=decoder, optimizer=make_adamw(decoder, TRAIN), config=config
    )

    def run(packed: PackedStep) -> float:
        labels = sum(int(count_labels(batch.pieces, store).sum()) for batch in packed)
        total = torch.zeros(1, dtype=torch.float64)
        for micro_batch in packed.ranks[ranks.rank]:
            batch = make_batch(store, micro_batch, ranks.device)
            loss = engine(batch.tokens_T, batch.doc_tokens, labels_T=batch.labels_T)
            # It averages over ranks and micro-batches; the loss is a sum over labels.
            engine.backward(loss * (ranks.world * MICRO_BATCHES / labels))
            engine.step()
            total += loss.detach()
        return float(ranks.sum_(total)) / labels

    return run


def compare(ranks: Ranks, name: str, port: int) -> dict[str, Any]:
    """All sides of a case."""
    os.dup2(2, 1)  # DeepSpeed prints, and stdout is the answer's
    settle(ranks.rank, pin=True)
    case = CASES[name]
    window = case.window_tokens
    tokens = ranks.world * MICRO_BATCHES * window
    pack = PackSpec(policy="by-work", context_tokens=window, step_tokens=tokens, cut="windows")
    # The small decoder's: if all micro-batches are alike, any curve packs alike.
    curve = obtain_curve(RunSpec(pack=pack), preset("2m"), ranks, Path(tempfile.gettempdir()))
    documents = np.full(tokens // 512, 512)
    if not case.even:
        drawn = draw_lengths("wikipedia", 4096, seed=1)
        whole = drawn[np.cumsum(drawn) < tokens]
        documents = np.append(whole, tokens - whole.sum())
    store = recut(open_corpus(), documents)
    packs = _packs(store, ranks.world, pack, curve)
    sides: dict[str, tuple[Run, PackedStep]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in case.sides:
            if side in OURS:
                run = ours(ranks, store, Path(folder), case.model, zero=OURS[side])
                sides[side] = run, packs["by-work"]
            else:
                run = theirs(ranks, store, port, case.model, most_whole=WHOLE[side])
                sides[side] = run, packs["in-order"]
        figures = _alternate(sides, ranks, tokens, case.steps)
    figures["skew"] = {name: skew(rank_seconds(p, curve)) for name, p in packs.items()}
    return figures | {"cpu_s": time.process_time()}


def _packs(store: TokenStore, world: int, pack: PackSpec, curve: Any) -> dict[str, PackedStep]:
    pieces: Pieces = np.stack(
        [np.arange(store.documents), np.zeros(store.documents, np.int64), store.doc_tokens], axis=1
    )
    packs = {}
    for policy in ("in-order", "by-work"):
        spec = dataclasses.replace(pack, policy=policy)
        packs[policy] = pack_step(pieces, spec, world, curve)
        counts = {len(batches) for batches in packs[policy].ranks}
        if counts != {MICRO_BATCHES}:
            raise ValueError(f"{policy} made {counts} micro-batches; both sides need as many.")
    return packs


def _alternate(
    sides: dict[str, tuple[Run, PackedStep]], ranks: Ranks, step_tokens: int, steps: int
) -> dict[str, Any]:
    walls: dict[str, list[float]] = {name: [] for name in sides}
    busiest: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for step in range(WARM + steps):
        # Each comes first, second, and so on, in turn.
        turn = step % len(order)
        for name in order[turn:] + order[:turn]:
            run, packed = sides[name]
            ranks.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            loss = run(packed)
            cpu_s = time.process_time() - cpu
            ranks.barrier()
            wall_s = time.perf_counter() - began
            losses[name].append(loss)
            most_s = float(ranks.gather_floats([cpu_s]).max())
            if step >= WARM:
                walls[name].append(wall_s)
                busiest[name].append(most_s)
    rows: dict[str, Any] = {
        name: {
            "step_s": spread(each),
            "cpu_s of the busiest rank": spread(busiest[name]),
            "tokens_per_s": step_tokens / statistics.median(each),
            "losses": losses[name],
        }
        for name, each in walls.items()
    }
    for theirs_name, ours_name in itertools.product(WHOLE, OURS):
        alike = ours_name == "ours" or theirs_name == "deepspeed, all whole"
        if not alike or theirs_name not in sides or ours_name not in sides:
            continue
        pair = f"{theirs_name} over {ours_name}"
        for what, sides_s in (("step", walls), ("CPU of the busiest rank", busiest)):
            pairs = list(zip(sides_s[theirs_name], sides_s[ours_name], strict=True))
            rows[f"{pair}, {what} (goal above 1)"] = spread([a / b for a, b in pairs])
        both = zip(losses[theirs_name], losses[ours_name], strict=True)
        apart = max(abs(a / b - 1) for a, b in both)
        rows[f"{pair}, largest difference of a step's loss [relative]"] = apart
    return rows


def measure() -> dict[str, Any]:
    """Both sides, or a sentence if DeepSpeed is missing."""
    what = "two ranks, one pinned core each, fp32, ZeRO-3; 2 micro-batches a rank"
    if importlib.util.find_spec("deepspeed") is None:
        return {
            "what": what,
            "skipped": "DeepSpeed is not installed. bench/peers/zero.py says how to get it.",
        }
    return {
        "what": what,
        **{case: measure_case(case) for case in CASES},
        "peer": f"DeepSpeed {importlib.metadata.version('deepspeed')}",
        "environment": environment(),
    }


def measure_case(case: str) -> dict[str, Any]:
    """One case, and what else the machine did meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    model = CASES[case].model
    stamp = LoadStamp()
    answers = run_ranks(2, compare, case, port)
    ranks_s = sum(answer.pop("cpu_s") for answer in answers)
    told = {"parameters": model.params, "layers": model.layers, "hidden": model.hidden}
    load = {"other_load_cores": round(stamp.other_load(ranks_s), 2)}
    return {"model": told, **answers[0], **load}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
