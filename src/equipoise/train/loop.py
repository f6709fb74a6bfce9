"""The training loop: pack, run, journal, save; resume where the last whole checkpoint stands.

What it decides
    When to stop; when to save, ``train.saving`` says, and what the disk has to do with it,
    ``train.watch``. Everything else was decided by run.toml, the stream, the packer and the curve,
    each a pure function that every rank evaluates for itself.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import equipoise
from equipoise.balance.packing.pack import skew
from equipoise.base.errors import CheckpointError, CorruptError
from equipoise.checkpoint.manifest import FIRST_FORMAT, FORMAT, Manifest, newest_good
from equipoise.checkpoint.same import require_same
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve, price_labels
from equipoise.data.batch import label_counter
from equipoise.data.cache.store import TokenStore, check_vocabulary, open_store
from equipoise.data.mixture import open_stream
from equipoise.fault.interference.sampler import HostSampler
from equipoise.nn.device.memory import forget_peak
from equipoise.nn.measure import touch_libraries
from equipoise.observe.console import StepView, summary_line
from equipoise.observe.journal import Journal
from equipoise.observe.pauses import GarbagePauses
from equipoise.optim.rate import learning_rate
from equipoise.sim.rank_loads import RankLoads
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
from equipoise.train.health.host import HostWatch
from equipoise.train.health.links import LinkWatch
from equipoise.train.health.slow import SlowWatch
from equipoise.train.process import StopRequest, return_freed_memory, spare_small_chunks
from equipoise.train.saving.loads import loads_texts, resume_loads
from equipoise.train.saving.newest import load_newest
from equipoise.train.saving.packer import packer_texts, resume_packer
from equipoise.train.saving.saves import RunSaves
from equipoise.train.saving.trust import set_aside
from equipoise.train.side import build_sides, run_sides, span_all
from equipoise.train.sinks.catalog import Sinks, open_sinks
from equipoise.train.trained import saved_bytes
from equipoise.train.watch import FolderGoneError, Word


@dataclass
class Position:
    """How far a run has come: steps done and tokens of the stream consumed."""

    step: int = 0
    tokens: int = 0
    loads: list[list[int]] | None = None
    """Tokens that chose each expert of each layer in the last step, if there are experts."""


class Trainer:
    """One rank's part of a run, from its folder to its last step."""

    links: LinkWatch | None = None
    """What is known of the ranks' links."""

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
        self._has_doubted = False
        self.sides = build_sides(resolved, ranks, journals, self.store, self.curve, self.stream)
        self.runner, self.record = self.sides[0].runner, self.sides[0].record
        self.packer = self.sides[0].packer
        self.evaluator = Evaluator(resolved, ranks, self.journal, self.runner, self.curve)
        needed = saved_bytes(self.spec, self.model, self.runner.model.decoder.params)
        self.ground = RunFolder(folder, ranks, journals, needed)
        self._second = Path(second) if (second := resolved.second_checkpoints) else None
        places = self.checkpoints, self._second
        self.saves = RunSaves.of_run(self.spec, places, self.runner, self.journal, self.ground)

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.folder / CHECKPOINTS

    def resume(self, view: StepView) -> None:
        """Continue from the newest whole checkpoint, if there is any.

        Raises:
            CheckpointError: none is whole, or it is of another model, corpus or version.
        """
        runner = self.runner
        newest = load_newest(
            self.checkpoints,
            runner.model,
            runner.optimizer,
            self.ranks,
            self.journal,
            self._require_own,
            second=self._second,
            frozen=self.spec.train.freeze,
        )
        if newest is None:
            return
        path, manifest, sentences = newest
        for sentence in sentences:
            view.say(f"{sentence} Passed over.")
            self.journal.write("fault", "torn-checkpoint", message=sentence)
        if not manifest.step:
            self.runner.optimizer.state.clear()  # torch saves no step as one of zero gradients
        loads = resume_loads(path, runner.model.decoder, manifest.step)
        self.position = Position(manifest.step, manifest.position_tokens, loads)
        self.ground.keep(path)
        self.saves.start(path, manifest.step)
        view.say(f"Resuming after step {manifest.step} from {path}.")
        if changes := describe_changes(manifest.run, resume_facts(self.spec)):
            self._note(
                view, f"run.toml has changed since then: {changes}. The run goes on as it is now."
            )
        if note := resume_packer(path, self.packer, self.spec, self.ranks.world):
            self._note(view, note)

    def _require_own(self, folder: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of another run.

        Raises:
            CheckpointError: says what differs.
        """
        is_first = manifest.format == FIRST_FORMAT
        require_same(
            manifest,
            folder,
            model=self.model,
            corpus_digest=self.store.first_digest if is_first else self.store.digest,
            seed=self.spec.train.seed,
            run=resume_facts(self.spec),
            engine=self.spec.model.engine,
        )

    def _note(self, view: StepView, sentence: str) -> None:
        """Say what differs from before, and journal it on rank 0."""
        view.say(sentence)
        if self.ranks.rank == 0:
            self.journal.write("instant", "changed", step=self.position.step, message=sentence)

    def run(self, view: StepView, stop: StopRequest) -> str:
        """Train to the last step or to a stop; why it ended ("done" or "interrupted").

        Raises:
            CheckpointError: a checkpoint cannot be kept; every step that could be saved is.
            FolderGoneError: the run's folder is not there any more; the steps are saved where
                the message says.
        """
        with ExitStack() as stack:
            stack.callback(self.ground.close)
            stack.callback(self.saves.close)
            pauses = self.runner.own.pauses = stack.enter_context(GarbagePauses())
            self._slow = SlowWatch(self.ranks, self.journal, pauses, self.links, len(self.sides))
            sinks = open_sinks(self.folder, self.spec, is_first=self.ranks.rank == 0)
            stack.callback(sinks.close)
            sampler = stack.enter_context(HostSampler())
            try:
                reason = self._run(view, stop, sinks, sampler)
            except CorruptError as error:
                self._distrust(error.verified)
                raise
            self.saves.finish(view)
            return reason

    def _run(self, view: StepView, stop: StopRequest, sinks: Sinks, sampler: HostSampler) -> str:
        steps, host = self.spec.train.steps, HostWatch(self.journal, sampler, self.runner.own)
        for side in self.sides:
            side.record.write_start(self.position.step)
        if said := disturbed_sentence(self.curve):
            view.say(said)
        reason = "done"
        saves = self.saves
        if self.position.step < steps:
            self.ground.require_room(self.position.step)
        if self.runner.state is not None:
            self.runner.state.begin(self.position.step)
        self.evaluator.begin(self.position.step, view, sinks)
        began, first, loss = time.perf_counter(), self.position.step, float("nan")
        while self.position.step < steps:
            step = self.position.step + 1
            word = saves.word | self.ground.look(
                has_unsaved=saves.saved_step < self.position.step, is_saving=saves.is_under_way
            )
            packs = self._pack(step)
            results = run_sides(
                self.sides,
                [packed for packed, _ in packs],
                step=step,
                rate=learning_rate(self.spec.train, step),
                clip_norm=self.spec.train.clip_norm,
                last_good=self._last_good,
                stop_asked=bool(stop) or self._is_stop_left(),
                word=word,
            )
            result, loads, loss = results[0], packs[0][1], results[0].loss
            tokens = self.position.tokens + self.spec.pack.step_tokens
            chosen = None if result.experts is None else result.experts.loads
            self.position = Position(step, tokens, chosen)
            figures, *_ = [
                side.write_step(packed, each, step=step, tokens=self.position.tokens)
                for side, packed, each in zip(self.sides, packs, results, strict=True)
            ]
            sinks.write(step, figures)
            host.look(result.rank_own[self.ranks.rank], loads.predicted_s[self.ranks.rank])
            saves.rhythm.note(result.step_s)
            if len(self.record.busy_over_predicted) == DOUBT_STEPS:
                self._doubt_curve(view)
            balance = skew(loads.predicted_s)
            view.show(step, result.loss, figures["tokens_per_s"], figures["mfu"], balance)
            if result.words[0] & Word.GONE:
                self._leave_if_gone(view)
            saves.hear(view, result.words)
            notices = (*self.ground.hear(result.words, step), *sinks.take_notices())
            slow = self._slow.look(step, loads, result, is_saving=saves.is_under_way)
            for sentence in (*notices, *result.describe(step), *slow):
                view.say(sentence)
            self.evaluator.look(step, view, sinks)
            if result.stop:
                reason = "interrupted"
                break
            if saves.is_due(step) or step == steps or result.words[0] & Word.SAVE:
                self._leave_if_gone(view)
                waits = bool(result.words[0] & Word.TIGHT)
                self._save(view, waits=waits, must=step == steps)
                if saves.saved_step == step < steps:
                    self.ground.require_room(self.position.step)
        saves.settle(view)
        if saves.saved_step != self.position.step or not steps:
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
        if done := self.position.step - first:
            took_s = time.perf_counter() - began - self.evaluator.spent_s
            view.say(summary_line(done, done * self.spec.pack.step_tokens, took_s, loss))
        self._doubt_curve(view)
        return reason

    def _distrust(self, verified: int) -> None:
        """Set aside what was saved since the state was last known to be right."""
        self.saves.distrust()
        for root in filter(None, (self.checkpoints, self._second)):
            if self.ranks.rank == 0:
                set_aside(root, after=verified)
        self.ranks.barrier()  # a rank that ends may end the others

    def _leave_if_gone(self, view: StepView) -> None:
        """Save the steps of a run whose folder is gone where they will be found, and end it.

        Raises:
            FolderGoneError: what became of the folder, and where its steps are.
        """
        fate = self.ground.fate()
        if fate is None:
            return
        self.saves.leave()
        if fate.rescue is None:
            raise FolderGoneError(
                f"{fate.sentence}. The steps since the last checkpoint are lost. {fate.advice}"
            )
        self.folder = fate.rescue
        self.saves.saver.root = self.checkpoints
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
            return self.ranks.rank == 0 and self._stop_file.is_file()
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
        self.saves.leave()  # it may be the one that is being written
        with suppress(CheckpointError):  # what is being reported is worse
            newest = newest_good(self.checkpoints, second=self._second)
            return None if newest is None else newest[0]
        return None

    def _pack(self, step: int) -> list[tuple[PackedStep, RankLoads]]:
        """What each side computes in a step."""
        with self.runner.own.reading():
            pieces = self.stream.step(self.position.tokens, self.spec.pack.step_tokens)
        return [side.pack(step, pieces) for side in self.sides]

    def _watch_saved(self, *, at_once: bool) -> None:
        """Have the state that is saved compared: in the next step, or now.

        Raises:
            CorruptError: bytes have changed.
        """
        state = self.runner.state
        if state is not None:
            state.note_save(self.position.step)
            if at_once:
                state.require_now(self.position.step)

    def _save(self, view: StepView, *, waits: bool = False, must: bool) -> None:
        """Save this position, as ``RunSaves.begin`` does.

        Raises:
            CheckpointError: it could not be written and the run ends here.
        """
        self._watch_saved(at_once=must or self.spec.checkpoint.keep == 1)
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
        texts = self.runner.model.decoder.texts | packer_texts(self.packer)
        texts |= loads_texts(self.position.loads)
        self.saves.begin(view, manifest, texts, waits=waits, must=must)
        for side in self.sides:
            side.record.beside_bytes = self.saves.saver.arena_bytes
