"""Where a step's figures go besides the journal."""

from pathlib import Path
from typing import Any

from equipoise.base.errors import SpecError


class TensorBoardSink:
    """TensorBoard scalars under ``train/``; a closed sink writes nothing."""

    def __init__(self, writer: Any | None) -> None:
        self._writer = writer

    @classmethod
    def open_if(cls, wanted: bool, folder: Path) -> "TensorBoardSink":
        """Open a sink in ``folder``, or a closed one.

        Raises:
            SpecError: TensorBoard is wanted and not installed.
        """
        if not wanted:
            return cls(None)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SpecError(
                "journal.tensorboard is true and TensorBoard is not installed. "
                "Run `pip install 'equipoise[tensorboard]'`, or set it to false."
            ) from error
        return cls(SummaryWriter(str(folder)))

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Write each figure of a step."""
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        """Write out what is pending."""
        if self._writer is not None:
            self._writer.close()
