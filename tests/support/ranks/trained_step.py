"""Steps of one rank, trained as they are in a run."""

import statistics

import numpy as np

from equipoise.comm.group import Ranks
from equipoise.data.cache.store import TokenStore
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import EventSink
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.process import settle
from equipoise.train.step import StepRunner

STEPS = 7


def trained_step_s(ranks: Ranks, model: ModelSpec, lengths: list[int]) -> float:
    """Median seconds of steps of one micro-batch in bf16; the first two are left out."""
    settle(ranks.rank, pin=False)
    drawn = np.random.default_rng(0).integers(0, model.vocab, sum(lengths))
    store = TokenStore.in_memory(drawn.astype(np.uint32), np.array(lengths), model.vocab)
    count = len(lengths)
    pieces = np.stack((np.arange(count), np.zeros(count, np.int64), lengths), axis=1)
    packed = PackedStep("by-work", ((MicroBatch(pieces),),))
    decoder = Decoder(model)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder.to(ranks.device), ranks, zero=1, precision="bf16")
    runner = StepRunner(sharded, make_adamw(decoder, TrainSpec()), store, ranks, EventSink())
    taken = [
        runner.run(
            packed, step=step, rate=1e-4, clip_norm=1.0, last_good=lambda: None, stop_asked=False
        ).step_s
        for step in range(STEPS)
    ]
    return statistics.median(taken[2:])
