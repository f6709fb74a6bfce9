"""A run's saves: begun when due, ended at the boundary of a step, journaled, and said.

Why
    A save runs beside the steps, so its end comes between two of them. All ranks must hear of it
    at the same one, because what they do next depends on it.

What it decides
    A rank with news of the save says so in its word, which goes with the numbers of a step; after
    that step all ranks settle it. A save that is due while another is under way waits for that
    one, which bounds memory and disk. Where the disk may not hold the checkpoint after this one,
    the run waits for the save at once, as for the last one of a run.

Kept true (tests/multi/train/test_train.py, tests/multi/train/test_disks.py)
    No checkpoint is counted on before it is published.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from equipoise.base.errors import CheckpointError
from equipoise.base.units import format_seconds
from equipoise.checkpoint.background import Saved, Saver
from equipoise.checkpoint.manifest import Manifest, remove
from equipoise.checkpoint.publish import SAVING
from equipoise.checkpoint.second import SecondFolder
from equipoise.comm.group import Ranks
from equipoise.observe.console import StepView
from equipoise.observe.journal import Journal
from equipoise.spec.run.spec import RunSpec
from equipoise.train.folder import RunFolder
from equipoise.train.saving.rhythm import Rhythm
from equipoise.train.step import StepRunner
from equipoise.train.watch import Word

_LONG_WAIT = 0.1
"""Share of a step that a run waits for its disk without a word."""


class RunSaves:
    """Saves of one run on one rank; methods that take a view are called by every rank.

    Args:
        saver: What saves.
        rhythm: When.
        ranks: All of them.
        journal: This rank's.
        ground: The run's folder.
        second: What copies checkpoints elsewhere, on rank 0, if anything does.
    """

    def __init__(
        self,
        saver: Saver,
        rhythm: Rhythm,
        ranks: Ranks,
        journal: Journal,
        ground: RunFolder,
        second: SecondFolder | None,
    ) -> None:
        self.saver, self.rhythm = saver, rhythm
        self.saved_step = 0
        """The step of the last checkpoint that was published, or that the run began from."""
        self._ranks, self._journal, self._ground = ranks, journal, ground
        self._second = second
        self._was_refused = self._has_said_slow = False

    @classmethod
    def of_run(
        cls,
        run: RunSpec,
        places: tuple[Path, Path | None],
        runner: StepRunner,
        journal: Journal,
        ground: RunFolder,
    ) -> "RunSaves":
        """What saves as a run's keys say, into a folder and, if there is one, a second one."""
        spec, ranks, (root, second) = run.checkpoint, runner.ranks, places
        tiers = runner.model.tiers
        saver = Saver(
            root,
            runner.model.decoder,
            runner.optimizer,
            ranks,
            keep=spec.keep,
            reached=partial(_leave_to_newer, journal),
            stored=None if tiers is None else tiers.stored,
        )
        if ranks.rank == 0:
            for left in root.glob(f"{SAVING}*"):  # by a run that was killed; its room is needed
                remove(left)
        rhythm = Rhythm(spec.every_steps, 3600 * spec.rank_mtbf_hours, ranks.world)
        copies = None
        if second is not None and ranks.rank == 0:
            copies = SecondFolder(second, spec.keep)
        return cls(saver, rhythm, ranks, journal, ground, copies)

    def start(self, checkpoint: Path, step: int) -> None:
        """Begin from a checkpoint of which every byte was verified."""
        self.saver.verified.add(checkpoint)
        self.saved_step = step
        self.rhythm.begin(step)

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self.rhythm.is_due(step, is_under_way=self.is_under_way)

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun and is not settled; the same on all ranks."""
        return self.saver.step is not None

    @property
    def word(self) -> Word:
        """This rank's word to the others."""
        return Word.SAVE_ENDED if self.saver.has_news else Word(0)

    def hear(self, view: StepView, words: Sequence[int]) -> None:
        """Settle the save under way, if a rank has news of it."""
        self._hear_second(view)
        if any(word & Word.SAVE_ENDED for word in words):
            self.settle(view)

    def begin(
        self,
        view: StepView,
        manifest: Manifest,
        texts: Mapping[str, str],
        *,
        waits: bool,
        must: bool,
    ) -> None:
        """Save this position, once the save under way has ended.

        Args:
            view: Where to say what happened.
            manifest: The checkpoint's description.
            texts: Further small files, by name.
            waits: Whether to go on only when it is published.
            must: Whether the run ends if it could not be saved.

        Raises:
            CheckpointError: it must be saved, and could not be.
        """
        late = self.settle(view)
        if late is not None and not self._has_said_slow:
            self._say_slow(view, late, manifest.step)
        self._ground.make_room()
        if waits or must:  # no rank may write before rank 0 has made room
            self._ranks.barrier()
        self.rhythm.begin(manifest.step)
        with self._journal.span("save", step=manifest.step):
            self.saver.begin(manifest, texts)
            if waits or must:
                self.settle(view, must=must)

    def settle(self, view: StepView, *, must: bool = False) -> Saved | None:
        """Wait for the save under way, if there is one.

        Args:
            view: Where to say what happened.
            must: Whether the run ends if the save has failed.

        Raises:
            CheckpointError: it must be saved, and could not be.
        """
        step = self.saver.step
        try:
            saved = self.saver.settle()
        except CheckpointError as error:
            self._refuse(view, step, error, must=must)
            return None
        if saved is None:
            return None
        self.saved_step = saved.step
        self._ground.keep(saved.path)
        if self._was_refused:
            view.say(f"The checkpoint of step {saved.step} is saved.")
        self._was_refused = False
        if self._second is not None:
            self._second.copy(saved.path, saved.step)
        times = saved.times
        self._journal.write(
            "scalar",
            "saved",
            step=saved.step,
            size_bytes=saved.size_bytes,
            blocked_s=times.blocked_s,
            staged_s=times.staged_s,
            written_s=times.written_s,
            core_s=times.core_s,
        )
        if self.rhythm.every == "auto":
            self._learn(view, saved)
        return saved

    def leave(self) -> None:
        """Let what is under way end, however it does, before the run itself ends."""
        with suppress(CheckpointError):
            self.saver.settle()

    def distrust(self) -> None:
        """Let what is under way end, and copy nothing more: it would come back when set aside."""
        self.leave()
        if self._second is not None:
            self._second.drop()

    def finish(self, view: StepView) -> None:
        """Wait until the last checkpoint is copied; no rank waits for this one any more."""
        if self._second is not None:
            self._second.wait()
            self._hear_second(view)

    def close(self) -> None:
        """Give up what is under way."""
        self.saver.close()
        if self._second is not None:
            self._second.close()

    def _hear_second(self, view: StepView) -> None:
        """Say why checkpoints could not be copied; training goes on."""
        for sentence in self._second.take_faults() if self._second is not None else ():
            self._journal.write("fault", "second", message=sentence)
            self._journal.flush()
            view.say(f"{sentence} The run goes on.")

    def _refuse(
        self, view: StepView, step: int | None, error: CheckpointError, *, must: bool
    ) -> None:
        self._journal.write("fault", "save", step=step, message=str(error))
        self._journal.flush()
        if must:
            raise error
        if not self._was_refused:  # once, however often it is tried
            view.say(f"{error} The run goes on.")
        self._was_refused = True

    def _learn(self, view: StepView, saved: Saved) -> None:
        """Let the next interval follow from the slowest rank's measurements."""
        times = saved.times
        on_core_s = times.core_s if self._ranks.device.type == "cpu" else 0.0
        mine = [times.blocked_s + on_core_s, times.written_s, self.rhythm.step_s]
        cost_s, written_s, step_s = self._ranks.gather_floats(mine).amax(0).tolist()
        decided = self.rhythm.learn(cost_s, written_s, step_s)
        if decided is None:
            return
        if self._ranks.rank == 0:
            self._journal.write("decision", "interval", step=saved.step, **decided)
        sentence = self.rhythm.news(decided)
        if sentence:
            view.say(sentence)

    def _say_slow(self, view: StepView, late: Saved, step: int) -> None:
        """Say once that steps wait for the disk."""
        waited_s = late.times.settled_s
        if waited_s > _LONG_WAIT * self.rhythm.step_s:
            self._has_said_slow = True
            view.say(
                f"The checkpoint of step {late.step} was still being written when that of step "
                f"{step} was due, and the run waited {format_seconds(waited_s)} for it. Save less "
                f"often (checkpoint.every_steps), or to a faster disk (--out)."
            )


def _leave_to_newer(journal: Journal, stage: str) -> None:
    """Give a save up at any stage once newer ranks write to the run's folder.

    Raises:
        CheckpointError: they do.
    """
    del stage
    if journal.is_passed:
        raise CheckpointError("Newer ranks have taken over the run's folder; nothing was saved.")
