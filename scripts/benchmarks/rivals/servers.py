"""Servers that the rivals need: PostgreSQL and Restate. Each in a folder of its own, gone with it."""

from __future__ import annotations

import contextlib
import os
import pwd
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

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
RESTATE_FOLDER = ROOT / ".bench"  # where scripts/bench has npm install it
POSTGRES_SETTINGS = ("-c", "listen_addresses=", "-c", "max_connections=600")
_UNPRIVILEGED = ("postgres", "nobody")


def postgres_programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``; None: there is no PostgreSQL."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A server that nobody else reaches; the URL of its database. Its user must be able to enter ``folder``.

    Raises BenchError.
    """
    programs = postgres_programs()
    if programs is None:
        raise BenchError("there is no PostgreSQL: neither initdb in PATH nor /usr/lib/postgresql")
    as_user = _as_unprivileged()
    home = Path(tempfile.mkdtemp(prefix="immortal-postgres-", dir=folder))
    try:
        home.chmod(0o755)
        data, sockets = home / "data", home / "s"
        for made in (data, sockets):
            made.mkdir()
            if as_user:
                shutil.chown(made, as_user[2])
        _run([*as_user, str(programs / "initdb"), "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8"], home)
        with open(home / "log", "w") as log:
            server = subprocess.Popen(
                [*as_user, str(programs / "postgres"), "-D", str(data), "-k", str(sockets), *POSTGRES_SETTINGS],
                cwd=home,
                stdout=log,
                stderr=log,
            )
        try:
            ready = [str(programs / "pg_isready"), "-q", "-h", str(sockets)]  # its socket is there before
            _wait(lambda: subprocess.run(ready, check=False).returncode == 0, server, home / "log", "PostgreSQL")
            yield f"postgresql://bench@/postgres?host={sockets}"
        finally:
            _stop(server, data / "postmaster.pid")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def postgres_database(url: str, name: str) -> str:
    """A new database of the server whose database ``url`` names; its URL."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    return url.replace("/postgres?", f"/{name}?")


def restate_program() -> Path | None:
    """Return the path of restate-server; None: it is not installed."""
    program = RESTATE_FOLDER / "node_modules" / ".bin" / "restate-server"
    if program.exists():
        return _native(program)
    found = shutil.which("restate-server")
    return Path(found) if found else None


def _native(program: Path) -> Path:
    """The server itself behind npm's launcher, so that stopping it stops no launcher alone."""
    for found in sorted(RESTATE_FOLDER.glob("node_modules/@restatedev/restate-server-*/bin/restate-server")):
        return found
    return program


class Restate:
    """A server reached through Unix sockets."""

    def __init__(self, sockets: Path) -> None:
        self.ingress = sockets / "ingress.sock"
        self.admin = sockets / "admin.sock"

    def register(self, uri: str) -> None:
        """Raises BenchError."""
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
    """A server of its own. Raises BenchError."""
    program = restate_program()
    if program is None:
        raise BenchError("there is no restate-server")
    home = Path(tempfile.mkdtemp(prefix="restate-", dir=folder))  # short: Unix sockets are made in it
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


def _as_unprivileged() -> list[str]:
    """Return the prefix for a command that refuses to run as root."""
    if os.geteuid() != 0:
        return []
    runuser = shutil.which("runuser")
    if runuser is None:
        raise BenchError("PostgreSQL refuses root, and there is no runuser")
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in _UNPRIVILEGED:
        if name in known:
            return [runuser, "-u", name, "--"]
    raise BenchError("PostgreSQL refuses root, and there is no user 'postgres' or 'nobody'")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{command[-1]} ended with status {done.returncode}: {done.stderr[-500:]}")


def _wait(is_ready: Callable[[], bool], server: subprocess.Popen[bytes], log: Path, name: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"{name} did not start: {log.read_text()[-1500:]}")
        time.sleep(POLL_INTERVAL_S)


def _stop(server: subprocess.Popen[bytes], pid_file: Path) -> None:
    """SIGINT to the server itself: runuser passes no signal on."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        os.kill(int(pid_file.read_text().splitlines()[0]), 2)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
