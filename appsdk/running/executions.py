"""Writer of the list of executions: handlers only append to a queue, one thread does the rest.

The list follows from the log, so a recovery writes the same rows again. Rows older than a checkpoint are on disk before
that checkpoint is sent, so no row is missing after a crash (docs/decisions/0088-list-of-executions.md).
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import describe_arguments
from immortal.appsdk.effects.effect import encodable
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.state.journal import Entry, SavedTask
from immortal.appsdk.types.handles import read_extension
from immortal.protocol import decoding
from immortal.protocol.client_frames import Caller
from immortal.protocol.executions import INDEX_BITS, TIMEOUT_S, key_of_call, open_to_write

FLUSH_S = 0.25  # a commit costs as much as several rows
BATCH_MAX = 20_000
WAITING_MAX = 200_000  # limit of unwritten operations: then handlers wait for the disk
DATA_SIZE_BYTES_MAX = 64 << 10  # of arguments and of a journal: larger ones are not kept
TEXT_CHARACTERS_MAX, LABEL_CHARACTERS_MAX = 500, 256
PRUNE_EACH_S, PRUNE_ROWS = 3600.0, 2000

_ROW = """
insert into executions (key, handler, method_id, state, began_ns, ended_ns, caller, call_number, record, message,
                        arguments, data, result, journal, origin, ended_record, ended_message)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (key) do update set
    handler = excluded.handler, method_id = excluded.method_id, state = excluded.state, began_ns = excluded.began_ns,
    ended_ns = excluded.ended_ns, caller = excluded.caller, call_number = excluded.call_number,
    record = excluded.record, message = excluded.message, arguments = excluded.arguments, data = excluded.data,
    result = excluded.result, journal = excluded.journal, origin = coalesce(excluded.origin, origin), stale = 0,
    ended_record = excluded.ended_record, ended_message = excluded.ended_message
"""
_UPDATE = """
update executions set state = ?, ended_ns = ?, result = ?, journal = ?, ended_record = ?, ended_message = ?
where key = ?
"""
_PART = """
insert into parts values (?, ?, ?, ?, ?) on conflict (key, step) do update set
    attempts = iif(excluded.number > number, 1, max(attempts, excluded.attempts)),
    destination = iif(excluded.number > 0, excluded.destination, destination), number = max(number, excluded.number)
"""
_TEXT, _DATA = 10, 11  # columns of such a row
_OF_END = 3, 5, 12, 13, 15, 16


class ExecutionWriter:
    """Writer of one instance's list to ``path``. ``keep_days``: of ended executions; 0: no limit.

    ``warn`` is called once if the list can't be written; then writing stops, and the app continues. The file and the
    thread are created with the first execution.
    """

    def __init__(self, path: Path, keep_days: int, warn: Callable[[str], None]) -> None:
        self.is_new = not path.exists()  # then labels of waiting handlers are not known yet
        self._path = path
        self._keep_days = keep_days
        self._warn = warn
        self._token = int.from_bytes(os.urandom(6)) + 1  # of this process: marks rows that it has not written again
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._flush_now = threading.Event()
        self._thread: threading.Thread | None = None
        self._database: sqlite3.Connection | None = None
        self._is_broken = False
        self._prune_due_s = 0.0
        self._rows: dict[int, list[Any]] = {}  # begun in this batch: many end in it
        self._labels: list[tuple[int, str, str]] = []
        self._parts: deque[tuple[int, int, int, str, int]] = deque()  # noted, and not yet taken by the thread
        self._is_woken = False  # the thread will take these parts
        self._has_stale = False

    # --- the handlers' thread ---------------------------------------------------------------------------------------

    def note_start(self, call: SavedTask, handler: Handler[Any, Any], origin: int | None = None) -> None:
        """Note an async handler that begins, or waits for its turn."""
        self._put(self._write_start, call, handler, origin)

    def note_restart(self, number: int, handler: Handler[Any, Any], arguments: bytes) -> None:
        """Note the new arguments of continue_as."""

        def write() -> None:
            text, _ = _shown_call(handler, arguments)
            if (row := self._rows.get(number)) is not None:
                row[_TEXT], row[_DATA] = text, _clipped_data(arguments)
            else:
                values = text, _clipped_data(arguments), number
                self._execute("update executions set arguments = ?, data = ? where key = ?", values)

        self._put(write)

    def note_end(
        self,
        number: int,
        state: str,
        result: bytes | str | None,
        entries: Sequence[Entry],
        time_ns: int | None,
        place: tuple[int, int],
    ) -> None:
        """Note the end of an execution. ``result``: encoded, or a text. ``place``: record and message that ended it."""
        self._put(self._write_end, number, state, result, entries, time_ns or 0, place)

    def note_labels(self, number: int, labels: Mapping[str, str]) -> None:
        self._put(self._write_labels, number, labels)

    def note_call(self, number: int, step: int, call_number: int, destination: str) -> None:
        """Note a call that the async handler ``number`` waits for."""
        self._note_part(number, step, call_number, destination, 1)

    def note_attempts(self, number: int, step: int, attempts: int) -> None:
        """Note the number of attempts of an effect."""
        self._note_part(number, step, 0, "", attempts)

    def note_handled_call(
        self,
        context: Context,
        handler: Handler[Any, Any],
        arguments: bytes,
        caller: Caller | None,
        labels: Mapping[str, str],
        state: str,
        result: bytes | str | None,
    ) -> None:
        """Note a call of a ``def`` handler: the message of ``context``. ``caller``: None if nobody waits."""
        place, time_ns = (context.sequence_id, context.message_index), context.record_time_ns or 0
        name, number = (None, 0) if caller is None else (caller.name, caller.number)
        call = SavedTask(key_of_call(*place), 0, handler.method_id, arguments, name, number, time_ns, [], [], *place)

        def write() -> None:
            self._write_start(call, handler, None)
            self._write_labels(call.number, labels)
            self._write_end(call.number, state, result, (), time_ns, place)

        self._put(write)

    def note_restore(self, next_number: int, record: int, waiting: list[tuple[SavedTask, Handler[Any, Any]]]) -> None:
        """Note that all input after ``record`` is handled again, from async handler ``next_number`` on."""
        if waiting or self._thread is not None or self._path.exists():
            self._put(self._write_restored, next_number, record, waiting)

    def flush(self, *, is_primary: bool) -> None:
        """Wait until all operations are on disk. ``is_primary``: no replay will write rows again."""
        if self._thread is None or self._is_broken:
            return
        done = threading.Event()
        self._put(self._sync, done, is_primary)
        self._flush_now.set()
        done.wait(TIMEOUT_S)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._flush_now.set()
            self._thread.join(TIMEOUT_S)

    def _put(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._is_broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="executions", daemon=True)
            self._thread.start()
        self._queue.put((write, arguments))
        if self._queue.qsize() > WAITING_MAX:
            self.flush(is_primary=False)

    def _note_part(self, *part: *tuple[int, int, int, str, int]) -> None:
        """Note a part for the thread. There can be one for each call, so it is a plain tuple, which costs least."""
        if not self._is_broken:
            self._parts.append(part)
        if not self._is_woken:
            self._is_woken = True
            self._put(self._write_rows)
        elif len(self._parts) > WAITING_MAX:
            self.flush(is_primary=False)

    # --- the thread that writes --------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_over = False
        while not is_over:
            first = self._queue.get()
            self._flush_now.wait(FLUSH_S)
            self._flush_now.clear()
            ops = [first]
            while len(ops) < BATCH_MAX and not self._queue.empty():
                ops.append(self._queue.get())
            is_over = None in ops
            self._write([one for one in ops if one is not None])
        if self._database is not None:
            self._database.close()

    def _write(self, ops: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        try:
            if self._database is not None and not self._path.exists():  # the file was removed
                self._database.close()
                self._database = None
            if self._database is None and not self._is_broken:
                self._database = open_to_write(self._path)
            for write, arguments in ops:
                if not self._is_broken or write == self._sync:
                    write(*arguments)
            if self._database is not None and not self._is_broken:
                self._write_rows()
                self._database.commit()
            if self._database is not None and self._keep_days and (now_s := time.monotonic()) >= self._prune_due_s:
                self._prune_due_s = now_s + PRUNE_EACH_S
                self._prune()
        except (sqlite3.Error, OSError, ValueError, OverflowError) as error:
            if not self._is_broken:
                self._warn(f"warning: the list of executions is not written any more: {self._path}: {error}")
            self._is_broken = True
            for write, arguments in ops:
                if write == self._sync:
                    arguments[0].set()

    def _execute(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        assert self._database is not None
        return self._database.execute(sql, values)

    def _write_start(self, call: SavedTask, handler: Handler[Any, Any], origin: int | None) -> None:
        text, labels = _shown_call(handler, call.arguments)
        front = [call.number, handler.function.__qualname__, handler.method_id, "waiting", call.started_ns, None]
        place = [call.caller, min(call.call_number, (1 << 63) - 1), call.sequence_id, call.message_index]
        if self._has_stale:
            sql = "delete from labels where key in (select key from executions where key = ? and stale <> 0)"
            self._execute(sql, (call.number,))
        self._rows[call.number] = [*front, *place, text, _clipped_data(call.arguments), None, None, origin, None, None]
        self._write_labels(call.number, labels)

    def _write_end(
        self,
        number: int,
        state: str,
        result: bytes | str | None,
        entries: Sequence[Entry],
        time_ns: int,
        place: tuple[int, int],
    ) -> None:
        journal = _clipped_data(encoder.encode(entries)) if entries else None
        text = _shown(result) if isinstance(result, bytes) else result
        text = None if text is None else encodable(text[:TEXT_CHARACTERS_MAX])
        values = state, time_ns, text, journal, *place
        if (row := self._rows.get(number)) is not None:
            for column, value in zip(_OF_END, values, strict=True):
                row[column] = value
        else:
            self._execute(_UPDATE, (*values, number))

    def _write_labels(self, number: int, labels: Mapping[str, str]) -> None:
        self._labels += [(number, name, value) for name, value in labels.items()]

    def _write_rows(self) -> None:
        assert self._database is not None
        rows, self._rows, labels, self._labels = self._rows, {}, self._labels, []
        self._is_woken = False  # before they are taken: a later one wakes the thread again
        parts = [self._parts.popleft() for _ in range(len(self._parts))]
        self._database.executemany(_ROW, rows.values())
        self._database.executemany(_PART, parts)
        self._database.executemany("insert or replace into labels values (?, ?, ?)", labels)

    def _write_restored(
        self, next_number: int, record: int, waiting: list[tuple[SavedTask, Handler[Any, Any]]]
    ) -> None:
        self._write_rows()
        limits = self._token, next_number, -((record + 1) << INDEX_BITS)
        made = self._execute("update executions set stale = ? where key >= ? or key < ?", limits)
        self._has_stale = self._has_stale or made.rowcount > 0
        rows = self._execute("select key from executions where state = 'waiting' and stale = 0 and key > 0", ())
        known = {int(key) for (key,) in rows}
        for saved, handler in waiting:
            if saved.number not in known:
                self._write_start(saved, handler, None)
        for key in known - {saved.number for saved, _ in waiting}:  # nobody has written how they ended
            self._execute("update executions set state = 'ended' where key = ?", (key,))

    def _sync(self, done: threading.Event, is_primary: bool) -> None:
        try:
            if self._database is None:
                return
            self._write_rows()
            if is_primary and self._has_stale:
                self._delete("stale = ?", (self._token,))
                self._has_stale = False
            self._database.commit()
            self._database.execute("pragma synchronous = full")
            self._database.execute(f"pragma user_version = {int(time.time()) & 0x7FFFFFFF}")  # syncs all earlier writes
            self._database.execute("pragma synchronous = normal")
        finally:
            done.set()

    def _prune(self) -> None:
        assert self._database is not None
        oldest_ns = time.time_ns() - self._keep_days * 86_400 * 10**9
        while self._delete(f"ended_ns < ? limit {PRUNE_ROWS}", (oldest_ns,)) == PRUNE_ROWS:
            self._database.commit()
        self._database.commit()

    def _delete(self, condition: str, values: Sequence[Any]) -> int:
        keys = [(key,) for (key,) in self._execute(f"select key from executions where {condition}", values)]  # noqa: S608
        assert self._database is not None
        for table in ("labels", "parts", "executions"):
            self._database.executemany(f"delete from {table} where key = ?", keys)  # noqa: S608
        return len(keys)


def _shown_call(handler: Handler[Any, Any], arguments: bytes) -> tuple[str, dict[str, str]]:
    """Return (arguments as text without secrets, the labels that the decorator names)."""
    try:
        values = decoding.decode_shown(arguments, type=list[Any], ext_hook=read_extension)
    except (decoding.DecodeError, ValueError):
        return f"({len(arguments)} bytes)", {}
    parameters = list(handler.signature.parameters)[: len(values)]
    marked = {
        name: values[parameters.index(name)] for name in handler.labels or () if name in parameters[: len(values)]
    }
    labels = {name: str(value)[:LABEL_CHARACTERS_MAX] for name, value in marked.items() if value is not None}
    return encodable(describe_arguments(values, parameters)), labels


def _clipped_data(data: bytes) -> bytes | None:
    return data if len(data) <= DATA_SIZE_BYTES_MAX else None


def _shown(value: bytes) -> str:
    try:
        return describe_arguments((decoding.decode_shown(value, ext_hook=read_extension),))[1:-1]
    except (decoding.DecodeError, ValueError):
        return f"{len(value)} bytes"
