"""What a rank refuses before it touches anything."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.fault.rank import FolderTakenError, hold_folder
from equipoise.launch.last_words import VARIABLE, listen
from equipoise.launch.local import LOCK
from equipoise.spec.model.presets import preset
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import LayoutSpec, RunSpec
from equipoise.train import worker


@pytest.mark.parametrize(
    ("context", "world", "fix"),
    [(1, 3, "--nproc-per-node 4, or --layout.dp 3"), (2, 3, "--nproc-per-node 4")],
)
def test_other_ranks_than_the_run_wants(tmp_path: Path, context: int, world: int, fix: str) -> None:
    layout = LayoutSpec(dp=4 // context, cp=context)
    spec = RunSpec(layout=layout)
    resolved = ResolvedFile(spec, preset("2m"), {}, layout.count_ranks(cores=1), "", "")
    with pytest.raises(LayoutError) as caught:
        worker._train(tmp_path, resolved, Ranks(0, world, torch.device("cpu")), quiet=True)
    assert str(caught.value) == f"torchrun started 3 ranks and the run wants 4. Pass {fix}."
    assert list(tmp_path.iterdir()) == []


class Alone(Ranks):
    """One rank, whose word is rank 0's."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone(0, 1, torch.device("cpu"))


def test_a_folder_that_another_run_holds(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FolderTakenError) as caught, hold_folder(tmp_path, ALONE):
            pass
    assert str(caught.value) == (
        f"Another run is writing to {tmp_path}. Wait until it ends, stop it, or choose another "
        "folder with --out."
    )
    with (
        hold_folder(tmp_path, ALONE),
        (tmp_path / LOCK).open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EPERM, errno.EIO])
def test_a_folder_that_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LayoutError) as caught, hold_folder(tmp_path, ALONE):
        pass
    assert not isinstance(caught.value, FolderTakenError)
    assert str(caught.value) == (
        f"{tmp_path}/.lock cannot be locked ({os.strerror(code)}), so nothing would keep a second "
        f"run from writing to the same journal. Choose another folder with --out, or mount this "
        f"one with locks (NFS: without nolock; Lustre: with flock)."
    )


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(LayoutError) as caught, hold_folder(tmp_path, ALONE):
        pass
    assert str(caught.value).startswith(f"{tmp_path}/.lock cannot be locked (Is a directory), so ")


def test_a_rank_without_a_prepared_run_tells_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without that, its launcher would start it again and again."""
    monkeypatch.setattr("sys.argv", ["worker", str(tmp_path)])
    with listen() as (address, heard):
        monkeypatch.setenv(VARIABLE, address)
        assert worker.main() == 2
    sentence = (
        f"{tmp_path} holds no readable resolved.json: it is not the folder of a run of this "
        "version. Start it with `equipoise train run.toml`."
    )
    assert capsys.readouterr().err == f"{sentence}\n"
    (error,) = heard.errors
    assert (error["message"], error["exit_code"], error["name"]) == (sentence, 2, "error")
    assert [*tmp_path.iterdir()] == []
