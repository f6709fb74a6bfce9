"""Are bits that flip in memory found within the steps between comparisons, and what does it cost?

Three ranks hold a small decoder whose state either all of them hold (copies) or each its part. In
each trial one rank's weights or moments change after a drawn step, in a drawn way, or nothing does.
Found means that a comparison within ``--every`` steps names that tensor, and that rank or, among
copies, a majority without it. What an update has since rounded away is healed, and no miss: all
bytes are then equal by SHA-256. The cost is that of real steps of two ranks: what the watch itself
takes of them by the clock, waiting for the other rank included; and, less exact beside other
programs, with and without the watch in turns of as many steps.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.lib.corpus import open_corpus
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.base.errors import CorruptError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.fault.fingerprint import HeldState
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import EventSink
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.health.state import StateWatch
from equipoise.train.step import StepRunner

_WORLD, _TURNS, _TOKENS = 3, 4, 2048
_WAYS = ("one bit", "two equal bits", "swap", "sign of a zero", "payload of a NaN", "nothing")


def change(tensor: Tensor, how: str, draw: random.Random) -> bool:
    """Change float32 values as a fault of their memory does; whether a byte has changed."""
    words = tensor.view(-1).view(torch.int32)
    before = words.clone()
    one, other = (draw.randrange(words.numel()) for _ in range(2))
    bit = draw.randrange(32)
    flip = 1 << bit if bit < 31 else -(1 << 31)
    if how == "one bit":
        words[one] ^= flip
    elif how == "two equal bits" and one != other:
        words[one] ^= flip
        words[other] ^= flip
    elif how == "swap":
        words[[one, other]] = words[[other, one]]
    elif how == "sign of a zero":
        words[one] = -(1 << 31) if words[one] == 0 else 0
    elif how == "payload of a NaN":
        words[one] = 0x7FC00001
    return not torch.equal(before, words)


def campaign(ranks: Ranks, zero: int, every: int, trials: int) -> dict[str, Any]:
    """Trials on one rank; which tensor changes when, where and how is drawn alike on all."""
    model = ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=320, head_width=16)
    decoder = Decoder(model)
    initialize(decoder, 0)
    ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    optimizer = make_adamw(decoder, TrainSpec())
    _step(decoder, optimizer)
    state = HeldState(decoder, optimizer, ranks.rank)
    whole = [each.tensor.clone() for each in state.held()]
    counted: Counter[str] = Counter()
    latest, missed = 0, []
    for trial in range(trials):
        for each, value in zip(state.held(), whole, strict=True):
            each.tensor.copy_(value)
        watch = StateWatch(state, ranks, EventSink(), every_steps=every)
        watch.begin(0)
        draw, how = random.Random(trial), _WAYS[trial % len(_WAYS)]
        after, rank = draw.randrange(1, every), draw.randrange(ranks.world)
        floats = [
            each
            for each in state.held()
            if each.tensor.dtype == torch.float32 and each.tensor.numel() > 1
        ]
        struck = draw.choice(floats)
        has_changed, verdict = False, None
        for number in range(1, after + every + 1):
            if number == after + 1 and ranks.rank == rank:
                has_changed = change(struck.tensor, how, draw)
            parts = watch.changed_parts()
            is_any = bool(ranks.gather_integers([len(parts)]).any())
            try:
                watch.require_right(number, parts, is_any=is_any)
            except CorruptError as error:
                verdict = number, str(error)
                break
            if number % every == 0 and number > after:
                break
            _step(decoder, optimizer)
            watch.updated()
        has_changed = ranks.gather_objects(has_changed)[rank]
        if not has_changed:
            counted["false alarms" if verdict else "nothing changed, nothing said"] += 1
        elif verdict is not None:
            is_right = struck.name in verdict[1] and f"Rank {rank} holds" in verdict[1]
            counted["found and named" if is_right else "found"] += 1
            latest = max(latest, verdict[0] - after)
        elif zero == 0 and len(set(ranks.gather_objects(_all_bytes(state)))) == 1:
            counted["healed by an update"] += 1
        else:
            missed.append((trial, how, struck.name))
    return {**counted, "missed": missed, "latest after [steps]": latest}


def _step(decoder: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in decoder.parameters():
        weight.grad = torch.ones_like(weight) * 1e-3
    optimizer.step()


def _all_bytes(state: HeldState) -> str:
    digest = hashlib.sha256()
    for each in state.held():
        digest.update(each.tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class TimedWatch(StateWatch):
    """A watch that counts the seconds which it takes of steps."""

    taken_s = 0.0

    def updated(self) -> None:
        with self._counting():
            super().updated()

    def changed_parts(self) -> list[str]:
        with self._counting():
            return super().changed_parts()

    def require_right(
        self, step: int, changed: list[str], *, is_any: bool, is_doubtful: bool = False
    ) -> None:
        with self._counting():
            super().require_right(step, changed, is_any=is_any, is_doubtful=is_doubtful)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.taken_s += time.perf_counter() - began


def cost(ranks: Ranks, zero: int, every: int) -> dict[str, list[float]]:
    """Seconds of a mean step in each turn, with the watch and without, and those of the watch."""
    torch.set_num_threads(1)
    store = open_corpus()
    decoder = Decoder(preset("2m"))
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    optimizer = make_adamw(decoder, TrainSpec())
    watch = TimedWatch(
        HeldState(decoder, optimizer, ranks.rank), ranks, EventSink(), every_steps=every
    )
    plain = StepRunner(sharded, optimizer, store, ranks, EventSink())
    runners = {"without": plain, "with": dataclasses.replace(plain, state=watch)}
    longest = np.argsort(store.doc_tokens)[-ranks.world :]
    packed = PackedStep(
        "by-work", tuple((MicroBatch(np.array([[each, 0, _TOKENS]])),) for each in longest)
    )
    run: Callable[[StepRunner, int], object] = lambda runner, number: runner.run(  # noqa: E731
        packed, step=number, rate=1e-4, clip_norm=1.0, last_good=lambda: None, stop_asked=False
    )
    run(plain, 1)  # makes the moments
    taken: dict[str, list[float]] = {name: [] for name in (*runners, "watch")}
    number = 0
    for turn in range(_TURNS):
        for name in list(runners)[:: 1 if turn % 2 else -1]:
            watch.begin(number)
            watch.taken_s = 0.0
            ranks.barrier()
            began = time.perf_counter()
            for _ in range(every):
                number += 1
                run(runners[name], number)
            ranks.barrier()
            taken[name].append((time.perf_counter() - began) / every)
            if name == "with":
                taken["watch"].append(watch.taken_s / every)
    return taken


def measure(trials: int, every: int, *, has_cost: bool) -> dict[str, object]:
    """Both."""
    stamp, answer = LoadStamp(), dict[str, object]()
    for zero, what in ((0, "copies"), (1, "parts")):
        answer[what] = run_ranks(_WORLD, campaign, zero, every, trials, timeout_s=3600.0)[0]
        if has_cost:
            taken = run_ranks(2, cost, zero, every, timeout_s=3600.0)[0]
            middle = {name: statistics.median(each) for name, each in taken.items()}
            answer[f"{what}: step_s"] = {name: spread(each) for name, each in taken.items()}
            answer[f"{what}: share of the watch (goal 0.02)"] = middle["watch"] / middle["with"]
            answer[f"{what}: steps with it over without"] = middle["with"] / middle["without"]
    return {
        "what": f"{trials} changes in memory each, compared every {every} steps (measured)",
        **answer,
        "other_load_cores": stamp.other_load(),
        "environment": environment(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--no-cost", action="store_true", help="leave step times out")
    args = parser.parse_args()
    json.dump(measure(args.trials, args.every, has_cost=not args.no_cost), sys.stdout, indent=1)
