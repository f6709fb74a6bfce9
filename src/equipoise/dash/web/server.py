"""The dashboard's HTTP server: one page, three answers, nothing that writes.

Why
    Run folders hold what a company trains on. A page of another site that a browser shows beside
    this one must not read them, and no request may name a file.

What it decides
    The standard library's threaded server: the page is for one person or a few. It answers GET and
    HEAD of a fixed table of paths; runs are named by digests. A request whose Host is a name that
    is not this server's is refused, so that a foreign name which resolves to 127.0.0.1 reads
    nothing (DNS rebinding). Answers carry an ETag and are sent once.

Kept true (tests/unit/dash/web/test_server.py)
    Every answer forbids framing, foreign scripts and foreign readers.
"""

import hashlib
import ipaddress
import json
import socket
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

from equipoise.base.errors import SpecError
from equipoise.dash.web.serving import Serving
from equipoise.dash.web.watch import MOST_COMPARED, Watch

_SCRIPTS = (
    "page/format.js",
    "page/draw.js",
    "page/charts.js",
    "page/timeline.js",
    "page/tables.js",
    "page/plan.js",
    "web/page/ask.js",
    "web/page/list.js",
    "web/page/run.js",
    "web/page/serving.js",
    "web/page/main.js",
)
"""The report's drawing, then what is live."""
_STYLES = ("page/report.css", "web/page/live.css")

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TIMEOUT_S = 30.0
"""A connection that says nothing for so long is closed."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a request gets."""

    status: HTTPStatus
    body: bytes
    kind: str


class Dashboard(ThreadingHTTPServer):
    """Serves a watch, and a server's metrics if there is one."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, watch: Watch, serving: Serving | None = None) -> None:
        self.watch, self.serving, self.host = watch, serving, host
        self.is_over = False
        self._fixed = _read_page(has_serving=serving is not None, has_runs=bool(watch.folders))
        try:
            place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = place[0]
            super().__init__((str(place[4][0]), port), _Handler)
        except (OSError, UnicodeError) as fault:  # the latter of a name with a long part
            said = getattr(fault, "strerror", None) or "No such host"
            raise SpecError(
                f"The dashboard cannot listen on {host} port {port}: {said}. "
                "Give another with --port, or --port 0 for a free one."
            ) from fault
        self._names = _own_names(host)

    def server_close(self) -> None:
        """Close, also for browsers that are connected."""
        self.is_over = True
        super().server_close()

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        host = str(self.server_address[0])
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def is_named(self, host: str) -> bool:
        """Whether a Host header names this server: an address, or a name that it has."""
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # an address cannot be pointed elsewhere

    def answer(self, target: str) -> Response:
        """What a path and its query get."""
        parts = urllib.parse.urlsplit(target)
        if parts.path in self._fixed:
            return self._fixed[parts.path]
        lives: dict[str, Callable[[str], Response]] = {
            "/api/runs": lambda _: _json(self.watch.list_runs()),
            "/api/run": self._runs,
            "/api/serving": self._serving,
        }
        if parts.path in lives:
            return lives[parts.path](parts.query)
        return _refuse(HTTPStatus.NOT_FOUND, "There is nothing here. The dashboard is at /.")

    def _runs(self, query: str) -> Response:
        try:
            keys = urllib.parse.parse_qs(query, max_num_fields=MOST_COMPARED).get("id", [])
        except ValueError:
            return _refuse(HTTPStatus.BAD_REQUEST, f"At most {MOST_COMPARED} runs are compared.")
        shown = self.watch.show(keys)
        if shown is None:
            return _refuse(HTTPStatus.NOT_FOUND, "There is no such run (any more).")
        return _json(shown)

    def _serving(self, _: str) -> Response:
        if self.serving is None:
            return _refuse(HTTPStatus.NOT_FOUND, "No server is watched. Give --metrics URL.")
        return _json(self.serving.as_json())

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Dashboard
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    disable_nagle_algorithm = True
    server_version = "equipoise"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        self._send(has_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._send(has_body=False)

    def do_POST(self) -> None:
        """Refuse: there is nothing to write."""
        self.close_connection = True  # a body that nobody reads is not the next request
        self._write(_refuse(HTTPStatus.METHOD_NOT_ALLOWED, "The dashboard answers GET alone."))

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: a page asks every second."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not HTTP as everything else is answered."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._write(_refuse(status, message or explain or status.phrase))

    def _send(self, *, has_body: bool) -> None:
        if self.server.is_over:
            self.close_connection = True
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_named(hosts[0]):
            answer = _refuse(
                HTTPStatus.MISDIRECTED_REQUEST,
                "This dashboard does not answer to that name. Open it by its address, or start it "
                "with --host NAME.",
            )
        else:
            try:
                answer = self.server.answer(self.path)
            except Exception as fault:  # one request never ends the others
                words = f"{type(fault).__name__}: {fault}"
                answer = _refuse(HTTPStatus.INTERNAL_SERVER_ERROR, words)
        self._write(answer, self.headers.get("If-None-Match"), has_body=has_body)

    def _write(self, answer: Response, known: str | None = None, *, has_body: bool = True) -> None:
        """Write an answer, or only that the browser has it already."""
        tag = f'"{hashlib.sha256(answer.body).hexdigest()[:24]}"'
        is_known = answer.status == HTTPStatus.OK and known == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", tag)
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        if not is_known:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if has_body and not is_known:
            self.wfile.write(answer.body)


def _json(body: bytes) -> Response:
    return Response(HTTPStatus.OK, body, "application/json")


def _refuse(status: HTTPStatus, sentence: str) -> Response:
    return Response(status, json.dumps({"error": sentence}).encode(), "application/json")


def _own_names(host: str) -> frozenset[str]:
    names = {"localhost", host.lower()}
    if host in ("0.0.0.0", "::"):  # noqa: S104
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def _read_page(*, has_serving: bool, has_runs: bool) -> dict[str, Response]:
    """The page, its style and its script."""
    home = resources.files("equipoise.dash")

    def join(names: tuple[str, ...]) -> str:
        return "\n".join((home / name).read_text(encoding="utf-8") for name in names)

    page = (home / "web/page/index.html").read_text(encoding="utf-8")
    page = page.replace("{{serving}}", "yes" if has_serving else "no")
    page = page.replace("{{runs}}", "yes" if has_runs or not has_serving else "no")
    script = f'(() => {{\n"use strict";\n{join(_SCRIPTS)}\n}})();\n'
    texts = {
        "/": (page, "text/html"),
        "/dash.css": (join(_STYLES), "text/css"),
        "/dash.js": (script, "text/javascript"),
    }
    return {
        path: Response(HTTPStatus.OK, text.encode(), f"{kind}; charset=utf-8")
        for path, (text, kind) in texts.items()
    }
