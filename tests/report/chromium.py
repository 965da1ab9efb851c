"""A headless Chromium through its DevTools pipe: JSON messages between zero bytes, no further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
)
QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser; `open` gives pages.

    Use it as a context manager: the process and its profile go at the end.
    """

    def __init__(self, seconds: float = 60) -> None:
        program = find()
        if program is None:
            raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
        self.seconds, self.count, self.buffer, self.events = seconds, 0, b"", []
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self.to = os.pipe()
        self.back, from_browser = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4: move ours out of the way first.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (to_browser, from_browser)]

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [program, *FLAGS, *QUIET, f"--user-data-dir={self.profile}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=connect, close_fds=False, **quiet)
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.back)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, params: dict | None = None, session: str | None = None) -> dict:
        """Send a command and wait for its answer; events that arrive meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params or {}} | (
            {"sessionId": session} if session else {}
        )
        os.write(self.to, json.dumps(message).encode() + b"\0")
        wanted, until = self.count, time.monotonic() + self.seconds
        while True:
            answer = self._read(until)
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self, until: float) -> dict:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(until - time.monotonic(), 0))
            piece = os.read(self.back, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("Chromium does not answer")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open a file, with a storage of its own, and wait until the page has drawn its figures."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, context, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        page.call("Page.navigate", {"url": Path(path).resolve().as_uri()})
        page.wait()
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, context: str, session: str) -> None:
        self.browser, self.context, self.session = browser, context, session

    def call(self, method: str, params: dict | None = None) -> dict:
        return self.browser.call(method, params, self.session)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, *, dark: bool) -> None:
        """Set what the system prefers, as a reader may do while the page is open."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def evaluate(self, script: str):
        """The value of an expression; promises are awaited, exceptions raised."""
        answer = self.call("Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True})
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self) -> None:
        """Wait until the page is loaded and has drawn its figures."""
        until = time.monotonic() + self.browser.seconds
        while not self.evaluate("document.readyState === 'complete' && 'bilipReady' in window"):
            if time.monotonic() > until:
                raise RuntimeError("the page did not load")
            time.sleep(0.05)
        self.evaluate("window.bilipReady.then(() => true)")

    def reload(self) -> None:
        self.evaluate("delete window.bilipReady")
        self.call("Page.reload")
        self.wait()

    def settle(self) -> None:
        """Wait for two frames, so that what was asked for is on the screen."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def events(self, *methods: str) -> list[dict]:
        """What happened in this tab so far."""
        return [
            e["params"]
            for e in self.browser.events
            if e.get("method") in methods and e.get("sessionId") == self.session
        ]

    def problems(self) -> list[str]:
        """Exceptions, console errors and warnings, and entries of the browser's own log."""
        thrown = [e["exceptionDetails"].get("text", "") for e in self.events("Runtime.exceptionThrown")]
        printed = [
            str(e["args"])
            for e in self.events("Runtime.consoleAPICalled")
            if e["type"] in ("error", "warning", "assert")
        ]
        logged = [
            e["entry"]["text"] for e in self.events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")
        ]
        return [*thrown, *printed, *logged]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, without those that carry their own data."""
        urls = [e["request"]["url"] for e in self.events("Network.requestWillBeSent")]
        return [u for u in urls if not u.startswith(("data:", "blob:"))]

    def screenshot(self, path: str | Path, *, clip: dict | None = None) -> None:
        """The whole page as a PNG."""
        options = {"captureBeyondViewport": True} | ({"clip": clip | {"scale": 1}} if clip else {})
        if not clip:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", options)["data"]))

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", {"browserContextId": self.context})
