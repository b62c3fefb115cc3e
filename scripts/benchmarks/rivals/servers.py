"""Servers that the rivals need: PostgreSQL and Restate. Each is in a folder of its own, and removed with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.coordinator.service.process import die_with_parent
from scripts.benchmarks.machine import ROOT
from tests.helpers.postgres import Postgres, binaries

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
RESTATE_FOLDER = ROOT / ".bench"  # scripts/bench installs it there with npm
POSTGRES_SETTINGS = ("-c", "max_connections=600")


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a private server, and yield the URL of its database. The server's user must be able to enter ``folder``.

    Raises BenchError.
    """
    programs = binaries()
    if programs is None:
        raise BenchError("there is no PostgreSQL: neither initdb in PATH nor /usr/lib/postgresql")
    server = Postgres(programs, folder, *POSTGRES_SETTINGS)
    try:
        yield server.url()
    finally:
        server.remove()


def postgres_database(url: str, name: str) -> str:
    """Create a database on the server of the database ``url``; return its URL."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    return url.replace("/postgres?", f"/{name}?")


def restate_program() -> Path | None:
    """Return the path of restate-server; None if it is not installed. Of npm's it is the server itself instead of the
    launcher: stopping the launcher would not stop the server."""
    native = sorted(RESTATE_FOLDER.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
    found = native[0] if native else shutil.which("restate-server")
    return Path(found) if found else None


class Restate:
    """Restate server that is reached through Unix sockets."""

    def __init__(self, sockets: Path) -> None:
        self.ingress = sockets / "ingress.sock"
        self.admin = sockets / "admin.sock"

    def register(self, uri: str) -> None:
        """Register the service at ``uri``. Raises BenchError."""
        status, answer = self._request(self.admin, "POST", "/deployments", json.dumps({"uri": uri}))
        if status != HTTPStatus.CREATED:
            raise BenchError(f"Restate did not take the service: {answer[:500]!r}")

    def is_ready(self) -> bool:
        try:
            health = (self.admin, "/health"), (self.ingress, "/restate/health")
            return all(self._request(path, "GET", url)[0] == HTTPStatus.OK for path, url in health)
        except OSError:
            return False

    @staticmethod
    def _request(path: Path, method: str, url: str, body: str | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection("local", timeout=START_TIMEOUT_S)
        with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.settimeout(START_TIMEOUT_S)
            connection.sock.connect(str(path))
            connection.request(method, url, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()


@contextlib.contextmanager
def restate(folder: Path) -> Iterator[Restate]:
    """Run a Restate server. Raises BenchError."""
    program = restate_program()
    if program is None:
        raise BenchError("there is no restate-server")
    home = Path(tempfile.mkdtemp(prefix="restate-", dir=folder))  # short: it holds Unix sockets
    with open(home / "log", "w") as log:
        server = subprocess.Popen(
            [str(program), "--no-logo", "--node-name", "n", "--base-dir", str(home / "d"), "--listen-mode", "unix"],
            cwd=home,
            stdout=log,
            stderr=log,
            env={**os.environ, "RESTATE_DISABLE_TELEMETRY": "true"},
            preexec_fn=die_with_parent(os.getpid()),
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for ingress in home.rglob("ingress.sock"):
                if (found := Restate(ingress.parent)).is_ready():
                    yield found
                    return
            if server.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"Restate did not start: {(home / 'log').read_text()[-1500:]}")
            time.sleep(POLL_INTERVAL_S)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(home, ignore_errors=True)
