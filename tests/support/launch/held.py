"""Runs that wait at a step until a test has acted, however late a busy machine lets it act.

Ranks read their orders from files beside the run's folder, and import a module that obeys them
because ``PYTHONPATH`` leads there. One folder with that module serves a whole session, so that runs
share a stem (``support.launch.stems``).
"""

import json
import os
from pathlib import Path

HOLD, DIE = ".hold", ".die"
"""What is added to the name of a run's folder, or of one of the two above it."""

OBEY = """
import os, sys

def before_each_step(obey):
    from functools import wraps

    if "equipoise.recsys.worker" in sys.orig_argv:
        from equipoise.recsys.trainer import RankTrainer as Trainer
        name = "_train_step"
    else:
        from equipoise.train.loop import Trainer
        name = "_pack"
    act = getattr(Trainer, name)

    @wraps(act)
    def obeying(self, given):
        obey(self.step + 1 if name == "_train_step" else given)
        return act(self, given)

    setattr(Trainer, name, obeying)

def before_each_update(obey):
    from equipoise.train.step import StepRunner

    update = StepRunner.update

    def obeying(self, made, **more):
        obey(more["step"])
        return update(self, made, **more)

    StepRunner.update = obeying

if "equipoise.fault.stem" in sys.orig_argv or "RANK" in os.environ:
    import json, signal, time
    from contextlib import suppress
    from pathlib import Path

    def order(kind):
        folder = Path(sys.argv[1])
        for place in (folder, *folder.parents[:2]):
            with suppress(OSError):
                return json.loads(Path(f"{place}{kind}").read_text())

    def hold(step):
        until = time.monotonic() + 240
        while (held := order(".hold")) is not None and step >= held and time.monotonic() < until:
            time.sleep(0.01)

    def die(step):
        how = order(".die")
        place = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]
        if how is None or how["rank_of"] != place or how["step"] != step:
            return
        until = time.monotonic() + 120
        saved = Path(sys.argv[1], "checkpoint", how["saved"])
        while not saved.exists() and time.monotonic() < until:  # it is written in the background
            time.sleep(0.01)
        if how["says"]:
            raise ValueError(how["says"])
        os.kill(os.getpid(), signal.SIGKILL)

    before_each_step(hold)
    if "equipoise.recsys.worker" not in sys.orig_argv:
        before_each_update(die)
"""


class Held:
    """Orders to the ranks of one run.

    Args:
        folder: The run's, or one or two above it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, step: int) -> None:
        """Let ranks begin no step from this one on, until they may go on."""
        self._write(HOLD, step)

    def go_on(self) -> None:
        """Let ranks begin any step."""
        Path(f"{self._folder}{HOLD}").unlink()

    def die(self, rank: int, world: int, *, step: int, saved: str, says: str = "") -> None:
        """Let one rank of several die in a step, once a checkpoint is there.

        Args:
            rank: It.
            world: Ranks of the starts in which it dies.
            step: In each start that comes there.
            saved: Name of the checkpoint that it leaves behind.
            says: Of an error that says this; by SIGKILL unless given.
        """
        self._write(DIE, {"rank_of": [rank, world], "step": step, "saved": saved, "says": says})

    def _write(self, kind: str, order: object) -> None:
        new = Path(f"{self._folder}{kind}.new")
        new.write_text(json.dumps(order))
        os.replace(new, f"{self._folder}{kind}")
