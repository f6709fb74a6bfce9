"""Files are written whole or not at all, and what is no file stays what it is."""

import os
import threading
from pathlib import Path

import pytest

from equipoise.base.durable import write_whole


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_whole(file, "old\n")
    write_whole(file, "new\n")
    assert file.read_text() == "new\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_old_text_stays_where_the_new_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_whole(file, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\udc80")
    assert file.read_text() == "old\n"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    """As a device does: whoever writes to /dev/null with enough rights must not replace it."""
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "words\n")
    reader.join(120)
    assert heard == ["words\n"]
    assert pipe.is_fifo()
