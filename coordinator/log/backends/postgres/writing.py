"""The log open for writing: one append is one round trip, which changes the log's head or nothing.

The head of a log has its epoch, how many appends its writer has done in it, the last record, and who writes. An append
says what it expects there. Who takes the log over raises the epoch: both change one row, so one of them comes first,
and no clock has a part in it.

A connection that breaks during an append leaves it unknown whether it was done; and the server may still be at it. So
the writer takes the log over from itself: once the epoch is one higher, that append was done or never will be, and the
count of appends says which.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psycopg

from coordinator.core.errors import FencedError, LogError, LogLockedError, LogUnavailableError, fail, require
from coordinator.core.interfaces import Standby
from coordinator.fault_points import armed, reach
from coordinator.log.backend import Append, Backend, Options, Row, Space, Span
from coordinator.log.backends.postgres import lease as leases
from coordinator.log.backends.postgres.chunks import CHUNKS, ChunkUploads, Pointer
from coordinator.log.backends.postgres.connecting import Address, Connections, connect, is_broken, reaching
from coordinator.log.backends.postgres.durability import Durability
from coordinator.log.backends.postgres.packing import packs
from coordinator.log.backends.postgres.view import RECORDS, SEQUENCE_ID_MAX, PostgresView, viewing
from coordinator.log.meta import read_identity

STATEMENT_SIZE_BYTES_MAX = 32 << 20  # of rows; a larger append is several statements of one transaction
ROWS_MAX = 20_000  # in a statement
MEASURED_S = 10.0  # the rows of a log are summed up, which takes as long as it has rows
UNKNOWN_FREE_BYTES = 1 << 60  # a database does not say what its disk has left

_APPEND = "SELECT * FROM immortal.append(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
CHANGE = "SELECT immortal.change(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"


class PostgresBackend(Backend):
    """``synced`` is told what each append took: the round trip, and the server's sync in it."""

    is_remote = True

    def __init__(self, address: Address, instance_name: str, options: Options) -> None:
        """Raises LogLockedError, LogFormatError, LogIdentityError, LogUnavailableError, LogError."""
        self.where = address.where
        self.mended: list[str] = []
        self.synced: Callable[[float], None] | None = None
        self._address = address
        self._instance = address.named
        self._lock = threading.Lock()
        self._readers = Connections(address)
        self._measured: tuple[float, int] | None = None
        self._appends_count = 0  # done in this epoch
        self._is_unknown = False  # whether one more was
        self._is_warned = False  # during an append
        self._is_given_up = self._is_ended = False
        self._lease = leases.Lease(address, options.lease_s, options.endpoint)
        self._chunks = ChunkUploads(options.checkpoints_to, address.named)
        self._has_objects = bool(options.checkpoints_to)
        self._connection = self._connected()
        try:
            with reaching(address):
                self.durability = Durability.of(self._connection)
                self.durability.check(self.where, allow_data_loss=options.allow_data_loss)
                with viewing(self._readers, self._instance) as view:
                    self.identity = read_identity(view, self.where, instance_name)
                self.fence = self._take()
                with viewing(self._readers, self._instance) as view:
                    named = {pointer.name for pointer in view.pointers()}
                self._has_objects = self._has_objects or bool(named)
                self._chunks.collect(named, self.fence)
        except BaseException:
            self._chunks.close()
            self._connection.close()
            self._readers.close()
            raise
        self._lease.begin()

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        connection = connect(self._address)
        connection.add_notice_handler(self._take_notice)
        return connection

    def _take_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """A wait for standbys that somebody has cut off is answered as done, with a warning."""
        self._is_warned = self._is_warned or notice.severity_nonlocalized == "WARNING"

    def _take(self) -> int:
        """The log, from whoever had it: whose lease counts no more. Its epoch."""
        connection = self._connection
        with connection.transaction():
            if (held := leases.holder(connection, self._instance, lock=True)) is not None:
                raise LogLockedError(f"the log {self.where} is in use by {held.name}")
            self._lease.take(connection)
            row = connection.execute(
                "UPDATE immortal.heads SET epoch = epoch + 1, appends_count = 0, holder = %s"
                " WHERE instance = %s AND is_there RETURNING epoch",
                [leases.own_name(), self._instance],
            ).fetchone()
            require(row is not None, f"a log without a head: {self.where}")
        assert row is not None
        return int(row[0])

    def view(self, *, copies: bool = False) -> AbstractContextManager[PostgresView]:
        self.refuse_after_failure()
        return viewing(self._readers, self._instance)

    def is_live(self) -> bool:
        return True

    @property
    def problem(self) -> str:  # type: ignore[override]  # as the next one
        return self._chunks.problem

    @property
    def standbys(self) -> Sequence[Standby]:  # type: ignore[override]  # it only ever is read
        return self._lease.standbys

    @property
    def lost(self) -> FencedError | None:
        lost_to = self._lease.lost_to
        return None if lost_to is None else fenced(self.where, *lost_to)

    # --- appending ----------------------------------------------------------------------------------------------------

    def append(self, append: Append) -> None:
        with self._lock:
            self.refuse_after_failure()
            if self._is_unknown:
                raise LogUnavailableError(f"what became of the last append to {self.where} is not known yet")
            started_s = time.perf_counter()
            gone = self._objects_of(append.deletes)
            append = self._chunks.outward(append, self.fence)
            parts = list(statements(append))
            self._is_warned = False
            try:
                with reaching(self._address):
                    answer = self._send(append, parts)
                if self._is_warned:
                    raise LogUnavailableError(f"the database {self.where} has not waited for its standbys")
            except LogUnavailableError:
                self._is_unknown = True
                raise
            except LogError as error:  # the server has refused it: nothing of it is there
                self.failure = error
                raise
            self._check(append, answer)
            self._appends_count += 1
            self._chunks.remove(gone)
            if self.synced is not None:
                self.synced(time.perf_counter() - started_s)

    def _objects_of(self, spans: Sequence[Span]) -> list[Pointer]:
        """Of the chunks that go."""
        chunks = [span for span in spans if span.table == CHUNKS] if self._has_objects else []
        if not chunks:
            return []
        with viewing(self._readers, self._instance) as view:
            return [pointer for span in chunks for pointer in view.pointers(span.first, span.end)]

    def _send(self, append: Append, parts: list[list[object]]) -> tuple[Any, ...]:
        connection, first = self._connection, parts[0]
        last = append.records[-1][0] if append.records else append.expected_last_sequence_id
        for span in append.deletes:
            if span.table == RECORDS and span.end is None:  # by hand: the log ends before it
                last = min(last, int.from_bytes(span.first.ljust(8, b"\0"), "big") - 1)
        head = [self._instance, append.fence, self._appends_count + 1, append.expected_last_sequence_id, last]
        with contextlib.ExitStack() as stack:
            if len(parts) > 1 or armed:
                stack.enter_context(connection.transaction())
            answer = connection.execute(_APPEND, [*head, *first], binary=True).fetchone()
            assert answer is not None
            if answer[0]:
                for part in parts[1:]:
                    connection.execute(CHANGE, [self._instance, *part])
            for point in append.points:
                reach(point)
        return answer

    def _check(self, append: Append, answer: tuple[Any, ...]) -> None:
        """Raises FencedError, InvariantError."""
        is_done, epoch, count, last, holder = answer
        if is_done:
            return
        if epoch != append.fence:
            self.failure = fenced(self.where, epoch, holder)
            raise self.failure
        if count != self._appends_count:
            fail(f"append {self._appends_count + 1} of an epoch that has {count}")
        fail(f"an append follows record {append.expected_last_sequence_id}, the log ends with {last}")

    def resolve(self) -> bool:
        with self._lock:
            self.refuse_after_failure()
            if not self._is_unknown:
                return False
            if is_broken(self._connection):
                with contextlib.suppress(psycopg.Error):
                    self._connection.close()
                self._connection = self._connected()
            with reaching(self._address), self._connection.transaction():
                # Waits for an append that the server is still at. The change is durable with all that was before it.
                row = self._connection.execute(
                    "SELECT epoch, appends_count, holder FROM immortal.heads WHERE instance = %s AND is_there"
                    " FOR UPDATE",
                    [self._instance],
                ).fetchone()
                if row is not None and row[0] == self.fence:
                    self._connection.execute(
                        "UPDATE immortal.heads SET epoch = epoch + 1, appends_count = 0 WHERE instance = %s",
                        [self._instance],
                    )
            epoch, count, holder = (0, 0, "whoever has removed it") if row is None else row
            if epoch != self.fence:
                self.failure = fenced(self.where, epoch, holder)
                raise self.failure
            done = count - self._appends_count
            if done not in (0, 1):
                self.failure = LogError(
                    f"the database {self.where} has lost acknowledged input: it has {count} appends of this epoch,"
                    f" {self._appends_count} were acknowledged; a server was promoted that had not all of them"
                )
                raise self.failure
            self.fence, self._appends_count, self._is_unknown = self.fence + 1, 0, False
            return bool(done)

    # --- what else ----------------------------------------------------------------------------------------------------

    def space(self) -> Space:
        now_s = time.monotonic()
        if self._measured is None or now_s - self._measured[0] > MEASURED_S:
            with self.view() as view:
                self._measured = now_s, view.used_bytes()
        return Space(self._measured[1], UNKNOWN_FREE_BYTES)

    def close(self) -> None:
        self._end(give_up=True)

    def abandon(self) -> None:
        self._end(give_up=False)

    def _end(self, *, give_up: bool) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if give_up:
            self.give_up()
        self.failure = self.failure or LogError(f"the log {self.where} is closed")
        self._lease.end()
        self._chunks.close()
        self._connection.close()
        self._readers.close()

    def give_up(self) -> None:
        """What fails leaves the lease to run out."""
        if self._is_given_up or isinstance(self.failure, FencedError):
            return
        self._is_given_up = True
        with contextlib.suppress(LogError), self._lock, reaching(self._address):
            if is_broken(self._connection):
                self._connection.close()
                self._connection = self._connected()
            self._lease.give_up(self._connection, self.heir)


def fenced(where: str, epoch: int, holder: str) -> FencedError:
    return FencedError(holder, f"fenced by {holder} at epoch {epoch}: it writes the log {where} now")


def statements(append: Append) -> Iterator[list[object]]:
    """The arguments of immortal.change, but the first, for one statement or more. Raises LogError."""
    spans = [span for span in append.deletes if span.table != RECORDS]
    removed = [span for span in append.deletes if span.table == RECORDS]
    require(len(removed) < 2, f"records are removed in {len(removed)} spans at once")
    packed = list(packs(append.records))
    batches = _batches(append.puts)
    first = next(batches, [])
    yield [*_span_arguments(spans, removed), *_columns(packed, 3), *_columns(first, 3)]
    for batch in batches:
        yield [*_span_arguments([], []), *_columns([], 3), *_columns(batch, 3)]


def _span_arguments(spans: list[Span], removed: list[Span]) -> list[object]:
    begin, end = 0, 0
    for span in removed:
        begin = int.from_bytes(span.first[:8].ljust(8, b"\0"), "big")
        end = SEQUENCE_ID_MAX if span.end is None else int.from_bytes(span.end[:8].ljust(8, b"\0"), "big")
        end += span.is_one
    tables, firsts, ends = _columns(spans, 3)
    return [tables, firsts, ends, begin, end]


def _columns(rows: Iterable[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(count)]


def _batches(puts: Iterable[Row]) -> Iterator[list[tuple[str, bytes, bytes]]]:
    batch: list[tuple[str, bytes, bytes]] = []
    size_bytes = 0
    for table, key, value in puts:
        if batch and (size_bytes + len(value) > STATEMENT_SIZE_BYTES_MAX or len(batch) >= ROWS_MAX):
            yield batch
            batch, size_bytes = [], 0
        batch.append((table, bytes(key), bytes(value)))
        size_bytes += len(key) + len(value)
    if batch:
        yield batch
