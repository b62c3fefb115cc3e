"""RowLogStore: the LogStore for writing. It reads from views of a backend, and writes each change as one append."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from immortal.coordinator.core.errors import (
    DamagedCheckpointError,
    DamagedLogError,
    LogUnavailableError,
    fail,
    require,
)
from immortal.coordinator.core.interfaces import (
    Letter,
    LogSpace,
    LogStore,
    LogSummary,
    Offer,
    OutputBatch,
    StoredClients,
    Transaction,
)
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log import checkpoints, verdicts, view_queries
from immortal.coordinator.log.authentication import (
    LogKey,
    LogKeyError,
    Macs,
    authentic_prefix,
    authenticate_records,
    find_key,
    not_authenticated_message,
    read_chunk,
    read_marker,
)
from immortal.coordinator.log.backend import Append, Backend, RemovalBudget
from immortal.coordinator.log.checkpoints import CheckpointWriter, decode_offer, half_written
from immortal.coordinator.log.identity import checked_prefix, first_and_last_sequence_id
from immortal.coordinator.log.repair import repair_sources
from immortal.coordinator.log.rows import Changes, add_dependent, changes_of, depends_on_log
from immortal.protocol.varint import Readable
from immortal.protocol.verdicts import MessageKey

if TYPE_CHECKING:
    from immortal.coordinator.log.sealer import Change, Sealer

_RECORD_HEADER = struct.Struct("<iiQq")


class _InFlight(NamedTuple):
    """Append without an answer of the backend yet, and the store's changes once it is durable."""

    ticket: int
    last_sequence_id: int
    has_header: bool
    change: Change | None


class RowLogStore(LogStore):
    """Log of one instance, open for writing. :func:`immortal.coordinator.log.open_log` or ``create_log`` returns it.

    LogStore specifies most methods. The others let a log port have several commits in flight, and find the outcome of
    commits without an answer. After LogFullError, LogSyncError or FencedError every call except ``close`` raises it
    again.
    """

    def __init__(
        self, backend: Backend, keys: Sequence[LogKey] = (), *, adopt: bool = False, accept: bool = False
    ) -> None:
        """Handle ``keys``, ``adopt``, ``accept`` like :func:`immortal.coordinator.log.open_log`, with its errors."""
        self.backend = backend
        self.identity = backend.identity
        self.macs: Macs | None = None  # None: the log is not authenticated
        self.problems: list[str] = []  # messages about damage that was left out
        self.repairs: list[str] = []  # messages about damage that was repaired when the log was opened
        self.clock_ns: Callable[[], int] = time.time_ns  # returns the time for verdicts
        self.impulses_loaded_size_bytes_max = view_queries.IMPULSES_LOADED_SIZE_BYTES_MAX
        self._write_lock = threading.RLock()
        self._damaged_checkpoint_ids: set[int] = set()
        self._checkpoint_writer = CheckpointWriter()
        self._sealer: Sealer | None = None
        self._ticket = 0  # of the last durable commit
        self._in_flight: deque[_InFlight] = deque()
        self._outcome_unknown = False  # of the appends in flight
        with backend.view() as view:
            marker = read_marker(view)
            self._last_sequence_id = first_and_last_sequence_id(view)[1]
        if marker is not None:  # first: MACs must match the repaired rows
            self.repairs += self._repair()
        if marker is not None and not accept:
            self._authenticate(Macs(find_key(keys, marker, self.identity.instance_name), self.identity, marker))
        elif keys and not (adopt or accept):
            raise LogKeyError(not_authenticated_message(self.identity.instance_name))
        damage = [] if accept else backend.check_end(self.macs and self.macs.mark)
        while changes := self._half_written():
            self._write_changes(changes)
        if self._sealer is None:
            self.repairs += self._repair()
        self.repairs += damage + backend.repairs
        if keys and (self.macs is None or self.macs.marker.key_id != keys[0].id):
            self._give_key(keys[0], None if marker is None or accept else marker.first_sequence_id)

    @property
    def appends_max(self) -> int:
        """Limit of small commits in flight; 1: :meth:`begin_commit` begins none.

        It is 1 for a log with a key: the key's part of an append depends on durable data.
        """
        return self.backend.appends_max if self._sealer is None else 1

    def poll_standby_offer(self) -> Offer | None:
        """Take a standby's answer to the request for a checkpoint; None: there is none yet. Raises LogError."""
        offer = self.backend.poll_standby_offer()
        return None if offer is None else decode_offer(offer)

    def _authenticate(self, macs: Macs) -> None:
        """Check the tables, then seal all later appends. Raises ForgedLogError, DamagedLogError."""
        from immortal.coordinator.log.sealer import Sealer  # imported here, as below: few logs have a key

        with self.backend.view() as view:
            self._sealer = Sealer(macs, view, self.identity.instance_name)
        self.macs = macs
        self.backend.release()  # all tables but those of records and chunks were read

    def _give_key(self, key: LogKey, first_sequence_id: int | None) -> None:
        """Seal the log's current content with ``key``. ``first_sequence_id``: first authenticated record so far."""
        from immortal.coordinator.log import sealer

        self._sealer = None
        with self.backend.view() as view:
            macs, append = sealer.seal_all(view, key, self.identity, first_sequence_id)
        self._append(append)
        self._authenticate(macs)
        self.backend.mark_end(macs.mark)

    def remove_authentication(self) -> None:
        """Remove the log's authentication on disk. Close the store afterwards."""
        from immortal.coordinator.log import sealer

        self._sealer = None
        self._append(sealer.unsealed(self._last_sequence_id, self.identity))
        self.backend.mark_end(None)

    def summary(self) -> LogSummary:
        problems: list[str] = []
        with self._naming_remedy(), self.backend.view() as view:
            summary = view_queries.load_summary(
                view, self.identity.committer_id, self.backend.view, problems, self.impulses_loaded_size_bytes_max
            )
        self.problems = problems
        self.backend.release()  # only heads of rows were read, but whole rows are mapped
        return summary

    def clients(self) -> StoredClients:
        problems: list[str] = []
        with self._naming_remedy(), self.backend.view() as view:
            clients = view_queries.load_clients(view, problems)
        self.problems = problems
        return clients

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        last = self._last_sequence_id  # read before the view, which must have all records up to it
        with self._naming_remedy():
            with self.backend.view() as view:
                values, gap = view_queries.collect_values(view, first_sequence_id, size_bytes_max)
                are = authenticate_records(view, self.macs, enumerate(values, first_sequence_id))
            if not values:
                if gap is not None:
                    raise gap
                if first_sequence_id <= last:
                    raise DamagedLogError(
                        f"record {first_sequence_id} is missing: the last is record {last}", first_sequence_id
                    )
            self.backend.count_bytes_touched(sum(map(len, values)))
            checked = checked_prefix(values, first_sequence_id, self.identity.committer_id)
            return authentic_prefix(checked, are[: len(checked)], first_sequence_id)

    def read_spilled(
        self, destination: str, first_position: int, last_position: int, size_bytes_max: int
    ) -> list[OutputBatch]:
        with self._naming_remedy(), self.backend.view() as view:
            batches = view_queries.read(view, destination, first_position, last_position, size_bytes_max)
        self.backend.count_bytes_touched(sum(len(batch.payload) for batch in batches))
        return batches

    def letter(self, key: MessageKey) -> Letter | None:
        with self.backend.view() as view:
            return verdicts.load_dead_letter(view, key)

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        try:
            with self.backend.view() as view:
                chunk = read_chunk(view, self.macs, checkpoint_id, index)
        except DamagedCheckpointError:
            self._damaged_checkpoint_ids.add(checkpoint_id)
            raise
        self.backend.count_bytes_touched(len(chunk))
        return chunk

    def space(self) -> LogSpace:
        return self.backend.space()

    @contextlib.contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        """Add the command that helps to errors about damage.

        Raises FencedError instead if another process writes the log by now.
        """
        try:
            yield
        except DamagedLogError as error:
            self.backend.require_write_lease()
            remedy = f"'immortal recover {self.identity.instance_name}' says what can be done"
            raise DamagedLogError(f"{error}: {remedy}", error.sequence_id) from error

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        with self._write_lock:
            self._resolve()
            changes = self._changes_of(transaction, self._last_sequence_id)
            if depends_on_log(transaction):
                with self.backend.view() as view:
                    add_dependent(changes, transaction, view)
                    if transaction.checkpoint is not None:
                        adopts = transaction.adopts
                        self._checkpoint_writer.put_header(view, transaction.checkpoint, changes, adopts=adopts)
            append = _append_of(transaction, changes, self._last_sequence_id)
            self._append(append, ticket, has_header=transaction.checkpoint is not None)

    def begin_commit(self, transaction: Transaction, ticket: int) -> bool:
        """Begin a commit without waiting: :meth:`finish_oldest` tells when it is durable. False: it can't be begun.

        All commits in flight are finished before anything else is written. If this raises LogUnavailableError, the
        commit counts as begun.
        """
        if self._sealer is not None or depends_on_log(transaction):
            return False
        with self._write_lock:
            last = self._in_flight[-1].last_sequence_id if self._in_flight else self._last_sequence_id
            append = _append_of(transaction, self._changes_of(transaction, last), last)
            append.fence = self.backend.fence
            self._in_flight.append(_InFlight(ticket, _last_of(append), False, None))
            with self._open():
                is_begun = self.backend.begin_append(append)
            if not is_begun:
                self._in_flight.pop()
            return is_begun

    def finish_oldest(self, *, wait: bool) -> bool:
        """Finish the oldest commit in flight; return True if it is durable now. ``wait``: block until it is.

        Raises like ``commit``: then the outcome of all commits in flight is known, or unknown, like the oldest one's.
        """
        with self._write_lock:
            with self._open():
                is_done = self.backend.finish_oldest(wait=wait)
            if is_done:
                self._note_appended(self._in_flight.popleft())
            return is_done

    def _changes_of(self, transaction: Transaction, last_sequence_id: int) -> Changes:
        """Check that the records follow ``last_sequence_id``, and turn the transaction into rows."""
        if transaction.records:
            check_records(transaction.records, last_sequence_id, self.identity.committer_id)
        return changes_of(transaction, self.clock_ns() if transaction.verdicts else 0)

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: Readable) -> None:
        if not data:
            return
        with self._write_lock:
            self._resolve()
            with self.backend.view() as view:
                changes = self._checkpoint_writer.put_chunk(view, checkpoint_id, index, data)
            self._write_changes(changes)
            self._checkpoint_writer.chunk_committed(checkpoint_id, index, data)

    def trim(
        self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None, keep_bytes: int | None = None
    ) -> bool:
        retention = None
        if keep_checkpoints is not None or keep_since_ns is not None or keep_bytes is not None:
            retention = checkpoints.Retention(keep_checkpoints, keep_since_ns, keep_bytes)
        budget = RemovalBudget.step()
        with self._write_lock:
            self._resolve()
            with self.backend.view() as view:
                changes, from_spilled = checkpoints.trim_step(view, retention, self._damaged_checkpoint_ids, budget)
            if changes or self.backend.must_append:
                spill_points = (FaultPoint.DURING_SPILL_TRIM,) if from_spilled else ()
                self._write_changes(changes, *spill_points, FaultPoint.DURING_TRIM)
        if from_spilled:
            reach(FaultPoint.AFTER_SPILL_TRIM)
        return budget.exhausted

    def _half_written(self) -> Changes:
        with self.backend.view() as view:
            return half_written(view)

    def _repair(self) -> list[str]:
        """Repair damaged rows if possible; return messages. Raises DamagedLogError."""
        with self._naming_remedy(), self.backend.view() as view:
            changes, done = repair_sources(view, self.identity.committer_id)
        if changes:
            self._write_changes(changes)
        return done

    def _write_changes(self, changes: Changes, *points: FaultPoint) -> None:
        last = self._last_sequence_id
        self._append(Append(last, puts=changes.puts, deletes=changes.deletes, points=points))

    def _append(self, append: Append, ticket: int = 0, *, has_header: bool = False) -> None:
        count = len(self._in_flight)
        require(count == 0, f"{count} commits are under way, and something else is to be written")
        append.fence = self.backend.fence
        change = None if self._sealer is None else self._sealer.seal(append, self.backend)
        self._in_flight.append(_InFlight(ticket, _last_of(append), has_header, change))
        with self._open():
            self.backend.append(append)
        self._note_appended(self._in_flight.popleft())

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Guard an operation: after LogUnavailableError, appends in flight stay unresolved; other errors drop them."""
        try:
            yield
        except LogUnavailableError:
            self._outcome_unknown = True
            raise
        except BaseException:
            self._in_flight.clear()
            raise

    def _note_appended(self, committed: _InFlight) -> None:
        if self._sealer is not None and committed.change is not None:
            self._sealer.adopt(committed.change)
        self._last_sequence_id = committed.last_sequence_id
        if committed.has_header:
            self._checkpoint_writer.header_committed()
        self._ticket = committed.ticket or self._ticket

    def tail(self) -> tuple[int, int]:
        """Return the ticket of this writer's last durable commit (0: it has none), and the last sequence ID.

        Raises LogUnavailableError, FencedError.
        """
        with self._write_lock:
            self._resolve()
            return self._ticket, self._last_sequence_id

    def _resolve(self) -> None:
        """Find out which of the appends without an answer are durable."""
        if self._outcome_unknown:
            for _ in range(self.backend.resolve()):
                self._note_appended(self._in_flight.popleft())
            self._in_flight.clear()
            self._outcome_unknown = False

    def close(self) -> None:
        self.backend.close()


def _append_of(transaction: Transaction, changes: Changes, last_sequence_id: int) -> Append:
    return Append(last_sequence_id, records=transaction.records, puts=changes.puts, deletes=changes.deletes)


def _last_of(append: Append) -> int:
    """Return the log's last sequence ID after this append."""
    return append.records[-1][0] if append.records else append.expected_last_sequence_id


def check_records(records: Sequence[tuple[int, Readable]], last_sequence_id: int, committer_id: int) -> None:
    """Check, also by their headers, that ``records`` follow the last one. A failure is a bug of the caller."""
    expected = last_sequence_id + 1
    for sequence_id, value in records:
        if sequence_id != expected:
            fail(f"record {sequence_id} is to be written after record {expected - 1}")
        if len(value) <= _RECORD_HEADER.size:
            fail(f"record {sequence_id} has only {len(value)} bytes")
        committer, size_bytes, _, inner = _RECORD_HEADER.unpack_from(value)
        if committer != committer_id or inner != sequence_id or size_bytes >= len(value):
            fail(
                f"record {sequence_id} says it is record {inner} of committer {committer} with {size_bytes} bytes;"
                f" the log belongs to committer {committer_id}, the value has {len(value)} bytes"
            )
        expected += 1
