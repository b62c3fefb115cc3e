"""Loop of an app around its dispatcher, for bytes from any source: no socket, no wait.

Output waits in ``pending``. Pieces of an inline checkpoint are made when there is room for them. A checkpoint that a
child process encodes is added to it in chunks between the other messages, at most SNAPSHOT_CHUNKS_PENDING_MAX ahead of
the receiver; the rest waits in the child.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from immortal.appsdk.calls.outbox import Chunk
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import BecamePrimary, Blob, Event, Goodbye, JournalGrew, Refusal, SnapshotBegun
from immortal.appsdk.errors import AppError, Refused, StateError
from immortal.appsdk.state.snapshots import CHUNK_SIZE_BYTES_MAX, Snapshot
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType
from immortal.protocol.varint import encode_zigzag

OUTPUT_PENDING_BYTES_MAX = 4 << 20  # not taken by the receiver: above it no input is handled
SNAPSHOT_CHUNKS_PENDING_MAX = (1 << 20) // CHUNK_SIZE_BYTES_MAX  # in pending, and not taken yet
_STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the clock that coordinators read


class AppLoop:
    """Loop of an app. ``on_primary``: called when the app becomes primary. ``coordinator``: its name, for messages."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        coordinator: str,
        on_primary: Callable[[], None],
        on_journal: Callable[[JournalGrew], None] = lambda grown: None,
    ) -> None:
        self.dispatcher = dispatcher
        self.snapshot: Snapshot | None = None
        self.pending: deque[memoryview] = deque()
        self.pending_size_bytes = 0  # also of output behind it whose pieces are not made yet
        self.sent_size_bytes = 0
        self.lock = threading.Lock()  # of pending: no other thread's bytes must come in between
        self._coordinator = coordinator
        self._on_primary = on_primary
        self._on_journal = on_journal
        self._deferred: deque[Blob | memoryview] = deque()  # output behind ``pending``, from a checkpoint on
        self._deferred_size_bytes = 0
        self._snapshot_ends: deque[int] = deque()  # for each pending chunk, its end in the output
        self.output_ended = False
        self._failure: AppError | None = None

    def fail(self, error: AppError) -> None:
        """Let the next :meth:`step` raise the error. For any thread."""
        if self._failure is None:
            self._failure = error

    def step(self) -> Event | None:
        """Handle input up to the next event, and add the app's output to ``pending``. None: no more input.

        Raises the error of :meth:`fail`, Refused, and what the dispatcher raises.
        """
        if self._deferred:
            with self.lock:
                self._fill(self.pending_size_bytes)  # a message would change the rows that are not read yet
        self.poll()
        event = self.dispatcher.next_event()
        if isinstance(event, Goodbye):
            return event
        if isinstance(event, Refusal):
            raise Refused(f"the coordinator{self._coordinator} refuses: {event.reason}")
        if isinstance(event, BecamePrimary):
            self._on_primary()
        elif isinstance(event, JournalGrew):
            self._on_journal(event)
        elif isinstance(event, SnapshotBegun):
            if self.snapshot is not None:
                raise RemoteProtocolError("a checkpoint was asked for while another one is on its way")
            self.snapshot = Snapshot(event.encode)
        due_ns = self.dispatcher.next_due_ns
        if due_ns is not None and due_ns <= (now_ns := self.now_ns()):
            self.dispatcher.log_time(now_ns)
        self.take_output()
        return event

    def poll(self) -> None:
        """Raise an error that a hook left, and read a child's chunks.

        Raises StateError if the state can't be saved and messages don't fail alone.
        """
        if self._failure is not None:
            raise self._failure
        if self.snapshot is not None:
            self._relay(self.snapshot)

    def take_output(self) -> None:
        """Move the dispatcher's output to the pending output."""
        self._append(self.dispatcher.data_to_send())

    def now_ns(self) -> int:
        """Return the instance's time, ns since the Unix epoch: the coordinator's, or the machine's without one."""
        reported = self.dispatcher.time
        return (
            time.time_ns()
            if reported is None
            else reported.time_ns + time.clock_gettime_ns(_STEADY_CLOCK) - reported.steady_ns
        )

    def remove_sent(self, size_bytes: int) -> None:
        """Remove the first ``size_bytes`` of ``pending``, which were sent. The caller holds the lock."""
        self.pending_size_bytes -= size_bytes
        self.sent_size_bytes += size_bytes
        pending = self.pending
        while size_bytes:
            first = pending[0]
            if size_bytes < len(first):
                pending[0] = first[size_bytes:]
                break
            size_bytes -= len(first)
            pending.popleft()
        if self._deferred:
            self._fill(OUTPUT_PENDING_BYTES_MAX)

    def end_output(self) -> None:
        """Drop all output: the connection accepts no more."""
        self.output_ended = True
        self.pending.clear()
        self._deferred.clear()
        self.pending_size_bytes = self._deferred_size_bytes = 0
        self.close()

    def close(self) -> None:
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None

    def _append(self, chunks: Iterable[Chunk]) -> None:
        if self.output_ended:
            return
        with self.lock:
            for chunk in chunks:
                if isinstance(chunk, Blob) or self._deferred:
                    self._deferred.append(chunk if isinstance(chunk, Blob) else memoryview(chunk))
                    self._deferred_size_bytes += len(chunk)
                elif len(chunk):
                    self.pending.append(memoryview(chunk))
                self.pending_size_bytes += len(chunk)
            if self._deferred:
                self._fill(OUTPUT_PENDING_BYTES_MAX)

    def _fill(self, size_bytes_max: int) -> None:
        """Move output that comes into ``pending``, until that has ``size_bytes_max``."""
        while self._deferred and self.pending_size_bytes - self._deferred_size_bytes < size_bytes_max:
            first = self._deferred[0]
            piece = next(first.pieces, None) if isinstance(first, Blob) else first
            if piece is None or not isinstance(first, Blob):
                self._deferred.popleft()
            if piece:
                self.pending.append(memoryview(piece))
                self._deferred_size_bytes -= len(piece)

    # --- a checkpoint beside the handlers ---------------------------------------------------------------------------

    @property
    def snapshot_has_room(self) -> bool:
        """True if the child's next chunk can be taken."""
        ends = self._snapshot_ends
        while ends and ends[0] <= self.sent_size_bytes:
            ends.popleft()
        return len(ends) < SNAPSHOT_CHUNKS_PENDING_MAX

    def _relay(self, snapshot: Snapshot) -> None:
        """Add the child's chunks to the output, as far as there is room."""
        if not self.snapshot_has_room:
            snapshot.note_unread()
        while self.snapshot_has_room:
            try:
                chunk = snapshot.read()
            except StateError as error:
                self.snapshot = None
                self.dispatcher.snapshot_failed(error)
                self.take_output()
                return
            if chunk is None:
                return
            if not chunk:
                self.snapshot = None
                self.dispatcher.snapshot_ended(snapshot.reason, forks_next=not snapshot.has_hung)
                self.take_output()
                return
            front = encode_zigzag(1 + len(chunk)) + bytes((MessageType.SNAPSHOT_CHUNK,))
            self._append([front, chunk])
            self._snapshot_ends.append(self.sent_size_bytes + self.pending_size_bytes)
