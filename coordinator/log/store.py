"""The writer: a LogStore over a backend. What it does for the core is read from a view and written as one append."""

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
    LogError,
    LogUnavailableError,
    fail,
    require,
)
from immortal.coordinator.core.interfaces import (
    Letter,
    LogSpace,
    LogSummary,
    Offer,
    OutputBatch,
    Standby,
    StoredClients,
    Transaction,
)
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log import checkpoints, spilled, verdicts, view_queries
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
from immortal.coordinator.log.format import StoredHeader
from immortal.coordinator.log.identity import checked_prefix, first_and_last_sequence_id
from immortal.coordinator.log.repair import repair_sources
from immortal.coordinator.log.rows import Changes, add_dependent, changes_of, depends_on_log
from immortal.protocol.varint import Readable
from immortal.protocol.verdicts import MessageKey

if TYPE_CHECKING:
    from immortal.coordinator.log.sealer import Change, Sealer

_RECORD_HEADER = struct.Struct("<iiQq")


class _Begun(NamedTuple):
    """An append that the backend has not answered, and what it changes here once it is durable."""

    ticket: int
    last_sequence_id: int
    has_header: bool
    change: Change | None


class RowLogStore:
    """The log of one instance, open for writing. Made by :func:`immortal.coordinator.log.open_log` or ``create_log``.

    commit, write_checkpoint_chunk and trim may run in one thread while read, read_checkpoint_chunk and summary
    run in another. After a LogFullError, LogSyncError or FencedError every call but :meth:`close` raises it again: what
    is durable is unknown until the log is opened anew.
    """

    def __init__(
        self, backend: Backend, keys: Sequence[LogKey] = (), *, adopt: bool = False, accept: bool = False
    ) -> None:
        """``keys``, ``adopt``, ``accept``: as :func:`immortal.coordinator.log.open_log`, with its errors."""
        self.backend = backend
        self.identity = backend.identity
        self.macs: Macs | None = None  # None: the log is not authenticated
        self.problems: list[str] = []  # what was found damaged and could be left out, in words
        self.rebuilt: list[str] = []  # what was found damaged when it was opened and was put right, in words
        self.clock_ns: Callable[[], int] = time.time_ns  # says when a dead letter's verdict was given
        self.impulses_loaded_size_bytes_max = view_queries.IMPULSES_LOADED_SIZE_BYTES_MAX
        self._write_lock = threading.RLock()
        self._damaged_checkpoint_ids: set[int] = set()
        self._checkpoint_writer = CheckpointWriter()
        self._sealer: Sealer | None = None
        self._ticket = 0  # of the last commit that is durable
        self._begun: deque[_Begun] = deque()
        self._is_unknown = False  # how many of those are durable
        with backend.view() as view:
            marker = read_marker(view)
            self._last_sequence_id = first_and_last_sequence_id(view)[1]
        if marker is not None:  # a row that was put right has to be what it was
            self.rebuilt += self._rebuild()
        if marker is not None and not accept:
            self._authenticate(Macs(find_key(keys, marker, self.identity.instance_name), self.identity, marker))
        elif keys and not (adopt or accept):
            raise LogKeyError(not_authenticated_message(self.identity.instance_name))
        mended = [] if accept else backend.check_end(self.macs and self.macs.mark)
        while self._remove_half_written():
            pass
        if self._sealer is None:
            self.rebuilt += self._rebuild()
        self.rebuilt += mended + backend.mended
        if keys and (self.macs is None or self.macs.marker.key_id != keys[0].id):
            self._give_key(keys[0], None if marker is None or accept else marker.first_sequence_id)

    @property
    def is_remote(self) -> bool:
        return self.backend.is_remote

    @property
    def appends_max(self) -> int:
        """As LogStore.appends_max. What a log's key adds to an append follows from what is durable."""
        return self.backend.appends_max if self._sealer is None else 1

    @property
    def lost(self) -> LogError | None:
        return self.backend.lost

    @property
    def problem(self) -> str:
        return self.backend.problem

    @property
    def standbys(self) -> Sequence[Standby]:
        return self.backend.standbys

    def hand_over_to(self, successor: str) -> None:
        self.backend.successor = successor

    def give_up(self) -> None:
        self.backend.give_up()

    def request_standby_checkpoint(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """As LogStore.request_standby_checkpoint."""
        self.backend.request_standby_checkpoint(name, checkpoint_id, epoch)

    def cancel_standby_request(self) -> None:
        """As LogStore.cancel_standby_request."""
        self.backend.cancel_standby_request()

    def take_offer(self) -> Offer | None:
        """As LogStore.take_offer."""
        offer = self.backend.take_offer()
        return None if offer is None else decode_offer(offer)

    # --- the log's key ------------------------------------------------------------------------------------------------

    def _authenticate(self, macs: Macs) -> None:
        """Raises ForgedLogError, DamagedLogError."""
        from immortal.coordinator.log.sealer import Sealer  # here, as below: few logs have a key

        with self.backend.view() as view:
            self._sealer = Sealer(macs, view, self.identity.instance_name)
        self.macs = macs
        self.backend.release()  # all tables but those of records and chunks were read

    def _give_key(self, key: LogKey, first_sequence_id: int | None) -> None:
        """Authenticate all that is in the log as it is now; ``first_sequence_id``: as it was with another key."""
        from immortal.coordinator.log import sealer

        self._sealer = None
        with self.backend.view() as view:
            macs, append = sealer.seal_all(view, key, self.identity, first_sequence_id)
        self._append(append)
        self._authenticate(macs)
        self.backend.mark_end(macs.mark)

    def forget_key(self) -> None:
        """Make it a log without authentication, as far as the disk goes: close it then."""
        from immortal.coordinator.log import sealer

        self._sealer = None
        self._append(sealer.unsealed(self._last_sequence_id))
        self.backend.mark_end(None)

    # --- reading ------------------------------------------------------------------------------------------------------

    def summary(self) -> LogSummary:
        """The log's state. A damaged checkpoint header is left out and described in :attr:`problems`.

        Impulses whose batch is acknowledged whole come with an empty payload: their positions count, their bytes
        do not.
        Raises DamagedLogError with sequence ID -1 for a damaged position, peer or meta value.
        """
        problems: list[str] = []
        with self._naming_remedy(), self.backend.view() as view:
            summary = view_queries.load_summary(
                view, self.identity.committer_id, self._load_outputs, problems, self.impulses_loaded_size_bytes_max
            )
        self.problems = problems
        self.backend.release()  # the heads of rows were looked at, and whole rows mapped
        return summary

    def _load_outputs(self, stored: StoredHeader) -> dict[str, list[OutputBatch]]:
        with self.backend.view() as view:
            return view_queries.load_outputs(view, stored)

    def clients(self) -> StoredClients:
        """Read clients' positions and replies. A damaged reply counts as removed and is described in :attr:`problems`.

        Raises DamagedLogError with sequence ID -1 for a damaged position.
        """
        problems: list[str] = []
        with self._naming_remedy(), self.backend.view() as view:
            clients = view_queries.load_clients(view, problems)
        self.problems = problems
        return clients

    def read(self, first_sequence_id: int, size_bytes_max: int) -> list[bytes]:
        """Checked values from ``first_sequence_id`` on: at most ``size_bytes_max``, but one if there is one.

        Raises DamagedLogError if the first of them is damaged or missing; those before a damaged one are returned.
        """
        last = self._last_sequence_id  # before the view: what was committed by now must be there
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
        """As LogStore.read_spilled."""
        with self._naming_remedy(), self.backend.view() as view:
            batches = spilled.read(view, destination, first_position, last_position, size_bytes_max)
        self.backend.count_bytes_touched(sum(len(batch.payload) for batch in batches))
        return batches

    def letter(self, key: MessageKey) -> Letter | None:
        """As LogStore.letter."""
        with self.backend.view() as view:
            return verdicts.load_dead_letter(view, key)

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes:
        """Chunk ``index``, b"" after the last.

        Raises DamagedCheckpointError; from then on trim does not count that checkpoint among those to keep.
        """
        try:
            with self.backend.view() as view:
                chunk = read_chunk(view, self.macs, checkpoint_id, index)
        except DamagedCheckpointError:
            self._damaged_checkpoint_ids.add(checkpoint_id)
            raise
        self.backend.count_bytes_touched(len(chunk))
        return chunk

    def space(self) -> LogSpace:
        """As LogStore.space."""
        return LogSpace(*self.backend.space())

    @contextlib.contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        """Add the command that helps to errors about damage.

        Raises FencedError instead if another process has the log by now.
        """
        try:
            yield
        except DamagedLogError as error:
            self.backend.require_write_lease()
            remedy = f"'immortal recover {self.identity.instance_name}' says what can be done"
            raise DamagedLogError(f"{error}: {remedy}", error.sequence_id) from error

    # --- writing ------------------------------------------------------------------------------------------------------

    def commit(self, transaction: Transaction, ticket: int = 0) -> None:
        """As LogStore.commit. Raises LogFullError, LogSyncError or FencedError, then refuses everything."""
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

    def begin(self, transaction: Transaction, ticket: int) -> bool:
        """As LogStore.begin."""
        if self._sealer is not None or depends_on_log(transaction):
            return False
        with self._write_lock:
            last = self._begun[-1].last_sequence_id if self._begun else self._last_sequence_id
            append = _append_of(transaction, self._changes_of(transaction, last), last)
            append.fence = self.backend.fence
            self._begun.append(_Begun(ticket, _last_of(append), False, None))
            with self._open():
                is_begun = self.backend.begin(append)
            if not is_begun:
                self._begun.pop()
            return is_begun

    def finish(self, *, wait: bool) -> bool:
        """As LogStore.finish."""
        with self._write_lock:
            with self._open():
                is_done = self.backend.finish(wait=wait)
            if is_done:
                self._appended(self._begun.popleft())
            return is_done

    def waits_for(self) -> tuple[int, int]:
        """As LogStore.waits_for."""
        return self.backend.waits_for()

    def _changes_of(self, transaction: Transaction, last_sequence_id: int) -> Changes:
        """``last_sequence_id``: where its records go on."""
        if transaction.records:
            check_records(transaction.records, last_sequence_id, self.identity.committer_id)
        return changes_of(transaction, self.clock_ns() if transaction.verdicts else 0)

    def write_checkpoint_chunk(self, checkpoint_id: int, index: int, data: Readable) -> None:
        """Keep one chunk; chunks come in order, index 0 begins anew. An empty one is not stored."""
        if not data:
            return
        with self._write_lock:
            self._resolve()
            with self.backend.view() as view:
                changes = self._checkpoint_writer.put_chunk(view, checkpoint_id, index, data)
            self._change(changes)
            self._checkpoint_writer.chunk_committed(checkpoint_id, index, data)

    def trim(self, *, keep_checkpoints: int | None, keep_since_ns: int | None = None) -> bool:
        """Remove one bounded step of what need not be kept; True if more remains.

        Kept are the newest ``keep_checkpoints`` with the records after them and, where ``keep_since_ns`` (ns since the
        Unix epoch) is given, the newest checkpoint taken at or before that moment with all that came after it.
        ``keep_checkpoints`` None: only ``keep_since_ns`` counts, and without it everything is kept. The newest valid
        checkpoint and the records after it always stay. Spilled outputs go as soon as they are acknowledged.
        """
        keep = None
        if keep_checkpoints is not None or keep_since_ns is not None:
            keep = checkpoints.Retention(keep_checkpoints, keep_since_ns)
        budget = RemovalBudget.step()
        with self._write_lock:
            self._resolve()
            with self.backend.view() as view:
                changes, from_spilled = checkpoints.trim_step(view, keep, self._damaged_checkpoint_ids, budget)
            if changes:
                spill_points = (FaultPoint.DURING_SPILL_TRIM,) if from_spilled else ()
                self._change(changes, *spill_points, FaultPoint.DURING_TRIM)
        if from_spilled:
            reach(FaultPoint.AFTER_SPILL_TRIM)
        return budget.exhausted

    def _remove_half_written(self) -> bool:
        """Remove one step of incomplete checkpoints; True if there were any: more may remain."""
        with self.backend.view() as view:
            changes = half_written(view)
        if changes:
            self._change(changes)
        return bool(changes)

    def _rebuild(self) -> list[str]:
        """Put damaged rows right that can be; what was done, in words. Raises DamagedLogError."""
        with self._naming_remedy(), self.backend.view() as view:
            changes, done = repair_sources(view, self.identity.committer_id)
        if changes:
            self._change(changes)
        return done

    def _change(self, changes: Changes, *points: FaultPoint) -> None:
        last = self._last_sequence_id
        self._append(Append(last, puts=changes.puts, deletes=changes.deletes, points=points))

    def _append(self, append: Append, ticket: int = 0, *, has_header: bool = False) -> None:
        require(not self._begun, f"{len(self._begun)} commits are under way, and something else is to be written")
        append.fence = self.backend.fence
        change = None if self._sealer is None else self._sealer.seal(append, self.backend)
        self._begun.append(_Begun(ticket, _last_of(append), has_header, change))
        with self._open():
            self.backend.append(append)
        self._appended(self._begun.popleft())

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """After LogUnavailableError appends in flight stay unresolved; after other errors they are dropped."""
        try:
            yield
        except LogUnavailableError:
            self._is_unknown = True
            raise
        except BaseException:
            self._begun.clear()
            raise

    def _appended(self, begun: _Begun) -> None:
        if self._sealer is not None and begun.change is not None:
            self._sealer.adopt(begun.change)
        self._last_sequence_id = begun.last_sequence_id
        if begun.has_header:
            self._checkpoint_writer.header_committed()
        self._ticket = begun.ticket or self._ticket

    def tail(self) -> tuple[int, int]:
        """As LogStore.tail."""
        with self._write_lock:
            self._resolve()
            return self._ticket, self._last_sequence_id

    def _resolve(self) -> None:
        """Find out which of the appends without an answer are durable."""
        if self._is_unknown:
            for _ in range(self.backend.resolve()):
                self._appended(self._begun.popleft())
            self._begun.clear()
            self._is_unknown = False

    def settle(self) -> None:
        """Bring all that is durable to where it belongs, as a stop does."""
        self.backend.settle()

    def close(self) -> None:
        """Close the log and let others write it. Harmless when closed already."""
        self.backend.close()


def _append_of(transaction: Transaction, changes: Changes, last_sequence_id: int) -> Append:
    return Append(last_sequence_id, records=transaction.records, puts=changes.puts, deletes=changes.deletes)


def _last_of(append: Append) -> int:
    """The last record, once it is done."""
    return append.records[-1][0] if append.records else append.expected_last_sequence_id


def check_records(records: Sequence[tuple[int, Readable]], last_sequence_id: int, committer_id: int) -> None:
    """Check that ``records`` follow the last one and that their headers say so too: else the caller has a bug."""
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
