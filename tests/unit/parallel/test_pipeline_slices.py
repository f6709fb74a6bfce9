"""Documents divided over time: however they are cut, gradients are those of whole documents."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.divided import macro_units, pack_divided_in_time
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.parallel.pipeline.executor import Executor, StageBatch
from equipoise.parallel.pipeline.pipeline import play_pipeline
from equipoise.parallel.pipeline.program import compile_rank
from equipoise.parallel.pipeline.slices import Slices
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.pack import MicroBatch
from equipoise.spec.run.spec import PackSpec, Recompute
from support.decoders import MODEL, TIED, Grads, gradient_errors, parts_of, uneven_edges

KINDS = st.sampled_from(("none", "attention", "selective", "full"))


def tokens_of(document: int, length: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(document)
    return torch.randint(MODEL.vocab, (length,), generator=source)


def one_rank(model, lengths: list[int]) -> tuple[float, Grads]:
    """Whole documents in one micro-batch."""
    decoder = Decoder(model).double()
    initialize(decoder, 0)
    tokens = [tokens_of(document, length) for document, length in enumerate(lengths)]
    labels = [torch.cat((x[1:], x.new_full((min(1, len(x)),), IGNORED))) for x in tokens]
    loss = decoder(torch.cat(tokens), lengths, labels_T=torch.cat(labels))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in decoder.named_parameters()}


def batches_of(lengths: list[int], packed: list[MicroBatch]) -> list[StageBatch]:
    batches = []
    for micro_batch in packed:
        tokens, labels = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for document, start, stop in micro_batch.pieces.tolist():
            whole = tokens_of(document, lengths[document])
            following = torch.cat((whole[1:], whole.new_full((1,), IGNORED)))
            tokens.append(whole[start:stop])
            labels.append(following[start:stop])
        batches.append(StageBatch(torch.cat(tokens), torch.cat(labels), Slices.of(micro_batch)))
    return batches


def schedule_of(strategy: str, ranks: int, packed: list[MicroBatch]) -> PipelineSchedule:
    prices = make_prices(1, 1, 1, stages=ranks, micro_batches=len(packed))
    return write_pipeline(strategy, prices, ranks=ranks, units=macro_units(tuple(packed)))


def check(model, lengths, packed, schedule, *, recompute: Recompute = "none") -> None:
    batches = batches_of(lengths, packed)
    parts = parts_of(
        model, uneven_edges(model.layers, schedule.stages), schedule, recompute=recompute
    )
    runs = play_pipeline(parts, schedule, batches, divisor=1.0)
    loss, wanted = one_rank(model, lengths)
    assert sum(run.loss for run in runs) == pytest.approx(loss, rel=1e-12)
    for part in parts:
        assert max(gradient_errors(part, wanted).values()) <= 1e-12


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], list[MicroBatch]]:
    """Documents cut into slices of any lengths, in consecutive micro-batches beside others."""
    lengths, rows = [], [[] for _ in range(draw(st.integers(1, 5)))]
    for document in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(rows) - 1))
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=len(rows) - first))
        begin = 0
        for at, size in enumerate(sizes):
            rows[first + at].append((document, begin, begin + size, 0))
            begin += size
        lengths.append(begin)
    packed = []
    for each in rows:
        table = np.array(each, dtype=np.int64).reshape(-1, 4)
        packed.append(MicroBatch(table[:, :3], table[:, 3]))
    return lengths, packed


@given(divided(), st.sampled_from(["gpipe", "1f1b", "auto"]), st.integers(1, 3), KINDS)
@settings(max_examples=12)
def test_any_cut_equals_whole_documents(case, strategy: str, ranks: int, recompute) -> None:
    lengths, packed = case
    model = MODEL if recompute == "none" else TIED
    check(model, lengths, packed, schedule_of(strategy, ranks, packed), recompute=recompute)


def test_what_the_packer_divides() -> None:
    lengths = [60, 5, 9, 14, 3, 8]
    pieces = np.array([(d, 0, length) for d, length in enumerate(lengths)])
    pack = PackSpec(policy="divided-in-time", context_tokens=32, step_tokens=99)
    step = pack_divided_in_time(pieces, pack, 1, break_even_curve(20.0))
    packed = list(step.ranks[0])
    assert any(batch.history_tokens.any() for batch in packed)
    check(MODEL, lengths, packed, schedule_of("1f1b", 2, packed))


def test_two_slices_in_one_micro_batch() -> None:
    packed = [MicroBatch(np.array([[0, 0, 4], [0, 4, 9]]), np.array([0, 0]))]
    check(MODEL, [9], packed, schedule_of("1f1b", 2, packed))


def test_nothing_is_kept_after_a_step() -> None:
    pieces = [(0, 0, 4), (0, 4, 7), (0, 7, 8)]
    packed = [MicroBatch(np.array([row]), np.array([0])) for row in pieces]
    schedule = schedule_of("gpipe", 1, packed)
    (part,) = parts_of(MODEL, (0, 6), schedule)
    executor = Executor(
        part,
        compile_rank(schedule, 0),
        batches_of([8], packed),
        divisor=1.0,
        dtype=torch.float64,
    )
    held = [not executor._resident.is_empty for _ in executor.steps()]
    assert any(held)
    assert executor._resident.is_empty


def test_keys_that_nobody_holds_are_told() -> None:
    packed = [MicroBatch(np.array([row]), np.array([0])) for row in [(7, 0, 4), (7, 4, 9)]]
    lengths = [1] * 7 + [9]
    batches = batches_of(lengths, packed)
    prices = make_prices(1, 1, 1, stages=2, micro_batches=2)
    apart = write_pipeline("1f1b", prices, ranks=2)
    parts = parts_of(MODEL, (0, 3, 6), apart)
    with pytest.raises(LayoutError) as told:
        play_pipeline(parts, apart, batches, divisor=1.0)
    assert str(told.value) == (
        "Micro-batch 1 reads tokens 0:4 of document 7, which no earlier micro-batch of its unit "
        "holds. Schedule the units that macro_units finds in the pack."
    )
