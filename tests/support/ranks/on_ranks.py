"""Functions that ranks run in tests; their first argument is their ``Ranks``."""

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from equipoise.base.errors import LayoutError
from equipoise.checkpoint import store as checkpoint_store
from equipoise.checkpoint.manifest import (
    FIRST_FORMAT,
    FORMAT,
    Manifest,
    read_manifest,
)
from equipoise.comm.group import Ranks
from equipoise.comm.mesh import Mesh
from equipoise.cost.curve import counted_curve
from equipoise.data.batch import Batch
from equipoise.data.cache.store import open_store
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.project import PLAIN
from equipoise.observe.journal import Journal
from equipoise.optim.adamw import clip, global_norm, make_adamw
from equipoise.parallel.apply import apply_axes
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.resume import resume_facts
from equipoise.spec.run.spec import LayoutSpec, TrainSpec
from equipoise.train import loop, side
from equipoise.train.build import build_runner
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.prove import check_cases
from equipoise.train.context import ContextGroup, Share
from equipoise.train.step import Gradients, StepRunner
from support.checkpoints.sealed import describe_files, write_manifest
from support.verbs import wait_until

Arrays = dict[str, np.ndarray]


def whole(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as one rank would hold it, in the dtype that it is kept in."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().numpy()


def weights_of(module: torch.nn.Module) -> Arrays:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Arrays:
    """Every weight and every tensor of the optimizer, by name."""
    state = weights_of(module)
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"{name} {key}"] = whole(value)
    return state


# Whole runs. -------------------------------------------------------------------------------


@dataclasses.dataclass
class Script:
    """A view that records its calls, and a user who acts at some step."""

    ranks: Ranks
    stop_at: int = 0
    spoil_at: int = 0
    """After this step the last norm is not a number: no rank's loss will be."""
    norm: torch.Tensor | None = None
    file_limit_at: int = 0
    """From this step on rank 1 cannot write large files, until the view reports that."""
    kill_at: int = 0
    """After this step the last rank is killed."""
    once: Path | None = None
    """A checkpoint that is waited for before a kill or a limit: it is written beside the steps."""
    deed_at: int = 0
    """After this step ``deed`` is done, by the rank of ``deed_rank``."""
    deed: Callable[[], object] | None = None
    deed_rank: int = 0
    undo: Callable[[], object] | None = None
    """Runs once, when a line with ``undo_at`` is printed."""
    undo_at: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    is_asked: bool = False

    def show(self, step: int, loss: float, *figures: float) -> None:
        self.losses.append(loss)
        self.is_asked = self.is_asked or step == self.stop_at
        if step in (self.kill_at, self.file_limit_at) and self.once is not None:
            wait_until(self.once.exists)
        if step == self.kill_at and self.ranks.rank == self.ranks.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.deed_at and self.ranks.rank == self.deed_rank and self.deed is not None:
            self.deed()
        if step == self.spoil_at and self.norm is not None:
            self.norm.fill_(torch.nan)
        if step == self.file_limit_at and self.ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    def say(self, line: str) -> None:
        self.said.append(line)
        if self.undo is not None and self.undo_at in line and self.ranks.rank == 0:
            undo, self.undo = self.undo, None
            undo()
        if "The run goes on." in line:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )

    def __bool__(self) -> bool:
        return self.is_asked


@dataclasses.dataclass
class Ended:
    """How a run ended on one rank."""

    reason: str
    losses: list[float]
    said: list[str]
    weights: Arrays
    dtypes: set[str]
    decay: list[float]
    pieces: list[tuple[int, int, int]]
    """Pieces that all ranks trained: document, start, stop."""


class NotingTrainer(loop.Trainer):
    """Notes which pieces of documents each step trains."""

    pieces: list[tuple[int, int, int]]

    def _pack(self, step: int) -> Any:
        packs = super()._pack(step)
        for batch in packs[0][0]:
            self.pieces += map(tuple, batch.pieces.tolist())
        return packs


def train(
    ranks: Ranks,
    folder: Path,
    resolved: ResolvedFile,
    script: dict[str, Any],
    kind: type[NotingTrainer] = NotingTrainer,
) -> Ended:
    """A whole run with a counted curve, so that nothing is measured."""
    loop.obtain_curve = lambda *_: counted_curve(resolved.model)
    view = Script(ranks, **script)
    with ExitStack() as stack:
        journals = [
            stack.enter_context(Journal(side / "journal", ranks.rank))
            for side, _ in resolved_sides(folder, resolved)
        ]
        trainer = kind(folder, resolved, ranks, journals)
        trainer.pieces = []
        last = getattr(trainer.runner.model.decoder, "norm", None)  # the last stage's
        norm = getattr(last, "weight", None)
        view.norm = None if norm is None else norm.data.to_local()
        trainer.resume(view)
        reason = trainer.run(view, view)
    runner = trainer.runner
    moments = [
        value
        for state in runner.optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    ]
    kept = [*runner.model.decoder.parameters(), *moments]
    with runner.model.loading(runner.optimizer):
        weights = weights_of(runner.model.decoder)
    return Ended(
        reason=reason,
        losses=view.losses,
        said=view.said,
        weights=weights,
        dtypes={str(tensor.dtype) for tensor in kept},
        decay=[group["weight_decay"] for group in runner.optimizer.param_groups],
        pieces=trainer.pieces,
    )


def train_strictly(ranks: Ranks, folder: Path, resolved: ResolvedFile) -> None:
    """A run whose sides must agree to the last bit."""
    side.AGREE = {"fp32": 0.0}
    train(ranks, folder, resolved, {})


class FirstTrainer(NotingTrainer):
    """Saves as the first versions did."""

    def _save(self, *_: Any, **__: Any) -> None:
        store = open_store(Path(self.resolved.corpus))
        manifest = dataclasses.replace(
            _manifest(self.model, self.position.step, self.ranks.world),
            position_tokens=self.position.tokens,
            corpus_digest=store.first_digest,
            seed=self.spec.train.seed,
            context_tokens=self.spec.pack.context_tokens,
            run=resume_facts(self.spec),
        )
        decoder, optimizer = self.runner.model.decoder, self.runner.optimizer
        write_first(self.checkpoints, decoder, optimizer, self.ranks, manifest)
        self.saves.saved_step = self.position.step


def train_first(ranks: Ranks, folder: Path, resolved: ResolvedFile) -> None:
    """A whole run that saves as the first versions did."""
    train(ranks, folder, resolved, {}, FirstTrainer)


def train_all(ranks: Ranks, runs: dict[Path, ResolvedFile]) -> None:
    """Runs one after another on the same ranks, in their own folders."""
    for folder, run in runs.items():
        train(ranks, folder, run, {})


def train_turns(
    ranks: Ranks, turns: list[tuple[Path, ResolvedFile, dict[str, Any]]]
) -> list[Ended]:
    """Runs one after another on the same ranks, some in the folder of one before."""
    return [train(ranks, *each) for each in turns]


def train_each(ranks: Ranks, folder: Path, runs: dict[str, ResolvedFile]) -> dict[str, Ended]:
    """Runs one after another on the same ranks, each in a folder of its own."""
    return {name: train(ranks, folder / name, run, {}) for name, run in runs.items()}


# Single steps. -----------------------------------------------------------------------------


def step_with_micro_batches(
    ranks: Ranks, folder: Path, corpus: str, model: ModelSpec, counts: list[int], zero: int
) -> list[tuple[float, float, Arrays]]:
    """One step on the same documents for each count of micro-batches: loss, norm, weights."""
    store = open_store(Path(corpus))
    index = np.arange(24, dtype=np.int64)
    pieces = np.stack((index, np.zeros_like(index), store.doc_tokens[:24]), axis=1)
    outcomes = []
    for count in counts:
        packed = PackedStep(
            "by-hand",
            tuple(
                tuple(MicroBatch(pieces[rank :: ranks.world][turn::count]) for turn in range(count))
                for rank in range(ranks.world)
            ),
        )
        decoder = Decoder(model)
        initialize(decoder, 0)
        sharded = ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
        with Journal(folder / str(count), ranks.rank) as journal:
            runner = StepRunner(sharded, make_adamw(decoder, TrainSpec()), store, ranks, journal)
            done = runner.run(
                packed,
                step=1,
                rate=1e-3,
                clip_norm=0.5,
                last_good=lambda: None,
                stop_asked=False,
            )
        outcomes.append((done.loss, done.grad_norm, weights_of(decoder)))
    return outcomes


def step_in_contexts(
    ranks: Ranks,
    folder: Path,
    corpus: str,
    model: ModelSpec,
    batches: list[list[list[int]]],
    layouts: list[LayoutSpec],
) -> list[tuple[float, float, Arrays]]:
    """One step on these micro-batches in each layout: loss, norm, weights."""
    store = open_store(Path(corpus))
    outcomes = []
    for number, layout in enumerate(layouts):
        context = ContextGroup.join(ranks, ContextPlanner(model, layout))
        data_ranks = ranks.world // layout.cp
        each = [MicroBatch(np.array(rows, dtype=np.int64).reshape(-1, 3)) for rows in batches]
        packed = PackedStep("by-hand", tuple(tuple(each[r::data_ranks]) for r in range(data_ranks)))
        decoder = Decoder(model)
        initialize(decoder, 0)
        sharded = ShardedDecoder(decoder, ranks, zero=layout.zero, precision="fp32")
        with Journal(folder / f"{ranks.world}-{number}", ranks.rank) as journal:
            # An eps above rounding: otherwise AdamW turns rounding into a whole step.
            optimizer = make_adamw(decoder, TrainSpec(eps=1e-4))
            runner = StepRunner(sharded, optimizer, store, ranks, journal, context)
            done = runner.run(
                packed, step=1, rate=1e-3, clip_norm=0.5, last_good=lambda: None, stop_asked=False
            )
        outcomes.append((done.loss, done.grad_norm, weights_of(decoder)))
    return outcomes


def steps_in_contexts(
    ranks: Ranks,
    folder: Path,
    corpus: str,
    model: ModelSpec,
    batches: dict[str, list[list[list[int]]]],
    layouts: list[LayoutSpec],
) -> dict[str, list[tuple[float, float, Arrays]]]:
    """Such a step on each of several batches."""
    return {
        name: step_in_contexts(ranks, folder / name, corpus, model, each, layouts)
        for name, each in batches.items()
    }


def join_context(ranks: Ranks, context: int) -> None:
    ContextGroup.join(ranks, ContextPlanner(preset("2m"), LayoutSpec(cp=context)))


def sharers_of(ranks: Ranks, context: int) -> list[int]:
    """The ranks that share micro-batches with this one."""
    mesh = Mesh.join(ranks, Layout(dp=ranks.world // context, cp=context))
    group = mesh.peers("cp").group
    return torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)


def pack_differently(
    ranks: Ranks, folder: Path, corpus: str, model: ModelSpec, layout: Layout | None = None
) -> None:
    """A step whose pack differs on the last rank; on a layout, by a micro-batch for which ranks
    would wait."""
    store = open_store(Path(corpus))
    last = ranks.rank == ranks.world - 1
    pieces = np.array([[0, 0, int(store.doc_tokens[0]) - (last and layout is None)]])
    turns = (MicroBatch(pieces),) * (2 if last and layout else 1)
    packed = PackedStep("by-hand", (turns,) * ranks.world)
    decoder = Decoder(model)
    initialize(decoder, 0)
    mesh = None if layout is None else Mesh.join(ranks, layout)
    sharded = apply_axes(decoder, ranks, zero=1, precision="fp32", mesh=mesh)
    with Journal(folder, ranks.rank) as journal:
        runner = StepRunner(sharded, make_adamw(decoder, TrainSpec()), store, ranks, journal)
        runner.run(
            packed, step=7, rate=1e-3, clip_norm=1.0, last_good=lambda: None, stop_asked=False
        )


# Gradients, norms, checkpoints. ---------------------------------------------------------------


def made_up_gradients(decoder: Decoder) -> None:
    """Give each parameter a gradient that every layout agrees on."""
    for number, (name, parameter) in enumerate(decoder.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        full = torch.randn(parameter.shape, generator=generator)
        mine = torch.empty_like(parameter)
        assert isinstance(mine, DTensor), name
        mesh, places = mine.device_mesh, mine.placements
        parameter.grad = distribute_tensor(full, mesh, places)


def clip_made_up(
    ranks: Ranks, model: ModelSpec, stages: list[int]
) -> list[tuple[float, float, Arrays]]:
    """Norm before and after a clip to 1, and the clipped gradients, at each ZeRO stage."""
    norms = []
    for zero in stages:
        decoder = Decoder(model)
        ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
        made_up_gradients(decoder)
        before = float(global_norm(decoder))
        clip(decoder, before, 1.0)
        gradients = {name: whole(p.grad) for name, p in decoder.named_parameters()}
        norms.append((before, float(global_norm(decoder)), gradients))
    return norms


def _stepped(
    ranks: Ranks, model: ModelSpec, zero: int, seed: int, train: TrainSpec
) -> tuple[Decoder, torch.optim.AdamW]:
    sharded, optimizer = _stepped_sharded(ranks, model, zero, seed, train)
    return sharded.decoder, optimizer


def _stepped_sharded(
    ranks: Ranks, model: ModelSpec, zero: int, seed: int, train: TrainSpec
) -> tuple[ShardedDecoder, torch.optim.AdamW]:
    decoder = Decoder(model)
    initialize(decoder, seed)
    sharded = ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    optimizer = make_adamw(decoder, train)
    for _ in range(2):
        made_up_gradients(decoder)
        optimizer.step()
    return sharded, optimizer


def _manifest(model: ModelSpec, step: int, world: int) -> Manifest:
    return Manifest(
        format=FORMAT,
        version="0.1.0",
        step=step,
        position_tokens=0,
        world=world,
        model=dataclasses.asdict(model),
        corpus_digest="c" * 32,
        seed=0,
        context_tokens=256,
        files={},
    )


def save(ranks: Ranks, root: Path, model: ModelSpec, zero: int, steps: list[int]) -> Arrays:
    """Save once for each step, keeping two; returns what was saved."""
    decoder, optimizer = _stepped(ranks, model, zero, 0, TrainSpec())
    for step in steps:
        manifest = _manifest(model, step, ranks.world)
        checkpoint_store.save(root, decoder, optimizer, ranks, manifest, keep=2)
    return state_of(decoder, optimizer)


def save_first(ranks: Ranks, root: Path, model: ModelSpec, zero: int, step: int) -> Arrays:
    """Save as the first versions did, by torch's own writer."""
    decoder, optimizer = _stepped(ranks, model, zero, 0, TrainSpec())
    write_first(root, decoder, optimizer, ranks, _manifest(model, step, ranks.world))
    return state_of(decoder, optimizer)


def write_first(
    root: Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    manifest: Manifest,
) -> None:
    """``checkpoint.store.save`` as it was for format 1."""
    folder = root / f"step-{manifest.step:06d}"
    if ranks.rank == 0:
        folder.mkdir(parents=True)
    ranks.barrier()
    state = {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer),
    }
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    state_dict_saver.save(state, storage_writer=writer)
    if ranks.rank == 0:
        changes = {"format": FIRST_FORMAT, "files": describe_files(folder)}
        write_manifest(folder, dataclasses.replace(manifest, **changes))
    ranks.barrier()


def save_keeping_one(ranks: Ranks, root: Path, model: ModelSpec, step: int) -> None:
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    checkpoint_store.save(
        root, decoder, optimizer, ranks, _manifest(model, step, ranks.world), keep=1
    )


def load(ranks: Ranks, folder: Path, model: ModelSpec, zero: int) -> tuple[Arrays, list[float]]:
    """Load into weights of another seed; returns the state, and the weight decays."""
    read_manifest(folder)
    decoder, optimizer = _stepped(ranks, model, zero, 1, TrainSpec(weight_decay=0.7))
    checkpoint_store.load(folder, decoder, optimizer)
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    return state_of(decoder, optimizer), decay


def load_fresh(ranks: Ranks, folder: Path, model: ModelSpec, zero: int) -> Arrays:
    """Load into an optimizer that has not made a step, as a resuming run does."""
    decoder = Decoder(model)
    initialize(decoder, 1)
    ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    optimizer = make_adamw(decoder, TrainSpec())
    checkpoint_store.load(folder, decoder, optimizer)
    return state_of(decoder, optimizer)


def load_unverified(ranks: Ranks, folder: Path, model: ModelSpec) -> None:
    decoder, optimizer = _stepped(ranks, model, 1, 1, TrainSpec())
    checkpoint_store.load(folder, decoder, optimizer)


def save_limited(
    ranks: Ranks, root: Path, model: ModelSpec, step: int, limited_rank: int | None
) -> None:
    """Save where one rank may not write files of more than 60 kB."""
    decoder, optimizer = _stepped(ranks, model, 1, 0, TrainSpec())
    if ranks.rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    manifest = _manifest(model, step, ranks.world)
    checkpoint_store.save(root, decoder, optimizer, ranks, manifest, keep=2)


# A check that must fail. ------------------------------------------------------------------------


def build_with_wrong_gradient(
    parameter: str, bad_rank: int, *, factor: float, step: int = 1
) -> Callable[..., StepRunner]:
    """Builds a step that spoils one rank's part of one gradient, after the sum."""

    class Wrong(StepRunner):
        def gradients(self, packed: PackedStep, **named: Any) -> Gradients:
            made = super().gradients(packed, **named)
            gradient = dict(self.model.decoder.named_parameters()).get(parameter)
            if self.ranks.rank == bad_rank and gradient is not None and named["step"] == step:
                grad = gradient.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
            return made

    def build(*arguments: Any, **named: Any) -> StepRunner:
        runner = build_runner(*arguments, **named)
        return Wrong(*(getattr(runner, field.name) for field in dataclasses.fields(runner)))

    return build


def check_with_wrong_gradient(
    ranks: Ranks, case: Case, parameter: str, bad_rank: int
) -> list[Verdict]:
    """A case in which one rank's part of one gradient is doubled after the sum."""
    build = build_with_wrong_gradient(parameter, bad_rank, factor=2.0)
    return check_cases(ranks, [case], build=build)


def check_without_sum(ranks: Ranks, case: Case) -> list[Verdict]:
    """A case whose step leaves out the sum over ranks."""

    class Wrong(StepRunner):
        def _sum_gradients(self) -> None:
            for weight in self.model.decoder.parameters():
                weight.grad = torch.zeros_like(weight)

    def build(*arguments: Any, **named: Any) -> StepRunner:
        runner = build_runner(*arguments, **named)
        return Wrong(*(getattr(runner, field.name) for field in dataclasses.fields(runner)))

    return check_cases(ranks, [case], build=build)


def check_with_plain_products(ranks: Ranks, case: Case) -> list[Verdict]:
    """A case in which the last rank does not round what it multiplies."""

    def build(*arguments: Any, **named: Any) -> StepRunner:
        runner = build_runner(*arguments, **named)
        decoder = runner.model.decoder
        if ranks.rank == ranks.world - 1 and isinstance(decoder, Decoder):
            decoder.set_products(PLAIN)
        return runner

    return check_cases(ranks, [case], build=build)


def check_with_wrong_shares(ranks: Ranks, case: Case, what: str) -> list[Verdict]:
    """A case in which the last rank's share has positions or labels of other tokens."""

    class Wrong(ContextGroup):
        def share(self, packed: PackedStep, turn: int, batch: Batch) -> Share:
            right = super().share(packed, turn, batch)
            if ranks.rank < ranks.world - 1:
                return right
            if what == "labels":
                return dataclasses.replace(right, labels_t=right.labels_t.roll(1))
            pack = dataclasses.replace(right.pack, positions_T=torch.arange(len(right.tokens_t)))
            return dataclasses.replace(right, pack=pack)

    def build(*arguments: Any, **named: Any) -> StepRunner:
        *others, sharing = arguments
        fields = [getattr(sharing, field.name) for field in dataclasses.fields(sharing)]
        return build_runner(*others, Wrong(*fields), **named)

    return check_cases(ranks, [case], build=build)


def check_with_a_byte_too_many(ranks: Ranks, case: Case) -> list[Verdict]:
    """A case in which the last rank counts more than it should."""

    def build(*arguments: Any, **named: Any) -> StepRunner:
        arguments[-1].ledger.sent_bytes[0] += ranks.rank == ranks.world - 1
        return build_runner(*arguments, **named)

    return check_cases(ranks, [case], build=build)


# Ranks that fail. -------------------------------------------------------------------------------


def count(ranks: Ranks, start: int) -> tuple[int, int]:
    total = ranks.sum_(torch.tensor(start + ranks.rank))
    return ranks.rank, int(total)


def raise_on_rank_1(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("a bad number")
    ranks.barrier()


def raise_known_on_rank_1(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise LayoutError("One sentence.")
    ranks.barrier()


def die_on_rank_1(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()


def sleep_deaf_on_rank_1(ranks: Ranks, file: Path) -> None:
    if ranks.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        file.write_text(str(os.getpid()))
        time.sleep(600)


def answer_with_what_cannot_be_sent(ranks: Ranks) -> object:
    return lambda: ranks
