"""Three servers of PostgreSQL: a primary and two streaming standbys; each commit waits for one of these.

:meth:`Cluster.promote_instead` and others change the primary. A former primary returns as a new copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

from immortal.coordinator.instances.registry import free_port
from immortal.coordinator.service.process import die_with_parent
from tests.helpers.postgres import user_of_servers
from tests.soak.service import wait_for

SERVERS = 3
OWNER = "owner"
SETTINGS = {
    "fsync": "on",
    "max_connections": "160",
    "shared_buffers": "16MB",
    "min_wal_size": "8MB",
    "max_wal_size": "32MB",
    "wal_keep_size": "16MB",
    "wal_retrieve_retry_interval": "200ms",
    "wal_receiver_timeout": "10s",
    "wal_sender_timeout": "10s",
    "synchronous_standby_names": f"ANY 1 ({', '.join(f'pg{number}' for number in range(SERVERS))})",
}
SEGMENT_MIB = 1  # of the write-ahead log: small, so that a full disk is reached soon


class Server:
    """Server of the cluster. ``size_mib``: of a file system of its own, in memory, which can become full (root)."""

    def __init__(self, programs: Path, number: int, folder: Path, address: str, size_mib: int | None) -> None:
        self.name = f"pg{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.port = free_port((address,), set())
        self._programs, self._address, self._user = programs, address, user_of_servers()
        self._log = folder / f"{self.name}.log"
        self._is_mounted = size_mib is not None
        if size_mib is not None:
            options = ["-t", "tmpfs", "-o", f"size={size_mib}m", "immortal-soak"]
            subprocess.run(["mount", *options, self.folder], check=True, capture_output=True)
        if self._user:
            shutil.chown(self.folder, self._user)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def place(self) -> str:
        return f"{self._address}:{self.port}"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def initialize(self, hosts: Sequence[str]) -> None:
        options = ["-U", OWNER, "-A", "trust", "-E", "UTF8", "--no-locale", f"--wal-segsize={SEGMENT_MIB}"]
        self.run("initdb", "-D", str(self.data), *options)
        with (self.data / "pg_hba.conf").open("a") as file:
            for host in hosts:
                file.write(f"host all all {host} trust\nhost replication all {host} trust\n")

    def copy(self, source: Server) -> None:
        """Copy all data of ``source``, which is running."""
        shutil.rmtree(self.data, ignore_errors=True)
        place = ["-h", self._address, "-p", str(source.port), "-U", OWNER]
        self.run("pg_basebackup", "-D", str(self.data), *place, "-c", "fast", "-X", "stream")
        (self.data / "standby.signal").touch()
        if self._user:
            shutil.chown(self.data / "standby.signal", self._user)

    def start(self, primary: str) -> None:
        """Start the server. ``primary``: the server that it follows while it is a standby."""
        settings = {**SETTINGS, "listen_addresses": self._address, "port": str(self.port), "primary_conninfo": primary}
        settings |= {"unix_socket_directories": str(self.folder), "cluster_name": self.name}
        arguments = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data, *arguments],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                user=self._user,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),
            )

    @property
    def is_up(self) -> bool:
        place = ["-h", self._address, "-p", str(self.port)]
        program = self._programs / "pg_isready"
        return subprocess.run([program, "-q", *place], check=False, cwd=self.folder).returncode == 0

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: signal.Signals = signal.SIGQUIT) -> None:
        """End the server. SIGQUIT acts as a crash: data in memory is not written."""
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def remove(self) -> None:
        self.end()
        if self._is_mounted:
            subprocess.run(["umount", "-l", self.folder], check=False, capture_output=True)

    def promote(self) -> None:
        self.run("pg_ctl", "promote", "-D", str(self.data), "-w", "-t", "60")

    def fill(self) -> None:
        """Fill the server's disk to the last byte."""
        with (self.folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def make_room(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(
            host=self._address, port=self.port, user=OWNER, dbname="postgres", autocommit=True, connect_timeout=5
        )

    def execute(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.connection() as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, user=self._user)
        assert done.returncode == 0, done.stderr

    def tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])


class Cluster:
    """Cluster as a context manager. ``address``: of all servers; ``hosts``: other hosts that can connect."""

    def __init__(
        self, programs: Path, address: str = "127.0.0.1", hosts: Sequence[str] = (), size_mib: int | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="immortal-cluster-"))
        self.folder.chmod(0o755)
        self._address, self._hosts = address, hosts
        self.servers: list[Server] = []
        self._programs, self._size_mib = programs, size_mib

    def __enter__(self) -> Cluster:
        try:
            for number in range(SERVERS):
                server = Server(self._programs, number, self.folder, self._address, self._size_mib)
                self.servers.append(server)
            self.primary, *standbys = self.servers
            self.primary.initialize(self._hosts)
            self._start(self.primary)
            for server in standbys:
                server.copy(self.primary)
                self._start(server)
            self.until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def standbys(self) -> list[Server]:
        return [server for server in self.servers if server is not self.primary]

    def url(self, user: str = OWNER) -> str:
        """Return the URL with all hosts."""
        places = ",".join(server.place for server in self.servers)
        return f"postgresql://{user}@{places}/postgres?sslmode=prefer"

    def _start(self, server: Server) -> None:
        others = [other for other in self.servers if other is not server]
        ports = ",".join(str(other.port) for other in others)
        hosts = ",".join(self._address for _ in others)
        server.start(
            f"host={hosts} port={ports} user={OWNER} application_name={server.name} target_session_attrs=read-write"
            " connect_timeout=5"
        )
        wait_for(lambda: server.is_up or not server.runs, server.tail)
        assert server.runs, server.tail()

    def restart(self, server: Server, number: signal.Signals = signal.SIGQUIT) -> None:
        server.end(number)
        self._start(server)

    def until_whole(self) -> None:
        """Wait until all servers run, and both standbys follow and have all data."""
        for server in self.servers:
            if not server.runs:
                self._start(server)

        def is_whole() -> bool:
            with contextlib.suppress(psycopg.Error):
                query = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND application_name <> ''"
                return bool(self.primary.execute(query)[0][0] >= SERVERS - 1)
            return False

        wait_for(is_whole, lambda: "both standbys follow\n" + "\n".join(one.tail() for one in self.servers))

    def fail_over(self) -> None:
        """End the primary at once, and promote the standby with most data, which has all that was acknowledged."""
        self.primary.end(signal.SIGQUIT)
        self.primary = max(self.standbys, key=_received)
        self.primary.promote()

    def promote_one_behind(self, until_more_is_done: Callable[[], None]) -> Server:
        """Promote a standby that was down during some commits, with all others down; return a complete one."""
        behind, other = self.standbys
        behind.end(signal.SIGQUIT)
        until_more_is_done()
        self.primary.end(signal.SIGQUIT)
        other.end(signal.SIGQUIT)
        self.primary = behind
        self._start(behind)
        behind.promote()
        return other

    def promote_instead(self, server: Server) -> None:
        """Promote ``server`` in place of the primary, which ends; all others return as its copies."""
        self.primary.end(signal.SIGQUIT)
        self.primary = server
        self._start(server)
        server.promote()
        self.rebuild()

    def rebuild(self) -> None:
        """Restart the servers that do not run, as copies of the primary."""
        for server in self.standbys:
            if not server.runs:
                server.copy(self.primary)
                self._start(server)


def _received(server: Server) -> int:
    query = "SELECT greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'::pg_lsn"
    return int(server.execute(query)[0][0])
