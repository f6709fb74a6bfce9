"""The kernel's counters of real connections: bytes, and seconds in which the network is slow."""

import json
import socket
import threading
import time

import pytest

from equipoise.fault.drill.acts import pace
from equipoise.observe.links import join_links, open_sockets, read_connections

SENT = 4 << 20


def send(*, rate: float = 0.0, late_s: float = 0.0) -> tuple[int, float]:
    """Bytes and busy seconds of a link that sends at a rate, to a reader that begins late."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        if rate:
            pace([one], rate)

        def read() -> None:
            time.sleep(late_s)
            left = SENT
            while left:
                left -= len(other.recv(1 << 18))

        reader = threading.Thread(target=read)
        reader.start()
        one.sendall(bytes(SENT))
        reader.join()
        names = {f"{each[0]}:{each[1]}" for each in (one.getsockname(), other.getsockname())}
        rows: list = []
        while not any(row[2] >= SENT for row in rows):  # until the last bytes are acknowledged
            rows = json.loads(json.dumps([row for row in read_connections() if row[0] in names]))
    (sender,) = [row for row in rows if row[0].endswith(f":{_port(rows, SENT)}")]
    links = join_links({0: [sender], 1: [row for row in rows if row is not sender]})
    assert links[1, 0].sent_bytes == 0
    return links[0, 1].sent_bytes, links[0, 1].busy_s


def _port(rows: list, least: int) -> str:
    """The port of the end that has sent this much."""
    return next(row[0].rpartition(":")[2] for row in rows if row[2] >= least)


def test_a_paced_link_is_busy_and_a_late_reader_is_not_the_links_fault() -> None:
    whole = range(SENT, SENT + 2)  # the opening counts as one
    sent, paced_s = send(rate=16e6)
    assert sent in whole
    assert paced_s > 0.1
    # A busy machine makes a link look busy for longer, and never for less.
    for late_s, most_s in ((0.0, 0.1), (0.4, 0.2)):  # the reader had no room for 0.4 s
        for _ in range(20):
            sent, busy_s = send(late_s=late_s)
            assert sent in whole
            if busy_s < most_s:
                break
        assert busy_s < most_s


def test_a_connection_whose_other_end_is_no_rank_is_no_link() -> None:
    rows = {0: [("a:1", "b:2", 9, 0.5, 0, 1), ("a:7", "s:80", 5, 0.1, 0, 1)], 1: []}
    assert join_links(rows) == {}  # type: ignore[arg-type]


def test_sockets_are_copies_and_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (copy,) = [
            each
            for each in open_sockets()
            if each.family == socket.AF_INET and each.getsockname()[1] == port
        ]
        with pytest.raises(OSError, match="Bad file descriptor"):
            copy.getsockname()
        assert server.getsockname()[1] == port
