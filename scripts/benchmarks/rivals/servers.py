"""Servers that the rivals need: PostgreSQL and Restate. Each is in a folder of its own, and removed with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.coordinator.service.process import die_with_parent
from scripts.benchmarks.context import ROOT
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
    """Return the path of restate-server; None if it is not installed."""
    program = RESTATE_FOLDER / "node_modules" / ".bin" / "restate-server"
    if program.exists():
        return _native(program)
    found = shutil.which("restate-server")
    return Path(found) if found else None


def _native(program: Path) -> Path:
    """Return the server itself instead of npm's launcher: stopping the launcher would not stop the server."""
    for found in sorted(RESTATE_FOLDER.glob("node_modules/@restatedev/restate-server-*/bin/restate-server")):
        return found
    return program


class Restate:
    """Restate server that is reached through Unix sockets."""

    def __init__(self, sockets: Path) -> None:
        self.ingress = sockets / "ingress.sock"
        self.admin = sockets / "admin.sock"

    def register(self, uri: str) -> None:
        """Register the service at ``uri``. Raises BenchError."""
        body = f'{{"uri": "{uri}"}}'.encode()
        head = "POST /deployments HTTP/1.1\r\nhost: local\r\ncontent-type: application/json\r\nconnection: close\r\n"
        answer = self._ask(self.admin, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if b" 201 " not in answer.split(b"\r\n")[0]:
            raise BenchError(f"Restate did not take the service: {answer[:500]!r}")

    def is_ready(self) -> bool:
        try:
            health = (self.admin, "/health"), (self.ingress, "/restate/health")
            return all(
                b" 200 "
                in self._ask(path, f"GET {url} HTTP/1.1\r\nhost: local\r\nconnection: close\r\n\r\n".encode()).split(
                    b"\r\n"
                )[0]
                for path, url in health
            )
        except OSError:
            return False

    @staticmethod
    def _ask(path: Path, request: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(START_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(request)
            answer = b""
            while data := connection.recv(1 << 16):
                answer += data
            return answer


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
        found: list[Path] = []

        def is_ready() -> bool:
            found[:] = [path.parent for path in home.rglob("ingress.sock")]
            return bool(found) and Restate(found[0]).is_ready()

        _wait(is_ready, server, home / "log", "Restate")
        yield Restate(found[0])
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(home, ignore_errors=True)


def _wait(is_ready: Callable[[], bool], server: subprocess.Popen[bytes], log: Path, name: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"{name} did not start: {log.read_text()[-1500:]}")
        time.sleep(POLL_INTERVAL_S)
