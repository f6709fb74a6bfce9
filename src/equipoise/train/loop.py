"""The training loop: pack, run, journal, save; resume where the last whole checkpoint stands.

What it decides
    When to save and when to stop; what the disk has to do with it, ``train.watch`` says.
    Everything else was decided by run.toml, the stream, the packer and the curve, each a pure
    function that every rank evaluates for itself.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import equipoise
from equipoise.balance.packing.pack import skew
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import (
    FIRST_FORMAT,
    FORMAT,
    Manifest,
    newest_good,
    require_same,
)
from equipoise.checkpoint.store import load, save
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve, price_labels
from equipoise.data.batch import check_vocabulary, label_counter
from equipoise.data.cache.store import TokenStore, open_store
from equipoise.data.mixture import open_stream
from equipoise.nn.device.memory import forget_peak
from equipoise.nn.measure import touch_libraries
from equipoise.observe.console import StepView, summary_line
from equipoise.observe.journal import Journal
from equipoise.optim.rate import learning_rate
from equipoise.sim.rank_loads import RankLoads
from equipoise.spec.catalog import POLICIES
from equipoise.spec.names import CHECKPOINTS
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.resume import describe_changes, resume_facts
from equipoise.train.build import measured_model
from equipoise.train.curves import (
    DOUBT_STEPS,
    activation_dtype,
    curve_file,
    disturbed_sentence,
    doubt_curve,
    obtain_curve,
)
from equipoise.train.evaluate import Evaluator
from equipoise.train.folder import RunFolder
from equipoise.train.process import StopRequest, return_freed_memory, spare_small_chunks
from equipoise.train.side import build_sides, run_sides, span_all
from equipoise.train.sinks.catalog import Sinks, open_sinks
from equipoise.train.trained import count_trained
from equipoise.train.watch import FolderGoneError, Word

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
        self, folder: Path, resolved: ResolvedFile, ranks: Ranks, journals: Sequence[Journal]
    ) -> None:
        self.folder, self.resolved, self.ranks, self.journals = folder, resolved, ranks, journals
        self.spec, self.model, self.journal = resolved.spec, resolved.model, journals[0]
        self.store: TokenStore = open_store(Path(resolved.corpus))
        check_vocabulary(self.store, self.model.vocab)
        self.stream = open_stream(
            self.store.doc_tokens,
            seed=self.spec.train.seed,
            context_tokens=self.spec.pack.context_tokens,
            mixture=self.store.mixture,
            whole=self.spec.data.whole,
        )
        cache, measured = self.store.folder.parent, measured_model(resolved)
        self._curve_file = curve_file(self.spec, self.model, ranks, cache, measured)
        with span_all(journals, "measure"):
            curve = obtain_curve(self.spec, self.model, ranks, cache, folder, measured)
            self.curve: LoadCurve = price_labels(curve, label_counter(self.store))
        touch_libraries(ranks.device, activation_dtype(self.spec))
        spare_small_chunks()
        return_freed_memory()
        forget_peak(ranks.device)
        self.position = Position()
        self._has_doubted = self._save_was_refused = False
        self.sides = build_sides(resolved, ranks, journals, self.store, self.curve, self.stream)
        self.runner, self.record = self.sides[0].runner, self.sides[0].record
        self.packer = self.sides[0].packer
        self.evaluator = Evaluator(resolved, ranks, self.journal, self.runner, self.curve)
        params = self.runner.model.decoder.params
        needed_bytes = 4 * params + 8 * count_trained(self.spec, self.model)  # moments
        self.ground = RunFolder(folder, ranks, journals, needed_bytes)

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.folder / CHECKPOINTS

    def resume(self, view: StepView) -> None:
        """Continue from the newest whole checkpoint, if there is any.

        Raises:
            CheckpointError: none is whole, or it is of another model, corpus or version.
        """
        newest, fault = None, ""
        if self.ranks.rank == 0:
            try:
                newest = newest_good(self.checkpoints)
                if newest is not None:
                    is_first = newest[1].format == FIRST_FORMAT
                    require_same(
                        newest[1],
                        newest[0],
                        model=self.model,
                        corpus_digest=self.store.first_digest if is_first else self.store.digest,
                        seed=self.spec.train.seed,
                        run=resume_facts(self.spec),
                        engine=self.spec.model.engine,
                    )
            except CheckpointError as error:
                fault = str(error)
        fault, newest = self.ranks.gather_objects((fault, newest))[0]
        if fault:
            raise CheckpointError(fault)
        if newest is None:
            return
        path, manifest, torn = newest
        for sentence in torn:
            view.say(f"{sentence} Passed over.")
            self.journal.write("fault", "torn-checkpoint", message=sentence)
        with self.journal.span("load", step=manifest.step):
            load(path, self.runner.model.decoder, self.runner.optimizer)
        if not manifest.step:
            self.runner.optimizer.state.clear()  # torch saves no step as one of zero gradients
        self.position = Position(manifest.step, manifest.position_tokens)
        self.ground.keep(path)
        view.say(f"Resuming after step {manifest.step} from {path}.")
        if changes := describe_changes(manifest.run, resume_facts(self.spec)):
            self._note(
                view, f"run.toml has changed since then: {changes}. The run goes on as it is now."
            )
        self._resume_packer(path, view)

    def _note(self, view: StepView, sentence: str) -> None:
        """Say what differs from before, and journal it on rank 0."""
        view.say(sentence)
        if self.ranks.rank == 0:
            self.journal.write("instant", "changed", step=self.position.step, message=sentence)

    def _resume_packer(self, checkpoint: Path, view: StepView) -> None:
        """Take up the documents that were left waiting."""
        file = checkpoint / _PACKER
        if not file.exists():
            return
        try:
            state = json.loads(file.read_bytes())
            waiting = state["waiting"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{checkpoint} is torn: its {_PACKER} cannot be read.") from error
        lets_wait = POLICIES[self.spec.pack.policy].lets_wait
        if not waiting and not lets_wait:
            return
        if not lets_wait:
            raise CheckpointError(
                f'{checkpoint} was packed by "delayed" and {waiting} documents still '
                f'wait in its queues; "{self.spec.pack.policy}" would lose them. Set pack.policy '
                f'= "delayed", or train into another folder with --out.'
            )
        self.packer.load_state_dict(state)
        ranks = self.ranks.world // self.spec.layout.sharing
        if state.get("ranks", ranks) != ranks:
            self._note(
                view,
                f'pack.policy = "delayed" packed for {state["ranks"]} data-parallel ranks before '
                f"and packs for {ranks} now: which documents share a step depends on that number. "
                f"Each is still trained once; {state['waiting']} wait.",
            )

    def run(self, view: StepView, stop: StopRequest) -> str:
        """Train to the last step or to a stop; why it ended ("done" or "interrupted").

        Raises:
            CheckpointError: a checkpoint cannot be kept; every step that could be saved is.
            FolderGoneError: the run's folder is not there any more; the steps are saved where
                the message says.
        """
        with ExitStack() as stack:
            stack.callback(self.ground.close)
            sinks = open_sinks(self.folder, self.spec, is_first=self.ranks.rank == 0)
            stack.callback(sinks.close)
            return self._run(view, stop, sinks)

    def _run(self, view: StepView, stop: StopRequest, sinks: Sinks) -> str:
        steps = self.spec.train.steps
        for side in self.sides:
            side.record.write_start(self.position.step)
        if said := disturbed_sentence(self.curve):
            view.say(said)
        reason = "done"
        saved_step = self.position.step
        if saved_step < steps:
            self.ground.require_room(self.position.step)
        self.evaluator.begin(self.position.step, view, sinks)
        began, first, loss = time.perf_counter(), self.position.step, float("nan")
        while self.position.step < steps:
            step = self.position.step + 1
            stop_asked = bool(stop) or self._is_stop_left()
            word = self.ground.look(has_unsaved=saved_step < self.position.step)
            packs = self._pack(step)
            results = run_sides(
                self.sides,
                [packed for packed, _ in packs],
                step=step,
                rate=learning_rate(self.spec.train, step),
                clip_norm=self.spec.train.clip_norm,
                last_good=self._last_good,
                stop_asked=stop_asked,
                word=word,
            )
            self.position = Position(step, self.position.tokens + self.spec.pack.step_tokens)
            result, loads = results[0], packs[0][1]
            loss = result.loss
            figures, *_ = [
                side.write_step(packed, each, step=step, tokens=self.position.tokens)
                for side, packed, each in zip(self.sides, packs, results, strict=True)
            ]
            sinks.write(step, figures)
            if len(self.record.busy_over_predicted) == DOUBT_STEPS:
                self._doubt_curve(view)
            balance = skew(loads.predicted_s)
            view.show(step, result.loss, figures["tokens_per_s"], figures["mfu"], balance)
            if result.words[0] & Word.GONE:
                self._leave_if_gone(view)
            notices = (*self.ground.hear(result.words, step), *sinks.take_notices())
            for sentence in (*notices, *result.describe(step)):
                view.say(sentence)
            self.evaluator.look(step, view, sinks)
            if result.stop:
                reason = "interrupted"
                break
            is_due = step % self.spec.checkpoint.every_steps == 0 or step == steps
            if is_due or result.words[0] & Word.SAVE:
                self._leave_if_gone(view)
                saved_step = self._save(view, must=step == steps) or saved_step
                if saved_step == step < steps:
                    self.ground.require_room(self.position.step)
        if saved_step != self.position.step or not steps:
            self._leave_if_gone(view)
            self._save(view, must=True)
        for side in self.sides:
            side.record.write_memory()
        if self.ranks.rank == 0:
            with suppress(OSError):
                self._stop_file.unlink(missing_ok=True)
            for journal in self.journals:
                journal.write("instant", "stop", reason=reason, step=self.position.step)
        for journal in self.journals:
            journal.flush()
        for sentence in self.ground.settle():
            view.say(sentence)
        done = self.position.step - first
        if done:
            took_s = time.perf_counter() - began - self.evaluator.spent_s
            view.say(summary_line(done, done * self.spec.pack.step_tokens, took_s, loss))
        self._doubt_curve(view)
        return reason

    def _leave_if_gone(self, view: StepView) -> None:
        """Save the steps of a run whose folder is gone where they will be found, and end it.

        Raises:
            FolderGoneError: what became of the folder, and where its steps are.
        """
        fate = self.ground.fate()
        if fate is None:
            return
        if fate.rescue is None:
            raise FolderGoneError(
                f"{fate.sentence}. The steps since the last checkpoint are lost. {fate.advice}"
            )
        self.folder = fate.rescue
        for side, (folder, _) in zip(
            self.sides, resolved_sides(self.folder, self.resolved), strict=True
        ):
            side.follow(folder / "journal", self.position.step)
        try:
            self._save(view, must=True)
        except CheckpointError as error:
            raise FolderGoneError(f"{fate.sentence}. {error}") from error
        message = (
            f"{fate.sentence}. Step {self.position.step} is saved in {self.checkpoints}; go on "
            f"from there with --out {self.folder}."
        )
        if self.ranks.rank == 0:
            self.journal.write("fault", "folder", step=self.position.step, message=message)
            self.journal.flush()
        self.ranks.barrier()  # a rank that ends may end the others
        raise FolderGoneError(message)

    def _is_stop_left(self) -> bool:
        """Whether somebody left word in the run's folder to stop; asked on rank 0."""
        with suppress(OSError):
            return self.ranks.rank == 0 and self._stop_file.exists()
        return False

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    def _doubt_curve(self, view: StepView) -> None:
        """Say so where steps contradict the curve; packs go on by it, as a resume will."""
        if self.ranks.rank != 0 or self._has_doubted:
            return
        if doubt := doubt_curve(self._curve_file, self.record.busy_over_predicted):
            self._has_doubted = True
            view.say(doubt)
            self.journal.write("decision", "doubt", step=self.position.step, message=doubt)
            self.journal.flush()

    def _last_good(self) -> Path | None:
        try:
            newest = newest_good(self.checkpoints)
        except CheckpointError:  # what is being reported is worse
            return None
        return None if newest is None else newest[0]

    def _pack(self, step: int) -> list[tuple[PackedStep, RankLoads]]:
        """What each side computes in a step."""
        pieces = self.stream.step(self.position.tokens, self.spec.pack.step_tokens)
        return [side.pack(step, pieces) for side in self.sides]

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
            run=resume_facts(self.spec),
            engine=self.spec.model.engine,
        )
        self.ground.make_room()
        try:
            with self.journal.span("save", step=self.position.step):
                decoder, optimizer = self.runner.model.decoder, self.runner.optimizer
                path = save(
                    self.checkpoints,
                    decoder,
                    optimizer,
                    self.ranks,
                    manifest,
                    keep=self.spec.checkpoint.keep,
                    texts=decoder.texts | ({_PACKER: json.dumps(waiting)} if waiting else {}),
                )
        except CheckpointError as error:
            self.journal.write("fault", "save", step=self.position.step, message=str(error))
            self.journal.flush()
            if must:
                raise
            if not self._save_was_refused:  # once, however often it is tried
                view.say(f"{error} The run goes on.")
            self._save_was_refused = True
            return None
        else:
            if self._save_was_refused:
                view.say(f"The checkpoint of step {self.position.step} is saved.")
            self._save_was_refused = False
            self.ground.keep(path)
        finally:
            return_freed_memory()
            forget_peak(self.ranks.device)  # a save copies shards, and steps do not
        return self.position.step
