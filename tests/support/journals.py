"""Write journals of made-up but believable runs, by the journal's schema."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NS_A_TOKEN = 60_000.0
NS_A_PAIR = 24.0


def write_run(
    folder: Path,
    *,
    policy: str = "by-work",
    ranks: int = 2,
    steps: int = 40,
    seed: int = 0,
    name: str | None = None,
    micro_batches: int = 2,
    stop: bool = True,
) -> Path:
    """A run of ``steps`` steps whose documents depend on ``seed`` alone, not on the policy."""
    rng = np.random.default_rng(seed)
    noise = np.random.default_rng([seed, len(policy)])
    journal = folder / "journal"
    journal.mkdir(parents=True)
    lines: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    now = 1_790_000_000.0
    lines[0].append(start_event(policy, ranks, steps, now, name or f"{policy}-demo"))
    lines[0].append(
        {
            "v": 1,
            "kind": "decision",
            "name": "memory",
            "t": now,
            "rank": 0,
            "forecast_bytes": 905_000_000,
            "terms": {
                "weights": 28_000_000,
                "gradients": 28_000_000,
                "optimizer": 28_000_000,
                "activations": 511_000_000,
                "logits": 90_000_000,
                "runtime": 220_000_000,
            },
        }
    )
    now += 2.0
    seen = 0
    for step in range(1, steps + 1):
        documents = np.minimum(4096, rng.lognormal(6.6, 1.5, size=40).astype(int) + 16)
        documents = documents[documents.cumsum() <= 8192 * ranks]
        in_order = _contiguous(documents, ranks)
        shares = in_order if policy == "in-order" else _heaviest_first(documents, ranks)
        before_s = [sum(map(price_s, share)) for share in in_order]
        predicted = [sum(map(price_s, share)) for share in shares]
        tokens = int(documents.sum())
        seen += tokens
        overhead = 0.05
        plan_s = 0.002
        busy = [each * noise.normal(1.02, 0.02) for each in predicted]
        if step == 1:
            busy = [each * 1.6 for each in busy]
        fullest = max(busy)
        step_s = plan_s + fullest + overhead
        lines[0].append(
            {
                "v": 1,
                "kind": "decision",
                "name": "pack",
                "t": now,
                "rank": 0,
                "step": step,
                "policy": policy,
                "plan_s": plan_s,
                "rank_tokens": [sum(map(int, share)) for share in shares],
                "rank_documents": [len(share) for share in shares],
                "rank_flop": [each * 4e10 for each in predicted],
                "predicted_s": predicted,
                "predicted_step_s": max(predicted) + overhead,
                "in_order_predicted_s": before_s,
                "skew": max(predicted) / float(np.mean(predicted)),
                "in_order_skew": max(before_s) / float(np.mean(before_s)),
                "micro_batches": [micro_batches] * ranks,
                "digest": f"{step:016x}",
            }
        )
        for rank in range(ranks):
            at = now

            def span(
                span_name: str,
                duration_s: float,
                *,
                rank: int = rank,
                step: int = step,
                **more: int,
            ) -> None:
                nonlocal at
                lines[rank].append(
                    {
                        "v": 1,
                        "kind": "span",
                        "name": span_name,
                        "t": at,
                        "rank": rank,
                        "duration_s": duration_s,
                        "step": step,
                        **more,
                    }
                )
                at += duration_s

            span("plan", plan_s)
            parts = noise.dirichlet([8.0] * micro_batches) * busy[rank]
            for index, part in enumerate(parts.tolist()):
                span("batch", part * 0.01, micro_batch=index)
                span("forward", part * 0.32, micro_batch=index)
                span("backward", part * 0.67, micro_batch=index)
            span("wait", fullest - busy[rank])
            span("reduce", 0.03)
            span("optimizer", 0.02)
            if step % 20 == 0:
                span("save", 0.08)
            lines[rank].append(
                {
                    "v": 1,
                    "kind": "scalar",
                    "name": "step",
                    "t": at,
                    "rank": rank,
                    "step": step,
                    "loss": 3.1 + 5.2 * float(np.exp(-step / 14)) + float(rng.normal(0, 0.04)),
                    "grad_norm": 1.0,
                    "lr": 3e-3,
                    "tokens": tokens,
                    "tokens_seen": seen,
                    "step_s": step_s,
                    "tokens_per_s": tokens / step_s,
                    "mfu": 0.31 * float(np.mean(busy)) / step_s,
                    "busy_s": busy[rank],
                    "wait_s": fullest - busy[rank],
                    "predicted_s": predicted[rank],
                    "predicted_step_s": max(predicted) + overhead,
                    "memory_bytes": 600_000_000 + rank,
                    "peak_memory_bytes": 842_000_000 + 9_000_000 * rank + min(step, 9) * 1_000_000,
                }
            )
        now += step_s + (0.08 if step % 20 == 0 else 0.0) + 0.001
    if stop:
        lines[0].append(
            {
                "v": 1,
                "kind": "instant",
                "name": "stop",
                "t": now,
                "rank": 0,
                "reason": "done",
                "step": steps,
            }
        )
    for rank, events in enumerate(lines):
        text = "".join(json.dumps(event) + "\n" for event in events)
        (journal / f"rank-{rank:05d}.jsonl").write_text(text)
    return folder


def price_s(tokens: int) -> float:
    """Seconds of one document: linear layers by token, attention by pair."""
    return (float(tokens) * NS_A_TOKEN + float(tokens) ** 2 / 2 * NS_A_PAIR) / 1e9


def start_event(policy: str, ranks: int, steps: int, t: float, name: str) -> dict[str, Any]:
    edges = [2**power for power in range(4, 17)]
    documents = [12, 40, 95, 190, 310, 402, 388, 240, 110, 44, 12, 4]
    return {
        "v": 1,
        "kind": "instant",
        "name": "start",
        "t": t,
        "rank": 0,
        "version": "0.1.0",
        "spec": {
            "name": name,
            "data": {"source": "python-stdlib", "path": "", "vocab": 4096},
            "model": {"preset": "7m", "init": "random", "layers": None},
            "pack": {
                "policy": policy,
                "context_tokens": 4096,
                "step_tokens": 8192 * ranks,
                "max_tokens": None,
            },
            "train": {"steps": steps, "seed": 0, "lr": 3e-3, "precision": "fp32"},
            "layout": {"dp": ranks, "zero": 1, "pin": False},
        },
        "origins": {
            "name": "run.toml:1",
            "data.source": "default",
            "data.path": "default",
            "data.vocab": "default",
            "model.preset": "run.toml:6",
            "model.init": "default",
            "model.layers": "preset 7m",
            "pack.policy": "--pack.policy",
            "pack.context_tokens": "run.toml:9",
            "pack.step_tokens": "run.toml:10",
            "pack.max_tokens": "default",
            "train.steps": "--train.steps",
            "train.seed": "default",
            "train.lr": "default",
            "train.precision": "default",
            "layout.dp": "run.toml:15",
            "layout.zero": "default",
            "layout.pin": "default",
        },
        "model": {"layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 4096},
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "os": "Linux 6.8",
            "cpu": "x86_64",
            "cores": ranks,
            "memory_bytes": 16 * 2**30,
        },
        "world": ranks,
        "resumed_step": 0,
        "corpus": {
            "documents": sum(documents),
            "tokens": sum(int(n * e * 1.4) for n, e in zip(documents, edges, strict=False)),
            "longest_tokens": 60_211,
            "histogram": {
                "edges": edges,
                "documents": documents,
                "tokens": [int(n * e * 1.4) for n, e in zip(documents, edges, strict=False)],
            },
        },
        "curve": {
            "ns_per_token": NS_A_TOKEN,
            "doc_tokens": [16, 4096],
            "doc_ns": [1e6, 4e8],
            "peak_flop_per_s": 1.2e11,
        },
    }


def _contiguous(documents: np.ndarray, ranks: int) -> list[list[int]]:
    """Runs of documents of about as many tokens each, as a plain stream is cut."""
    middle = documents.cumsum() - documents / 2
    owner = np.minimum(ranks - 1, (middle * ranks / documents.sum()).astype(int))
    return [documents[owner == rank].tolist() for rank in range(ranks)]


def _heaviest_first(documents: np.ndarray, ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for tokens in sorted(documents.tolist(), reverse=True):
        rank = load.index(min(load))
        shares[rank].append(tokens)
        load[rank] += price_s(tokens)
    return shares


def write_sides(
    folder: Path, policies: Sequence[str] = ("in-order", "by-work"), session: int = 7
) -> Path:
    """A run that compares policies, as ``train --compare`` leaves it."""
    for policy in policies:
        write_run(folder / policy, policy=policy, steps=12)
        file = folder / policy / "journal" / "rank-00000.jsonl"
        first, _, rest = file.read_text().partition("\n")
        start = json.loads(first) | {"compared": {"policies": policies, "session": session}}
        file.write_text(json.dumps(start) + "\n" + rest)
    return folder
