"""PostgreSQL of the tests' own: from the machine's packages, on a Unix socket, with synced writes as in service."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.soak.service import wait_for

BINARIES = Path("/usr/lib/postgresql")
VERSION_MIN = 15


def binaries() -> Path | None:
    """Return the newest server that Debian's packages installed, if new enough; otherwise the one in PATH."""
    versions = [path for path in BINARIES.glob("*") if path.name.isdecimal() and int(path.name) >= VERSION_MIN]
    newest = max(versions, key=lambda path: int(path.name), default=None)
    found = None if newest is None else newest / "bin"
    if found is None and (on_path := shutil.which("initdb")) is not None:
        found = Path(on_path).resolve().parent
    return found if found is not None and (found / "initdb").exists() else None


class Postgres:
    """Server that runs until :meth:`stop`. ``folder``: of its socket and its data, within ``place``."""

    def __init__(self, programs: Path, place: Path | None = None, *settings: str) -> None:
        self._programs = programs
        self._settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="immortal-postgres-", dir=place))
        self._data = self.folder / "data"
        self._user = user_of_servers()
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._log = self.folder / "log"
        self._run("initdb", "-N", "-D", str(self._data), "-U", "owner", "-A", "trust", "-E", "UTF8", "--no-locale")
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        arguments = ["-D", str(self._data), "-k", str(self.folder), "-c", "listen_addresses=", "-c", "fsync=on"]
        arguments += self._settings
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", *arguments], stdout=log, stderr=log, cwd=self.folder, user=self._user
            )
        wait_for(self._is_up, lambda: self._log.read_text())

    def _is_up(self) -> bool:
        done = subprocess.run([self._programs / "pg_isready", "-q", "-h", self.folder], check=False, cwd=self.folder)
        return done.returncode == 0

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Stop the server. SIGINT ends connections; SIGQUIT is like a crash, with a recovery at the next start."""
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(30)
            self._server = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, instance: str = "", database: str = "postgres", **options: str) -> str:
        """Return the URL of the log of ``instance``."""
        name = re.sub(r"\W+", "-", instance)
        more = "".join(f"&{key}={quote(value)}" for key, value in options.items())
        return f"postgresql://owner@/{database}?host={self.folder}{more}{f'#{name}' if name else ''}"

    def execute(self, query: str, *values: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            user=self._user,
        )
        assert done.returncode == 0, done.stderr


def user_of_servers() -> str | None:
    """Return the user of the server, which refuses to run as root; None: the user of this process."""
    if os.geteuid() != 0:
        return None
    return "postgres" if _is_user("postgres") else "nobody"


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
