"""Runs on ranks of which one changes a byte of its state between two steps."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import CorruptError
from equipoise.comm.group import Ranks
from equipoise.spec.run.resolved import ResolvedFile
from support.ranks.on_ranks import NotingTrainer, train

WORDS = torch.int32


def change(tensor: Tensor, how: str) -> None:
    """Change a float32 tensor as a fault of its memory does."""
    words = tensor.view(-1).view(WORDS)
    if how == "flip":
        words[3] ^= 1 << 2
    elif how == "sign":  # what a sum of floats does not see where the value is 0
        words[3] ^= -(1 << 31)
    elif how == "two equal flips":
        words[3] ^= 1 << 9
        words[5] ^= 1 << 9
    elif how == "swap":
        words[3], words[5] = words[5].item(), words[3].item()
    elif how == "nan":
        words[3] = 0x7FC00001
    else:
        raise ValueError(how)


def flip(
    ranks: Ranks, folder: Path, resolved: ResolvedFile, faults: dict[str, tuple[int, str, str]]
) -> list[tuple[str, list[str], list[int]]]:
    """Runs in which the last rank's state changes after a step: step, tensor's kind, how.

    Returns:
        Of each, what ended it, the checkpoints left, and the steps that were done.
    """
    ended = []
    for name, (step, kind, how) in faults.items():
        trainers: list[NotingTrainer] = []

        class Kept(NotingTrainer):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                trainers.append(self)  # noqa: B023

        def deed(kind: str = kind, how: str = how, trainers: list[Any] = trainers) -> None:
            runner = trainers[0].runner
            (weight,) = [
                each
                for name, each in runner.model.decoder.named_parameters()
                if name.endswith("layers.0.feed_forward.down.weight")
            ]
            tensor = weight.detach() if kind == "weight" else runner.optimizer.state[weight][kind]
            change(tensor.to_local(), how)

        said = ""
        script = {"deed_at": step, "deed": deed, "deed_rank": ranks.world - 1}
        try:
            train(ranks, folder / name, resolved, script, Kept)
        except CorruptError as error:
            said = str(error)
        left = sorted(path.name for path in (folder / name / "checkpoint").iterdir())
        ended.append((said, left, [trainers[0].position.step]))
    return ended
