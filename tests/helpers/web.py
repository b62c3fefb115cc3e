"""Web server as a process, on a free port of loopback, that can be killed and restarted."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_S = 40.0


class Web:
    """uvicorn in ``folder``. The listening socket is the test's, so that the port stays the same over restarts."""

    def __init__(self, folder: Path, app: str) -> None:
        self._folder = folder
        self._app = app
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "web.log").open("a")
        self.start()

    def start(self) -> None:
        descriptor = self.listener.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", self._app, "--fd", str(descriptor), "--log-level", "warning"],
            cwd=self._folder,
            stderr=self._log,
            pass_fds=[descriptor],
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request; return the status, the body (decoded if it is JSON), and the headers in lower case."""
        connection = self.connection()
        try:
            given = None if body is None else json.dumps(body)
            connection.request(method, path, given, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
            answer = json.loads(text) if "json" in (response.getheader("content-type") or "") else text
            return response.status, answer, {name.lower(): value for name, value in response.getheaders()}
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any, dict[str, str]]:
        return self.ask("POST", path, body, {} if key is None else {"Idempotency-Key": key})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.listener.close()
        self._log.close()
