"""The stage of a drill: the user's run in small, an undisturbed rehearsal, and fresh folders.

What it decides
    What is made smaller, so that a rehearsal takes seconds: steps, their tokens, and the steps
    between checkpoints. Model, layout, packing policy, precision and ``[fault]`` stay the user's.
    Whatever a run would write outside its folder is switched off. All rehearsals pack by the price
    curve of the undisturbed one, so that the same weights come out.

Kept true (tests/unit/fault/drill/test_stage.py, tests/multi/fault/test_drill.py)
    Nothing is written outside the scratch folder but the token cache, which every run shares.
"""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.base.errors import FaultError, SpecError
from equipoise.fault.drill.attempt import Attempt
from equipoise.fault.drill.facts import events, ledger, state
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.spec.run.spec import CheckpointSpec, RunSpec

STEPS, EVERY = 24, 8
"""Steps of a rehearsal, and between its checkpoints."""

_CONTEXT_TOKENS = 1024
_MOST_WINDOWS = 4
"""Windows of a step that each data-parallel rank gets."""

_SWITCHED_OFF = (
    ("eval.path", ""),
    ("eval.source", "by-path"),  # and what only an evaluation reads
    ("eval.field", ""),
    ("eval.tokens", "all"),
    ("journal.tensorboard", "false"),
    ("journal.wandb", "false"),
    ("journal.mlflow", "false"),
    ("checkpoint.second_path", ""),
)


@dataclass(frozen=True, slots=True)
class DrillRun:
    """The user's run, as words of a command line, and what it resolves to."""

    words: tuple[str, ...]
    spec: RunSpec
    ranks: int


@dataclass(slots=True)
class Stage:
    """Where rehearsals take place.

    Args:
        asked: The user's run.
        root: Scratch folder of all rehearsals; it exists.
        seed: Of places and moments.
        minutes: How long a rehearsal lasts whose faults come at random moments.
    """

    asked: DrillRun
    root: Path
    seed: int = 0
    minutes: float = 2.0
    scaled: list[str] = field(default_factory=list)
    """What was made smaller, a phrase each."""
    words: tuple[str, ...] = ()
    """The run in small, after ``equipoise train``."""
    step_tokens: int = 0
    rehearsed: dict[str, Rehearsal] = field(default_factory=dict)
    """The first rehearsal of each fault so far."""
    _made: int = 0

    @property
    def reference(self) -> Path:
        """Folder of the undisturbed run."""
        return self.root / "undisturbed"

    @property
    def bytecode(self) -> Path:
        """Folder of modules that its commands have compiled, where the environment keeps none."""
        return self.root / "bytecode"

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.asked.ranks

    @property
    def data_ranks(self) -> int:
        """Ranks that have documents of their own."""
        return max(1, self.ranks // self.asked.spec.layout.sharing)

    def draw(self, *names: object) -> random.Random:
        """Random numbers that depend on the seed and on what they are for."""
        return random.Random(":".join(map(str, (self.seed, *names))))  # noqa: S311

    def prepare(self) -> None:
        """Rehearse without a fault; the run's own sizes are kept where smaller ones do not go.

        Raises:
            FaultError: the undisturbed run does not reach its end; with its own last words.
        """
        small = smaller(self.asked)
        for sizes in (small, {}) if small else ({},):
            self.words = self._words(sizes)
            words = (*self.words, "--out", str(self.reference))
            with Attempt(words, None, self.bytecode) as attempt:
                code = attempt.end()
            if code != 2:
                break
            shutil.rmtree(self.reference, ignore_errors=True)
        if code:
            error = SpecError if code == 2 else FaultError
            raise error(
                f"The run does not reach its end even without a fault: {attempt.last_words} "
                f"Make it train first, then rehearse its faults."
            )
        spec = self.asked.spec
        self.step_tokens = sizes.get("pack.step_tokens", spec.pack.step_tokens)
        wished = {
            "train.steps": (spec.train.steps, STEPS),
            "checkpoint.every_steps": (spec.checkpoint.every_steps, EVERY),
            "pack.context_tokens": (spec.pack.context_tokens, sizes.get("pack.context_tokens")),
            "pack.step_tokens": (spec.pack.step_tokens, sizes.get("pack.step_tokens")),
        }
        self.scaled[:] = [
            f"{key} {_number(before)} -> {_number(after)}"
            for key, (before, after) in wished.items()
            if after not in (None, before)
        ]

    def _words(self, sizes: dict[str, int]) -> tuple[str, ...]:
        train = self.asked.spec.train
        warmup = min(train.warmup_steps, STEPS // 2)
        keys: dict[str, object] = {
            **sizes,
            "train.steps": STEPS,
            "train.warmup_steps": warmup,
            "checkpoint.every_steps": EVERY,
            "checkpoint.rank_mtbf_hours": CheckpointSpec().rank_mtbf_hours,  # only "auto" has it
            "checkpoint.keep": 3,
            "eval.every_steps": EVERY,
        }
        if train.decay_steps is not None:
            keys["train.decay_steps"] = min(train.decay_steps, STEPS - warmup)
        more = [f"--{key}={value}" for key, value in (*keys.items(), *_SWITCHED_OFF)]
        return (*self.asked.words, *more)

    def folder(self, name: str) -> Path:
        """A new folder for a rehearsal, with the price curve of the undisturbed run."""
        self._made += 1
        folder = self.root / f"{self._made:03}-{name}"
        folder.mkdir()
        if (self.reference / "curves").is_dir():
            shutil.copytree(self.reference / "curves", folder / "curves")
        return folder

    def copied(self, name: str, *, until: int) -> Path:
        """A copy of the undisturbed run, as it was after a step at which it saved."""
        folder = self.folder(name)
        shutil.copytree(self.reference, folder, dirs_exist_ok=True)
        for checkpoint in (folder / "checkpoint").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > until:
                shutil.rmtree(checkpoint)
        return folder

    def start(self, folder: Path, *more: str, drill: Path | None = None) -> Attempt:
        """Start the run in a folder of its own."""
        words = (*self.words, "--out", str(folder), "--no-proof", *more)
        return Attempt(words, drill, self.bytecode)

    def is_equal(self, folder: Path, other: Path | None = None) -> bool:
        """Whether a run ended with the weights, moments and documents of another.

        Args:
            folder: Of the rehearsed run.
            other: The undisturbed run unless given.
        """
        ours, other = state(folder, STEPS), other or self.reference
        return bool(ours) and (ours, ledger(folder)) == (state(other, STEPS), ledger(other))

    def loss_distances(self, folder: Path) -> list[float]:
        """By how much of itself each step's loss differs from the undisturbed run's.

        Empty unless both trained the same steps on as many tokens.
        """
        ours, theirs = (
            {each["step"]: (each["tokens_seen"], each["loss"]) for each in events(run, "step")}
            for run in (folder, self.reference)
        )
        if {step: seen for step, (seen, _) in ours.items()} != {
            step: seen for step, (seen, _) in theirs.items()
        }:
            return []
        return [abs(ours[step][1] / theirs[step][1] - 1) for step in sorted(ours)]

    def lost_tokens(self, folder: Path, *steps: int) -> int:
        """Tokens of the steps that were computed again, those cut off in the middle among them.

        Args:
            folder: Of the rehearsed run.
            steps: The step that each fault struck, in order.
        """
        resumed: list[int] = [event["resumed_step"] for event in events(folder, "start")][1:]
        lost = [max(0, at - since) for at, since in zip(steps, resumed, strict=False)]
        return sum(lost) * self.step_tokens


def smaller(asked: DrillRun) -> dict[str, int]:
    """Sizes of a small step with the same proportions; empty where the user's are as small."""
    pack = asked.spec.pack
    context = min(pack.context_tokens, _CONTEXT_TOKENS)
    data_ranks = max(1, asked.ranks // asked.spec.layout.sharing)
    windows = min(max(1, pack.step_tokens // pack.context_tokens), _MOST_WINDOWS * data_ranks)
    step = windows * context
    if step >= pack.step_tokens:
        return {}
    most = {} if pack.max_tokens is None else {"pack.max_tokens": min(pack.max_tokens, step)}
    return {"pack.context_tokens": context, "pack.step_tokens": step, **most}


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
