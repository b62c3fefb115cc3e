"""Queries of the page: a process each, a few at a time, ended when it takes too long."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import msgspec

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.moment import Time, parse_moment
from immortal.pipeline.sql.opening import open_sql, wrong_query
from immortal.presenters.records import cell
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.web.errors import WebError

AT_ONCE_MAX = 2  # each may replay several services
ANSWER_S = 120.0  # the first query of a large log writes its columns
SAID_CHARACTERS_MAX = 2000  # of the last words of a process that gave no answer


class _Answer(msgspec.Struct):
    found: Found | None = None
    error: str = ""


class SqlJobs:
    """For all threads."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(AT_ONCE_MAX)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, order: SqlOrder) -> Found:
        """Raises WebError."""
        if not self._room.acquire(blocking=False):
            raise WebError(f"{AT_ONCE_MAX} queries run already: try again when one of them is done", 409)
        try:
            answer = self._ask(order)
        finally:
            self._room.release()
        if answer.found is None:
            raise WebError(answer.error, 422)
        return answer.found

    def close(self) -> None:
        with self._lock:
            for process in self._running:
                _end(process)

    def _ask(self, order: SqlOrder) -> _Answer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "immortal.web.sql_jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            start_new_session=True,  # ended with the replays that it has started
        )
        with self._lock:
            self._running.add(process)
        try:
            said, complaints = process.communicate(msgspec.json.encode(order), timeout=ANSWER_S)
            return decoding.decode_json(said, type=_Answer)
        except subprocess.TimeoutExpired:
            return _Answer(error=f"it took longer than {ANSWER_S:.0f} s, and was ended: 'immortal sql' waits longer")
        except decoding.DecodeError:
            last = complaints.decode("utf-8", "replace")[-SAID_CHARACTERS_MAX:].strip()
            return _Answer(error=f"its process ended with status {process.returncode}\n{last}".strip())
        finally:
            with self._lock:
                self._running.discard(process)
            _end(process)
            process.communicate()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ``python -m immortal.web.sql_jobs``: one query of `immortal sql`, in a process of its own.
#
# Its order is JSON on stdin. What comes out is one line of JSON: {"found": {...}} or {"error": TEXT}.


ROWS_SHOWN_MAX = 500
CELL_CHARACTERS_MAX = 300
MEMORY_MB = 2048  # of the process; a query may have half of it


class SqlOrder(msgspec.Struct, frozen=True):
    """``at`` "": now. ``names`` (): all instances that have a log."""

    home: str
    query: str
    at: str = ""
    names: tuple[str, ...] = ()


class Found(msgspec.Struct):
    """``cuts``: (instance, its last record that was shown)."""

    columns: list[str]
    rows: list[list[str]]
    has_more: bool
    cuts: list[tuple[str, int]]


def run(order: SqlOrder) -> Found:
    """Raises ImmortalError."""
    at: int | Time | None = parse_moment(order.at) if order.at else None
    with open_sql(Registry(order.home), order.names, at, order.query) as database:
        import duckdb

        database.seal(MEMORY_MB // 2)
        try:
            statements = database.connection.extract_statements(order.query)
            if [one.type for one in statements] != [duckdb.StatementType.SELECT]:
                raise WebError("one query that only reads was expected, such as select ... from ...")
            made = database.run(order.query)
            rows = made.fetchmany(ROWS_SHOWN_MAX + 1)
        except duckdb.Error as error:
            raise wrong_query(error) from None
        return Found(
            [_clipped(name) for name in made.columns],
            [[_clipped(cell(value)) for value in row] for row in rows[:ROWS_SHOWN_MAX]],
            len(rows) > ROWS_SHOWN_MAX,
            [(name, cut.last) for name, cut in database.cuts.items()],
        )


def _clipped(text: str) -> str:
    """Clip a text and replace what JSON can't carry, such as half a surrogate pair."""
    shown = text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"
    return shown.encode("utf-8", "replace").decode()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what users' classes print
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, Any]
    try:
        answer = {"found": run(decoding.decode_json(sys.stdin.buffer.read(), type=SqlOrder))}
    except MemoryError:
        answer = {"error": f"it needs more than {MEMORY_MB} MiB of memory"}
    except (ImmortalError, OSError) as error:
        answer = {"error": str(error)}
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
