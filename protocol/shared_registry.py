"""Registry that many machines share: rows of a database, and on each machine a folder that is their copy.

A registry's readers read files. If ``IMMORTAL_HOME`` is a URL, the files are in the folder that ``IMMORTAL_LOCAL``
names (".immortal"). This folder is a copy; its file ORIGIN_FILE_NAME names the original. These files are shared, all
others in the folder (private keys, sockets, logs in folders) belong to the machine alone:

NAME.toml             the settings
NAME/public_keys      the public keys of all machines that have keys for NAME. The lease holder's keys are first: those
                      of the endpoint in the lease, and among equal endpoints those of the holder's host
NAME/upgrade.json     the requested upgrade
NAME/endpoint         the endpoint in the lease of its log, and the lease holder in words, one line each; only the
                      database writes it

A change goes to the database first, then into the copies. Without the database, readers use the copy's last state.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from immortal.protocol import distribution
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import PUBLIC_FILE_MODE, acquire_lock, make_folder, open_lock, replace_file
from immortal.protocol.process import at_fork, disown_in_child

if TYPE_CHECKING:
    from psycopg import Connection

HOME_VARIABLE = "IMMORTAL_HOME"
HOME_DEFAULT = ".immortal"
LOCAL_VARIABLE = "IMMORTAL_LOCAL"
chosen_home: str | os.PathLike[str] | None = None
"""Home that the caller has chosen for this process: a folder, or a URL; None: HOME_VARIABLE decides."""
ORIGIN_FILE_NAME = ".origin"
SETTINGS, PUBLIC_KEYS, UPGRADE, ENDPOINT = "settings", "public_keys", "upgrade", "endpoint"
LEASES_CHANNEL = "immortal"  # of immortal.coordinator.log.backends.postgres.connections
CHANNEL = "immortal_registry"
POLL_S = 1.0  # between two pulls if the database announces nothing
RETRY_S = 0.5  # between two attempts to reach a database that does not answer
LOCK_TIMEOUT_S = 10.0  # a change takes milliseconds
_CHANGES = 0x72656769  # number of the advisory lock that is held during a change
_FILE_NAMES = {PUBLIC_KEYS: "public_keys", UPGRADE: "upgrade.json", ENDPOINT: "endpoint"}
PARTS = {file_name: part for part, file_name in _FILE_NAMES.items()}
_LOCK_FILE_NAME = ".copy_lock"
_LOCAL_HOST = re.compile(r"$|[/@]|localhost$|127\.|::1$")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # checked, since it becomes the name of a file
_SEEN = """
SELECT (SELECT coalesce(max(revision), 0) FROM immortal.registry), (SELECT count(*) FROM immortal.registry),
    (SELECT md5(string_agg(concat_ws(' ', instance, endpoint, holder), chr(10) ORDER BY instance)) FROM immortal.leases)
"""
_ROWS = """
SELECT r.instance, r.part, r.content FROM immortal.registry r LEFT JOIN immortal.leases l USING (instance)
    ORDER BY r.instance, r.part, (r.endpoint <> '' AND r.endpoint = l.endpoint) IS NOT TRUE,
        starts_with(l.holder, r.host || ' (process ') IS NOT TRUE, r.machine
"""
_LEASES = "SELECT instance, endpoint, holder FROM immortal.leases WHERE endpoint <> ''"
_PUT = """
INSERT INTO immortal.registry AS r (instance, part, machine, host, content) VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (instance, part, machine) DO UPDATE SET content = excluded.content, host = excluded.host,
    revision = nextval('immortal.registry_revisions'), changed = clock_timestamp()
"""


class SharedHomeError(ImmortalError):
    """Raised if the registry of a database can't be read or changed, or its copy can't be updated here."""


def is_url(home: object) -> bool:
    return isinstance(home, str) and _URL.match(home) is not None


def folder_of(home: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the registry ``home`` (None: IMMORTAL_HOME, .immortal); for a URL the local copy, updated.

    Raises SharedHomeError if there is no copy yet and the database does not answer.
    """
    home = home or os.environ.get(HOME_VARIABLE) or HOME_DEFAULT
    if not isinstance(home, str) or not is_url(home):
        return Path(home).absolute()
    copy = _open_copy(home, Path(os.environ.get(LOCAL_VARIABLE) or HOME_DEFAULT).absolute())
    copy.refresh()
    return copy.folder


def copy_of(folder: Path) -> Copy | None:
    """Return the copy in ``folder``; None if the folder is a registry of its own. Raises SharedHomeError."""
    folder = folder.absolute()
    try:
        url, machine = (folder / ORIGIN_FILE_NAME).read_text("utf-8").split()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise SharedHomeError(f"{folder / ORIGIN_FILE_NAME} can't be read ({error}): restore it") from None
    with _GUARD:
        known = _COPIES.get(folder)  # a process has one copy object, which knows the change in progress
        if known is None or (database_of(known.url), known.machine) != (database_of(url), machine):
            known = _COPIES[folder] = Copy(url, folder, machine)
        return known


def share(url: str, folder: Path, files: dict[tuple[str, str], str]) -> Copy:
    """Store ``files``, by (name, part), in the database, and make ``folder`` its copy. Raises SharedHomeError."""
    copy = Copy(url, folder, secrets.token_hex(8))
    names = {name for name, _ in files}
    with copy._connected() as connection, connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_CHANGES])
        there = connection.execute("SELECT DISTINCT instance FROM immortal.registry").fetchall()
        if both := sorted(names & {name for (name,) in there}):
            raise SharedHomeError(f"{url} has {', '.join(both[:5])} already: nothing was brought there")
        for (name, part), text in files.items():
            copy._insert(connection, name, part, text)
    copy.refresh()
    return copy_of(folder) or copy


def path_in(folder: Path, name: str, part: str) -> Path:
    """Return the path of the file ``part`` of ``name``."""
    return folder / (f"{name}.toml" if part == SETTINGS else f"{name}/{_FILE_NAMES[part]}")


def _open_copy(url: str, folder: Path) -> Copy:
    """Return the copy of ``url`` in ``folder``. Raises SharedHomeError if the folder holds something else."""
    if not url.startswith("postgresql://"):
        raise SharedHomeError(f"{url!r} is no place of a registry: a folder was expected, or postgresql://...")
    copy = copy_of(folder)
    if copy is None:
        own = sorted(file.stem for file in folder.glob("*.toml")) if folder.is_dir() else []
        if own:
            raise SharedHomeError(
                f"{folder} is a registry of its own, with {', '.join(own[:5])}: 'immortal --home {folder} registry copy"
                f" --to URL' brings it into the database; or let {LOCAL_VARIABLE} name another folder for this machine"
            )
        return Copy(url, folder, secrets.token_hex(8))
    if database_of(copy.url) != database_of(url):
        raise SharedHomeError(
            f"{folder} is this machine's part of the registry {copy.url}, not of {url}: let {LOCAL_VARIABLE} name"
            " another folder"
        )
    if copy.url != url:  # the same database with another role
        copy.url = url
        copy.mark_folder()
    return copy


class Copy:
    """Local copy of the registry in the database ``url``. ``machine``: an ID of its folder, random, for the database.

    ``problem``: why the copy is not up to date; "" if it is. Methods raise SharedHomeError.
    """

    def __init__(self, url: str, folder: Path, machine: str) -> None:
        self.url, self.folder, self.machine = url, folder, machine
        self.problem = ""
        self.changes = 0  # number of pulls that found news
        self._lock = threading.RLock()
        self._connection: Connection[tuple[Any, ...]] | None = None  # of the change in progress
        self._seen: tuple[object, ...] | None = None
        self._sync_thread: _SyncThread | None = None
        self._sync_users = 0

    def path(self, name: str, part: str) -> Path:
        return path_in(self.folder, name, part)

    def log_of(self, name: str) -> str:
        """Return the URL of the log of ``name`` in the same database."""
        return f"{self.url}#{name}"

    def has_log(self, name: str, log: str) -> bool:
        """Return True if ``log`` is in the same database, whatever role the URLs connect as."""
        return database_of(log) == database_of(self.log_of(name))

    def endpoint(self, name: str, log: str) -> str | None:
        """Return the endpoint of ``name`` in the lease of ``log``; None if there is none, or another database has it.

        The log's URL can have another host: a database of the same name counts if it has a lease of ``name``.
        """
        ours, theirs = urlsplit(self.url), urlsplit(log)
        if (ours.scheme, ours.path, name) != (theirs.scheme, theirs.path, theirs.fragment or name):
            return None
        return next(iter(_lease(self.path(name, ENDPOINT))), None)

    def mark_folder(self) -> None:
        """Mark the folder as a copy. Raises OSError."""
        replace_file(self.folder / ORIGIN_FILE_NAME, f"{self.url}\n{self.machine}\n".encode(), mode=PUBLIC_FILE_MODE)

    # --- from the database -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Update the copy. If a copy exists and the database does not answer, set ``problem`` instead of raising."""
        if self._sync_thread is not None:
            return
        try:
            with self._connected() as connection:
                self.pull(connection)
        except SharedHomeError as error:
            if not (self.folder / ORIGIN_FILE_NAME).exists():
                raise
            self.problem = str(error)

    def pull(self, connection: Connection[tuple[Any, ...]]) -> None:
        """Pull changes, one process of the machine at a time, so that no older state replaces a newer one."""
        with self._lock, self._files_locked():
            seen, rows, leases = self._read(connection)
            self.problem = ""
            if seen is not None and seen == self._seen:
                return
            wanted: dict[Path, str] = {}
            for name, part, content in rows:
                if _NAME.fullmatch(name) and not name.endswith(".toml") and part in (SETTINGS, *_FILE_NAMES):
                    path = self.path(name, part)
                    wanted[path] = wanted.get(path, "") + content
            names = {name for name, part, _ in rows if part == SETTINGS}
            # The endpoint is last: a reader that sees a move finds the keys already in the matching order.
            wanted |= {self.path(name, ENDPOINT): f"{at}\n{holder}\n" for name, at, holder in leases if name in names}
            self._write(wanted, {self.path(name, ENDPOINT) for name in names})
            self._seen = seen
            self.changes += 1  # even if another process of this machine wrote the files first

    def _read(self, connection: Connection[tuple[Any, ...]]) -> tuple[tuple[object, ...] | None, list[Any], list[Any]]:
        from psycopg import IsolationLevel, errors

        try:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            with connection.transaction():
                seen = connection.execute(_SEEN).fetchone()
                if seen == self._seen:
                    return seen, [], []
                return seen, connection.execute(_ROWS).fetchall(), connection.execute(_LEASES).fetchall()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            return None, [], []  # nothing is registered there yet
        finally:
            if not connection.closed:
                connection.isolation_level = None

    def _write(self, wanted: dict[Path, str], spared: set[Path]) -> None:
        """Write the files of ``wanted``; remove the others except ``spared``."""
        there = {self.path(file.stem, SETTINGS) for file in self.folder.glob("*.toml")}
        for file_name in _FILE_NAMES.values():
            there.update(self.folder.glob(f"*/{file_name}"))
        has_changed = False
        try:
            for path, text in wanted.items():
                if path not in there or path.read_text("utf-8") != text:
                    make_folder(path.parent)
                    replace_file(path, text.encode(), mode=PUBLIC_FILE_MODE)
                    has_changed = True
            for path in there - wanted.keys() - spared:
                path.unlink(missing_ok=True)
                has_changed = True
            if has_changed:
                os.utime(self.folder)  # all coordinators of this machine poll its modification time
        except (OSError, UnicodeDecodeError) as error:
            raise SharedHomeError(f"the copy of the registry in {self.folder} can't be written: {error}") from None

    @contextlib.contextmanager
    def _files_locked(self) -> Iterator[None]:
        try:
            make_folder(self.folder)
            if not (self.folder / ORIGIN_FILE_NAME).exists():
                self.mark_folder()
            descriptor = open_lock(self.folder / _LOCK_FILE_NAME)
        except OSError as error:
            raise SharedHomeError(f"{self.folder} can't hold a copy of the registry: {error}") from None
        try:
            acquire_lock(descriptor, LOCK_TIMEOUT_S)
            yield
        except BlockingIOError:
            raise SharedHomeError(f"another process keeps {self.folder} locked: end it") from None
        finally:
            os.close(descriptor)

    # --- to the database ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[Connection[tuple[Any, ...]]]:
        """Lock the registry against all machines for one change, and update the copy first."""
        with self._lock:
            if self._connection is not None:
                yield self._connection
                return
            with self._connected() as connection:
                connection.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_S:g}s'")
                connection.execute("SELECT pg_advisory_lock(%s)", [_CHANGES])
                self.pull(connection)
                self._connection = connection
                try:
                    yield connection
                finally:
                    self._connection = None

    def write_file(self, name: str, part: str, text: str | None) -> None:
        """Write one file, in the database and here. ``text`` None removes it.

        For public keys, a text replaces this machine's keys; None removes the keys of all machines.
        """
        with self.changing() as connection:
            with connection.transaction():
                if text is None:
                    connection.execute("DELETE FROM immortal.registry WHERE instance = %s AND part = %s", [name, part])
                else:
                    self._insert(connection, name, part, text)
                connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, name])
            self.pull(connection)

    def _insert(self, connection: Connection[tuple[Any, ...]], name: str, part: str, text: str) -> None:
        machine = self.machine if part == PUBLIC_KEYS else ""
        connection.execute(_PUT, [name, part, machine, socket.gethostname(), text])

    def announce(self, name: str, endpoint: str) -> None:
        """Store this machine's endpoint of ``name``, so that peers try this machine's key first."""
        with self._connected() as connection:
            connection.execute(
                "UPDATE immortal.registry SET endpoint = %s, host = %s,"
                " revision = nextval('immortal.registry_revisions')"
                " WHERE instance = %s AND part = %s AND machine = %s AND endpoint <> %s",
                [endpoint, socket.gethostname(), name, PUBLIC_KEYS, self.machine, endpoint],
            )
            connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, name])

    def machines(self, name: str) -> list[tuple[str, str, str]]:
        """Return the machines with keys for ``name``: ID, host, and the last endpoint there."""
        with self._connected() as connection:
            return connection.execute(
                "SELECT machine, host, endpoint FROM immortal.registry WHERE instance = %s AND part = %s"
                " ORDER BY host, machine",
                [name, PUBLIC_KEYS],
            ).fetchall()

    def revoke_keys(self, name: str, machine: str) -> bool:
        """Revoke the keys of ``name`` on ``machine``; return True if there were any."""
        with self.changing() as connection:
            gone = connection.execute(
                "DELETE FROM immortal.registry WHERE instance = %s AND part = %s AND machine = %s",
                [name, PUBLIC_KEYS, machine],
            )
            connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, name])
            self.pull(connection)
            return bool(gone.rowcount)

    # --- continuously ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Keep the copy up to date inside this context, by the database's notifications and by polling."""
        self.start_sync()
        try:
            yield
        finally:
            self.stop_sync()

    def start_sync(self) -> None:
        with _GUARD:
            self._sync_users += 1
            if self._sync_thread is None:
                self._sync_thread = _SyncThread(self)

    def stop_sync(self) -> None:
        with _GUARD:
            self._sync_users -= 1
            if not self._sync_users and self._sync_thread is not None:
                self._sync_thread.close()
                self._sync_thread = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection[tuple[Any, ...]]]:
        """Connect to the database, and turn its failures into SharedHomeError."""
        try:
            import psycopg
            from psycopg import errors
        except ImportError:
            extra = distribution.add_extra("postgres")
            raise SharedHomeError(f"a registry in PostgreSQL needs psycopg: {extra}") from None
        try:
            with _connect(self.url) as connection:
                yield connection
        except (errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedColumn):
            raise SharedHomeError(
                f"the database {self.url} has no registry yet: 'immortal register NAME' begins one in an empty"
                " database, 'immortal --home FOLDER log upgrade NAME' brings an older schema there"
            ) from None
        except errors.LockNotAvailable:
            raise SharedHomeError(
                f"the registry {self.url} is being changed, for more than {LOCK_TIMEOUT_S:g} s: try again"
            ) from None
        except errors.InsufficientPrivilege as error:
            raise SharedHomeError(
                f"the database {self.url} refuses it: {error.diag.message_primary}; to read the registry a role needs"
                " immortal_reader, to change it immortal_writer, or 'immortal registry role' for this name"
            ) from None
        except psycopg.Error as error:
            raise SharedHomeError(f"the registry {self.url} does not answer: {error_line(error)}") from None


class _SyncThread:
    """Thread that keeps a copy up to date for :meth:`Copy.synchronized`, with its own connection."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        os.close(self._wake)

    def close(self) -> None:
        """End the thread; a connection attempt can delay its end."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                with self._copy._connected() as connection:
                    self._follow(connection)
            except SharedHomeError as error:
                self._copy.problem = str(error)
            if not self._is_closed:
                select.select([self._wake], [], [], RETRY_S)

    def _follow(self, connection: Connection[tuple[Any, ...]]) -> None:
        connection.execute(f"LISTEN {LEASES_CHANNEL}")
        connection.execute(f"LISTEN {CHANNEL}")
        while not self._is_closed:
            due_s = time.monotonic() + POLL_S
            self._copy.pull(connection)
            while not self._is_closed and (rest_s := due_s - time.monotonic()) > 0:
                if list(connection.notifies(timeout=0)):
                    break
                select.select([connection.fileno(), self._wake], [], [], rest_s)


_COPIES: dict[Path, Copy] = {}
_GUARD = threading.Lock()


def _reset_in_child() -> None:
    """Drop the copies in a forked child, which must open its own: connections and threads belong to the parent."""
    global _GUARD
    _GUARD = threading.Lock()
    disown_in_child(*_COPIES.values())
    _COPIES.clear()


at_fork(_reset_in_child)


def database_of(url: str) -> str:
    """Remove the role from a database's URL."""
    return re.sub("//[^/@]*@", "//", url, count=1)


def as_role(url: str, role: str) -> str:
    """Return a database's URL with ``role`` as the connecting role."""
    return database_of(url).replace("//", f"//{quote(role, safe='')}@", 1)


def with_ssl_mode(parameters: dict[str, Any]) -> dict[str, Any]:
    """Add sslmode verify-full for a remote server, unless the parameters or PGSSLMODE choose otherwise.

    ``parameters``: a connection's parameters in libpq's words.
    """
    named = ("host", "PGHOST", "hostaddr", "PGHOSTADDR")
    hosts = next(filter(None, (parameters.get(key) or os.environ.get(key) for key in named)), "").split(",")
    if "service" in parameters or "PGSSLMODE" in os.environ or all(map(_LOCAL_HOST.match, hosts)):
        return parameters
    return {"sslmode": "verify-full", **parameters}


def writer_parameters(parameters: dict[str, Any], application: str) -> dict[str, Any]:
    """Return psycopg's arguments that connect to the server that accepts writes, among several hosts.

    A connection counts as broken after 10 s of silence on the wire. A live server that waits for its standbys is not
    silent, since TCP answers. ``parameters``: a connection's parameters in libpq's words.
    """
    return {"connect_timeout": 5, **with_ssl_mode(parameters)} | {
        "application_name": application,
        "target_session_attrs": "read-write",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
        "client_encoding": "UTF8",
        "autocommit": True,
    }


def error_line(error: Exception) -> str:
    """Shorten an error of libpq to one line; it has a line for each host that was tried, and hints."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hint = "; a server elsewhere needs TLS and a certificate for its name, unless its URL has ?sslmode=..."
    said = "; ".join(dict.fromkeys(lines[:3])) or type(error).__name__
    return said + hint * ("SSL" in said or "certificate" in said)


def last_holder(folder: Path) -> str:
    """Describe the last holder of the instance of ``folder``, with its endpoint; "" if unknown here."""
    match _lease(folder / _FILE_NAMES[ENDPOINT]):
        case [endpoint, holder]:
            return f"{holder} had it last, at {endpoint}"
    return ""


def _lease(path: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").splitlines()
    return []


def _connect(url: str) -> Connection[tuple[Any, ...]]:
    """Connect to the server that accepts writes. Raises psycopg's errors, SharedHomeError."""
    import psycopg
    from psycopg import conninfo

    try:
        parameters: dict[str, Any] = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise SharedHomeError(f"{url!r} is no URL of a database: {error}") from None
    if parameters.get("password") or "#" in url:
        raise SharedHomeError(
            "the URL of a registry is one of a database, without a password and without '#NAME': passwords are written"
            " into ~/.pgpass (or the file that PGPASSFILE names)"
        )
    connection: Connection[tuple[Any, ...]] = psycopg.connect(**writer_parameters(parameters, "immortal registry"))
    try:
        # A confirmed registration must survive, whatever the server's settings.
        connection.execute("SET synchronous_commit = on")
    except BaseException:
        connection.close()
        raise
    return connection
