"""Functions of ranks that look for a price curve."""

import os
import subprocess
import sys
from pathlib import Path

from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import RunSpec
from equipoise.train.curves import obtain_curve


def obtain(ranks: Ranks, spec: RunSpec, model: ModelSpec, cache: Path, own: Path) -> LoadCurve:
    """The curve of this rank."""
    return obtain_curve(spec, model, ranks, cache, own)


def obtain_beside_others(
    ranks: Ranks, spec: RunSpec, model: ModelSpec, cache: Path, own: Path
) -> LoadCurve:
    """Likewise, on one core that three other programs compute on, too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        return obtain_curve(spec, model, ranks, cache, own)
    finally:
        os.sched_setaffinity(0, before)
        for each in others:
            each.kill()
            each.wait()
