"""Drive a real headless Chromium over its DevTools pipe: standard library only."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

DEADLINE_S = 120.0
"""Longest wait for an answer, or for a page to be so far: cores may be busy with other tests."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)

# DevTools' pipe is descriptors 3 (commands) and 4 (answers). Ours are first moved out of the
# way of those two. A shell would do, but dash cannot name a descriptor above 9.
AS_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if program := shutil.which(name):
            return program
    raise AssertionError(
        "The browser tests need Chromium and found none on PATH. apt-get install chromium"
    )


@contextmanager
def chromium(profile: Path) -> Iterator["Browser"]:
    """A browser that ends with the block."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = [sys.executable, "-ISc", AS_3_AND_4, str(to_read), str(from_write)]
    process = subprocess.Popen(
        [*command, find_chromium(), *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        browser = Browser(to_write, from_read)
        yield browser
        browser.call("Browser.close")
        process.wait(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(from_read)


class Browser:
    """Commands out, answers and events in; each is one JSON text that ends in a null byte."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read = write, read
        self.ids = itertools.count(1)
        self.rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(deadline=time.monotonic() + DEADLINE_S, waiting_for=method)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer {waiting_for} within {DEADLINE_S:g} s"
            piece = os.read(self.read, 1 << 20)
            assert piece, f"Chromium ended before it answered {waiting_for}"
            self.rest += piece
        text, _, self.rest = self.rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def open(self, url: str, *, width: int, height: int = 900, scheme: str = "light") -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        page.call("Page.navigate", url=url)
        page.wait_for("window.reportReady === true")
        return page


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"not true in {DEADLINE_S:g} s: {expression}; {self.faults()}"
            )
            time.sleep(0.02)

    def settle(self) -> None:
        """Two frames: resize observers and redraws have run."""
        self.evaluate("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def events(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self.browser.events
            if event.get("method") == method and event.get("sessionId") == self.session
        ]

    def faults(self) -> list[Any]:
        """Exceptions, and console and browser messages of level error or warning."""
        return [
            *self.events("Runtime.exceptionThrown"),
            *(
                each
                for each in self.events("Runtime.consoleAPICalled")
                if each["type"] in ("error", "warning", "assert")
            ),
            *(
                each
                for each in self.events("Log.entryAdded")
                if each["entry"]["level"] in ("error", "warning")
            ),
        ]

    def requests(self) -> list[str]:
        return [each["request"]["url"] for each in self.events("Network.requestWillBeSent")]

    def screenshot(self, out: Path, *, full: bool = True) -> None:
        self.settle()
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        out.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
