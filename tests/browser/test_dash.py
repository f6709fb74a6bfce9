"""The live dashboard in a real Chromium, while runs are written.

A test waits for several beats of the page, of a second each.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from equipoise.dash.web.server import Dashboard
from equipoise.dash.web.serving import Serving
from equipoise.dash.web.watch import Watch
from support.launch.ports import free_port

SIZES = [(390, "dark"), (1440, "light")]


@pytest.fixture(scope="module")
def browser(devtools: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with devtools.chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@contextmanager
def serve(*folders: Path, serving: Serving | None = None, port: int = 0) -> Iterator[Dashboard]:
    with Dashboard("127.0.0.1", port, Watch(folders), serving) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Growing:
    """A run that somebody else wrote, appended step by step."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.folder = folder / "journal"
        self.folder.mkdir(parents=True)
        self.lines = {path.name: path.read_text().splitlines() for path in whole.rglob("*.jsonl")}

    def to(self, step: int) -> None:
        for name, lines in self.lines.items():
            with (self.folder / name).open("a") as file:
                while lines and json.loads(lines[0]).get("step", 0) <= step:
                    file.write(lines.pop(0) + "\n")


def require_whole(page: Any, width: int, origin: str) -> None:
    page.settle()
    assert page.faults() == []
    assert all(url.startswith((origin, "data:")) for url in page.requests())
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.getElementById('trouble').hidden")
    assert page.evaluate("document.body.innerText.match(/NaN|undefined|null|Infinity/)") is None
    assert page.evaluate("document.querySelectorAll('svg [d*=NaN], svg [x*=NaN]').length") == 0


@pytest.mark.parametrize(("width", "scheme"), SIZES[:1])
def test_a_run_appears_and_grows_while_one_looks(
    browser: Any, journals: ModuleType, tmp_path: Path, width: int, scheme: str
) -> None:
    whole = journals.write_run(tmp_path / "elsewhere", steps=30)
    (tmp_path / "runs").mkdir()
    with serve(tmp_path / "runs") as server:
        page = browser.open(server.url, width=width, scheme=scheme)
        page.wait_for("document.querySelector('.empty')?.innerText.startsWith('No run yet.')")
        run = Growing(whole, tmp_path / "runs" / "first")
        run.to(10)
        page.wait_for("document.querySelector('.facts')?.innerText.includes('10 / 30')")
        run.to(12)
        page.wait_for("document.querySelector('.facts')?.innerText.includes('12 / 30')")
        assert page.evaluate("document.querySelector('.pill').textContent").startswith("running")
        require_whole(page, width, server.url)
        page.evaluate("document.querySelector('.card a').click()")
        status = "document.querySelector('#timeline .controls span')?.textContent"
        page.wait_for(f"{status}?.startsWith('first, step 12:')")
        run.to(20)
        page.wait_for(f"{status}?.startsWith('first, step 20:')")
        # A view that was moved stands still, until the newest is asked for.
        page.evaluate("document.querySelector('[aria-label=\"previous step\"]').click()")
        run.to(24)
        page.wait_for("document.querySelector('.tile dd').textContent.startsWith('24')")
        assert page.evaluate(status).startswith("first, step 19:")
        page.evaluate("document.querySelector('[aria-label=\"follow the newest step\"]').click()")
        page.wait_for(f"{status}?.startsWith('first, step 24:')")
        # What was opened stays open when newer numbers come.
        page.evaluate("document.querySelector('#loss details').open = true")
        run.to(30)
        page.wait_for("document.querySelector('.pill').textContent === 'finished'")
        page.wait_for("document.querySelectorAll('#loss table tbody tr').length === 30")
        figures = page.evaluate("[...document.querySelectorAll('figure')].map(each => each.id)")
        assert figures == [
            "timeline", "loss", "step-time", "skew", "wait", "throughput", "memory"
        ]  # fmt: skip
        assert page.evaluate("document.querySelector('#events').innerText").count("Finished.") == 1
        require_whole(page, width, server.url)
        page.close()


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_two_runs_lie_on_the_same_axes(
    browser: Any, journals: ModuleType, tmp_path: Path, width: int, scheme: str
) -> None:
    for policy in ("in-order", "by-work"):
        journals.write_run(tmp_path / policy, policy=policy)
    with serve(tmp_path) as server:
        page = browser.open(server.url, width=width, scheme=scheme)
        page.wait_for("document.querySelectorAll('.card input').length === 2")
        page.evaluate("document.querySelectorAll('.card input').forEach(each => each.click())")
        page.wait_for("document.querySelector('.compare a')?.textContent === 'Compare'")
        page.evaluate("document.querySelector('.compare a').click()")
        page.wait_for("document.querySelectorAll('#loss polyline').length === 2")
        page.wait_for("document.querySelectorAll('#step-time polyline').length === 4")
        assert "less time per step than" in page.evaluate("document.querySelector('h1').innerText")
        require_whole(page, width, server.url)
        page.close()


def test_a_fault_is_said_and_marked(browser: Any, journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", stop=False)
    message = "Rank 0 did not come to step 41 <b>in time</b>."
    fault = {"v": 1, "kind": "fault", "name": "error", "t": 1.8e9, "rank": 1, "message": message}
    with (folder / "journal" / "rank-00001.jsonl").open("a") as file:
        file.write(json.dumps(fault) + "\n")
    with serve(folder) as server:
        page = browser.open(server.url, width=390)
        page.wait_for("!!document.querySelector('.card.fault')")
        said = page.evaluate("document.querySelector('.card .said').textContent")
        assert said == f"Rank 1 ended after step 40: {message}"
        page.evaluate("document.querySelector('.card a').click()")
        page.wait_for("!!document.querySelector('#loss line.event.fault')")
        assert message in page.evaluate("document.querySelector('#events li.fault').textContent")
        require_whole(page, 390, server.url)
        shutil.rmtree(folder)
        page.wait_for("document.querySelector('h1').innerText === 'This run is no longer there.'")
        page.close()


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_server_is_seen_by_its_metrics(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    registry = CollectorRegistry()
    model = ["model_name"]
    running = Gauge("equipoise_requests_running", "R.", model, registry=registry).labels("m")
    Gauge("equipoise_kv_cache_usage_ratio", "K.", model, registry=registry).labels("m").set(0.43)
    first = Histogram("equipoise_time_to_first_token_seconds", "F.", registry=registry)
    tokens = Counter("equipoise_generation_tokens", "T.", ["tenant"], registry=registry)
    sent = Counter("equipoise_context_bytes", "B.", ["variant"], registry=registry)

    def work() -> None:
        running.inc()
        first.observe(0.2)
        sent.labels("pass-q").inc(1 << 20)
        tokens.labels("search").inc(500)
        tokens.labels("<i>chat").inc(300)

    work()
    target, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    serving = Serving(f"127.0.0.1:{target.server_port}")
    serving.fetch()
    with serve(tmp_path, serving=serving) as server:
        page = browser.open(server.url, width=width, scheme=scheme)
        page.wait_for("document.querySelector('#strip')?.innerText.includes('1 running')")
        page.evaluate("document.querySelector('#strip a').click()")
        work()
        serving.fetch()
        page.wait_for("document.querySelector('.tiles')?.innerText.includes('43%')")
        work()
        serving.fetch()
        page.wait_for("document.querySelectorAll('#tenants polyline').length === 2")
        assert "<i>chat" in page.evaluate("document.querySelector('#tenants .legend').textContent")
        figures = page.evaluate("[...document.querySelectorAll('figure')].map(each => each.id)")
        assert figures == ["first-token", "queue", "tokens", "kv", "tenants", "fairness", "context"]
        require_whole(page, width, server.url)
        target.shutdown()
        target.server_close()
        thread.join()
        serving.fetch()
        page.wait_for("document.querySelector('.state')?.innerText.includes('does not answer')")
        page.close()
    with serve(serving=serving) as server:  # without a folder the server is the first page
        page = browser.open(server.url, width=width, scheme=scheme)
        page.wait_for("document.querySelector('h1')?.innerText === 'Serving'")
        page.close()


def test_a_dashboard_that_was_ended_says_so_and_comes_back(
    browser: Any, journals: ModuleType, tmp_path: Path
) -> None:
    journals.write_run(tmp_path / "run", steps=10)
    port = free_port()
    with serve(tmp_path, port=port) as server:
        page = browser.open(server.url, width=1440)
        page.wait_for("!!document.querySelector('.card')")
    trouble = "document.getElementById('trouble')"
    page.wait_for(f"{trouble}.innerText.startsWith('The dashboard does not answer')")
    assert page.evaluate("document.querySelectorAll('.card').length") == 1
    with serve(tmp_path, port=port):
        page.wait_for(f"{trouble}.hidden")
    page.close()
