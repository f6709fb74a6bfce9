"""What a start refuses before any rank, and how the end of ranks is put into a sentence."""

import errno
import fcntl
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from equipoise.base.errors import EquipoiseError, FaultError, LayoutError
from equipoise.launch.agent import PROGRAM, SPARE, whole_environment
from equipoise.launch.ends import Killed
from equipoise.launch.explain import RanksEnd, explain
from equipoise.launch.forms import Job, Nodes, agent_words
from equipoise.launch.gang import Launch, spares_command
from equipoise.launch.last_words import Words
from equipoise.launch.local import (
    LOCK,
    claim_folder,
    folder_unlocked,
    require_free_folder,
    require_free_port,
)
from support.launch.ports import free_port

RESUME = "Run the same command again to resume from the last checkpoint."


def refused(call, *args) -> str:
    with pytest.raises(LayoutError) as caught:
        call(*args)
    return str(caught.value)


def test_a_port_that_is_listened_on() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert refused(require_free_port, port) == (
            f"Port {port} cannot be used (Address already in use). Choose another with --port, or "
            "omit --port to take any free one."
        )
    require_free_port(port)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none(port: int) -> None:
    assert refused(require_free_port, port) == (
        f"--port {port} is not a port. Choose one from 1 to 65535, or omit --port to take any "
        "free one."
    )


def test_a_folder_whose_run_goes_on(tmp_path: Path) -> None:
    require_free_folder(tmp_path / "none")
    require_free_folder(tmp_path)
    with (tmp_path / LOCK).open("a") as held:
        require_free_folder(tmp_path)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert refused(require_free_folder, tmp_path) == (
            f"Another run is writing to {tmp_path}. Wait until it ends, stop it, or choose "
            "another folder with --out."
        )
    require_free_folder(tmp_path)


def test_a_folder_is_claimed_by_one_command(tmp_path: Path) -> None:
    """Also before rank 0 holds the lock, and between two starts."""
    with claim_folder(tmp_path):
        require_free_folder(tmp_path)  # rank 0 may lock it
        assert refused(lambda: claim_folder(tmp_path).__enter__()) == (
            f"Another run is writing to {tmp_path}. Wait until it ends, stop it, or choose "
            "another folder with --out."
        )
        handles = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == handles - 1
    with claim_folder(tmp_path), claim_folder(tmp_path / "none"):
        pass


def test_a_pipe_in_the_place_of_the_lock_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert refused(require_free_folder, tmp_path) == (
        f"{tmp_path / LOCK} cannot be locked (It is a pipe, a socket or a device, not a file), so "
        "nothing would keep a second run from writing to the same journal. Choose another folder "
        "with --out, or mount this one with locks (NFS: without nolock; Lustre: with flock)."
    )


@pytest.mark.parametrize("target", ["gone/lock", LOCK])
def test_a_link_that_leads_nowhere_in_the_place_of_the_lock(tmp_path: Path, target: str) -> None:
    lock = tmp_path / LOCK
    lock.symlink_to(target)
    said = (
        f"{lock} is a link to {target}, which leads to no file, so nothing can be locked. Remove "
        "the link, or choose another folder with --out."
    )
    assert refused(require_free_folder, tmp_path) == said
    assert folder_unlocked(tmp_path, OSError(errno.ENOENT, "")) == said
    lock.unlink()
    (tmp_path / "elsewhere").touch()
    lock.symlink_to("elsewhere")
    require_free_folder(tmp_path)


def test_the_agent_of_ranks_that_are_kept_ready(tmp_path: Path) -> None:
    """As the forms' one, but that it meets nobody, keeps logs and looks often."""
    words = spares_command(Launch(tmp_path, 2, True, 0))
    job = Job("run", tmp_path, Nodes(1, 2, "none"), python=sys.executable)
    assert set(agent_words(job)) - set(words) == {"--nnodes=1"}
    assert words[:3] == agent_words(job)[:3]
    assert words[-5:] == [*SPARE, PROGRAM, str(tmp_path), "--quiet"]
    assert "--standalone" in words


def test_agents_of_several_nodes_wait_for_one_that_comes_back(tmp_path: Path) -> None:
    def words(nodes: int, wait_s: float | None) -> list[str]:
        job = Job("run", tmp_path, Nodes(nodes, 2, "none"), wait_s=wait_s)
        return [word for word in agent_words(job) if "join_timeout" in word]

    assert words(2, 90.4) == ["--rdzv-conf=join_timeout=90"]
    assert words(2, None) == words(1, 90.0) == []


def test_ranks_have_the_readers_environment_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("ASKED", "yes")
    found = whole_environment()
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.tcache_count=0"
    assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"], found["ASKED"]) == (
        "1",
        "1",
        "yes",
    )
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert whole_environment()["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=0"


KILLED = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-08-01_10:00:00
  host      : node
  rank      : {rank} (local_rank: {rank})
  exitcode  : -{number} (pid: 4711)
  error_file: <N/A>
  traceback : Signal {number} received by PID 4711
"""


def told(log: str = "", *faults: Words) -> EquipoiseError:
    return ended(log, *faults).error()


def ended(log: str = "", *faults: Words) -> RanksEnd:
    return explain(Launch(Path("run"), 2, True, 0), log, faults)


def fault(rank: int, name: str = "exception", **fields) -> Words:
    event = {"type": "ValueError", "message": "bad", "exit_code": 6, "traceback": "TRACE"}
    return {"rank": rank, "name": name, **event} | fields


LOST = fault(0, message="Connection closed by peer [127.0.0.1]:1")


def test_a_killed_rank_is_named_though_its_peer_complained() -> None:
    error = told(KILLED.format(rank=1, number=9), LOST)
    assert isinstance(error, FaultError)
    assert (
        str(error) == f"Rank 1 of 2 (pid 4711) was ended by SIGKILL; it left no traceback. {RESUME}"
    )


def test_the_agent_knows_better_than_its_launcher_who_ended_first() -> None:
    launch, seen = Launch(Path("run"), 2, True, 0), Killed(0, 4710, 9)
    log = "rank      : 1\n  exitcode  : -9 (pid: 4711)\n"
    assert explain(launch, log, [], seen).rank == 1
    unnamed = explain(launch, "", [], Killed(1, 4712, 40))  # between SIGRTMIN and SIGRTMAX
    assert "was ended by signal 40; it left no traceback." in unnamed.sentence
    for unsure in (
        "",
        "rank      : 1\n  exitcode  : 6 (pid: 4711)\n",  # it lost its peer
        KILLED.format(rank=1, number=9),  # torchrun's: others stand before the first
    ):
        assert explain(launch, unsure, [], seen).rank == 0


def test_the_agents_own_sigterm_is_no_cause() -> None:
    log = KILLED.format(rank=0, number=signal.SIGTERM.value) + KILLED.format(rank=1, number=11)
    assert str(told(log)) == (
        f"Rank 1 of 2 (pid 4711) was ended by SIGSEGV; it left no traceback. {RESUME}"
    )


def test_an_error_of_ours_is_told_in_its_own_words_and_exit_code() -> None:
    known = fault(1, "error", message="One sentence.", exit_code=4)
    error = told(KILLED.format(rank=0, number=9), LOST, known)
    assert (str(error), error.exit_code) == ("One sentence.", 4)


def test_the_first_exception_that_is_not_a_lost_connection_is_the_cause() -> None:
    error = told("", LOST, fault(1, message="bad\nsecond line"))
    assert str(error) == f"Rank 1 of 2 failed: ValueError: bad {RESUME}\nTRACE"


def test_ranks_that_said_nothing_leave_the_agents_last_lines() -> None:
    log = "\n".join(f"line {number}" for number in range(20))
    tail = "\n".join(f"line {number}" for number in range(5, 20))
    assert str(told(log)) == f"The ranks ended without a word. {RESUME}\n{tail}"
    traces = [[], ["Traceback (most recent call last):", "NameError: x"]]
    begun = explain(Launch(Path("run"), 2, True, 0), log, [], None, traces)
    assert (begun.kind, begun.rank) == ("failed", 1)
    assert begun.sentence == "Rank 1 of 2 failed before it began: NameError: x"
    assert begun.more == "\n".join(traces[1])


def test_a_save_that_a_killed_rank_did_not_finish_is_no_cause() -> None:
    lost = fault(0, "error", type="CheckpointError", message="Not saved (closed by peer).")
    end = ended(KILLED.format(rank=1, number=9), lost)
    assert (end.kind, end.rank) == ("killed", 1)
    assert ended("", lost).kind == "refused"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("HungError", "hung"), ("NonFiniteError", "non-finite"), ("LayoutError", "refused")],
)
def test_errors_of_ours_have_the_kind_of_their_class(kind: str, expected: str) -> None:
    advice = "Run the same command again to resume."
    end = ended(
        KILLED.format(rank=1, number=9), fault(0, "error", type=kind, message=f"So. {advice}")
    )
    assert (end.kind, end.sentence, end.advice) == (expected, "So.", advice)
    assert str(end.error("Why.")) == f"So. Why. {advice}"


def test_an_agent_without_a_word_counts_as_killed() -> None:
    assert ended("line").kind == "killed"
