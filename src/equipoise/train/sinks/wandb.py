"""Weights & Biases: an offline folder, which ``wandb sync`` uploads.

What it decides
    ``WANDB_MODE`` is ``offline`` unless the environment says otherwise; offline, nothing of the
    library uses a network. A resumed run has the id of the first one, so that both are one run.

Sources
    wandb 0.31: ``wandb.init``; WANDB_ERROR_REPORTING keeps its crash reports at home.
"""

import os
import secrets
from collections.abc import Mapping

from equipoise.train.sinks.sink import Sink, SinkRun

_NAME = "wandb"


class _WandbRun:
    def __init__(self, run: SinkRun) -> None:
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        known = run.known_id(_NAME)
        name = known or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "equipoise"),
            name=run.name,
            id=name,
            dir=str(run.folder),
            config=dict(run.config),
            # Offline there is nothing to resume from: wandb sync joins the folders by their id.
            resume="allow" if mode != "offline" else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True
            ),
        )
        if not known:
            run.keep_id(_NAME, name)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def open_wandb(run: SinkRun) -> Sink:
    """Begin a run of W&B, or continue the one that this run has."""
    return _WandbRun(run)
