"""Functions of ranks in tests of experts that lie in a file."""

import dataclasses
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import CheckpointError
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.memory.slices import SliceFile
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import set_loss_scale
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.expert.buffers import TierCounts
from equipoise.parallel.expert.tiers import ExpertTiers
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.expert.prefetch import Ahead, SliceBytes
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import ExpertsSpec, Recompute
from support.ranks.on_ranks import Ended, train

TURNS = 2
RATE = 0.5


@dataclasses.dataclass(frozen=True)
class TierCase:
    """A layout, and how much memory experts have."""

    model: ModelSpec
    layout: Layout
    memory_mib: float
    dtype: torch.dtype = torch.float64
    recompute: Recompute = "none"
    ahead: Ahead | None = None
    steps: int = 1
    idle: int = -1
    """A rank without tokens."""


@dataclasses.dataclass(frozen=True)
class TierOutcome:
    """Errors against one rank in the worst of the steps; counts of the last one."""

    loss_error: float
    gradient_error: float
    weight_error: float
    counts: TierCounts
    sent: int
    capacity: int
    sizes: SliceBytes
    all_bytes: int
    """Slices and moments of this rank."""
    block_bytes: int
    weights: list[Tensor]
    losses: list[float]


def _tokens(case: TierCase, rank: int, step: int, turn: int) -> Tensor:
    """Uneven documents."""
    drawn = torch.Generator().manual_seed(100 * step + 10 * turn + rank)
    count = 0 if rank == case.idle else 24 + 5 * rank
    return torch.randint(case.model.vocab, (count,), generator=drawn)


def _decoder(case: TierCase) -> Decoder:
    decoder = Decoder(case.model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name:
                weight *= 8.0  # so that experts differ
    return decoder.to(case.dtype)


def _backward(case: TierCase, decoder: Decoder, rank: int, step: int, turn: int) -> float:
    ranks = case.layout.world
    labels = sum(len(_tokens(case, r, step, t)) for r in range(ranks) for t in range(TURNS))
    set_loss_scale(decoder, 1 / labels)
    tokens = _tokens(case, rank, step, turn)
    loss = decoder(tokens, (len(tokens),) * (len(tokens) > 0), labels_T=tokens) / labels
    loss.backward()
    return float(loss.detach())


def _relative(mine: Tensor, reference: Tensor) -> float:
    scale = float(reference.abs().max()) or 1.0
    return float((mine - reference).abs().max()) / scale


def spread(ranks: Ranks, case: TierCase, folder: Path | None = None) -> ShardedDecoder:
    """A case's decoder, divided."""
    return apply_axes(
        _decoder(case),
        ranks,
        zero=3,
        precision="fp32",
        mesh=Mesh.join(ranks, case.layout),
        recompute=case.recompute,
        experts=ExpertsSpec(memory_mib=case.memory_mib),
        folder=folder,
    )


def _prove(ranks: Ranks, case: TierCase) -> TierOutcome:
    world, expected = ranks.world, _decoder(case)
    sharded = spread(ranks, case)
    decoder, tiers = sharded.decoder, sharded.tiers
    assert isinstance(tiers, ExpertTiers)
    tiers._ahead = case.ahead
    plain = torch.optim.SGD(expected.parameters(), lr=RATE)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=RATE)
    errors: dict[str, list[float]] = {"loss": [], "gradient": [], "weight": []}
    losses = []
    for step in range(case.steps):
        tiers.take()
        tiers.ledger.sent_bytes[:] = 0
        reference, loss = 0.0, 0.0
        for turn in range(TURNS):
            reference += sum(_backward(case, expected, rank, step, turn) for rank in range(world))
            sharded.prepare_micro_batch(last=turn == TURNS - 1)
            loss += _backward(case, decoder, ranks.rank, step, turn)
        losses.append(loss)
        errors["loss"].append(abs(sum(ranks.gather_objects(loss)) - reference) / reference)
        for mine, whole in zip(decoder.parameters(), expected.parameters(), strict=True):
            errors["gradient"].append(_relative(mine.grad.full_tensor(), whole.grad))
        tiers.update(optimizer, optimizer.step)
        plain.step()
        counts, sent = tiers.take(), int(tiers.ledger.sent_bytes.sum())
        for each in (optimizer, plain):
            each.zero_grad()
        with torch.no_grad():  # a forward alone goes by a schedule of its own
            tokens = _tokens(case, ranks.rank, step, 0)
            decoder(tokens, (len(tokens),) * (len(tokens) > 0), labels_T=tokens)
        sharded.free_gathered()
        with sharded.loading(optimizer):
            weights = [each.full_tensor().detach().clone() for each in decoder.parameters()]
        for mine, whole in zip(weights, expected.parameters(), strict=True):
            errors["weight"].append(_relative(mine, whole.detach()))
    sizes = tiers._sizes
    layers = len(tiers._layers)
    outcome = TierOutcome(
        *(max(each) for each in errors.values()),
        counts=counts,
        sent=sent,
        capacity=tiers.capacity,
        sizes=sizes,
        all_bytes=layers * (sizes.slice + sizes.moments),
        block_bytes=tiers._there.file.block_bytes,
        weights=weights,
        losses=losses,
    )
    tiers.close()
    return outcome


def prove(ranks: Ranks, cases: list[TierCase]) -> list[TierOutcome]:
    """Each case against the plain model on one rank."""
    return [_prove(ranks, case) for case in cases]


def refuse(ranks: Ranks, case: TierCase) -> None:
    spread(ranks, case)


def damage(ranks: Ranks, case: TierCase, what: str) -> str:
    """The message where the file is damaged, or cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        sharded = spread(ranks, case, Path(folder))
        tiers = sharded.tiers
        optimizer = torch.optim.SGD(sharded.decoder.parameters(), lr=RATE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if what == "damaged":
                blocks = Path(folder) / "blocks"
                blocks.write_bytes(b"\1" * blocks.stat().st_size)
                _backward(case, sharded.decoder, 0, 0, 0)
            else:
                _backward(case, sharded.decoder, 0, 0, 0)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
                tiers.update(optimizer, optimizer.step)
                tiers.take()
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return ""


def train_turns(
    ranks: Ranks, turns: list[tuple[Path, ResolvedFile, dict[str, Any]]]
) -> list[Ended | str]:
    """Runs one after another; one with ``torn_at`` ends amid the writes of that many parts."""
    ended: list[Ended | str] = []
    plain = SliceFile.write
    for folder, run, script in turns:
        left = [script.pop("torn_at", -1)]

        def write(self: SliceFile, name: str, tensor: Tensor, left: list[int] = left) -> None:
            left[0] -= 1
            plain(self, name, tensor if left[0] else tensor[: len(tensor) // 2])
            if left[0] == 0:
                raise CheckpointError("The machine has failed.")

        SliceFile.write = write
        try:
            ended.append(train(ranks, folder, run, script))
        except CheckpointError as error:
            ended.append(str(error))
        finally:
            SliceFile.write = plain
    return ended
