"""Transport over the app's one connection: mutual proof of the secret, then a blocking loop between socket and app.

Two limits keep memory bounded. While the coordinator has not taken OUTPUT_PENDING_BYTES_MAX, no input is handled, for
however long (it pushes back while a peer is down). Meanwhile the app continues to read up to INPUT_BUFFERED_BYTES_MAX,
so that it receives a Goodbye, a Refusal or the end, and never keeps the coordinator from sending.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path

from immortal.appsdk.dispatch.events import Flush, Goodbye
from immortal.appsdk.errors import ConnectError, Disconnected, Refused, UpgradeError
from immortal.appsdk.running.app_loop import OUTPUT_PENDING_BYTES_MAX, AppLoop
from immortal.protocol.app_handshake import (
    ANSWER_SIZE_BYTES_MAX,
    NONCE_SIZE_BYTES,
    Answer,
    Handshake,
    Role,
    channel_of,
    decode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import SECRET_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, decode_messages
from immortal.protocol.readers import Record, RecordReader

CONNECT_TIMEOUT_S = 30.0  # a coordinator that opens a large log can take seconds before it listens
CONNECT_ATTEMPT_TIMEOUT_S = 5.0
CONNECT_DELAY_S_MIN, CONNECT_DELAY_S_MAX = 0.01, 0.05  # an attempt costs less than a service that stays down
RECEIVE_SIZE_BYTES = 256 << 10  # per recv: more costs more in fresh memory than it saves in calls
INPUT_BUFFERED_BYTES_MAX = 8 << 20  # read while no input is handled
LAST_OUTPUT_TIMEOUT_S = 5.0  # for the last output before the app leaves
TIMER_WAIT_MS_MAX = 10_000  # then the time is checked again
SEND_CHUNKS_MAX = 256  # of one sendmsg; the system's own limit is 1024
UNIX = "unix:"  # prefix of the path of a Unix socket
UNIX_PATH_SIZE_BYTES_MAX = 107  # the kernel's limit
UNIX_SEND_BUFFER_SIZE_BYTES = 1 << 20


def parse_address(address: str) -> tuple[str, int] | str:
    """Parse an address: ``host:port`` to a pair, ``unix:path`` to the path. Raises ConnectError."""
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
    """Connect to a coordinator; retry until it listens. Raises ConnectError after ``timeout_s``."""
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
    """Connect; return None if the connection has connected to itself. Raises OSError."""
    if isinstance(target, str):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_ATTEMPT_TIMEOUT_S)
        try:
            # The system's default is small: with it a Unix socket costs more than TCP, otherwise half as much.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BUFFER_SIZE_BYTES)
            connection.connect(target)
            check_owner(connection, f"{UNIX}{target}")
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection(target, CONNECT_ATTEMPT_TIMEOUT_S)
    # Without a listener, a connection to a port from the clients' range can connect to itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_secret(path: str) -> bytes:
    """Read the secret, the only line of the file at ``path``. Raises ConnectError.

    Read it after the connection is made: the coordinator writes a new secret at each start, before it listens.
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
    """Pipe by which other threads end the main thread's wait."""

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
    """Runs one connection to its end. ``address``: for messages."""

    def __init__(self, connection: socket.socket, loop: AppLoop, waker: Waker, address: str) -> None:
        self._connection = connection
        self._loop = loop
        self._dispatcher = loop.dispatcher
        self._dispatcher.streams = True
        self._waker = waker
        self._address = address
        self._snapshot_polled = -1
        self._input_ended = False
        self._poll = select.poll()
        self._poll.register(waker.fileno(), select.POLLIN)
        self._interest = 0

    def run(self) -> str:
        """Run until the coordinator says Goodbye; return its reason. Raises Disconnected, errors of AppLoop.step."""
        try:
            return self._run()
        except UpgradeError:
            self.send_last_output()
            raise
        finally:
            self._loop.close()

    def _run(self) -> str:
        loop = self._loop
        while True:
            if loop.pending_size_bytes < OUTPUT_PENDING_BYTES_MAX:
                event = loop.step()
                if isinstance(event, Goodbye):
                    return event.reason
                self._send()
                if isinstance(event, Flush):
                    while loop.pending:
                        self._wait()
                if event is not None:
                    continue
                if self._input_ended:
                    raise self._disconnected()
            else:
                loop.poll()
            self._wait()

    def send_last_output(self, timeout_s: float = LAST_OUTPUT_TIMEOUT_S) -> None:
        """Send the dispatcher's last output so that the coordinator can read it, before the connection is closed.

        Input that arrives after a close would make the system discard unsent output. Never raises."""
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        self._loop.take_output()
        self._send()
        with contextlib.suppress(OSError):
            while self._loop.pending:
                poll.register(self._connection, select.POLLOUT)
                if not poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                    return
                self._send()
            self._connection.shutdown(socket.SHUT_WR)
            poll.register(self._connection, select.POLLIN)
            while not self._input_ended and poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                self._input_ended = not self._connection.recv(RECEIVE_SIZE_BYTES)

    def _disconnected(self) -> Disconnected:
        where = " (in the middle of a record)" if self._dispatcher.buffered_bytes else ""
        return Disconnected(
            f"the coordinator at {self._address} is gone{where}; it and the app live and die together: start both again"
        )

    # --- sending ----------------------------------------------------------------------------------------------------

    def is_disconnected(self) -> bool:
        """Return True if the coordinator has ended the connection. For any thread."""
        poller = select.poll()
        poller.register(self._connection, select.POLLRDHUP)
        return bool(poller.poll(0))

    def send_from_other_thread(self, message: bytes) -> bool:
        """Send ``message`` at once, from any thread, while a handler runs; return False if that is not possible now."""
        loop = self._loop
        if not loop.lock.acquire(blocking=False):
            return False
        try:
            if loop.pending or loop.output_ended:
                return False
            sent = self._connection.send(message)
            if sent < len(message):
                loop.pending.append(memoryview(message)[sent:])
                loop.pending_size_bytes += len(message) - sent
            return True
        except OSError:
            return False
        finally:
            loop.lock.release()

    def _send(self) -> None:
        with self._loop.lock:
            self._send_pending()

    def _send_pending(self) -> None:
        pending = self._loop.pending
        while pending:
            try:
                sent = self._connection.sendmsg([pending[index] for index in range(min(len(pending), SEND_CHUNKS_MAX))])
            except BlockingIOError:
                return
            except OSError:
                self._loop.end_output()  # the coordinator's last messages can still be read
                return
            self._loop.remove_sent(sent)

    # --- waiting and receiving --------------------------------------------------------------------------------------

    def _poll_snapshot(self) -> None:
        """Wait for the child's output only while there is room for it."""
        snapshot = self._loop.snapshot
        wanted = snapshot.fileno() if snapshot is not None and self._loop.snapshot_has_room else -1
        if wanted == self._snapshot_polled:
            return
        if self._snapshot_polled >= 0:
            self._poll.unregister(self._snapshot_polled)
        if wanted >= 0:
            self._poll.register(wanted, select.POLLIN)
        self._snapshot_polled = wanted

    def _wait(self) -> None:
        """Wait for input, for room for output, or for the waker; read what is there."""
        interest = select.POLLOUT if self._loop.pending else 0
        if not self._input_ended and (
            self._loop.pending_size_bytes < OUTPUT_PENDING_BYTES_MAX
            or self._dispatcher.buffered_bytes < INPUT_BUFFERED_BYTES_MAX
        ):
            interest |= select.POLLIN
        if interest != self._interest:
            self._poll.register(self._connection, interest)
            self._interest = interest
        self._poll_snapshot()
        for descriptor, happened in self._poll.poll(self._poll_timeout_ms()):
            if descriptor == self._waker.fileno():
                self._waker.clear()
                continue
            if descriptor == self._snapshot_polled:
                continue  # read when the output's turn comes
            if happened & select.POLLOUT:
                self._send()
            if happened & ~select.POLLOUT:
                self._receive()

    def _poll_timeout_ms(self) -> int | None:
        """Return the time in ms until a timer is due or a child has been silent for too long."""
        times_ms = []
        due_ns = self._dispatcher.next_due_ns
        if due_ns is not None and self._loop.pending_size_bytes < OUTPUT_PENDING_BYTES_MAX:
            times_ms.append(min(max(0, (due_ns - self._loop.now_ns()) // 1_000_000 + 1), TIMER_WAIT_MS_MAX))
        if self._loop.snapshot is not None and self._snapshot_polled >= 0:
            times_ms.append(max(0, int(1000 * self._loop.snapshot.time_left_s()) + 1))
        return min(times_ms, default=None)

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
            self._loop.end_output()


# Before the first record: the listener must prove to be the coordinator, then the app proves to be its app.
#
# The secret itself is never sent. So a process that listens in the coordinator's place learns nothing, and is ignored.


ANSWER_TIMEOUT_S = 60.0  # a coordinator answers at once, unless its disk hangs
_ROOT = 0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def check_owner(connection: socket.socket, address: str) -> None:
    """Check that this user, or root, listens at the other end of a Unix socket. Raises ConnectError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user_id, _ = _CREDENTIALS.unpack(credentials)
    if user_id not in (_ROOT, os.geteuid()):
        raise ConnectError(
            f"user {user_id} listens at {address} (process {process_id}), not user {os.geteuid()}, whose this app is: "
            f"run the app and its coordinator as the same user"
        )


def authenticate(connection: socket.socket, secret: bytes, address: str) -> None:
    """Let both ends of the fresh, non-blocking ``connection`` prove that they know ``secret``.

    Raises ConnectError if the listener can't, and Refused if it says that it does not want this app; all else that it
    sends is ignored.
    """
    nonce = os.urandom(NONCE_SIZE_BYTES)
    try:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.sendall(encode_challenge(nonce))
        answer = _answer(connection, address)
        channel = channel_of(connection.getsockname(), connection.getpeername())
        handshake = Handshake(nonce, answer.coordinator_nonce, answer.instance, channel)
        if not handshake.is_proven(secret, Role.COORDINATOR, answer.proof):
            raise ConnectError(
                f"who listens at {address} does not know the secret that this app was given, so it is not its "
                f"coordinator (it calls itself {answer.instance!r}), or something stands between the two; see "
                f"that the address and the secret's file are those of one instance that runs"
            )
        connection.sendall(encode_proof(handshake.proof(secret, Role.APP)))
        connection.setblocking(False)
    except RemoteProtocolError as error:
        raise ConnectError(f"who listens at {address} is not the coordinator of this app: {error}") from None
    except TimeoutError:
        raise ConnectError(
            f"who listens at {address} has not proven to be the coordinator of this app within {ANSWER_TIMEOUT_S:g} s"
        ) from None
    except OSError as error:
        raise _connect_error(address, error.strerror or str(error)) from None


def _answer(connection: socket.socket, address: str) -> Answer:
    """Receive the answer to the Challenge. Raises ConnectError, Refused, RemoteProtocolError, OSError."""
    reader = RecordReader()
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    size_bytes = 0
    while True:
        data = connection.recv(ANSWER_SIZE_BYTES_MAX)
        if not data:
            raise _connect_error(address, "the connection was closed")
        reader.receive_data(data)
        size_bytes += len(data)
        event = reader.next_event()
        if event is not None:
            break
        if size_bytes >= ANSWER_SIZE_BYTES_MAX:
            raise RemoteProtocolError(f"its answer has more than {ANSWER_SIZE_BYTES_MAX} bytes")
        if (rest_s := deadline_s - time.monotonic()) <= 0:  # it can come byte by byte
            raise TimeoutError
        connection.settimeout(rest_s)
    messages = list(decode_messages(event.content)) if isinstance(event, Record) else []
    if isinstance(event, Record) and len(messages) == 1 and not reader.buffered_bytes:
        message_type, start, end = messages[0]
        if message_type == MessageType.PROOF:
            return decode_answer(event.content[start:end])
        if message_type == MessageType.REFUSAL:
            reason = event.content[start:end].decode("utf-8", "replace")
            raise Refused(f"who listens at {address} refuses: {''.join(filter(str.isprintable, reason))}")
    raise RemoteProtocolError("its answer to a Challenge is something else than a Proof")


def _connect_error(address: str, problem: str) -> ConnectError:
    return ConnectError(
        f"who listens at {address} went away before it had proven to be the coordinator of this app ({problem}): it "
        f"has another app ('immortal status' says), ends, or is of a version before this proof"
    )
