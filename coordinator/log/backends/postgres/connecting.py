"""Connections to the database of a log: its URL, and how errors of the driver become ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from coordinator.core.errors import LogError, LogFullError, LogUnavailableError

if TYPE_CHECKING:
    import psycopg

CONNECT_TIMEOUT_S = 5
_PASSWORD = re.compile(r"(//[^/?#@]*?:)[^/?#@]*@|(password=)[^&#]*")
_GONE = ("08", "57", "25006")  # connections; shut down, or another server takes over; it takes no writes any more
_DISK_FULL = ("53100", "53400")  # disk_full, configuration_limit_exceeded


class Database:
    """``location``: what stands behind ``postgresql:``, with the log's name behind a #."""

    def __init__(self, scheme: str, location: str) -> None:
        url, _, name = location.partition("#")
        self.url = f"{scheme}:{url}"
        self.log_name = unquote(name)
        self.where = _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***{'@' if found[1] else ''}", self.url)
        if name:
            self.where += f"#{name}"

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """To the server that takes writes, if there are several. Raises LogUnavailableError, LogError."""
        driver = load_driver()
        try:
            connection: psycopg.Connection[tuple[Any, ...]] = driver.connect(
                self.url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                target_session_attrs="read-write",
                application_name="immortal",
                prepare_threshold=1,
            )
            # A commit that is given up may be there all the same, and on no standby: nobody gives one up.
            connection.execute("SET statement_timeout = 0; SET lock_timeout = 0; SET idle_session_timeout = 0")
        except driver.Error as error:
            raise error_of(error, self.where) from error
        return connection


def load_driver() -> Any:
    """Raises LogError where there is none."""
    try:
        import psycopg
    except ImportError as error:
        raise LogError(f"logs in PostgreSQL need psycopg: pip install 'immortal[postgres]' ({error})") from None
    return psycopg


def error_of(error: Exception, where: str) -> LogError:
    """What an error of the driver means."""
    driver = load_driver()
    said = " ".join(str(error).split()) or type(error).__name__
    if getattr(error, "sqlstate", None) in _DISK_FULL:
        return LogFullError(f"the database of {where} is full: {said}")
    # 08: the connection; 57: shut down, or another server took over; 25006: it takes no writes any more.
    state = getattr(error, "sqlstate", None) or ""
    if (
        isinstance(error, driver.OperationalError | driver.InterfaceError)
        or state[:2] in ("08", "57")
        or state == "25006"
    ):
        return LogUnavailableError(f"the database of {where} does not answer: {said}")
    return LogError(f"the database of {where} refuses: {said}")


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Errors of the driver become ours."""
    try:
        yield
    except load_driver().Error as error:
        raise error_of(error, where) from error
