"""Speculative MoE on a model that is trained here: rows and bytes that travel on held-out text.

A model of 8 experts a layer, two for each token, is trained on nine in ten files of the Python that
runs this; its experts are clustered by documents of these, and everything is measured on the tenth
file of each ten, which neither has seen. Two gloo ranks share all weights (``tp = ep = 2``)
and count the bytes that they send between experts' ranks, forward, over the same micro-batches:

    speculative    experts clustered, tokens by the table of routes
    clustered      experts clustered, tokens as they come
    fixed          the model as it was trained, tokens as they come
    round-robin    expert e on rank e mod 2, tokens as they come

Seconds are of whole forward passes, sides in turn, on loopback, where the cores that compute also
send, and on links of limited rate (a network namespace behind a token bucket), where fewer bytes
are less time. ``SPECULATIVE_RUN`` names a run that is trained already, so that a shared machine may
train it in pieces.
"""

import json
import os
import pickle
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.lib.limited import run_on_link
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.expert.routes import ROUTES, RouteTable, read_table
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mesh import Mesh
from equipoise.data.cache.store import open_store
from equipoise.data.held_out import cut_documents, draw_documents
from equipoise.data.progress import SilentProgress
from equipoise.nn.loss import IGNORED
from equipoise.nn.moe.layer import Router
from equipoise.parallel.expert.exchange import spread_experts
from equipoise.parallel.expert.speculative import place_by_routes
from equipoise.parallel.tensor.shard import split_weights
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.expert.schedule import COUNT_BYTES
from equipoise.serve.generate import build_decoder
from equipoise.serve.routes import Clustered, cluster_model, renumber_experts
from equipoise.serve.source import TrainedModel, open_model
from equipoise.spec.layout import Layout, rows_of
from equipoise.spec.run.resolved import read_resolved

FILES, STEPS, RANKS = 300, 200, 2
TOKENS, ROUNDS, RATES_MBIT = 1 << 15, 3, (100, 400)


def make_corpus(folder: Path) -> None:
    """Nine in ten of some files of the standard library to train on, and the others."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    sized = sorted(path for path in paths if 2_000 < path.stat().st_size < 60_000)
    chosen = sized[:: max(1, len(sized) // FILES)]
    for at, path in enumerate(chosen):
        kind = folder / ("held" if at % 10 == 9 else "trained")
        kind.mkdir(parents=True, exist_ok=True)
        (kind / f"{at:04d}-{path.name}").write_bytes(path.read_bytes())


def train(folder: Path) -> Path:
    """The run, trained in this many steps."""
    if not (folder / "trained").is_dir():
        make_corpus(folder)
    sizes = "layers=2 hidden=128 heads=4 kv_heads=4 ffn=256 experts=8 top_k=2 expert_ffn=256"
    flags = [f"--model.{key}={value}" for key, value in (each.split("=") for each in sizes.split())]
    flags += ["--data.source=text", f"--data.path={folder / 'trained'}"]
    flags += [f"--eval.path={folder / 'held'}", "--layout.dp=1"]
    flags += ["--data.vocab=2048", "--pack.context_tokens=1024", "--pack.step_tokens=2048"]
    flags += [f"--train.steps={STEPS}", "--train.lr=0.002", "--checkpoint.every_steps=100"]
    command = [sys.executable, "-m", "equipoise.cli.main", "train", *flags]
    run = folder / "run"
    subprocess.run([*command, f"--out={run}", "--no-proof", "--quiet"], check=True)
    return run


def _forward(
    ranks: Ranks,
    sides: list[tuple[str, TrainedModel, RouteTable | None]],
    batches: list[tuple[np.ndarray, list[int]]],
) -> dict[str, object]:
    """Rows and bytes of this rank, by side, and seconds of each round."""
    torch.set_num_threads(1)
    made, away, rows = {}, {}, {}
    for name, trained, table in sides:
        decoder = build_decoder(trained)
        mesh = Mesh.join(ranks, Layout(tp=ranks.world, ep=ranks.world, zero=0))
        ledgers = spread_experts(decoder, mesh, policy=MixedPrecisionPolicy())
        split_weights(decoder, mesh)
        if table is not None:
            place_by_routes(decoder, mesh, table)
        sharded = ShardedDecoder(decoder, ranks, zero=0, precision="fp32", mesh=mesh)
        made[name] = decoder, ledgers, sharded
        away[name], rows[name] = 0, 0
        own = rows_of(trained.model.experts, ranks=ranks.world, rank=ranks.rank)

        def note(_m: object, _a: object, out: tuple, name: str = name, own: range = own) -> None:
            counts = out[1].counts_X
            rows[name] += int(counts.sum())
            away[name] += int(counts.sum() - counts[own.start : own.stop].sum())

        for module in decoder.modules():
            if isinstance(module, Router):
                module.register_forward_hook(note)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, float] = {}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, (decoder, _, _) in made.items():
                ranks.barrier()
                began, total = time.perf_counter(), 0.0
                for tokens, lengths in batches:
                    text = torch.from_numpy(tokens)
                    labels = torch.roll(text, -1)
                    labels[np.cumsum(lengths) - 1] = IGNORED
                    total += float(decoder(text, lengths, labels_T=labels))
                seconds[name].append(time.perf_counter() - began)
                losses[name] = total
    return {
        name: {
            "rows": rows[name] // ROUNDS,
            "away": away[name] // ROUNDS,
            "sent_bytes": sum(int(each.sent_bytes.sum()) for each in ledgers) // ROUNDS,
            "forward_s": seconds[name],
            "loss": losses[name],
        }
        for name, (_, ledgers, _) in made.items()
    }


def _batches(run: Path) -> list[tuple[np.ndarray, list[int]]]:
    """Micro-batches of held-out documents, each as long as a window where it fits."""
    resolved = read_resolved(run)
    held, window = open_store(Path(resolved.eval_corpus)), resolved.spec.pack.context_tokens
    documents = draw_documents(held.doc_tokens, TOKENS)
    pieces = cut_documents(documents, held.doc_tokens, window)
    batches: list[tuple[np.ndarray, list[int]]] = []
    parts: list[np.ndarray] = []
    for piece in pieces.tolist():
        text = held.read(*piece)
        if parts and sum(map(len, parts)) + len(text) > window:
            batches.append((np.concatenate(parts), [len(each) for each in parts]))
            parts = []
        parts.append(text)
    return [*batches, (np.concatenate(parts), [len(each) for each in parts])]


def _sides(run: Path, clustered: Clustered, folder: Path) -> list[tuple]:
    trained, model = open_model(run), clustered.trained.model
    (folder / ROUTES).write_bytes(clustered.trained.files.contents[ROUTES])
    table = read_table(folder / ROUTES)
    turns = np.argsort(np.arange(model.experts) % RANKS, kind="stable")
    order = np.tile(turns, (model.sparse_layers, 1))
    state = renumber_experts(trained.state, model, order)
    in_turn = TrainedModel(trained.origin, model, state, trained.files)
    return [
        ("speculative", clustered.trained, table),
        ("clustered", clustered.trained, None),
        ("fixed", trained, None),
        ("round-robin", in_turn, None),
    ]


def on_links(inputs: Path) -> dict[str, object]:
    """Seconds of every side on links of limited rate.

    Args:
        inputs: Sides and micro-batches, as ``inside`` reads them.
    """
    return {
        f"{rate} Mbit/s": run_on_link(f"bench.experts.speculative {inputs}", rate, limit_s=600)
        for rate in RATES_MBIT
    }


def inside(inputs: Path) -> dict[str, object]:
    """Seconds of every side on the link of this namespace."""
    made = run_ranks(RANKS, _forward, *pickle.loads(inputs.read_bytes()))[0]
    return {
        "forward_s": {name: spread(each["forward_s"]) for name, each in made.items()},
        "speculative_over_round_robin_s": _ratio(made),
    }


def _ratio(made: dict[str, dict[str, list[float]]]) -> float:
    """Median over rounds, whose sides ran one after another."""
    pairs = zip(made["speculative"]["forward_s"], made["round-robin"]["forward_s"], strict=True)
    return statistics.median(one / other for one, other in pairs)


def measure() -> dict[str, object]:
    """Train unless a run is given, cluster, and count."""
    torch.set_num_threads(1)
    stamp = LoadStamp()
    given = os.environ.get("SPECULATIVE_RUN")
    with tempfile.TemporaryDirectory() as made:
        run = Path(given) if given else train(Path(made))
        clustered = cluster_model(open_model(run), RANKS, progress=SilentProgress())
        model = clustered.trained.model
        sides = _sides(run, clustered, Path(made))
        batches = _batches(run)
        per_rank = run_ranks(RANKS, _forward, sides, batches)
        inputs = Path(made) / "inputs.pickle"
        inputs.write_bytes(pickle.dumps((sides, batches)))
        links = on_links(inputs)
        step = clustered.trained.step
    tokens = sum(len(text) for text, _ in batches)
    table: dict[str, dict[str, object]] = {}
    reference = per_rank[0]["fixed"]["loss"]
    for name, *_ in sides:
        each = [rank[name] for rank in per_rank]
        rows, away = (sum(one[key] for one in each) for key in ("rows", "away"))
        sent = sum(one["sent_bytes"] for one in each)
        counts = len(batches) * model.sparse_layers * (RANKS - 1) * COUNT_BYTES * model.experts
        formula = 2 * away * model.hidden * 4 + counts
        table[name] = {
            "local_rate": 1 - away / rows,
            "sent_bytes": sent,
            "bytes_by_formula": formula,
            "sent_bytes_a_token": sent / tokens,
            "forward_s": spread(each[0]["forward_s"]),
            "loss_off_fixed": abs(each[0]["loss"] - reference) / reference,
        }
    base = float(table["round-robin"]["sent_bytes"])
    return {
        "bench": "experts.speculative",
        "kind": "measured",
        "environment": environment(),
        "ranks": RANKS,
        "steps_trained": step,
        "model": {"layers": model.layers, "hidden": model.hidden, "experts": model.experts},
        "fitted_tokens": clustered.fitted_tokens,
        "held_out": {"tokens": tokens, "documents_also_trained": clustered.left_out},
        "forward": table,
        "bytes_over_round_robin": {
            name: float(each["sent_bytes"]) / base for name, each in table.items()
        },
        "rates_by_counting_routes": {
            name: getattr(clustered.rates, name)
            for name in ("predicted", "known", "in_order", "own", "skew")
        },
        "speculative_over_round_robin_s": _ratio(per_rank[0]),
        "links": links,
        "other_load_cores": stamp.other_load(),
    }


if __name__ == "__main__":
    is_inside = sys.argv[2:] == ["inside"]
    json.dump(inside(Path(sys.argv[1])) if is_inside else measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
