"""Who writes a log, as others may know: a lease, which its holder renews. It says when to ask for the right to write,
and nothing more: whether somebody may write, the log's head says (writing.py).

A lease counts until it has run out by the database's clock, or was given up, or its process is known to be gone: on
the holder's own machine that is seen at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from coordinator.core.errors import LogError
from coordinator.log.backends.postgres.connecting import Address, connect, is_broken, reaching
from protocol.process_file import ProcessFile, is_living, own_fields

LEASE_S = 3.0  # a machine that is gone is waited for so long
RENEW_S = 0.5
_OURS: set[str] = set()  # the nonces of this process's leases that are held


class Process(ProcessFile, frozen=True, kw_only=True):
    """Of a holder. ``space``: where its process ID means something: the boot of its machine, and its PID namespace."""

    space: str
    nonce: str


def own_process() -> Process:
    return Process(space=_space(), nonce=secrets.token_hex(8), **own_fields())


def own_name() -> str:
    """Of this process, in words."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # nobody's: the lease has to run out


def is_gone(text: str) -> bool:
    """Whether the process that a lease names is known not to be there any more."""
    try:
        process = msgspec.json.decode(text, type=Process)
    except msgspec.MsgspecError:
        return False
    if process.space != _space():
        return False
    if process.pid == os.getpid() and is_living(process):
        return process.nonce not in _OURS
    return not is_living(process)


def holder(connection: psycopg.Connection[tuple[Any, ...]], instance: str, *, lock: bool = False) -> str | None:
    """Whose lease counts now, in words. ``lock``: nobody else changes it in this transaction."""
    row = connection.execute(
        "SELECT process, holder FROM immortal.leases WHERE instance = %s AND until > clock_timestamp()"
        + (" FOR UPDATE" if lock else ""),
        [instance],
    ).fetchone()
    return None if row is None or is_gone(row[0]) else str(row[1])


def head(connection: psycopg.Connection[tuple[Any, ...]], instance: str) -> tuple[int, str]:
    """The epoch of a log, and who writes it, in words."""
    row = connection.execute(
        "SELECT epoch, holder FROM immortal.heads WHERE instance = %s AND is_there", [instance]
    ).fetchone()
    return (0, "whoever has removed it") if row is None else (row[0], row[1])


class Lease:
    """Held from :meth:`take` on. A thread renews it, on a connection of its own: appends may wait for a standby."""

    def __init__(self, address: Address) -> None:
        self.lost_to: tuple[int, str] | None = None  # the epoch of who has taken the log since, and who that is
        self._address = address
        self._process = own_process()
        self._text = msgspec.json.encode(self._process).decode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-lease", daemon=True)

    def take(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """In the transaction of ``connection`` that takes the log."""
        connection.execute(
            "INSERT INTO immortal.leases VALUES (%s, %s, %s, clock_timestamp() + make_interval(secs => %s))"
            " ON CONFLICT (instance) DO UPDATE SET process = excluded.process, holder = excluded.holder,"
            " until = excluded.until",
            [self._address.named, self._text, own_name(), LEASE_S],
        )

    def begin(self) -> None:
        """The transaction is done: renew it from here on."""
        _OURS.add(self._process.nonce)
        self._thread.start()

    def end(self, *, give_up: bool) -> None:
        """``give_up``: others need not wait until it has run out."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        _OURS.discard(self._process.nonce)
        if not give_up:
            return
        with contextlib.suppress(LogError), reaching(self._address), connect(self._address) as connection:
            connection.execute(
                "UPDATE immortal.leases SET until = '-infinity' WHERE instance = %s AND process = %s",
                [self._address.named, self._text],
            )

    def _run(self) -> None:
        connection: psycopg.Connection[tuple[Any, ...]] | None = None
        while not self._ended.wait(RENEW_S):
            with contextlib.suppress(LogError):  # the next time, or the lease runs out: no append stands on it
                if connection is None or is_broken(connection):
                    connection = connect(self._address)
                    connection.execute("SET synchronous_commit = off")  # nothing is lost with it
                with reaching(self._address):
                    renewed = connection.execute(
                        "UPDATE immortal.leases SET until = clock_timestamp() + make_interval(secs => %s)"
                        " WHERE instance = %s AND process = %s",
                        [LEASE_S, self._address.named, self._text],
                    )
                    if not renewed.rowcount:
                        self.lost_to = head(connection, self._address.named)
        if connection is not None:
            connection.close()
