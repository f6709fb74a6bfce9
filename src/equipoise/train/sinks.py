"""Where a step's figures go besides the journal.

What it decides
    A sink never ends a run: what its disk refuses is dropped and counted, and it is opened
    anew at the next step.
"""

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from equipoise.base.disk import explain_refusal
from equipoise.base.errors import SpecError


class TensorBoardSink:
    """TensorBoard scalars under ``train/``; a closed sink writes nothing."""

    def __init__(self, make: Callable[[str], Any] | None, folder: Path) -> None:
        self._make, self._folder = make, folder
        self._writer: Any = None
        self._lost_steps = 0
        self._notices: list[str] = []

    @classmethod
    def open_if(cls, wanted: bool, folder: Path) -> "TensorBoardSink":
        """Open a sink in ``folder``, or a closed one.

        Raises:
            SpecError: TensorBoard is wanted and not installed.
        """
        if not wanted:
            return cls(None, folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SpecError(
                "journal.tensorboard is true and TensorBoard is not installed. "
                "Run `pip install 'equipoise[tensorboard]'`, or set it to false."
            ) from error
        return cls(SummaryWriter, folder)

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Write each figure of a step."""
        if self._make is None:
            return
        try:
            if self._writer is None:
                if not self._folder.parent.is_dir():  # TensorBoard would make it
                    raise FileNotFoundError(errno.ENOENT, f"{self._folder.parent} has vanished")
                self._writer = self._make(str(self._folder))
            for name, value in figures.items():
                self._writer.add_scalar(f"train/{name}", value, step)
            self._writer.flush()
        except OSError as error:
            self._refuse(error)
        else:
            self._resume()

    def take_notices(self) -> list[str]:
        """Sentences for the reader since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        """Write out what is pending."""
        self._drop()
        self._make = None

    def _refuse(self, error: OSError) -> None:
        self._drop()
        self._lost_steps += 1
        if self._lost_steps == 1:
            self._notices.append(
                f"TensorBoard's files in {self._folder} cannot be written "
                f"({explain_refusal(error, self._folder)}). The run goes on without them."
            )

    def _resume(self) -> None:
        if self._lost_steps:
            self._notices.append(
                f"TensorBoard's files in {self._folder} can be written again; "
                f"{self._lost_steps:,} steps are missing."
            )
        self._lost_steps = 0

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()
