"""Real browser without a screen, and `immortal web` as a process: tests see pages as a person does."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.helpers.cli import DEADLINE_S, command_line

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or ""
PICTURES = "IMMORTAL_TEST_PICTURES"
"""Environment variable with a folder where screenshots are kept."""
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class WebServer:
    """`immortal web` in ``folder``. ``url`` has no path; ``login`` is the address that it has printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            command_line("web", *options), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.login = self.process.stdout.readline().strip()
        if not self.login:
            assert self.process.stderr is not None
            raise AssertionError(f"it did not start: {self.process.stderr.read()}")
        parts = urlsplit(self.login)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.port: int = parts.port or 0
        self.token = parts.query.removeprefix("token=")
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, dict[str, str]]:
        """Send a request; return status, text, headers in lower case. Without ``headers`` it has the token."""
        given = {"Authorization": f"Bearer {self.token}"} if headers is None else headers
        if body is not None:
            given = {"Content-Type": "application/x-www-form-urlencoded", **given}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, text, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return status


class Browser:
    """Page of a browser, and its errors."""

    def __init__(self, page: Page, server: WebServer) -> None:
        from axe_playwright_python.sync_playwright import Axe

        self.page = page
        self.server = server
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self._axe = Axe()
        page.set_default_timeout(DEADLINE_S * 500)
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.errors.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def log_in(self, server: WebServer) -> None:
        """Open the printed login address, and store its token in this tab, as if it had been typed."""
        self.page.goto(server.login)
        self.page.evaluate("token => sessionStorage.setItem('token', JSON.stringify([token, 1e15]))", server.token)

    def go(self, path: str) -> Page:
        self.page.goto(self.server.url + path)
        return self.page

    def picture(self, name: str) -> None:
        """Save a screenshot, if PICTURES names a folder."""
        if folder := os.environ.get(PICTURES):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    def findings(self) -> list[str]:
        """Return the serious and critical findings of axe-core on the current page."""
        results: Any = self._axe.run(self.page)
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in results.response["violations"]
            if one["impact"] in ("serious", "critical")
        ]

    def is_too_wide(self) -> bool:
        """Return True if the page scrolls sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@contextmanager
def browser(server: WebServer, folder: Path) -> Iterator[Browser]:
    """Yield a browser that is logged in. ``folder``: for the browser's own files."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder),
            executable_path=CHROMIUM,
            args=list(_OPTIONS),
            viewport={"width": 1280, "height": 800},
            color_scheme="light",
        )
        try:
            made = Browser(context.pages[0] if context.pages else context.new_page(), server)
            made.log_in(server)
            yield made
        finally:
            context.close()


def csrf_of(html: str) -> str:
    """Return the CSRF token of the page's form."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', html)
    assert found is not None, html
    return found[1]
