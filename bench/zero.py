"""ZeRO-3 on two ranks, one core each, fp32: ours beside DeepSpeed's, over the same decoder.

Both sides run in one process a rank and alternate step by step, from the same weights over the
same pieces: the same number of micro-batches, AdamW with the same groups, the same clip.

- equal: every micro-batch has the same tokens in documents of the same lengths.
- equal, once more: DeepSpeed as it is by default, which keeps every weight of fewer than 100,000
  numbers whole on each rank: all of this decoder but its embedding. Ours shards every weight.
- uneven: documents of Wikipedia's lengths. Ours packs by work; DeepSpeed has no packer and gets
  windows of equal tokens in order, as its data loaders make them.

DeepSpeed is no dependency. To get it (its first start also compiles, for a minute or more)::

    DS_BUILD_OPS=0 pip install --target PEERS --no-deps --no-build-isolation \\
        deepspeed==0.19.8 hjson ninja py-cpuinfo einops msgpack
    PYTHONPATH=PEERS python -m bench.run zero
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.corpus import open_corpus, recut
from bench.stamp import LoadStamp, environment, spread
from equipoise.balance.pack import pack_step, rank_seconds, skew
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.data.batch import count_labels, make_batch
from equipoise.data.store import TokenStore
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import Journal
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero import ShardedDecoder
from equipoise.spec.model import preset
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run import PackSpec, RunSpec, TrainSpec
from equipoise.spec.workload import draw_lengths
from equipoise.train.curves import obtain_curve
from equipoise.train.process import settle
from equipoise.train.step import StepRunner

STEPS, WARM = 5, 1
WINDOWS, MICRO_BATCHES = {"equal": 2048, "uneven": 8192}, 2
MODEL = preset("2m")
TRAIN = TrainSpec(lr=1e-3, eps=1e-5)  # above rounding, which an AdamW of 1e-8 would make steps of

Run = Callable[[PackedStep], float]
"""A step, that returns its loss."""


def ours(ranks: Ranks, store: TokenStore, folder: Path) -> Run:
    """The product's own step."""
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder, ranks, zero=3, precision="fp32")
    journal = Journal(folder, ranks.rank)
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


def theirs(ranks: Ranks, store: TokenStore, port: int, *, most_whole: int) -> Run:
    """DeepSpeed's engine around the same decoder and optimizer.

    ``most_whole`` is its ``stage3_param_persistence_threshold``: so large may a weight be that is
    kept whole.
    """
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import deepspeed

    decoder = Decoder(MODEL)
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
        labels = sum(count_labels(batch.pieces, store.doc_tokens) for batch in packed)
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


def compare(ranks: Ranks, case: str, port: int) -> dict[str, Any]:
    """Both sides, on equal or on uneven micro-batches."""
    os.dup2(2, 1)  # DeepSpeed prints, and stdout is the answer's
    settle(ranks.rank, pin=True)
    window = WINDOWS[case]
    tokens = ranks.world * MICRO_BATCHES * window
    pack = PackSpec(policy="by-work", context_tokens=window, step_tokens=tokens, cut="windows")
    curve = obtain_curve(RunSpec(pack=pack), MODEL, ranks, Path(tempfile.gettempdir()))
    documents = np.full(tokens // 512, 512)
    if case == "uneven":
        drawn = draw_lengths("wikipedia", 4096, seed=1)
        whole = drawn[np.cumsum(drawn) < tokens]
        documents = np.append(whole, tokens - whole.sum())
    store = recut(open_corpus(), documents)
    packs = _packs(store, ranks.world, pack, curve)
    in_order = packs["in-order"]
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "ours": (ours(ranks, store, Path(folder)), packs["by-work"]),
            "deepspeed": (theirs(ranks, store, port, most_whole=0), in_order),
        }
        if case == "equal":
            default = theirs(ranks, store, port, most_whole=100_000)
            sides["deepspeed by default"] = (default, in_order)
        found = _alternate(sides, ranks, tokens)
    found["skew"] = {name: skew(rank_seconds(p, curve)) for name, p in packs.items()}
    return found | {"cpu_s": time.process_time()}


def _packs(store: TokenStore, world: int, pack: PackSpec, curve: Any) -> dict[str, PackedStep]:
    pieces: Pieces = np.stack(
        [np.arange(store.documents), np.zeros(store.documents, np.int64), store.doc_tokens], axis=1
    )
    found = {}
    for policy in ("in-order", "by-work"):
        spec = dataclasses.replace(pack, policy=policy)
        found[policy] = pack_step(pieces, spec, world, curve)
        counts = {len(batches) for batches in found[policy].ranks}
        if counts != {MICRO_BATCHES}:
            raise ValueError(f"{policy} made {counts} micro-batches; both sides need as many.")
    return found


def _alternate(
    sides: dict[str, tuple[Run, PackedStep]], ranks: Ranks, step_tokens: int
) -> dict[str, Any]:
    walls: dict[str, list[float]] = {name: [] for name in sides}
    busiest: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(WARM + STEPS):
        for name in sides if step % 2 else reversed(sides):
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
    for name in list(sides)[1:]:
        for what, found in (("step", walls), ("CPU of the busiest rank", busiest)):
            pairs = zip(found[name], found["ours"], strict=True)
            rows[f"{name} over ours, {what} (goal above 1)"] = spread([a / b for a, b in pairs])
        apart = [abs(a / b - 1) for a, b in zip(losses[name], losses["ours"], strict=True)]
        rows[f"{name} and ours, largest difference of a step's loss [relative]"] = max(apart)
    return rows


def measure() -> dict[str, Any]:
    """Both sides where there are both; a sentence where there is one."""
    what = "two ranks, one pinned core each, fp32, ZeRO-3; 2m decoder, 2 micro-batches a rank"
    if importlib.util.find_spec("deepspeed") is None:
        return {
            "what": what,
            "skipped": "DeepSpeed is not installed. The head of bench/zero.py says how to get it.",
        }
    return {
        "what": what,
        **{case: measure_case(case) for case in WINDOWS},
        "peer": f"DeepSpeed {importlib.metadata.version('deepspeed')}",
        "environment": environment(),
    }


def measure_case(case: str) -> dict[str, Any]:
    """One of them, and what else the machine did meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    stamp = LoadStamp()
    answers = run_ranks(2, compare, case, port)
    ranks_s = sum(answer.pop("cpu_s") for answer in answers)
    return answers[0] | {"other_load_cores": round(stamp.other_load(ranks_s), 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
