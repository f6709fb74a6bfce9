"""On a CUDA device: attention and one training step equal the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from equipoise.balance.context.plan import plan_context
from equipoise.comm.group import Ranks, join
from equipoise.data.cache.store import TokenStore
from equipoise.nn.attention import attend_documents
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.device.clock import make_marks
from equipoise.nn.device.memory import forget_peak, held_bytes, peak_bytes
from equipoise.observe.journal import EventSink
from equipoise.optim.adamw import clip, global_norm, make_adamw
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.mask import Mask
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.step import StepRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = (130, 1, 64, 5, 200)
MODEL = ModelSpec(layers=2, hidden=128, heads=4, kv_heads=2, ffn=160, vocab=320, head_width=32)


def test_attention_and_its_gradients_equal_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(sum(LENGTHS), heads, 64, generator=generator) for heads in (4, 2, 2)]
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        q, k, v = (part.to(device, dtype).requires_grad_() for part in parts)
        out = attend_documents(q, k, v, LENGTHS)
        out.sum().backward()
        found.append([x.detach().float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for cpu, cuda in zip(*found, strict=True):
        # bf16 keeps 8 bits.
        assert (cpu - cuda).abs().max() <= 0.03 * cpu.abs().max()


@pytest.mark.parametrize("strategy", ["needed-kv", "ring", "pass-q", "ulysses"])
def test_attention_in_parts_equals_the_cpus(strategy: str) -> None:
    """All ranks played on one device."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(sum(LENGTHS), heads, 64, generator=generator) for heads in (4, 2, 2)]
    plan = plan_context(LENGTHS, 3, strategy, heads=4, kv_heads=2, mask=Mask("window", 70))
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        q, k, v = (part.to(device, dtype).requires_grad_() for part in parts)
        out = attend_in_one_process(q, k, v, plan)
        out.sum().backward()
        found.append([x.detach().float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for cpu, cuda in zip(*found, strict=True):
        assert (cpu - cuda).abs().max() <= 0.03 * cpu.abs().max()


def _step(ranks: Ranks, precision: str) -> tuple[float, float, dict[str, np.ndarray]]:
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder.to(ranks.device), ranks, zero=1, precision=precision)
    optimizer = make_adamw(decoder, TrainSpec(lr=1e-3))
    tokens = torch.arange(sum(LENGTHS), device=ranks.device) * 7 % MODEL.vocab
    sharded.prepare_micro_batch(last=False)
    loss = decoder(tokens, LENGTHS, labels_T=tokens.roll(-1)) / len(tokens)
    loss.backward()
    sharded.sum_gradients()
    norm = float(global_norm(decoder))
    clip(decoder, norm, 1.0)
    optimizer.step()
    weights = {
        name: parameter.full_tensor().detach().cpu().numpy()
        for name, parameter in decoder.named_parameters()
    }
    return float(loss.detach()), norm, weights


def test_a_training_step_is_near_the_cpus(tmp_path: Path) -> None:
    found = []
    for name in ("cpu", "cuda:0"):
        store = dist.FileStore(str(tmp_path / name), 1)
        with join(store, 0, 1, torch.device(name)) as ranks:
            found.append(_step(ranks, "bf16"))
    (loss, norm, weights), (cuda_loss, cuda_norm, cuda_weights) = found
    assert cuda_loss == pytest.approx(loss, rel=1e-2)
    assert cuda_norm == pytest.approx(norm, rel=3e-2)
    for name, array in weights.items():
        # AdamW's first step is as long as the learning rate, whatever the gradient.
        assert np.abs(cuda_weights[name] - array).max() <= 2.1e-3, name


class Strict(EventSink):
    """Lets torch raise where a micro-batch would wait for the device; keeps spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def write(self, kind: str, name: str, *, t: float | None = None, **fields: Any) -> None:
        self.spans.append({"name": name, **fields})

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        is_strict = name in ("forward", "backward")
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_micro_batches_do_not_wait_for_the_device(tmp_path: Path) -> None:
    journal, lengths = Strict(), np.array(LENGTHS * 2)
    drawn = np.random.default_rng(0).integers(0, MODEL.vocab, lengths.sum())
    store = TokenStore.in_memory(drawn.astype(np.uint32), lengths, MODEL.vocab)
    pieces = np.stack((np.arange(10), np.zeros(10, np.int64), lengths), axis=1)
    packed = PackedStep("by-work", ((MicroBatch(pieces[:5]), MicroBatch(pieces[5:])),))
    file = dist.FileStore(str(tmp_path / "store"), 1)
    with join(file, 0, 1, torch.device("cuda", 0)) as ranks:
        decoder = Decoder(MODEL)
        initialize(decoder, 0)
        sharded = ShardedDecoder(decoder.to(ranks.device), ranks, zero=1, precision="bf16")
        runner = StepRunner(sharded, make_adamw(decoder, TrainSpec()), store, ranks, journal)
        for step in (1, 2):
            result = runner.run(
                packed,
                step=step,
                rate=1e-3,
                clip_norm=1.0,
                last_good=lambda: None,
                stop_asked=False,
            )
    forwards = [each for each in journal.spans if each["name"] == "forward"]
    assert [(each["step"], each["micro_batch"]) for each in forwards] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert all(each["duration_s"] > 0 for each in forwards)
    assert 0 < result.rank_busy_s[0] < result.step_s


def test_marks_are_passed_in_order() -> None:
    marks = make_marks(torch.device("cuda", 0))
    x = torch.randn(4096, 4096, device="cuda")
    begin = marks.mark()
    for _ in range(8):
        x = x @ x
    end = marks.mark()
    moments = marks.read()
    assert moments.passed_s(begin, end) == moments.busy_s(begin, end) > 0


def test_a_tensors_bytes_are_the_allocators() -> None:
    device = torch.device("cuda", 0)
    forget_peak(device)
    before = held_bytes(device)
    tensor = torch.ones(1 << 20, dtype=torch.uint8, device=device)
    assert held_bytes(device) - before == 1 << 20
    del tensor
    assert held_bytes(device) == before
    assert peak_bytes(device) - before == 1 << 20
