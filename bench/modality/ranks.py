"""One rank of the measurement of ``bench.modality.throughput``."""

import dataclasses
import time
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.comm.group import Ranks
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.observe.journal import EventSink
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec
from equipoise.train.build import build_packer, build_runner, join_sharing
from equipoise.train.check.items import stand_ins
from equipoise.train.check.sample import Sample

MODEL = dataclasses.replace(preset("7m"), vocab=1024)
VISION = VisionSpec(layers=2, hidden=64, patch=4)
DOCUMENTS = tuple(np.random.default_rng(1).integers(40, 500, 30).tolist())


@dataclass(frozen=True, slots=True)
class StepReport:
    """Seconds of both kinds of steps, in turns."""

    tokens: int
    rows: int
    text_s: list[float]
    image_s: list[float]
    text_processor_s: float
    image_processor_s: float
    encode_s: list[float]
    bridge_bytes: int
    skew: float
    skew_in_turn: float
    ranks_s: float
    """Processor seconds of both ranks, all in all."""


def measure_steps(ranks: Ranks, rounds: int, share: float) -> StepReport:
    """Take turns between a step with images and one of text, after one of each that counts not.

    Args:
        ranks: Two.
        rounds: Turns that count.
        share: Of the tokens, how many stand in for images at most.
    """
    sides = {
        name: _side(ranks, vision, share)
        for name, vision in (("text", VisionSpec()), ("image", VISION))
    }
    wall: dict[str, list[float]] = {name: [] for name in sides}
    processor = dict.fromkeys(sides, 0.0)
    for turn in range(rounds + 1):
        for name, (runner, packed) in sides.items():
            ranks.barrier()
            began, used = time.perf_counter(), time.process_time()
            made = runner.gradients(packed, step=turn + 1)
            runner.update(made, step=turn + 1, rate=1e-4, clip_norm=1.0)
            ranks.barrier()
            if turn:
                wall[name].append(time.perf_counter() - began)
                processor[name] += time.process_time() - used
            if made.encoders is not None:
                encoders = made.encoders
    both = ranks.gather_floats(list(processor.values())).sum(0).tolist()
    work, in_turn = np.array(encoders.work), np.array(encoders.work_in_turn)
    return StepReport(
        sum(DOCUMENTS),
        encoders.rows,
        wall["text"],
        wall["image"],
        both[0],
        both[1],
        encoders.encode_s,
        encoders.bytes,
        float(work.max() / work.mean()),
        float(in_turn.max() / in_turn.mean()),
        float(ranks.gather_floats([time.process_time()]).sum()),
    )


def _sample(vision: VisionSpec, share: float) -> Sample:
    """The documents, with images in the first of them, as far as a share allows."""
    encoders = RunSpec(vision=vision, audio=AudioSpec()).encoders
    sample = Sample.draw(MODEL.vocab, DOCUMENTS, encoders=encoders)
    items = sample.items
    if items is None:
        return sample
    held = int(np.searchsorted(items.rows.cumsum(), share * sum(DOCUMENTS), side="right"))
    items = dataclasses.replace(
        items,
        first=np.minimum(items.first, held),
        begin=items.begin[:held],
        rows=items.rows[:held],
        kind=items.kind[:held],
        grid=items.grid[:held],
        content=items.content[:held],
    )
    stands = [stand_ins(items, at, tokens) for at, tokens in enumerate(DOCUMENTS)]
    is_learned = tuple(torch.from_numpy(~each) for each in stands)
    return dataclasses.replace(sample, is_learned=is_learned, items=items)


def _side(ranks: Ranks, vision: VisionSpec, share: float):
    """What runs the steps of one kind, and the step."""
    spec = RunSpec(
        pack=PackSpec(context_tokens=512, step_tokens=sum(DOCUMENTS)),
        layout=LayoutSpec(dp=ranks.world),
        vision=vision,
        audio=AudioSpec(),
    )
    resolved = ResolvedFile(spec, MODEL, {}, ranks.world, "", "")
    sample = _sample(vision, share)
    curve = counted_curve(MODEL)
    stream = DocumentStream(sample.pieces[:, 2], seed=0, context_tokens=512)
    sharing = join_sharing(resolved, ranks, curve, stream)
    runner = build_runner(resolved, ranks, sample.store, EventSink(), sharing)
    return runner, build_packer(spec, ranks.world, curve).step(sample.pieces)
