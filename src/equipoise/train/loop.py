"""The training loop: pack, run, journal, save; resume where the last whole checkpoint stands.

What it decides
    When to save and when to stop. Everything else was decided by run.toml, the stream, the
    packer and the curve, each a pure function that every rank evaluates for itself.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import equipoise
from equipoise.balance.pack import make_packer, skew
from equipoise.balance.turns import TOGETHER, align_turns
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import FORMAT, Manifest, newest_good, require_same
from equipoise.checkpoint.store import load, save
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.data.batch import check_vocabulary
from equipoise.data.store import TokenStore, open_store
from equipoise.data.stream import DocumentStream
from equipoise.nn.measure import touch_libraries
from equipoise.observe.console import StepView, summary_line
from equipoise.observe.journal import Journal
from equipoise.observe.machine import forget_peak
from equipoise.optim.rate import learning_rate
from equipoise.spec.pack import PackedStep
from equipoise.spec.resolved import ResolvedFile
from equipoise.train.build import build_runner, join_sharing
from equipoise.train.curves import activation_dtype, curve_file, doubt_curve, obtain_curve
from equipoise.train.process import StopRequest, return_freed_memory, spare_small_chunks
from equipoise.train.record import RunRecord
from equipoise.train.shares import RankLoads
from equipoise.train.sinks import TensorBoardSink

CHECKPOINTS = "checkpoint"

_PACKER = "packer.json"
"""File of a checkpoint with the documents that a packer lets wait."""


@dataclass
class Position:
    """How far a run has come: steps done and tokens of the stream consumed."""

    step: int = 0
    tokens: int = 0


class Trainer:
    """One rank's part of a run, from its folder to its last step."""

    def __init__(
        self, folder: Path, resolved: ResolvedFile, ranks: Ranks, journal: Journal
    ) -> None:
        self.folder, self.resolved, self.ranks, self.journal = folder, resolved, ranks, journal
        self.spec, self.model = resolved.spec, resolved.model
        self.store: TokenStore = open_store(Path(resolved.corpus))
        check_vocabulary(self.store, self.model.vocab)
        self.stream = DocumentStream(
            self.store.doc_tokens,
            seed=self.spec.train.seed,
            context_tokens=self.spec.pack.context_tokens,
        )
        with journal.span("measure"):
            self.curve: LoadCurve = obtain_curve(
                self.spec, self.model, ranks, self.store.folder.parent
            )
        self.sharing = join_sharing(resolved, ranks, self.curve, self.stream)
        data_ranks = ranks.world // self.spec.layout.sharing
        meets = self.spec.layout.of_ranks(ranks.world).meets_each_turn
        self.packer = make_packer(self.spec.pack, data_ranks, self.curve, meets_each_turn=meets)
        touch_libraries(ranks.device, activation_dtype(self.spec))
        spare_small_chunks()
        return_freed_memory()
        forget_peak()
        self.position = Position()
        self.record = RunRecord(resolved, self.sharing, ranks, journal, self.store, self.curve)
        self.runner = build_runner(resolved, ranks, self.store, journal, self.sharing)

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.folder / CHECKPOINTS

    def resume(self, view: StepView) -> None:
        """Continue from the newest whole checkpoint, if there is any.

        Raises:
            CheckpointError: none is whole, or it is of another model, corpus or version.
        """
        found = None
        fault = ""
        if self.ranks.rank == 0:
            try:
                found = newest_good(self.checkpoints)
                if found is not None:
                    require_same(
                        found[1],
                        found[0],
                        model=self.model,
                        corpus_digest=self.store.digest,
                        seed=self.spec.train.seed,
                    )
            except CheckpointError as error:
                fault = str(error)
        fault, found = self.ranks.gather_objects((fault, found))[0]
        if fault:
            raise CheckpointError(fault)
        if found is None:
            return
        path, manifest, torn = found
        for sentence in torn:
            view.say(f"{sentence} Passed over.")
            self.journal.write("fault", "torn-checkpoint", message=sentence)
        with self.journal.span("load", step=manifest.step):
            load(path, self.runner.model.decoder, self.runner.optimizer)
        self.position = Position(manifest.step, manifest.position_tokens)
        self._resume_packer(path)
        view.say(f"Resuming after step {manifest.step} from {path}.")

    def _resume_packer(self, checkpoint: Path) -> None:
        """Take up the documents that were left waiting."""
        file = checkpoint / _PACKER
        if not file.exists():
            return
        state = json.loads(file.read_text())
        if self.spec.pack.policy != "delayed":
            raise CheckpointError(
                f'{checkpoint} was packed by "delayed" and {state["waiting"]} documents still '
                f'wait in its queues; "{self.spec.pack.policy}" would lose them. Set pack.policy '
                f'= "delayed", or train into another folder with --out.'
            )
        self.packer.load_state_dict(state)

    def run(self, view: StepView, stop: StopRequest) -> str:
        """Train to the last step or to a stop; why it ended ("done" or "interrupted")."""
        steps = self.spec.train.steps
        self.record.write_start(self.position.step)
        reason = "done"
        saved_step = self.position.step
        board = TensorBoardSink.open_if(
            self.spec.journal.tensorboard and self.ranks.rank == 0, self.folder / "tensorboard"
        )
        began, first, loss = time.perf_counter(), self.position.step, float("nan")
        while self.position.step < steps:
            step = self.position.step + 1
            stop_asked = bool(stop) or (self.ranks.rank == 0 and self._stop_file.exists())
            packed, loads = self._pack(step)
            result = self.runner.run(
                packed,
                step=step,
                rate=learning_rate(self.spec.train, step),
                clip_norm=self.spec.train.clip_norm,
                last_good=self._last_good,
                stop_asked=stop_asked,
            )
            self.position = Position(step, self.position.tokens + self.spec.pack.step_tokens)
            loss = result.loss
            figures = self.record.write_step(
                packed, loads, result, step=step, tokens_seen=self.position.tokens
            )
            board.write(step, figures)
            balance = skew(loads.predicted_s)
            view.show(step, result.loss, figures["tokens_per_s"], figures["mfu"], balance)
            if result.stop:
                reason = "interrupted"
                break
            if step % self.spec.checkpoint.every_steps == 0 or step == steps:
                saved_step = self._save(view, must=step == steps) or saved_step
        if saved_step != self.position.step:
            self._save(view, must=True)
        self.record.write_memory()
        board.close()
        if self.ranks.rank == 0:
            self._stop_file.unlink(missing_ok=True)
            self.journal.write("instant", "stop", reason=reason, step=self.position.step)
        self.journal.flush()
        done = self.position.step - first
        if done:
            took_s = time.perf_counter() - began
            view.say(summary_line(done, done * self.spec.pack.step_tokens, took_s, loss))
        if self.ranks.rank == 0:
            self._doubt_curve(view)
        return reason

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    def _doubt_curve(self, view: StepView) -> None:
        file = curve_file(self.spec, self.model, self.ranks, self.store.folder.parent)
        if doubt := doubt_curve(file, self.record.busy_over_predicted):
            view.say(doubt)

    def _last_good(self) -> Path | None:
        try:
            found = newest_good(self.checkpoints)
        except CheckpointError:  # what is being told is worse
            return None
        return None if found is None else found[0]

    def _pack(self, step: int) -> tuple[PackedStep, RankLoads]:
        """Decide the step, on every rank alike, and journal the decision on rank 0."""
        began = time.perf_counter()
        pieces = self.stream.step(self.position.tokens, self.spec.pack.step_tokens)
        packed = self.packer.step(pieces)
        if packed.policy in TOGETHER:
            packed = align_turns(packed)
        loads = self.sharing.loads(packed, self.curve)
        plan_s = time.perf_counter() - began
        self.record.write_pack(step, packed, pieces, loads, plan_s)
        return packed, loads

    def _save(self, view: StepView, *, must: bool) -> int | None:
        """Save this position; the step that was saved, or None when the disk refused.

        Raises:
            CheckpointError: it could not be written and the run ends here.
        """
        waiting = self.packer.state_dict()
        manifest = Manifest(
            format=FORMAT,
            version=equipoise.__version__,
            step=self.position.step,
            position_tokens=self.position.tokens,
            world=self.ranks.world,
            model=dataclasses.asdict(self.model),
            corpus_digest=self.store.digest,
            seed=self.spec.train.seed,
            context_tokens=self.spec.pack.context_tokens,
            files={},
        )
        try:
            with self.journal.span("save", step=self.position.step):
                save(
                    self.checkpoints,
                    self.runner.model.decoder,
                    self.runner.optimizer,
                    self.ranks,
                    manifest,
                    keep=self.spec.checkpoint.keep,
                    texts={_PACKER: json.dumps(waiting)} if waiting else {},
                )
        except CheckpointError as error:
            self.journal.write("fault", "save", step=self.position.step, message=str(error))
            self.journal.flush()
            if must:
                raise
            view.say(f"{error} The run goes on.")
            return None
        finally:
            # A save copies shards; the peak that is held against the forecast is of steps.
            return_freed_memory()
            forget_peak()
        return self.position.step
