"""TCP proxy that breaks connections when a test says so.

"To" is the direction towards the target, "back" the other. A fault applies to all connections, also later ones, until
it is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

DEADLINE_S = 20.0
PIECE_SIZE_BYTES = 1 << 16
Result = TypeVar("Result")


@dataclass(slots=True)
class Faults:
    """Faults of the proxy, changed by :meth:`FaultProxy.set` only."""

    stalled: bool = False  # nothing is read: the sender's window fills, as if the other end hung
    held: bool = False  # everything is read and kept, nothing is passed on
    black_hole: bool = False  # everything is read and thrown away
    delay_s: float = 0.0  # each piece is passed on so much later
    rate_bytes_per_s: float | None = None  # towards the target
    cut_after_bytes: int | None = None  # all connections end after so many more towards the target
    refusing: bool = False  # new connections are closed at once


@dataclass(slots=True, eq=False)
class _Line:
    """One direction of a connection: pieces on their way, with the times at which they arrived."""

    pieces: deque[tuple[float, bytes]] = field(default_factory=deque)
    ended: bool = False
    stranded: bool = False  # its sender is cut off; its pieces wait for deliver_stranded()


@dataclass(slots=True, eq=False)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    to: _Line = field(default_factory=_Line)
    back: _Line = field(default_factory=_Line)
    recorded: bytearray = field(default_factory=bytearray)


class FaultProxy:
    """Proxy at ``endpoint``, which passes connections on to ``target``; both are tcp://host:port. A context manager."""

    def __init__(self, target: str, *, record: bool = False) -> None:
        self.target = target
        self.endpoint = ""
        self.accepted = 0  # connections made so far
        self.cuts = 0  # made by cut_after_bytes
        self.passed_bytes = 0  # towards the target
        self.recordings: list[bytes] = []  # of ended connections: all bytes from the near side
        self._record = record
        self._faults = Faults()
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    # --- methods for tests --------------------------------------------------------------------------------------------

    def set(self, **faults: object) -> None:
        """Change :class:`Faults`, as in ``set(delay_s=0.1)``."""

        def change() -> None:
            for name, value in faults.items():
                setattr(self._faults, name, value)

        self._do(change)

    def retarget(self, target: str) -> None:
        """Pass new connections on to another target."""
        self._do(lambda: setattr(self, "target", target))

    def cut(self) -> int:
        """End all connections at once, with the bytes on their way; return their number."""
        return self._do(self._cut_all)

    def strand(self) -> int:
        """Cut the senders off, but keep their connections to the target, with the bytes on their way there."""
        return self._do(self._strand_all)

    def deliver_stranded(self) -> None:
        """Let stranded bytes arrive; their connections stay open until the target ends them."""
        self._do(self._unstrand_all)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this object holds."""

        async def waiting() -> None:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(condition), DEADLINE_S)

        self._run(waiting())

    def play_again(self, recording: bytes) -> socket.socket:
        """Open a connection to the target that sends the bytes of an earlier one; the caller must close it."""
        host, port = _address(self.target)
        again = socket.create_connection((host, port), timeout=DEADLINE_S)
        again.sendall(recording)
        return again

    # --- on the loop --------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def _do(self, change: Callable[[], Result]) -> Result:
        async def changing() -> Result:
            async with self._changed:
                result = change()
                self._changed.notify_all()
                return result

        return self._run(changing())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        if not condition():
            async with self._changed:
                await self._changed.wait_for(condition)

    async def _accept(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await self._tell()
        if self._faults.refusing:
            near.transport.abort()
            return
        try:
            far_reader, far = await asyncio.open_connection(*_address(self.target))
        except OSError:
            near.transport.abort()
            return
        connection = _Connection(near, far)
        self._connections.append(connection)
        for work in (
            self._take(near_reader, connection, connection.to),
            self._give(connection.to, connection, far),
            self._take(far_reader, connection, connection.back),
            self._give(connection.back, connection, near),
        ):
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, reader: asyncio.StreamReader, connection: _Connection, line: _Line) -> None:
        with contextlib.suppress(OSError):
            while True:
                await self._wait_for(lambda: not self._faults.stalled)
                data = await reader.read(PIECE_SIZE_BYTES)
                if not data:
                    break
                if self._record and line is connection.to:
                    connection.recorded += data
                if not self._faults.black_hole:
                    line.pieces.append((time.monotonic(), data))
                    await self._tell()
        line.ended = True
        await self._tell()

    async def _give(self, line: _Line, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        faults = self._faults

        def may_go() -> bool:
            return not (faults.stalled or faults.held or line.stranded) and bool(line.pieces or line.ended)

        with contextlib.suppress(OSError):
            while True:
                await self._wait_for(may_go)
                if not line.pieces:
                    break
                came_at, data = line.pieces.popleft()
                await asyncio.sleep(max(0.0, came_at + faults.delay_s - time.monotonic()))
                if line is connection.to:
                    data = await self._limit(line, data)
                    self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
                if line is connection.to and faults.cut_after_bytes == 0:
                    faults.cut_after_bytes = None
                    self.cuts += 1
                    self._cut_all()
                await self._tell()
        if not line.stranded and connection in self._connections:
            self._end_connection(connection)

    async def _limit(self, line: _Line, data: bytes) -> bytes:
        """Return the part of ``data`` that is sent now, after its time; the rest is put back."""
        faults = self._faults
        size_bytes = len(data)
        if faults.rate_bytes_per_s is not None:
            size_bytes = min(size_bytes, max(1, int(faults.rate_bytes_per_s / 50)))
            await asyncio.sleep(size_bytes / faults.rate_bytes_per_s)
        if faults.cut_after_bytes is not None:
            size_bytes = min(size_bytes, faults.cut_after_bytes)
            faults.cut_after_bytes -= size_bytes
        if size_bytes < len(data):
            line.pieces.appendleft((0.0, data[size_bytes:]))
        return data[:size_bytes]

    def _cut_all(self) -> int:
        count = len(self._connections)
        for connection in list(self._connections):
            self._end_connection(connection)
        return count

    def _end_connection(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        for line in (connection.to, connection.back):
            line.pieces.clear()
            line.ended = True
        if self._record:
            self.recordings.append(bytes(connection.recorded))
        for writer in (connection.near, connection.far):
            with contextlib.suppress(OSError):
                writer.close()  # sends the transport's remaining bytes, then ends the connection

    def _strand_all(self) -> int:
        count = 0
        for connection in self._connections:
            if not connection.to.stranded:
                connection.to.stranded = True
                connection.near.transport.abort()
                count += 1
        return count

    def _unstrand_all(self) -> None:
        for connection in self._connections:
            connection.to.stranded = False

    async def _end(self) -> None:
        self._server.close()
        self._cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
