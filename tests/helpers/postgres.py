"""A PostgreSQL server of the test's own, from the system's packages: at a Unix socket, with its data in a folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

WAIT_S = 60


def programs() -> Path | None:
    """The folder of the newest server that is installed; None: there is none, or nobody to run it as."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found or int(found[-1].parts[-3]) < 15:
        return None
    if os.geteuid() == 0 and not any(entry.pw_name == "postgres" for entry in pwd.getpwall()):
        return None
    return found[-1].parent


class Server:
    """Runs until :meth:`close`. ``url``: of its database, as its superuser."""

    def __init__(self) -> None:
        found = programs()
        if found is None:
            pytest.skip("no PostgreSQL 15 or newer: install the package 'postgresql'")
        self._programs = found
        self._as: list[str] = []
        self.folder = folder = Path(tempfile.mkdtemp(prefix="immortal-pg-"))  # short: a socket's path is in it
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        self._run("initdb", "-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(
                f"listen_addresses = ''\nunix_socket_directories = '{folder}'\nmax_connections = 60\n"
                "shared_buffers = 32MB\n"
            )
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self.start()

    def start(self) -> None:
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-l", log, "-w", "-t", str(WAIT_S), "start")

    def stop(self, mode: str = "immediate") -> None:
        """``mode``: "fast" ends the sessions, "immediate" is a crash."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", mode, "-w", "-t", str(WAIT_S), "stop")

    def close(self) -> None:
        """For good."""
        self.stop()
        shutil.rmtree(self.folder)

    def kill(self) -> None:
        """kill -9 of the postmaster alone; its children end by themselves."""
        os.kill(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
