"""Writes a log in PostgreSQL: one append is one round trip, which changes the log's head or nothing.

The head of a log has its epoch, the number of appends in this epoch, the last record, and the writer's name. An append
gives the head that it expects. A takeover raises the epoch. Both change the same row, so one of them comes first, and
no clock is involved. Small appends can be in flight together: each expects the head that the append before it leaves,
so if one fails, all later ones fail too.

If a connection breaks, the outcome of appends in flight is unknown, and the server may still be working on them. So the
writer takes the log over from itself. Once the epoch is one higher, no earlier append can be done any more, and the
head's number of appends tells which ones were.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import psycopg

from immortal.coordinator.core.errors import (
    FencedError,
    LogError,
    LogLockedError,
    LogLostError,
    LogUnavailableError,
    fail,
    require,
)
from immortal.coordinator.core.interfaces import LogSpace, Standby
from immortal.coordinator.fault_points import armed, reach
from immortal.coordinator.log.backend import Append, Backend, Options, Span, StandbyCheckpointRequest
from immortal.coordinator.log.backends.postgres import connections as leases
from immortal.coordinator.log.backends.postgres import standby as standbys
from immortal.coordinator.log.backends.postgres.chunks import CHUNKS, ChunkUploads, Pointer
from immortal.coordinator.log.backends.postgres.connections import (
    Address,
    Connection,
    Connections,
    connect,
    is_broken,
    translated_errors,
)
from immortal.coordinator.log.backends.postgres.durability import DurabilityGuard
from immortal.coordinator.log.backends.postgres.statements import CHANGE, Answer, Sender, statements
from immortal.coordinator.log.backends.postgres.view import RECORDS, PostgresView, viewing
from immortal.coordinator.log.identity import read_identity

APPENDS_MAX = 2
"""Small appends in flight at a time: as many as a server does while the answer to the first returns to another
machine. The server syncs for each, so more of them would cost more than they gain."""
MEASUREMENT_INTERVAL_S = 10.0  # a measurement reads all rows of a log
UNKNOWN_FREE_BYTES = 1 << 60  # a database does not report its disk's free space

_APPEND = "SELECT * FROM immortal.append(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
_CHECKPOINT_TABLES = (CHUNKS, "checkpoints")  # their rows may need an object store, which must be waited for


class PostgresBackend(Backend):
    """Log in PostgreSQL, open for writing.

    ``synced``: called after each append with its duration in seconds: the round trip and the server's sync.
    """

    is_remote = True
    appends_max = APPENDS_MAX

    def __init__(
        self, address: Address, instance_name: str, options: Options, sequence_id_required_min: int = -1
    ) -> None:
        """Open the log and take it over. ``sequence_id_required_min``: a record that the log once had.

        Raises LogLockedError, LogLostError, LogFormatError, LogIdentityError, LogUnavailableError, LogError.
        """
        self.label = address.label
        self.repairs: list[str] = []
        self.synced: Callable[[float], None] | None = None
        self._address = address
        self._instance = address.named
        self._lock = threading.Lock()
        self._readers = Connections(address)
        self._measured: tuple[float, int] | None = None
        self._appends_count = 0  # acknowledged in this epoch
        self._in_flight: deque[tuple[Append, float]] = deque()  # appends without an answer, and when each began
        self._outcome_unknown = False  # whether the appends in flight were done
        self._takeover: tuple[int, int] | None = None  # in resolve(): the new epoch, the appends done in the old one
        self._is_warned = False  # a warning arrived since the first append in flight
        self._is_released = self._is_ended = False
        self._request_key = b""  # row of the open request to a standby; b"": none
        self._guard = DurabilityGuard(address, allow_data_loss=options.allow_data_loss)
        self._lease = leases.Lease(address, options.lease_s, options.endpoint, self._check_in_background)
        self._chunks = ChunkUploads(options.checkpoints_to, address.named)
        self._has_objects = bool(options.checkpoints_to)
        self._connection = self._connected()
        try:
            with translated_errors(address):
                self._guard.check_connection(self._connection)
                self._sender = self._create_sender()
                with viewing(self._readers, self._instance) as view:
                    self.identity = read_identity(view, self.label, instance_name)
                self.fence = self._take_over(sequence_id_required_min)
                with viewing(self._readers, self._instance) as view:
                    named = {pointer.name for pointer in view.pointers()}
                self._has_objects = self._has_objects or bool(named)
                self._chunks.collect(named, self.fence)
        except BaseException:
            self._chunks.close()
            self._connection.close()
            self._readers.close()
            raise
        self._lease.start_renewing()

    def _connected(self) -> Connection:
        connection = connect(self._address)
        connection.add_notice_handler(self._handle_notice)
        return connection

    def _create_sender(self) -> Sender:
        return Sender(self._connection, reads_settings=self._guard.waits_for_standbys)

    def _reconnect(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()
        self._connection = self._connected()
        with translated_errors(self._address):
            self._sender = self._create_sender()

    def _handle_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """Note a warning: an append whose wait for standbys was cancelled is answered as done, with a warning."""
        self._is_warned = self._is_warned or notice.severity_nonlocalized == "WARNING"

    def _take_over(self, sequence_id_required_min: int) -> int:
        """Take the log over, once no lease is valid; return its new epoch. Raises LogLockedError, LogLostError."""
        connection = self._connection
        with self._guard.record_data_loss(connection), connection.transaction():
            if (holder := leases.holder(connection, self._instance, lock=True)) is not None:
                raise LogLockedError(f"the log {self.label} is in use by {holder.name}")
            self._lease.take_over(connection)
            standbys.forget(connection, self._instance)
            head = leases.head_count(connection, self._instance, lock=True)
            row = connection.execute(
                "UPDATE immortal.heads SET epoch = epoch + 1, appends_count = 0, holder = %s"
                " WHERE instance = %s AND is_there RETURNING epoch, last_sequence_id",
                [leases.process_name(), self._instance],
            ).fetchone()
            require(row is not None, f"a log without a head: {self.label}")
            assert row is not None
            self._guard.check_takeover(connection, head, row[1], sequence_id_required_min)
        return int(row[0])

    def _check_in_background(self, connection: Connection) -> None:
        """Check the log in the lease's thread at each renewal, since there may be no append for a long time."""
        done: tuple[int, int] | None = None
        if self._lock.acquire(blocking=False):
            done = self.fence, self._appends_count
            self._lock.release()
        self._guard.check_in_background(connection, done)

    def view(self, *, copies: bool = False) -> AbstractContextManager[PostgresView]:
        self.raise_failure()
        return viewing(self._readers, self._instance)

    def is_live(self) -> bool:
        return True

    @property
    def problem(self) -> str:  # type: ignore[override]  # it is only read
        return self._guard.doubt or self._chunks.problem

    @property
    def standbys(self) -> Sequence[Standby]:  # type: ignore[override]  # it is only read
        return self._lease.standbys

    @property
    def fenced_by(self) -> FencedError | None:
        lost_to = self._lease.lost_to
        if lost_to is None or lost_to[0] < self.fence:  # the database is an older copy: the next append notices it
            return None
        return fenced(self.label, *lost_to)

    def require_write_lease(self) -> None:
        with self._readers.borrowed() as connection:
            epoch, holder = leases.head(connection, self._instance)
        settling = self._takeover
        if epoch != self.fence and (settling is None or epoch != settling[0]):
            raise fenced(self.label, epoch, holder)

    def append(self, append: Append) -> None:
        with self._lock:
            self._require_known()
            require(not self._in_flight, f"{len(self._in_flight)} appends are under way, and one is to be waited for")
            gone = self._objects_of(append.deletes)
            append = self._chunks.redirect_chunks(append, self.fence)
            parts = list(statements(append))
            if len(parts) == 1 and not armed:
                self._send(append, parts[0])
                while not self._handle_answer():
                    self._sender.wait()
            else:
                self._send_parts(append, parts)
            self._chunks.remove(gone)

    def begin_append(self, append: Append) -> bool:
        with self._lock:
            self._require_known()
            if any(row[0] in _CHECKPOINT_TABLES for row in (*append.puts, *append.deletes)):
                return False
            first, *more = statements(append)
            if more:
                return False
            self._send(append, first)
            return True

    def finish_oldest(self, *, wait: bool) -> bool:
        with self._lock:
            self._require_known()
            while not self._handle_answer():
                if not wait:
                    return False
                self._sender.wait()
            return True

    def poll_target(self) -> tuple[int, int]:
        return self._connection.fileno(), self._sender.events

    def _require_known(self) -> None:
        self.raise_failure()
        if self._guard.doubt and not self._outcome_unknown:
            self._outcome_unknown = True  # includes appends already sent
            raise LogUnavailableError(self._guard.doubt)
        if self._outcome_unknown:
            raise LogUnavailableError(f"what became of the last append to {self.label} is not known yet")

    def _objects_of(self, spans: Sequence[Span]) -> list[Pointer]:
        """Return the pointers of the chunks in ``spans`` that are in an object store."""
        chunks = [span for span in spans if span.table == CHUNKS] if self._has_objects else []
        if not chunks:
            return []
        with viewing(self._readers, self._instance) as view:
            return [pointer for span in chunks for pointer in view.pointers(span.first, span.end)]

    def _send(self, append: Append, part: list[object]) -> None:
        head = self._head(append)
        with self._open():
            self._sender.send([*head, *part])

    def _head(self, append: Append) -> list[object]:
        """Return the first arguments of immortal.append. From now on the append counts as in flight."""
        last = append.records[-1][0] if append.records else append.expected_last_sequence_id
        for span in append.deletes:
            if span.table == RECORDS and span.end is None:  # an operator's cut: the log ends before it
                last = min(last, int.from_bytes(span.first.ljust(8, b"\0"), "big") - 1)
        if not self._in_flight:
            self._is_warned = False
        self._in_flight.append((append, time.perf_counter()))
        number = self._appends_count + len(self._in_flight)
        return [self._instance, append.fence, number, append.expected_last_sequence_id, last]

    def _handle_answer(self) -> bool:
        """Process the answer to the oldest append in flight; return True if there was one."""
        with self._open():
            answer = self._sender.answer()
        if answer is not None:
            self._finish_append(answer)
        return answer is not None

    def _send_parts(self, append: Append, parts: list[list[object]]) -> None:
        """Send a large append in one transaction, and wait for its end."""
        connection, head = self._connection, self._head(append)
        with self._open(), connection.transaction():
            row = connection.execute(_APPEND, [*head, *parts[0]], binary=True).fetchone()
            assert row is not None
            if row[0]:
                for part in parts[1:]:
                    connection.execute(CHANGE, [self._instance, *part])
            for point in append.points:
                reach(point)
        if self._guard.waits_for_standbys:
            with self._open():
                self._sender.request_settings()
        self._finish_append(Answer(*row))

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Translate the database's errors. After LogUnavailableError the outcome of appends in flight is unknown; after
        another error the backend has failed."""
        try:
            with translated_errors(self._address):
                yield
        except LogUnavailableError:
            self._outcome_unknown = True
            raise
        except LogError as error:  # the server has refused an append: neither it nor any later one is done
            self.failure = error
            raise

    def _finish_append(self, answer: Answer) -> None:
        if self._is_warned:
            self._outcome_unknown = True
            raise LogUnavailableError(f"the database {self.label} has not waited for its standbys")
        append, begun_s = self._in_flight[0]
        self._check(append, answer)
        if self._guard.waits_for_standbys:
            try:
                self._guard.check_after_commit(self._sender.settings)
            except LogUnavailableError:
                self._outcome_unknown = True
                raise
        self._in_flight.popleft()
        self._appends_count += 1
        if self.synced is not None:
            self.synced(time.perf_counter() - begun_s)

    def _check(self, append: Append, answer: Answer) -> None:
        """Check that the append was done. Raises FencedError, InvariantError."""
        if answer.is_done:
            return
        if answer.epoch != append.fence:
            self.failure = fenced(self.label, answer.epoch, answer.holder)
            raise self.failure
        if answer.appends_count != self._appends_count:
            fail(f"append {self._appends_count + 1} of an epoch that has {answer.appends_count}")
        last = answer.last_sequence_id
        fail(f"an append follows record {append.expected_last_sequence_id}, the log ends with {last}")

    def resolve(self) -> int:
        with self._lock:
            self.raise_failure()
            if not self._outcome_unknown:
                return 0
            self._reconnect()  # answers may still be in flight on the old connection
            self._is_warned = False
            self._guard.recheck(self._connection)
            with (
                self._guard.record_data_loss(self._connection),
                translated_errors(self._address),
                self._connection.transaction(),
            ):
                # The row's lock waits for an append that the server still works on. An append that comes later finds
                # another epoch. The new epoch is durable together with all earlier appends.
                row = self._connection.execute(
                    "SELECT epoch, appends_count, holder, is_there FROM immortal.heads WHERE instance = %s FOR UPDATE",
                    [self._instance],
                ).fetchone()
                epoch, count, holder, is_there = row or (0, 0, "", True)
                if not is_there:
                    self.failure = fenced(self.label, epoch, "whoever has removed it")
                    raise self.failure
                done = self._done_until(epoch, count, holder)
                self._takeover = epoch + 1, done
                self._connection.execute(
                    "UPDATE immortal.heads SET epoch = epoch + 1, appends_count = 0 WHERE instance = %s",
                    [self._instance],
                )
            if self._is_warned:
                raise LogUnavailableError(f"the database {self.label} has not waited for its standbys")
            self._guard.recheck(self._connection)  # the server's settings must have been right for that commit too
            self.fence, self._appends_count, self._outcome_unknown, self._takeover = epoch + 1, 0, False, None
            self._in_flight.clear()
            self._guard.doubt = ""
            return done

    def _done_until(self, epoch: int, count: int, holder: str) -> int:
        """Return the number of appends in flight that the head shows as done. Raises FencedError, LogError."""
        if self._takeover is not None and (epoch, count, holder) == (self._takeover[0], 0, leases.process_name()):
            return self._takeover[1]  # an earlier call raised the epoch, but did not get the answer
        try:
            self._guard.require_whole(self._connection, (self.fence, self._appends_count))
        except LogLostError as error:
            self.failure = error
            raise
        if epoch > self.fence or (epoch == self.fence and holder != leases.process_name()):
            self.failure = fenced(self.label, epoch, holder)
            raise self.failure
        done: int = count - self._appends_count
        if epoch < self.fence or not 0 <= done <= len(self._in_flight):
            acknowledged = f"{self._appends_count} were acknowledged in epoch {self.fence}"
            self.failure = self._guard.lost(f"it has {count} appends of epoch {epoch}, and {acknowledged}")
            raise self.failure
        return done

    def request_standby_checkpoint(self, name: str, checkpoint_id: int, epoch: int) -> None:
        request = StandbyCheckpointRequest(self.fence, checkpoint_id, epoch)
        self._request_key = standbys.key_of(request, name)
        with self._readers.borrowed() as connection:
            standbys.request_checkpoint(connection, self._instance, request, name)

    def cancel_standby_request(self) -> None:
        if self._request_key and self.fenced_by is None:
            self._request_key = b""
            with self._readers.borrowed() as connection:
                standbys.forget(connection, self._instance)

    def poll_standby_offer(self) -> bytes | None:
        if not self._request_key:
            return None
        with self._readers.borrowed() as connection:
            offer = standbys.answer_of(connection, self._instance, self._request_key)
        if offer is not None:
            self._request_key = b""
        return offer

    def space(self) -> LogSpace:
        now_s = time.monotonic()
        if self._measured is None or now_s - self._measured[0] > MEASUREMENT_INTERVAL_S:
            with self.view() as view:
                self._measured = now_s, view.used_bytes()
        return LogSpace(self._measured[1], UNKNOWN_FREE_BYTES)

    def close(self) -> None:
        self._end(release_lease=True)

    def close_uncleanly(self) -> None:
        self._end(release_lease=False)

    def _end(self, *, release_lease: bool) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if release_lease:
            self.release_lease()
        self.failure = self.failure or LogError(f"the log {self.label} is closed")
        self._lease.end()
        self._chunks.close()
        self._connection.close()
        self._readers.close()

    def release_lease(self) -> None:
        """Release the lease. If that fails, it runs out by itself."""
        if self._is_released or isinstance(self.failure, FencedError):
            return
        self._is_released = True
        with contextlib.suppress(LogError), self._lock, translated_errors(self._address):
            if is_broken(self._connection) or self._in_flight:
                self._reconnect()
            self._lease.release(self._connection, self.successor)


def fenced(label: str, epoch: int, holder: str) -> FencedError:
    return FencedError(holder, f"fenced by {holder} at epoch {epoch}: it writes the log {label} now")
