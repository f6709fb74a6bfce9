"""Weights and moments that change though nothing wrote to them: found before they spread.

Why
    A flipped bit trains on without an error, and a checkpoint that holds it is as whole as any.

What it decides
    When fingerprints are taken, and what they are compared with:

    - *copies*, which several ranks hold (ZeRO 0, or ``layout.replicas``): every
      ``fault.fingerprint_steps`` steps, with each other;
    - *parts*, which one rank alone holds (ZeRO 1 to 3): nobody else can say what they were. So
      each is compared with itself, after an update, or when a run begins, and before the next:
      between the two nothing may write to it. On a device that reads all bytes too often, so there
      only copies are watched.

    Both are compared when gradients are there and before the update, so that a step which finds a
    change has changed nothing. The state that a checkpoint holds is compared in the step after, at
    once at the end of a run or if no older checkpoint is kept, and at any step whose numbers are
    not finite. What was saved since the last comparison that agreed is not trusted: it is set
    aside, and the ranks start again from the newest checkpoint before.

    ::

        update 40 | save 40 | forward, backward of 41 | compare: state 40 | update 41
                                     ^ a flip here, or in 40's copy, sets checkpoint 40 aside

    Not covered: gradients and activations, and what happens during an update to a part.

Kept true (tests/multi/fault/test_flips.py, tests/unit/train/test_state_watch.py)
    A flip of any bit, a swap, and two equal flips are found within the steps between comparisons;
    the run ends with the weights of an undisturbed one.
"""

from collections.abc import Sequence

from equipoise.comm.group import Ranks
from equipoise.fault.detect.copies import Corruption, Sums, judge_copies
from equipoise.fault.fingerprint import HeldState, HeldTensor, fingerprints, fold_sums
from equipoise.observe.journal import EventSink


class StateWatch:
    """Watches one rank's weights and moments; methods that gather are called by every rank.

    Args:
        state: What this rank holds.
        ranks: All of them.
        journal: This rank's.
        every_steps: Steps between comparisons of copies; 0 watches nothing.
    """

    def __init__(
        self, state: HeldState, ranks: Ranks, journal: EventSink, *, every_steps: int
    ) -> None:
        self._state, self._ranks, self._journal = state, ranks, journal
        self._every_steps = every_steps
        self._watches_parts = ranks.device.type == "cpu" and every_steps > 0
        self._parts: dict[str, int] | None = None
        """Fingerprints after the last update; None where that is unknown."""
        self._covers_all = False
        """Whether every tensor is among them."""
        self._sets: list[list[tuple[int, ...]]] | None = None
        """Every rank's sets of ranks that hold copies of its tensors."""
        self._saved_step = -1
        self.verified = 0
        """The last step after which the state is known to be right."""

    def begin(self, step: int) -> None:
        """Trust the state as it is now, after a step: it was made, or loaded and verified."""
        self.verified, self._saved_step = step, -1
        self.updated()

    def note_save(self, step: int) -> None:
        """Compare the state of a checkpoint in the step after."""
        self._saved_step = step

    def updated(self) -> None:
        """Take the fingerprints of parts, right after an update or when a run begins."""
        if self._watches_parts:
            held = self._state.held()
            self._parts = _sums(_parts(held))
            self._covers_all = len(self._parts) == len(held)

    def changed_parts(self) -> list[str]:
        """Parts of this rank that have changed since the last update."""
        if self._parts is None:
            return []
        now = _sums(_parts(self._state.held()))
        return [name for name, before in self._parts.items() if now.get(name) != before]

    def require_right(
        self, step: int, changed: list[str], *, is_any: bool, is_doubtful: bool = False
    ) -> None:
        """Compare, if it is due, and refuse to go on from bytes that have changed.

        Args:
            step: The step whose update comes next.
            changed: What ``changed_parts`` says of this rank.
            is_any: Whether any rank's does; the same on all ranks.
            is_doubtful: Whether there is another reason to compare; the same on all ranks.

        Raises:
            CorruptError: on every rank; names who holds them, and the tensors.
        """
        if not self._every_steps:
            return
        is_due = step % self._every_steps == 0 or self._saved_step == step - 1
        corruption = self._find_changed(changed) if is_any else None
        if corruption is None and (is_due or is_doubtful):
            corruption = self._compare_copies()
        if corruption is not None:
            error = corruption.error(step, self.verified)
            self._journal.write(
                "fault",
                "corrupt",
                step=step,
                ranks=corruption.ranks,
                tensors=corruption.tensors,
                is_certain=corruption.is_certain,
                verified_step=self.verified,
                message=str(error),
            )
            raise error
        if is_due or self._covers_all:
            self.verified = step - 1

    def require_now(self, step: int) -> None:
        """Compare the state after a step; every rank calls it.

        Raises:
            CorruptError: as ``require_right``.
        """
        if self._every_steps:
            changed = self.changed_parts()
            is_any = bool(self._ranks.gather_integers([len(changed)]).any())
            self.require_right(step + 1, changed, is_any=is_any)

    def _find_changed(self, changed: list[str]) -> Corruption:
        every = self._ranks.gather_objects(changed)
        ranks = tuple(rank for rank, names in enumerate(every) if names)
        tensors = dict.fromkeys(name for names in every for name in names)
        return Corruption(ranks, tuple(tensors), is_certain=True)

    def _compare_copies(self) -> Corruption | None:
        """A number for each set of copies first; all fingerprints only if those differ."""
        held = [each for each in self._state.held() if len(each.copies) > 1]
        sums, copies = _sums(held), {each.name: each.copies for each in held}
        own = sorted(set(copies.values()))
        if self._sets is None:
            self._sets = self._ranks.gather_objects(own)
        most = max(map(len, self._sets))
        if not most:
            return None
        folded = [
            fold_sums([value for name, value in sums.items() if copies[name] == each])
            for each in own
        ]
        rows = self._ranks.gather_integers(folded + [0] * (most - len(own))).tolist()
        seen: dict[tuple[int, ...], set[int]] = {}
        for sets, row in zip(self._sets, rows, strict=True):
            for each, value in zip(sets, row, strict=False):
                seen.setdefault(each, set()).add(value)
        if all(len(values) == 1 for values in seen.values()):
            return None
        mine: Sums = {name: (copies[name], value) for name, value in sums.items()}
        return judge_copies(self._ranks.gather_objects(mine))


def _parts(held: Sequence[HeldTensor]) -> list[HeldTensor]:
    """Those that no other rank holds."""
    return [each for each in held if len(each.copies) == 1]


def _sums(held: Sequence[HeldTensor]) -> dict[str, int]:
    return {each.name: value for each, value in zip(held, fingerprints(held), strict=True)}
