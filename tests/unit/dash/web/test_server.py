import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.dash.web.server import Dashboard
from equipoise.dash.web.watch import Watch


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Dashboard]:
    with Dashboard("127.0.0.1", 0, Watch([*runs.values()])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Reply = tuple[int, dict[str, str], bytes]


def ask(server: Dashboard, path: str, method: str = "GET", **headers: str) -> Reply:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    link.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        link.putheader(name.replace("_", "-"), value)
    link.endheaders()
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer.status, dict(answer.headers), body


def send(server: Dashboard, text: bytes) -> bytes:
    """What the server says to these very bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as link:
        link.sendall(text)
        answer = b""
        while piece := link.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "path", ["/", "/dash.js", "/dash.css", "/api/runs", "/nope", "/api/serving", "/api/run"]
)
def test_every_answer_forbids_foreign_readers(server: Dashboard, path: str) -> None:
    _, headers, _ = ask(server, path)
    assert headers["Content-Security-Policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-cache"
    assert "Access-Control-Allow-Origin" not in headers


def test_the_page_names_nothing_elsewhere(server: Dashboard) -> None:
    for path in ("/", "/dash.js", "/dash.css"):
        status, _, body = ask(server, path)
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert status == 200 and "http" not in text.replace("https://ui", ""), path


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd",
        "/dash.js/../../server.py", "/api/run?id=../../etc", "/api/run?id=%2Fetc%2Fpasswd",
        "/api/run?id=", "/api/run", "/api", "/page/format.js", "/\x7f", "http://evil/api/x",
    ],
)  # fmt: skip
def test_no_path_names_a_file(server: Dashboard, path: str) -> None:
    raw = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = send(server, raw.encode())
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert b"root:" not in answer and b'{"error": "' in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200),
        ("192.168.1.7", 200), ("evil.example", 421), ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421), ("", 421), ("[", 421), ("localhost@evil.example", 421),
    ],
)  # fmt: skip
def test_a_foreign_name_reads_nothing(server: Dashboard, host: str, status: int) -> None:
    got, _, body = ask(server, "/api/runs", Host=host)
    assert got == status
    if status == 421:
        assert json.loads(body) == {
            "error": "This dashboard does not answer to that name. Open it by its address, or "
            "start it with --host NAME."
        }


def test_without_a_host_or_with_two_nothing_is_read(server: Dashboard) -> None:
    assert b"421" in send(server, b"GET / HTTP/1.0\r\n\r\n").split(b"\r\n")[0]
    two = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n"
    assert b"421" in send(server, two).split(b"\r\n")[0]


def test_what_has_not_changed_is_not_sent(server: Dashboard) -> None:
    while json.loads(ask(server, "/api/runs")[2])["is_behind"]:
        pass
    _, headers, body = ask(server, "/api/runs")
    again = ask(server, "/api/runs", If_None_Match=headers["ETag"])
    assert (again[0], again[2]) == (304, b"") and body
    one = json.loads(body)["runs"][0]["id"]
    _, headers, _ = ask(server, f"/api/run?id={one}")
    assert ask(server, f"/api/run?id={one}", If_None_Match=headers["ETag"])[0] == 304
    status, headers, body = ask(server, f"/api/run?id={one}", "HEAD")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) > 1_000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(server: Dashboard, method: str) -> None:
    status, headers, body = ask(server, "/api/runs", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert json.loads(body) == {"error": "The dashboard answers GET alone."}


@pytest.mark.parametrize("text", [b"\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_not_http_is_answered_and_closed(server: Dashboard, text: bytes) -> None:
    answer = send(server, text)
    assert b'{"error": "' in answer
    assert b"<html" not in answer.lower()


def test_more_runs_than_can_be_compared_are_refused(server: Dashboard) -> None:
    status, _, body = ask(server, "/api/run?" + "&".join(["id=a"] * 9))
    assert (status, json.loads(body)) == (400, {"error": "At most 8 runs are compared."})


def test_a_port_in_use_is_one_sentence(
    server: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        Dashboard("127.0.0.1", server.server_port, Watch([]))
    assert str(caught.value) == (
        f"The dashboard cannot listen on 127.0.0.1 port {server.server_port}: Address already in "
        "use. Give another with --port, or --port 0 for a free one."
    )
    with pytest.raises(SpecError) as caught:
        Dashboard("x" * 64, 0, Watch([]))
    assert str(caught.value) == (
        f"The dashboard cannot listen on {'x' * 64} port 0: No such host. Give another with "
        "--port, or --port 0 for a free one."
    )
    assert main(["dash", "--port", "70000"]) == 2
    assert '"70000" is not a port: 0 to 65,535' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope"], "No such folder: nope. Give the folder of a run, or one in which runs are.\n"),
        ([], "No such folder: runs. Give the folder of a run, or one in which runs are.\n"),
        (["--metrics", "ftp://x"], '--metrics "ftp://x" is not the address of a server. Give one '
         "such as http://127.0.0.1:8000/metrics.\n"),
    ],
)  # fmt: skip
def test_the_verb_refuses_in_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dash", *words]) == 2
    assert capsys.readouterr() == ("", sentence)


def test_ctrl_c_ends_it_without_a_word(runs: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "equipoise.cli.main", "dash", str(runs["by-work"])]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", "--host", "localhost"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        row = json.loads(process.stdout.readline())
        assert row["folders"] == [str(runs["by-work"])] and row["metrics"] is None
        port = int(row["url"].rstrip("/").rpartition(":")[2])
        link = http.client.HTTPConnection("localhost", port, timeout=120)
        link.request("GET", "/api/runs")
        assert link.getresponse().status == 200
        process.send_signal(signal.SIGINT)  # while a connection is open
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == 0
        link.close()
    finally:
        process.kill()
        process.wait()
