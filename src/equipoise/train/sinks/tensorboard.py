"""TensorBoard: event files in the run's folder."""

from collections.abc import Mapping

from equipoise.train.sinks.sink import Sink, SinkRun


class _EventFiles:
    def __init__(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tensorboard(run: SinkRun) -> Sink:
    """Begin another event file; TensorBoard joins those of a folder."""
    return _EventFiles(run)
