"""A recommender of ML-100K served and in few bits: losses, bytes, samples a second, P99.

The recipe is trained on one rank; 3 seeds; the run of the first is served. Losses are of normalised
entropy, relative to fp32: those of the search on the validation split, beside those on the test
split, which nothing has seen. Scoring alternates between fp32 and each budget in one process. Over
HTTP, 8 clients ask for rankings of 100 films each, at once; then one client asks alone.
"""

import http.client
import itertools
import json
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.recommend import ALONE, RECIPE
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.observe.journal import EventSink
from equipoise.recsys.columns import read_ml_100k
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import prepare
from equipoise.recsys.lowbit.artefact import open_any
from equipoise.recsys.lowbit.request import convert_run
from equipoise.recsys.place import plan_samples
from equipoise.recsys.rank.coding import write_coding
from equipoise.recsys.rank.ranker import Ranker
from equipoise.recsys.samples import Samples, read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.serve.http.server import ServerThread
from equipoise.serve.ranking.app import RankState, make_rank_app
from equipoise.serve.ranking.batcher import Batcher
from equipoise.spec.recommend import read_recommend

BUDGETS, SEEDS, ROUNDS = (0.0005, 0.001, 0.005), (0, 1, 2), 7
CLIENTS, REQUESTS, CANDIDATES = 8, 40, 100


def train(folder: Path, samples: Samples, seed: int) -> Path:
    """A run's folder."""
    spec, base = read_recommend(RECIPE, ALONE)
    spec = replace(spec, train=replace(spec.train, seed=seed))
    own = folder / f"seed-{seed}"
    prepare(own, spec, base)
    write_coding(own, samples.coding)
    plan = plan_samples(spec, samples).plan
    exchange = TimedExchange(alone=True)
    RankTrainer(own, spec, samples, plan, EventSink(), exchange).run(lambda _: None)
    return own


def score_rates(rankers: dict[str, Ranker], samples: Samples) -> dict[str, dict[str, Any]]:
    """Samples a second of passes of 64 and 4,096, models in turn."""
    begin, _ = samples.bounds("test")
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in rankers}
    for size, passes in ((64, 40), (4096, 2)):
        jagged, numbers, _ = samples.batch(np.arange(begin, begin + size))
        for _, (name, ranker) in itertools.product(range(ROUNDS), rankers.items()):
            ranker.scorer.score(jagged, numbers)
            began = time.process_time()
            for _ in range(passes):
                ranker.scorer.score(jagged, numbers)
            took = time.process_time() - began
            rates[name].setdefault(str(size), []).append(passes * size / took)
    return {name: {k: spread(v) for k, v in row.items()} for name, row in rates.items()}


def make_bodies() -> list[bytes]:
    """Requests: a user, and films drawn at random, with their columns."""
    file, source = read_ml_100k(), np.random.default_rng(0)
    user = ("user_id", "gender", "occupation", "zip3", "age5", "age", "hour")
    film = ("item_id", "release_year", "genres", "year")
    bodies = []
    for _ in range(CLIENTS * REQUESTS):
        row, films = (
            source.integers(len(file["user_id"])),
            source.integers(100_000, size=CANDIDATES),
        )
        context = {n: file[n][row].item() for n in user}
        context["age"] = float(context["age"])
        candidates = {n: file[n][films].tolist() for n in film}
        bodies.append(json.dumps({"context": context, "candidates": candidates}).encode())
    return bodies


def load(ranker: Ranker, clients: int) -> dict[str, Any]:
    """Requests a second and latencies, as clients see them and as the server says."""
    bodies, seconds = make_bodies(), []
    with Batcher(ranker) as batcher:
        state = RankState(batcher)
        with ServerThread(make_rank_app(state), state) as server:

            def ask(own: list[bytes]) -> None:
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                for body in own:
                    began = time.perf_counter()
                    connection.request(
                        "POST", "/v1/rank", body, {"Content-Type": "application/json"}
                    )
                    reply = connection.getresponse()
                    if reply.status != 200:
                        raise SystemExit(reply.read())
                    reply.read()
                    seconds.append(time.perf_counter() - began)
                connection.close()

            began = time.perf_counter()
            threads = [
                threading.Thread(target=ask, args=(bodies[at * REQUESTS : (at + 1) * REQUESTS],))
                for at in range(clients)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            took = time.perf_counter() - began
            said = [state.metrics.quantile_s(share) for share in (0.5, 0.99)]
    stats = batcher.stats
    return {
        "clients": clients,
        "requests_per_s": len(seconds) / took,
        "candidates_per_s": stats.candidates / took,
        "requests_of_a_pass": stats.requests / stats.passes,
        "client_p50_s": statistics.median(seconds),
        "client_p99_s": sorted(seconds)[int(0.99 * len(seconds))],
        "server_p50_s": said[0],
        "server_p99_s": said[1],
    }


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    stamp, rows = LoadStamp(), []
    spec, base = read_recommend(RECIPE, ALONE)
    samples = read_samples(spec.data, base)
    with tempfile.TemporaryDirectory() as room:
        runs = [train(Path(room), samples, seed) for seed in SEEDS]
        for run, budget in itertools.product(runs, BUDGETS):
            facts = convert_run(run, Path(room) / f"{run.name}-{budget}", budget)
            rows.append(
                {
                    "run": run.name,
                    "budget": budget,
                    "validation": facts["loss"]["loss"],
                    "test": facts["held_out"]["loss"],
                    "test_deviation": facts["held_out"]["deviation"],
                    "entropy": [facts["held_out"][k] for k in ("entropy_fp32", "entropy_kept")],
                    "auc": [facts["held_out"][k] for k in ("auc_fp32", "auc_kept")],
                    "bytes": facts["bytes"],
                    "times_smaller": facts["bytes"]["fp32"] / facts["bytes"]["kept"],
                    "forms": {part["name"]: part["form"] for part in facts["parts"]},
                    "fired": [w["window"] for w in facts["windows"] if w["fired"]],
                }
            )
        rankers = {"fp32": open_any(runs[0])}
        rankers |= {f"budget {b:g}": open_any(Path(room) / f"seed-0-{b}") for b in BUDGETS}
        rates = score_rates(rankers, samples)
        served = {
            name: [load(rankers[name], clients) for clients in (CLIENTS, 1)]
            for name in ("fp32", "budget 0.001")
        }
    report = {
        "what": "DLRM of ML-100K by time, served and in few bits",
        "environment": environment(),
        "budgets": rows,
        "samples_per_cpu_s": rates,
        "http": served,
        "other_load": stamp.other_load(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
