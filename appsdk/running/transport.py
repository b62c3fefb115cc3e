"""The app's one connection: a blocking loop on the main thread that feeds the dispatcher and sends what it wants sent.

Two limits keep memory bounded. With OUTPUT_PENDING_BYTES_MAX not taken by the coordinator, no input is handled until it
reads again (for however long: it pushes back when a peer is down). Up to INPUT_BUFFERED_BYTES_MAX the app goes on
reading meanwhile, so that it hears of a Goodbye, a Refusal or the end, and never keeps the coordinator from sending.

A checkpoint that a child process encodes goes out in chunks between the other messages, SNAPSHOT_CHUNKS_PENDING_MAX
ahead of the coordinator at most; the rest waits in the child.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from appsdk.calls.outbox import Chunk
from appsdk.dispatch.dispatcher import Dispatcher
from appsdk.dispatch.events import BecamePrimary, Flush, Goodbye, MessageFailed, Refusal, SnapshotBegun
from appsdk.errors import AppError, ConnectError, Disconnected, Refused, UpgradeError
from appsdk.running.authenticate import check_owner
from appsdk.state.snapshot import CHUNK_SIZE_BYTES_MAX, Snapshot
from protocol.errors import RemoteProtocolError
from protocol.extensions import SECRET_SIZE_BYTES_MAX
from protocol.messages import MessageType, encode_message
from protocol.varint import encode_zigzag
from protocol.verdicts import Verdict

CONNECT_TIMEOUT_S = 30.0  # a coordinator that opens a large log may take seconds before it listens
CONNECT_ATTEMPT_TIMEOUT_S = 5.0
CONNECT_DELAY_S_MIN, CONNECT_DELAY_S_MAX = 0.01, 0.05  # an attempt costs less than a service that is still down
RECEIVE_SIZE_BYTES = 256 << 10  # of one recv: larger ones cost more in fresh memory than they save in calls
OUTPUT_PENDING_BYTES_MAX = 4 << 20  # handed to the socket and not taken: beyond it no input is handled
INPUT_BUFFERED_BYTES_MAX = 8 << 20  # read while no input is handled
SNAPSHOT_CHUNKS_PENDING_MAX = (1 << 20) // CHUNK_SIZE_BYTES_MAX  # handed to the socket and not taken
LAST_WORDS_TIMEOUT_S = 5.0  # for what the coordinator is to hear before the app leaves
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the one that coordinators read
TIMER_WAIT_MS_MAX = 10_000  # then the time is looked at again
SEND_CHUNKS_MAX = 256  # of one sendmsg; the system's own limit is 1024
UNIX = "unix:"  # in front of the path of a Unix socket
UNIX_PATH_SIZE_BYTES_MAX = 107  # the kernel's limit
UNIX_SEND_BUFFER_SIZE_BYTES = 1 << 20


def parse_address(address: str) -> tuple[str, int] | str:
    """``host:port`` as a pair, ``unix:path`` as the path. Raises ConnectError."""
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        size_bytes = len(os.fsencode(path))
        if not 0 < size_bytes <= UNIX_PATH_SIZE_BYTES_MAX or "\0" in path:
            raise ConnectError(
                f"the coordinator's address is {address!r}, with a path of {size_bytes} bytes; a Unix socket's path "
                f"has 1 to {UNIX_PATH_SIZE_BYTES_MAX}, none of them zero"
            )
        return path
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConnectError(
            f"the coordinator's address is {address!r}, HOST:PORT was expected (such as 127.0.0.1:7001), or unix:PATH"
        )
    return host.strip("[]"), int(port)


def connect(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
    """Connect, and try again until a coordinator listens. Raises ConnectError after ``timeout_s``."""
    target = parse_address(address)
    deadline_s = time.monotonic() + timeout_s
    delay_s = CONNECT_DELAY_S_MIN
    while True:
        try:
            connection = _connect_once(target)
            if connection is not None:
                connection.setblocking(False)
                return connection
            problem = "nobody listens there"
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() + delay_s > deadline_s:
            raise ConnectError(
                f"no coordinator at {address} for {timeout_s:g} s ({problem}): start it with 'immortal "
                f"coordinator NAME', "
                f"or both with 'immortal run NAME module:Class'"
            )
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, CONNECT_DELAY_S_MAX)


def _connect_once(target: tuple[str, int] | str) -> socket.socket | None:
    """None where the connection has met itself. Raises OSError."""
    if isinstance(target, str):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_ATTEMPT_TIMEOUT_S)
        try:
            # The system's default is small: with it, a Unix socket costs more than TCP, otherwise half of it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_SIZE_BYTES)
            connection.connect(target)
            check_owner(connection, f"{UNIX}{target}")
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection(target, CONNECT_ATTEMPT_TIMEOUT_S)
    # Without a listener, a connection to a port that the system picks for clients may meet itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_secret(path: str) -> bytes:
    """The secret in the file at ``path``, its one line. Raises ConnectError.

    To be read once the connection is there: the coordinator makes a new secret at each start, before it listens.
    """
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConnectError(f"the secret for the coordinator can't be read from {path}: {error.strerror}") from None
    if not 0 < len(secret) <= SECRET_SIZE_BYTES_MAX:
        raise ConnectError(
            f"the secret for the coordinator in {path} has {len(secret)} bytes, "
            f"1 to {SECRET_SIZE_BYTES_MAX} were expected"
        )
    return secret


class Waker:
    """Lets other threads end the main thread's wait."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits any more
            self._sender.send(b"\0")

    def clear(self) -> None:
        try:
            while len(self._receiver.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Transport:
    """Runs one connection to its end. ``address`` is for messages.

    ``on_failure``: told of each message that has failed alone.
    """

    def __init__(
        self,
        connection: socket.socket,
        dispatcher: Dispatcher,
        waker: Waker,
        address: str,
        on_failure: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._connection = connection
        self._dispatcher = dispatcher
        self._waker = waker
        self._address = address
        self._on_failure = on_failure
        self._send_lock = threading.Lock()  # held while bytes go out, or wait to: nobody else's may come in between
        self._pending: deque[memoryview] = deque()
        self._pending_size_bytes = 0
        self._sent_size_bytes = 0
        self._snapshot: Snapshot | None = None
        self._snapshot_ends: deque[int] = deque()  # up to which byte of all output each of its pending chunks goes
        self._snapshot_polled = -1
        self._input_ended = False
        self._output_ended = False
        self._failure: AppError | None = None
        self._poll = select.poll()
        self._poll.register(waker.fileno(), select.POLLIN)
        self._interest = 0

    def fail(self, error: AppError) -> None:
        """From any thread: end the run with this error."""
        if self._failure is None:
            self._failure = error
        self._waker.wake()

    def run(self, on_primary: Callable[[], None]) -> str:
        """Run until the coordinator says Goodbye; its reason.

        Raises Refused, Disconnected, what :meth:`fail` was given, and whatever the dispatcher raises.
        """
        try:
            return self._run(on_primary)
        except UpgradeError:
            self.say_last_words()
            raise
        finally:
            if self._snapshot is not None:
                self._snapshot.close()

    def _run(self, on_primary: Callable[[], None]) -> str:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._snapshot is not None:
                self._relay(self._snapshot)
            if self._pending_size_bytes < OUTPUT_PENDING_BYTES_MAX:
                event = self._dispatcher.next_event()
                if isinstance(event, Goodbye):
                    return event.reason
                if isinstance(event, Refusal):
                    raise Refused(f"the coordinator at {self._address} refuses: {event.reason}")
                if isinstance(event, BecamePrimary):
                    on_primary()
                elif isinstance(event, MessageFailed):
                    self._on_failure(event.verdict)
                elif isinstance(event, SnapshotBegun):
                    if self._snapshot is not None:
                        raise RemoteProtocolError("a checkpoint was asked for while another one is on its way")
                    self._snapshot = Snapshot(event.encode)
                due_ns = self._dispatcher.next_due_ns
                if due_ns is not None and due_ns <= (now_ns := self._now_ns()):
                    self._dispatcher.tell_time(now_ns)
                self._take(self._dispatcher.data_to_send())
                self._send()
                if isinstance(event, Flush):
                    while self._pending:
                        self._wait()
                if event is not None:
                    continue
                if self._input_ended:
                    raise self._gone()
            self._wait()

    def say_last_words(self, timeout_s: float = LAST_WORDS_TIMEOUT_S) -> None:
        """Send what the dispatcher still has, and see to it that the coordinator can read it, before the connection is
        closed: what comes in after that would make the system throw away what is on its way out. Raises nothing."""
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        self._take(self._dispatcher.data_to_send())
        self._send()
        with contextlib.suppress(OSError):
            while self._pending:
                poll.register(self._connection, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                    return
                self._send()
            self._connection.shutdown(socket.SHUT_WR)
            poll.register(self._connection, select.POLLIN)
            while not self._input_ended and poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                self._input_ended = not self._connection.recv(RECEIVE_SIZE_BYTES)

    def _gone(self) -> Disconnected:
        where = " (in the middle of a record)" if self._dispatcher.buffered_bytes else ""
        return Disconnected(
            f"the coordinator at {self._address} is gone{where}; it and the app live and die together: start both again"
        )

    # --- sending ----------------------------------------------------------------------------------------------------

    def _take(self, chunks: Iterable[Chunk]) -> None:
        if self._output_ended:
            return
        with self._send_lock:
            for chunk in chunks:
                if len(chunk):
                    self._pending.append(memoryview(chunk))
                    self._pending_size_bytes += len(chunk)

    def is_left(self) -> bool:
        """The coordinator has ended the connection. From any thread."""
        poller = select.poll()
        poller.register(self._connection, select.POLLRDHUP)
        return bool(poller.poll(0))

    def say_beside(self, message: bytes) -> bool:
        """From any thread, while a handler runs: send ``message`` at once; False where that is not possible now."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            if self._pending or self._output_ended:
                return False
            sent = self._connection.send(message)
            if sent < len(message):
                self._pending.append(memoryview(message)[sent:])
                self._pending_size_bytes += len(message) - sent
            return True
        except OSError:
            return False
        finally:
            self._send_lock.release()

    def _send(self) -> None:
        """As much as the socket takes now."""
        with self._send_lock:
            self._send_pending()

    def _send_pending(self) -> None:
        pending = self._pending
        while pending:
            try:
                sent = self._connection.sendmsg([pending[index] for index in range(min(len(pending), SEND_CHUNKS_MAX))])
            except BlockingIOError:
                return
            except OSError:
                self._end_output()  # what the coordinator said before it went away may still be read
                return
            self._pending_size_bytes -= sent
            self._sent_size_bytes += sent
            while sent:
                first = pending[0]
                if sent < len(first):
                    pending[0] = first[sent:]
                    break
                sent -= len(first)
                pending.popleft()

    def _end_output(self) -> None:
        self._output_ended = True
        self._pending.clear()
        self._pending_size_bytes = 0
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    # --- a checkpoint beside the handlers ---------------------------------------------------------------------------

    def _snapshot_has_room(self) -> bool:
        ends = self._snapshot_ends
        while ends and ends[0] <= self._sent_size_bytes:
            ends.popleft()
        return len(ends) < SNAPSHOT_CHUNKS_PENDING_MAX

    def _relay(self, snapshot: Snapshot) -> None:
        """Put what the child has written behind the output, as far as there is room for it."""
        if not self._snapshot_has_room():
            snapshot.not_read()
        while self._snapshot_has_room():
            chunk = snapshot.read()
            if chunk is None:
                return
            if not chunk:
                self._snapshot = None
                self._dispatcher.forks_next = not snapshot.has_hung
                self._take([encode_message(MessageType.SNAPSHOT_END, snapshot.reason.encode())])
                return
            front = encode_zigzag(1 + len(chunk)) + bytes((MessageType.SNAPSHOT_CHUNK,))
            self._take([front, chunk])
            self._snapshot_ends.append(self._sent_size_bytes + self._pending_size_bytes)

    def _poll_snapshot(self) -> None:
        """Wait for the child only while there is room for what it writes."""
        snapshot = self._snapshot
        wanted = snapshot.fileno() if snapshot is not None and self._snapshot_has_room() else -1
        if wanted == self._snapshot_polled:
            return
        if self._snapshot_polled >= 0:
            self._poll.unregister(self._snapshot_polled)
        if wanted >= 0:
            self._poll.register(wanted, select.POLLIN)
        self._snapshot_polled = wanted

    # --- waiting and receiving --------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until there is input, room for output, or a call of the waker; take what is there."""
        interest = select.POLLOUT if self._pending else 0
        if not self._input_ended and (
            self._pending_size_bytes < OUTPUT_PENDING_BYTES_MAX
            or self._dispatcher.buffered_bytes < INPUT_BUFFERED_BYTES_MAX
        ):
            interest |= select.POLLIN
        if interest != self._interest:
            self._poll.register(self._connection, interest)
            self._interest = interest
        self._poll_snapshot()
        for descriptor, happened in self._poll.poll(self._time_to_wait_ms()):
            if descriptor == self._waker.fileno():
                self._waker.clear()
                continue
            if descriptor == self._snapshot_polled:
                continue  # read when the output's turn comes
            if happened & select.POLLOUT:
                self._send()
            if happened & ~select.POLLOUT:
                self._receive()

    def _time_to_wait_ms(self) -> int | None:
        """Until a timer is due, or a child has been silent for too long."""
        times_ms = []
        due_ns = self._dispatcher.next_due_ns
        if due_ns is not None and self._pending_size_bytes < OUTPUT_PENDING_BYTES_MAX:
            times_ms.append(min(max(0, (due_ns - self._now_ns()) // 1_000_000 + 1), TIMER_WAIT_MS_MAX))
        if self._snapshot is not None and self._snapshot_polled >= 0:
            times_ms.append(max(0, int(1000 * self._snapshot.time_left_s()) + 1))
        return min(times_ms, default=None)

    def _now_ns(self) -> int:
        """The instance's time. Its coordinator has the clock; one that tells no time leaves us with the machine's."""
        told = self._dispatcher.time
        return time.time_ns() if told is None else told.time_ns + time.clock_gettime_ns(_STEADY) - told.steady_ns

    def _receive(self) -> None:
        try:
            data = self._connection.recv(RECEIVE_SIZE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._dispatcher.receive_data(data)
        else:
            self._input_ended = True
            self._end_output()
