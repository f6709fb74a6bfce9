"""Steps of a pipeline on two ranks, ours and the peer's, and what halves of backwards cost.

- peer: ``torch.distributed.pipelining`` on equal micro-batches of the same stages; sides alternate
  step by step on the same two ranks, one pinned core each.
- split: the backward of one micro-batch on one rank: whole, in halves, and by two autograd calls.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bench.lib.stamp import spread
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.defer import defer_weights
from equipoise.parallel.pipeline.executor import StageBatch
from equipoise.parallel.pipeline.part import DecoderPart, make_part
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.pipeline.timeline import gather_timeline
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import PipelineTimeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.process import settle

MODEL = ModelSpec(layers=8, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1024, head_width=32)
MICRO_BATCHES = 8
WARM, STEPS = 3, 6


def batch_of(lengths: Sequence[int]) -> StageBatch:
    tokens = torch.randint(MODEL.vocab, (int(sum(lengths)),))
    return StageBatch(tokens, tokens.roll(-1), tuple(map(int, lengths)))


def in_documents(tokens: int, most: int = 500) -> list[int]:
    """Lengths that sum to ``tokens``: documents of ``most`` and a rest."""
    return [most] * (tokens // most) + ([tokens % most] if tokens % most else [])


class Runner:
    """Runs steps of schedules on this rank, and times them."""

    def __init__(self, ranks: Ranks, edges: Sequence[int], held: Sequence[int]) -> None:
        self.ranks = ranks
        peers = Mesh.join(ranks, Layout(pp=2)).peers("pp")
        self.pipeline = Pipeline(make_part(MODEL, edges, held), peers)

    def step(
        self, schedule: PipelineSchedule, batches: Sequence[StageBatch]
    ) -> tuple[float, PipelineTimeline]:
        """Seconds until the last rank has ended, and what each instruction took."""
        self.pipeline.part.zero_grad(set_to_none=False)
        self.ranks.barrier()
        began = time.perf_counter()
        run = self.pipeline.run(schedule, batches, divisor=1000.0)
        self.ranks.barrier()
        return time.perf_counter() - began, gather_timeline(run.timeline)


class _Stage(torch.nn.Module):
    """A stage as the peer expects it: a tensor in, a tensor out, one pack for all."""

    def __init__(self, part: DecoderPart, stage: int, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.part, self.stage, self.lengths = part, stage, lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.part
        if self.stage == 0:
            x = part.embed(x)
        layers = (part.layers[at] for at in part.layers_of(self.stage))
        return part.run_layers(x, self.lengths, layers)


def peer(ranks: Ranks, name: str) -> dict[str, Any]:
    """Ours and the peer's on equal micro-batches of the same stages."""
    settle(ranks.rank, pin=True)
    torch.manual_seed(0)
    lengths = (256,) * 4
    batches = [batch_of(lengths) for _ in range(MICRO_BATCHES)]
    schedule = write_pipeline(
        name, make_prices(1, 1, 1, stages=2, micro_batches=MICRO_BATCHES), ranks=2
    )
    runner = Runner(ranks, (0, 4, 8), [ranks.rank])
    part = runner.pipeline.part
    theirs = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name](
        PipelineStage(_Stage(part, ranks.rank, lengths), ranks.rank, 2, torch.device("cpu")),
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda x, labels: part.finish(x, labels) / 1000.0,
        scale_grads=False,
    )
    tokens = torch.cat([batch.tokens_t for batch in batches])
    labels = torch.cat([batch.labels_t for batch in batches])

    def run_theirs() -> float:
        part.zero_grad(set_to_none=False)
        ranks.barrier()
        began = time.perf_counter()
        if ranks.rank == 0:
            theirs.step(tokens)
        else:
            theirs.step(target=labels, losses=[])
        ranks.barrier()
        return time.perf_counter() - began

    def gradients() -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in part.parameters()])

    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: runner.step(schedule, batches)[0],
        "torch": run_theirs,
    }
    walls: dict[str, list[float]] = {side: [] for side in sides}
    last_gradients = {}
    for step in range(WARM + 2 * STEPS):
        for side in sides if step % 2 else reversed(sides):
            wall = sides[side]()
            last_gradients[side] = gradients()
            if step >= WARM:
                walls[side].append(wall)
    ratios = [one / other for one, other in zip(walls["ours"], walls["torch"], strict=True)]
    return {
        "ours_s": spread(walls["ours"]),
        "torch_s": spread(walls["torch"]),
        "ours_over_torch (goal 1.05)": spread(ratios),
        "largest_gradient_difference": float(
            (last_gradients["ours"] - last_gradients["torch"]).abs().max()
        ),
        "cpu_s": time.process_time(),
    }


def split_cost(ranks: Ranks) -> dict[str, Any]:
    """Forward and backward of one micro-batch on one rank: whole, in halves, by two calls."""
    settle(ranks.rank, pin=True)
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    batch = batch_of((256,) * 4)
    x_TD = torch.randn(1024, MODEL.hidden)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = x_TD.clone().requires_grad_()
        return x, decoder.run_layers(x, batch.pack, decoder.layers).sum()

    def whole() -> tuple[float, float]:
        _, out = forward()
        began = time.perf_counter()
        out.backward()
        return time.perf_counter() - began, 0.0

    def halves() -> tuple[float, float]:
        _, out = forward()
        began = time.perf_counter()
        later = defer_weights(out)
        out.backward()
        middle = time.perf_counter()
        later.finish()
        return middle - began, time.perf_counter() - middle

    def asked_twice() -> tuple[float, float]:
        x, out = forward()
        began = time.perf_counter()
        torch.autograd.grad(out, x, retain_graph=True)
        middle = time.perf_counter()
        out.backward(inputs=list(decoder.layers.parameters()))
        return middle - began, time.perf_counter() - middle

    ways = {"whole": whole, "halves": halves, "asked twice": asked_twice}
    times_of: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(14):
        for way, run in ways.items():
            times = run()
            if turn >= 2:
                times_of[way].append(times)
    return {
        way: {
            "input_s": statistics.median(first for first, _ in times),
            "weight_s": statistics.median(second for _, second in times),
            "both_s": statistics.median(map(sum, times)),
        }
        for way, times in times_of.items()
    }
