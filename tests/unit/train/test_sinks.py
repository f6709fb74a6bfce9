"""TensorBoard: scalars where it is installed, a sentence where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.train.sinks import TensorBoardSink


def test_a_sink_that_is_not_wanted_writes_nothing(tmp_path: Path) -> None:
    sink = TensorBoardSink.open_if(False, tmp_path / "tensorboard")
    sink.write(1, {"loss": 2.0})
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SpecError) as caught:
        TensorBoardSink.open_if(True, tmp_path)
    assert str(caught.value) == (
        "journal.tensorboard is true and TensorBoard is not installed. Run "
        "`pip install 'equipoise[tensorboard]'`, or set it to false."
    )


PROGRAM = """
import sys
from pathlib import Path
from equipoise.train.sinks import TensorBoardSink
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sink = TensorBoardSink.open_if(True, Path(sys.argv[1]))
for step, loss in ((1, 3.0), (2, 2.5)):
    sink.write(step, {"loss": loss, "lr": 0.5})
sink.close()
board = EventAccumulator(sys.argv[1]).Reload()
print(board.Tags()["scalars"], [(e.step, e.value) for e in board.Scalars("train/loss")])
"""


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    # In a process of its own: TensorBoard warns of things that are not ours.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['train/loss', 'train/lr'] [(1, 3.0), (2, 2.5)]\n"
