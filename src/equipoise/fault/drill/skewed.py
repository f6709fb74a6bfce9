"""Checkpoints of another order of documents, of a newer version, or of other numbers (F15).

What it decides
    The newest checkpoint is whole in all three: its sums are right, and what differs is what it
    says of itself. The command must refuse it by the difference and touch nothing; with what the
    run had before, the same command goes on.

Kept true (tests/unit/fault/drill/test_skewed.py)
    Each changes what it names and nothing else, and leaves a checkpoint whose sums are right.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from equipoise.base.digest import digest_file
from equipoise.checkpoint.index import read_index, render_index
from equipoise.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    folder_name,
    open_manifest,
    render_manifest,
)
from equipoise.fault.drill.asked import contents
from equipoise.fault.drill.injection import Fired
from equipoise.fault.drill.judge import SAME_COMMAND, Expected, judge
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import EVERY, Stage
from equipoise.spec.names import CHECKPOINTS

_OTHER_DTYPE = {"float32": "int32", "bfloat16": "float16"}
"""Another dtype with as many bytes, so that sizes do not give it away."""


def other_seed(stage: Stage, repeat: int) -> Rehearsal:
    """The command is started with another seed, and so with another order of documents."""
    del repeat
    folder, seed = stage.copied("skew", until=2 * EVERY), stage.asked.spec.train.seed
    pattern = rf"(?i)seed.*{seed + 1}|{seed + 1}.*seed"
    what = f"{seed} -> {seed + 1}"
    return _refused(stage, folder, "train.seed", what, pattern, f"--train.seed={seed + 1}")


def newer_version(stage: Stage, repeat: int) -> Rehearsal:
    """The newest checkpoint has the format of a version that is not there yet."""
    del repeat
    pattern = rf"checkpoint format {FORMAT + 1}, .*this version reads up to {FORMAT}"
    return _rewritten(stage, "version", make_newer, pattern)


def other_dtype(stage: Stage, repeat: int) -> Rehearsal:
    """A tensor of the newest checkpoint is of another dtype, with as many bytes."""
    del repeat
    return _rewritten(stage, "dtype", make_other_dtype, "")


def make_newer(checkpoint: Path) -> str:
    """Give a checkpoint the next format; what was changed."""
    manifest = open_manifest(checkpoint)
    later = dataclasses.replace(manifest, format=FORMAT + 1, version="9.0")
    (checkpoint / MANIFEST).write_text(render_manifest(later))
    return f"{manifest.format} -> {later.format}"


def make_other_dtype(checkpoint: Path) -> str:
    """Let the first tensor of a checkpoint say another dtype of the same width; what was changed.

    Its sums are made anew, as if it had been saved so.
    """
    index, manifest = dict(read_index(checkpoint)), open_manifest(checkpoint)
    name = min(each for each, tensor in index.items() if tensor.dtype in _OTHER_DTYPE)
    before = index[name].dtype
    index[name] = dataclasses.replace(index[name], dtype=_OTHER_DTYPE[before])
    places = checkpoint / "tensors.json"
    places.write_text(render_index(index))
    files = manifest.files | {places.name: (places.stat().st_size, digest_file(places))}
    (checkpoint / MANIFEST).write_text(render_manifest(dataclasses.replace(manifest, files=files)))
    return f"{name} {before} -> {index[name].dtype}"


def _rewritten(stage: Stage, name: str, rewrite: Callable[[Path], str], pattern: str) -> Rehearsal:
    """Start on a newest checkpoint that says otherwise; put it back before the same command."""
    folder = stage.copied(name, until=2 * EVERY)
    newest = folder / CHECKPOINTS / folder_name(2 * EVERY)
    whole = stage.root / f"{folder.name}-whole"
    shutil.copytree(newest, whole)
    what = rewrite(newest)
    if not pattern:
        tensor, old, _, new = what.split()
        pattern = rf"{tensor}.*{old}.*{new}|{tensor}.*{new}.*{old}"

    def put_back() -> None:
        shutil.rmtree(newest)
        whole.rename(newest)

    return _refused(stage, folder, name, what, pattern, before=put_back)


def _refused(
    stage: Stage,
    folder: Path,
    name: str,
    what: str,
    pattern: str,
    *more: str,
    before: Callable[[], object] = lambda: None,
) -> Rehearsal:
    """Start a run that must be refused with a line, and must touch no checkpoint.

    Args:
        stage: Of the rehearsal.
        folder: The run's.
        name: What differs.
        what: From what to what.
        pattern: Of the line that names it.
        more: Further words of the command.
        before: Done before the same command is started again.
    """
    held = contents(folder / CHECKPOINTS)
    fired = Fired(0, 0, 0, "", 0, time.monotonic(), time.time(), what)
    with stage.start(folder, *more) as attempt:
        attempt.end()
    is_kept = contents(folder / CHECKPOINTS) == held
    before()
    names = pattern if is_kept else "nothing: it was touched"
    return judge(
        stage, folder, attempt, fired, Expected(name, "manifest", lambda _: names, (SAME_COMMAND,))
    )
