"""Outgoing messages: calls, in one buffer per destination, and impulses, in one queue with a window.

A batch collects the parts of its messages (fronts and arguments in turn) and joins them once: when it has
BATCH_SIZE_BYTES, when the dispatcher has no more input, and before a checkpoint. Large parts are sent without a join.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from immortal.appsdk.calls.codec import (
    bind_arguments,
    describe_depth,
    encode_value,
    encoder,
    largest,
    nesting_max,
    positional_count,
    unencodable,
)
from immortal.appsdk.calls.context import QUERY_RUNS, Context
from immortal.appsdk.errors import AS_RPC, Disconnected, QueryError, UsageError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    RpcType,
    encode_attach_to,
    encode_barrier,
    encode_message,
    encode_name,
)
from immortal.protocol.nesting import is_nested_beyond
from immortal.protocol.process import after_fork_message, register
from immortal.protocol.system_methods import FENCING_METHOD_ID, HANDLES_METHOD_ID, ORDERED_METHOD_ID, ORDERING_METHOD_ID
from immortal.protocol.varint import decode_zigzag_int, encode_zigzag

if TYPE_CHECKING:
    import cython

BATCH_SIZE_BYTES = 64 << 10  # enough to make the cost of a batch negligible; small enough to keep both ends busy
AWAITED_BATCH_SIZE_BYTES = 8 << 10
"""Size at which a batch of awaited calls, or of answers, is closed.
To make one costs ten times as much as to pass it on: the other side would idle for ms while a full batch fills."""

LARGE_PART_SIZE_BYTES = 8 << 10  # batches of such large calls are sent in parts: that costs less than a copy
FRONTED_SIZE_BYTES_MAX = 4 << 10  # of arguments: the fronts of smaller ones are cached, by size

BATCH_FRONT_SIZE_BYTES_MAX = 1 << 10  # size, type, name, count, with room for anything that wraps the batch later
CALL_SIZE_BYTES_MAX = MESSAGE_SIZE_BYTES_MAX - BATCH_SIZE_BYTES - BATCH_FRONT_SIZE_BYTES_MAX
"""Limit of one encoded call: its batch is a message, and can hold almost BATCH_SIZE_BYTES before it."""

READY_SIZE_BYTES_MAX = 256 << 10  # of closed batches: with more, the delivery pauses until they are taken

IMPULSES_OUTSTANDING_MAX = 16_384  # sent, not yet durable: limit of what hooks have in flight
IMPULSES_OUTSTANDING_BYTES_MAX = 4 << 20

OF_ORDER = frozenset({ORDERED_METHOD_ID, ORDERING_METHOD_ID, FENCING_METHOD_ID, HANDLES_METHOD_ID})
"""IDs of the methods by which instances agree on an order, or on handles. Their messages need no barrier."""

Write = Callable[[list[bytes], tuple[Any, ...]], int]
Send = Callable[[tuple[Any, ...]], None]
Chunk = bytes | bytearray | memoryview
Name = str
"""Type of a name: ``str`` or a subclass, such as a StrEnum, which compiled code would refuse for ``str``."""


class _TooLargeError(Exception):
    """Raised if the arguments or the result of a call have more bytes than a message can have."""


class _Fronts(dict[int, tuple[bytes, int]]):
    """Cache of the bytes before one method's arguments, and of the message size, by the size of the arguments.

    Raises _TooLargeError above CALL_SIZE_BYTES_MAX.
    """

    def __init__(self, name: Name, method_id: int, rpc_type: RpcType, kind: RpcKind = RpcKind.CALL) -> None:
        super().__init__()
        self._name = name
        self._what = "the call's arguments take" if kind == RpcKind.CALL else "what it returned or raised takes"
        self._rest = bytes((MessageType.RPC, kind)) + encode_zigzag(method_id) + bytes((rpc_type,))

    def __missing__(self, arguments_size_bytes: int) -> tuple[bytes, int]:
        size_bytes = len(self._rest) + arguments_size_bytes
        if size_bytes > CALL_SIZE_BYTES_MAX:
            raise _TooLargeError(
                f"{self._name}: {self._what} {arguments_size_bytes} bytes, at most "
                f"{CALL_SIZE_BYTES_MAX - len(self._rest)} are possible: send them in parts"
            )
        front = encode_zigzag(size_bytes) + self._rest
        found = front, len(front) + arguments_size_bytes
        if arguments_size_bytes <= FRONTED_SIZE_BYTES_MAX:
            self[arguments_size_bytes] = found
        return found


def _refused(name: Name, parameters: Iterable[str], arguments: Sequence[Any], error: Exception) -> Exception:
    """Return the exception to raise for a call that failed with ``error`` before it was sent."""
    if isinstance(error, _TooLargeError):
        return UsageError(f"{error}{largest(parameters, arguments)}")
    return unencodable(name, parameters, arguments, error)


def _encoded_again(
    fronts: _Fronts, name: Name, parameters: Iterable[str], arguments: tuple[Any, ...], error: Exception
) -> tuple[bytes, bytes, int]:
    """Encode a call again, if ``error`` is about integers of more than 64 bits; return (front, body, size).
    Raises the exception that :func:`_refused` returns for any other error."""
    try:
        if isinstance(error, OverflowError):
            body = encode_value(arguments)
            front, size_bytes = fronts[len(body)]
            return front, body, size_bytes
    except Exception as another:
        error = another
    raise _refused(name, parameters, arguments, error) from error


def make_writer(
    name: Name,
    method_id: int,
    rpc_type: RpcType,
    kind: RpcKind = RpcKind.CALL,
    parameters: Iterable[str] = (),
    context: Context | None = None,
) -> Write:
    """Make a function that appends an RPC message (incoming form) to a list, in two parts, and returns its size.

    ``parameters``: names of the arguments, for messages. The function raises TypeError for arguments that can't be
    encoded, and UsageError above CALL_SIZE_BYTES_MAX or if they are nested too deeply (``context``: of handlers, whose
    log can be older than that limit); then the list is unchanged. (``Outbox.make_fork`` repeats these lines: a function
    call would cost too much there.)
    """
    fronts = _Fronts(name, method_id, rpc_type, kind)
    encode = encoder.encode
    shallow = nesting_max

    def write(parts: list[bytes], arguments: tuple[Any, ...]) -> int:
        try:
            body = encode(arguments)
            front, size_bytes = fronts[len(body)]
        except Exception as error:
            front, body, size_bytes = _encoded_again(fronts, name, parameters, arguments, error)
        if len(body) > shallow and is_nested_beyond(body, 0, len(body), shallow + 1):
            raise UsageError(describe_depth(name, parameters, arguments))
        parts += (front, body)
        return size_bytes

    return write


def encode_call(write: Write, arguments: tuple[Any, ...]) -> bytes:
    """Encode a message in one piece with ``write``, made by :func:`make_writer`. Raises the errors of ``write``."""
    parts: list[bytes] = []
    write(parts, arguments)
    return b"".join(parts)


class Batch:
    """Batch of messages to one destination, not encoded yet."""

    __slots__ = ("destination", "parts", "size_bytes")

    def __init__(self, destination: Name) -> None:
        self.destination = destination
        self.parts: list[bytes] = []  # two per message
        self.size_bytes = 0

    @property
    def count(self) -> int:
        return len(self.parts) // 2


class Outbox:
    """Outbox of one connection: calls and impulses, in their order of sending.

    Calls come from the handlers' thread only; impulses (``self.impulses``) from any other.
    """

    def __init__(self, context: Context, wake: Callable[[], None] = lambda: None) -> None:
        self._context = context
        self.impulses = ImpulseQueue(context, wake)
        self.ready_size_bytes = 0  # of closed batches and other messages
        self._ready: list[Chunk] = []
        self._batches: dict[str, Batch] = {}
        self._open: list[Batch] = []  # those with messages, ordered by their first message
        self._attached: set[str] = set()
        # Counters for a rewind, by destination: messages closed since the copy of the state, messages closed since the
        # mark, and messages that are made again and must not be sent again.
        self._closed_counts: dict[str, int] = {}
        self._closed_since_mark: list[tuple[str, int, int]] = []  # ..., and how many of them were sent before
        self._mark = (0, 0, "")
        self.order_method_ids = OF_ORDER
        self._unordered = ""  # the last destination; calls to others must not leave before it has the call
        self._repeated: dict[str, int] = {}
        self._reports: list[bytes] = []
        self.collected: list[tuple[str, list[bytes]]] | None = None  # takes all batches, none is sent
        self.only_reports = False  # :meth:`pop_chunks` returns only reports
        self.holder: Any = (
            None  # an immortal.appsdk.ordering.multicasts.Multicasts that may hold calls back; None: nothing does
        )

    # --- rewinds -----------------------------------------------------------------------------------------------------

    def begin_copy(self) -> None:
        """Reset the counters: the state is copied now, and includes all calls so far."""
        self.close_batches()
        self._closed_counts.clear()
        self._closed_since_mark.clear()

    def mark(self) -> None:
        """Begin to count the output of the next messages. All closed output belongs to earlier messages."""
        self._mark = len(self._ready), self.ready_size_bytes, self._unordered
        self._closed_since_mark.clear()

    def rewind_to_copy(self) -> None:
        """Drop the calls since the mark, and skip the earlier ones when they are made again.

        All calls since the copy are made again; they must not be sent twice."""
        count, self.ready_size_bytes, self._unordered = self._mark
        del self._ready[count:]
        for batch in self._open:
            batch.parts, batch.size_bytes = [], 0
        self._open.clear()
        repeated = self._repeated
        for destination, closed_count, repeated_count in self._closed_since_mark:
            self._closed_counts[destination] -= closed_count
            repeated[destination] = repeated.get(destination, 0) + repeated_count
        self._closed_since_mark.clear()
        for destination, closed_count in self._closed_counts.items():
            repeated[destination] = repeated.get(destination, 0) + closed_count
        self._closed_counts.clear()
        self._attached.clear()  # an attachment that was taken back is sent again; a repetition is harmless

    def _drop_repeated(self, batch: Batch, count: int) -> None:
        """Drop the first ``count`` messages of ``batch``, which were sent before."""
        dropped = batch.parts[: 2 * count]
        batch.parts = batch.parts[2 * count :]
        batch.size_bytes -= sum(map(len, dropped))

    def make_fork(
        self, destination: Name, name: Name, method_id: int, signature: inspect.Signature
    ) -> Callable[..., None]:
        """Make ``fork`` for a method: it sends a call that no caller awaits. ``destination`` "" is the own instance."""
        batch: Batch = self._batches.setdefault(destination, Batch(destination))
        parameters_count: cython.Py_ssize_t = positional_count(signature)
        context: Context = self._context
        opened, get_ident = self._open, threading.get_ident
        fronts = _Fronts(name, method_id, RpcType.FORK)
        encode = encoder.encode
        shallow: cython.Py_ssize_t = nesting_max

        def fork(*arguments: Any, **keywords: Any) -> None:
            if keywords or len(arguments) != parameters_count:
                bound = bind_arguments(name, signature, arguments, keywords)
                arguments = bound if keywords else arguments
            caller_id: cython.ulong = get_ident()
            if caller_id != context.handling_thread_id:
                raise outside_handler_error(context, name)
            try:
                body = encode(arguments)
                front, size_bytes = fronts[len(body)]
            except Exception as error:
                front, body, size_bytes = _encoded_again(fronts, name, signature.parameters, arguments, error)
            if len(body) > shallow and is_nested_beyond(body, 0, len(body), shallow + 1):
                raise UsageError(describe_depth(name, signature.parameters, arguments))
            if context.carries_handles:
                context.nodes.accounts.count_outgoing(destination, body)
            parts = batch.parts
            if not parts:
                opened.append(batch)
            parts.append(front)
            parts.append(body)
            batch.size_bytes = size_bytes = batch.size_bytes + size_bytes
            if size_bytes >= BATCH_SIZE_BYTES:
                self._close_full(batch)

        return fork

    def make_sender(
        self,
        destination: Name,
        name: Name,
        method_id: int,
        kind: RpcKind,
        parameters: Iterable[str] = (),
        rpc_type: RpcType = RpcType.ASYNC,
    ) -> Send:
        """Make a sender of awaited calls of one method, or of answers to them. Only the SDK uses the sender."""
        write = make_writer(name, method_id, rpc_type, kind, parameters, self._context)
        batch = self._batches.setdefault(destination, Batch(destination))

        def send(arguments: tuple[Any, ...]) -> None:
            is_first = not batch.parts
            size_bytes = write(batch.parts, arguments)
            if self._context.carries_handles:
                is_first = self._pass_handles(batch)
            batch.size_bytes += size_bytes
            if is_first:
                self._open.append(batch)
            if batch.size_bytes >= AWAITED_BATCH_SIZE_BYTES:
                self._close_full(batch)
                self._context.slice_end = 0

        return send

    def _pass_handles(self, batch: Batch) -> bool:
        """Register the handles in the last message of ``batch``. Remove that message if a handle can't be passed."""
        message = batch.parts[-2:]
        del batch.parts[-2:]
        self._context.nodes.accounts.count_outgoing(batch.destination, message[1])
        is_first = not batch.parts
        batch.parts += message
        return is_first

    def _close_full(self, batch: Batch) -> None:
        """Close a full batch, and before it all older ones if effects must not leave before their causes."""
        if self.holder is None:
            self._open.remove(batch)
            self._close(batch)
        else:
            self.close_open()

    def _close(self, batch: Batch) -> None:
        if self.holder is not None and self.holder.must_hold(batch.destination):
            self._hold_back(batch)
        else:
            self._send_batch(batch)

    def _hold_back(self, batch: Batch) -> None:
        """Hand the messages of a batch to ``self.holder``, which sends them later."""
        self.holder.hold(batch.destination, batch.parts)
        batch.parts, batch.size_bytes = [], 0

    def push(self, destination: Name, parts: list[bytes]) -> None:
        """Send messages, in two parts each, even if calls are held back. Requires :meth:`close_open` first."""
        batch, count = Batch(destination), len(parts)
        start = 0
        for index in range(0, count, 2):
            batch.size_bytes += len(parts[index]) + len(parts[index + 1])
            if batch.size_bytes >= BATCH_SIZE_BYTES or index + 2 >= count:
                batch.parts = parts[start : index + 2]
                start = index + 2
                self._note_pushed(batch)
                self._send_batch(batch)

    def _note_pushed(self, batch: Batch) -> None:
        """Note a batch that is pushed, for a subclass that records where messages come from."""

    def _send_batch(self, batch: Batch) -> None:
        destination, count = batch.destination, batch.count
        if self.collected is not None:
            self.collected.append((destination, batch.parts))
            self._drop_repeated(batch, count)
            return
        self._closed_counts[destination] = self._closed_counts.get(destination, 0) + count
        repeated = min(count, self._repeated.get(destination, 0)) if self._repeated else 0
        self._closed_since_mark.append((destination, count, repeated))
        if repeated:
            self._repeated[destination] -= repeated
            self._drop_repeated(batch, repeated)
        if batch.parts:
            if self.holder is not None and destination:
                self._order(batch)
            self._append(MessageType.STREAM_BATCH, batch)
        batch.parts, batch.size_bytes = [], 0
        if self.ready_size_bytes >= READY_SIZE_BYTES_MAX:
            self._context.slice_end = 0

    def _order(self, batch: Batch) -> None:
        """Send a barrier before calls to another destination, so that earlier calls are logged first.

        Only members of ordered multicasts do this. Messages of the multicast protocol and answers need no barrier."""
        destination = batch.destination
        if self._unordered and self._unordered != destination:
            self.send(encode_barrier(self._unordered))
            self._unordered = ""
        if any(self._is_plain_call(front) for front in batch.parts[::2]):
            self._unordered = destination

    def _is_plain_call(self, front: bytes) -> bool:
        """Return True for a call of a method not in OF_ORDER. ``front``: its encoded form before the arguments."""
        _, start = decode_zigzag_int(front, 0)
        return front[start + 1] == RpcKind.CALL and decode_zigzag_int(front, start + 2)[0] not in self.order_method_ids

    def _append(self, message_type: MessageType, batch: Batch) -> None:
        self._attach(batch.destination)
        count, size_bytes = batch.count, batch.size_bytes
        fields = encode_name(batch.destination) + encode_zigzag(count)
        front = encode_zigzag(1 + len(fields) + size_bytes) + bytes((message_type,)) + fields
        if size_bytes < count * LARGE_PART_SIZE_BYTES:
            self.send(b"".join((front, *batch.parts)))
            return
        self.send(front)
        for part in batch.parts:
            self.send(part)

    def _attach(self, destination: Name) -> None:
        if destination and destination not in self._attached:
            self._attached.add(destination)
            self.send(encode_attach_to(destination))

    def send(self, chunk: Chunk) -> None:
        """Append bytes to the output. The app also sends its own messages (Hello, Checkpoint) by this method."""
        self._ready.append(chunk)
        self.ready_size_bytes += len(chunk)

    def report(self, message: bytes) -> None:
        """Send ``message`` before all other output: no rewind takes it back."""
        self._reports.append(message)

    def close_batches(self) -> None:
        """Close all open batches, so that calls made so far precede what is sent next. Called between two messages."""
        self.close_open()
        if self.holder is not None:
            self.holder.flush()

    def close_open(self) -> None:
        """Close all open batches, as :meth:`close_batches` does, also in the middle of a message."""
        for batch in self._open:
            self._close(batch)
        self._open.clear()

    def pop_chunks(self) -> list[Chunk]:
        """Return the output to send now, for the caller to own: with impulses, or only reports if ``only_reports``."""
        if self.only_reports:
            reports: list[Chunk] = [*self._reports]
            self._reports = []
            return reports
        self.close_batches()
        for batch in self.impulses.pop_batches():
            self._append(MessageType.IMPULSE_BATCH, batch)
        if self.impulses.checkpoint_wanted:
            self.impulses.checkpoint_wanted = False
            self.send(encode_message(MessageType.TAKE_CHECKPOINT))
        popped, self._ready = self._ready, []
        self.ready_size_bytes = 0
        if self._reports:
            popped[:0], self._reports = self._reports, []
        return popped


def outside_handler_error(context: Context, name: Name) -> UsageError:
    if threading.get_ident() != context.thread_id:
        return UsageError(
            f"{name}.fork: from a hook or another thread calls are impulses, since no replay would repeat them: "
            f"impulses.{name.rpartition('.')[2]}(...), or impulses.to(self.<peer>).{name.rpartition('.')[2]}(...)"
        )
    if context.handling_thread_id == QUERY_RUNS:
        return QueryError(f"{name}.fork: a query only reads, and calls nobody: {AS_RPC}")
    return UsageError(
        f"{name}.fork: only handlers send calls (@rpc, @impulse and @initial methods): what __init__, prepare, "
        f"checkpoint, restore and upgrade do is not in the log; use an @initial method for calls at the first start"
    )


class ImpulseQueue:
    """Queue of impulses of all hooks, in one order, with a window: senders wait while too many are not durable yet."""

    def __init__(self, context: Context, wake: Callable[[], None]) -> None:
        self._context = context
        self._wake = wake
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # enter it by its lock, which is C; this is Python
        self._batches: list[Batch] = []
        self._why_closed: str | None = None
        self.checkpoint_wanted = False
        self._sent_count = self._sent_size_bytes = 0  # by the app's threads
        self._popped_count = self._popped_size_bytes = 0  # by the connection
        self._accepted_count = self._accepted_size_bytes = 0  # by the coordinator
        self._count_limit = IMPULSES_OUTSTANDING_MAX  # of what can have been sent: moves with what is accepted
        self._size_limit_bytes = IMPULSES_OUTSTANDING_BYTES_MAX
        self._marks: deque[tuple[int, int]] = deque()  # (count, size in bytes) up to the end of each batch taken
        self._process_id = os.getpid()
        register(self)

    def forked_in_child(self) -> None:
        """Close the queue in a forked child: the thread that sends to the coordinator is in the parent."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        advice = "it is the app; a child may call it as a client, with immortal.appsdk.client.connect"
        self._why_closed = after_fork_message("these impulses' way", self._process_id, advice)

    def append(self, destination: Name, name: Name, write: Write, arguments: tuple[Any, ...]) -> None:
        """Queue one impulse; wait while the window is full. Handlers must not call this method.

        Raises Disconnected, TypeError if it can't be encoded, UsageError from a handler or if it is too large.
        """
        if threading.get_ident() == self._context.thread_id:
            raise UsageError(f"impulses.{name}: a handler's calls are no impulses: use .fork(...)")
        with self._lock:
            while (
                self._sent_count >= self._count_limit or self._sent_size_bytes >= self._size_limit_bytes
            ) and self._why_closed is None:
                self._changed.wait()
            if self._why_closed is not None:
                raise Disconnected(self._why_closed)
            if not self._put(destination, write, arguments):
                return
        self._wake()

    def append_own(self, write: Write, arguments: tuple[Any, ...]) -> None:
        """Queue one impulse of the SDK to this instance, even if the window is full: there are few. Thread-safe.

        Raises UsageError for one that is too large.
        """
        with self._lock:
            is_news = self._put("", write, arguments)
        if is_news and threading.get_ident() != self._context.thread_id:
            self._wake()

    def _put(self, destination: Name, write: Write, arguments: tuple[Any, ...]) -> bool:
        """Queue an impulse; return True if the connection must be woken to send it."""
        batches = self._batches
        batch = batches[-1] if batches else None
        if batch is None or batch.destination != destination or batch.size_bytes >= BATCH_SIZE_BYTES:
            batch = Batch(destination)
        is_first = not batch.parts
        size_bytes = write(batch.parts, arguments)
        batch.size_bytes += size_bytes
        self._sent_count += 1
        self._sent_size_bytes += size_bytes
        if not is_first:
            return False
        batches.append(batch)
        return len(batches) == 1

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint, from any thread. Raises Disconnected."""
        with self._lock:
            if self._why_closed is not None:
                raise Disconnected(self._why_closed)
            self.checkpoint_wanted = True
        self._wake()

    def pop_batches(self) -> list[Batch]:
        """Return the batches to be sent now, in order."""
        if not self._batches:  # read without the lock: a thread that appends wakes the connection afterwards
            return []
        with self._lock:
            popped, self._batches = self._batches, []
            for batch in popped:
                self._popped_count += batch.count
                self._popped_size_bytes += batch.size_bytes
                self._marks.append((self._popped_count, self._popped_size_bytes))
        return popped

    def accept(self, count: int) -> None:
        """Note that the first ``count`` impulses of this connection are durable. Raises RemoteProtocolError."""
        with self._lock:
            if not self._accepted_count <= count <= self._popped_count:
                raise RemoteProtocolError(
                    f"the coordinator says that {count} impulses are accepted; it had said {self._accepted_count}, "
                    f"and was sent {self._popped_count}"
                )
            self._accepted_count = count
            while self._marks and self._marks[0][0] <= count:
                self._accepted_size_bytes = self._marks.popleft()[1]
            self._count_limit = count + IMPULSES_OUTSTANDING_MAX
            self._size_limit_bytes = self._accepted_size_bytes + IMPULSES_OUTSTANDING_BYTES_MAX
            self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> None:
        """Wait until all impulses sent so far are durable. Raises TimeoutError, Disconnected, UsageError."""
        if threading.get_ident() == self._context.thread_id:
            raise UsageError("impulses.flush: a handler can't wait for impulses: they are handled after it")
        with self._lock:
            target = self._sent_count
            done = self._changed.wait_for(
                lambda: self._accepted_count >= target or self._why_closed is not None, timeout_s
            )
            if not done:
                missing = target - self._accepted_count
                raise TimeoutError(f"after {timeout_s} s {missing} impulses are not accepted yet")
            if self._accepted_count < target:
                raise Disconnected(self._why_closed)

    def close(self, reason: str) -> None:
        """Close the queue: the connection has ended, and present and later senders get Disconnected."""
        with self._lock:
            if self._why_closed is None:
                self._why_closed = reason
            self._changed.notify_all()
