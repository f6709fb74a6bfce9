"""A run's folder and its disk, as all ranks learn of them.

Why
    Each rank writes a journal of its own, and rank 0 alone looks at the folder. What one of them
    meets must be known to all before it changes what they do, or they would wait for each other
    in different collectives.

What it decides
    A rank reports what it met in a word that goes with the numbers of a step, so that nothing more
    is exchanged while all is well; sentences follow only when a word says so.

Kept true (tests/multi/train/test_disks.py)
    One rank whose disk is full, or whose journal is gone, keeps no other waiting.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from equipoise.base.errors import CheckpointError
from equipoise.comm.group import Ranks
from equipoise.observe.journal import Journal
from equipoise.train.watch import Fate, FolderWatch, Word


class RunFolder:
    """One rank's view; methods that gather are called by every rank.

    Args:
        folder: Of the run; it exists.
        ranks: All of them.
        journals: This rank's.
        needed_bytes: Of a checkpoint, until one was saved.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, journals: Sequence[Journal], needed_bytes: int
    ) -> None:
        self._ranks, self._journals = ranks, journals
        fence = journals[0].fence if journals else None
        self._watch = FolderWatch(folder, needed_bytes, fence) if ranks.rank == 0 else None

    def close(self) -> None:
        """Let go of the folder."""
        if self._watch is not None:
            self._watch.close()

    def keep(self, checkpoint: Path) -> None:
        """Count on a checkpoint that was just saved, or loaded."""
        if self._watch is not None:
            self._watch.keep(checkpoint)

    def make_room(self) -> None:
        """Drop checkpoints older than the last good one, if the next one fits only then."""
        if self._watch is not None:
            self._watch.make_room()

    def look(self, *, has_unsaved: bool, is_saving: bool = False) -> Word:
        """This rank's word to the others before a step; see ``FolderWatch.look``."""
        has_notices = any(journal.has_notices for journal in self._journals)
        word = Word.NOTICE if has_notices else Word(0)
        if self._watch is None:
            return word
        return word | self._watch.look(has_unsaved=has_unsaved, is_saving=is_saving)

    def hear(self, words: Sequence[int], step: int) -> list[str]:
        """Sentences of all ranks, gathered if any rank's word of this step says so."""
        if not any(word & Word.NOTICE for word in words):
            return []
        notices = self._take_notices()
        for sentence in self._watch.take_notices() if self._watch is not None else []:
            self._journals[0].write("fault", "disk", step=step, message=sentence)
            notices.append(sentence)
        return list(chain.from_iterable(self._ranks.gather_objects(notices)))

    def fate(self) -> Fate | None:
        """What became of the folder, gathered; None while it is where it was."""
        fate = None if self._watch is None else self._watch.fate()
        first: Fate | None = self._ranks.gather_objects(fate)[0]
        return first

    def require_room(self, step: int) -> None:
        """Stop while all steps are saved, if the next checkpoint cannot be kept; gathers.

        Raises:
            CheckpointError: names the disk, what is free and what is needed.
        """
        shortage = "" if self._watch is None else self._watch.shortage()
        shortage = self._ranks.gather_objects(shortage)[0]
        if shortage:
            done = f"Step {step} was the last that could be kept, so the run stopped there"
            raise CheckpointError(
                f"{shortage} {done if step else 'No step was run'}; the same command goes on."
            )

    def settle(self) -> list[str]:
        """Sentences at the end of a run, with what no journal could take; gathers."""
        unwritten = sum(journal.unwritten_lines for journal in self._journals)
        told = self._ranks.gather_objects((unwritten, self._take_notices()))
        sentences = list(chain.from_iterable(notices for _, notices in told))
        if lines := sum(lines for lines, _ in told):
            sentences.append(
                f"{lines:,} lines of the run's journals could not be written and are lost."
            )
        return sentences

    def _take_notices(self) -> list[str]:
        return [sentence for journal in self._journals for sentence in journal.take_notices()]
