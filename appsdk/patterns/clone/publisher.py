"""Publisher's socket, the feed from the table's handlers, and the thread that runs both in the table's process."""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from immortal.appsdk.client.discovery import home_of, pair_of
from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.frames import Refused, decode_request, encode
from immortal.appsdk.patterns.clone.model import CloneError, Entries, Place, Presence, Row
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.listener import Listener, ListenError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.safe_output import RateLimit

logger = logging.getLogger("immortal.clone")

_NOBLOCK = int(zmq.NOBLOCK)
_QUEUED_MAX = 65_536  # frames to one client inside ZeroMQ: its window is what bounds them
_TURN_FRAMES_MAX = 1000  # that are taken in before others have their turn
_OPTIONS = {
    zmq.MAXMSGSIZE: limits.REQUEST_SIZE_BYTES_MAX,
    zmq.SNDHWM: _QUEUED_MAX,
    zmq.BACKLOG: limits.BACKLOG,
    zmq.ROUTER_MANDATORY: 1,
    zmq.HANDSHAKE_IVL: limits.HANDSHAKE_TIMEOUT_MS,
}


class Publisher:
    """Publisher that listens until :meth:`close`. ``publishing``: what it publishes; None: nothing yet.

    ``identity``: whose keys in the registry folder ``home`` are shown; then only callers with keys of that folder get
    in. "": everybody does that reaches ``endpoint``, which is on this machine then, unless ``insecure`` is True.
    Raises CloneError.
    """

    def __init__(self, endpoint: str, *, home: Path, identity: str = "", insecure: bool = False) -> None:
        self.publishing: Publication | None = None
        self.malformed = 0  # frames that were dropped
        self._flushed_s = self._pause_s = 0.0
        self._warnings = RateLimit(burst=1)
        try:
            self._listener = Listener(endpoint, _OPTIONS, home=home, identity=identity, insecure=insecure)
        except ListenError as error:
            raise CloneError(str(error)) from None
        self.endpoint = self._listener.endpoint
        self._socket = self._listener.socket

    def fileno(self) -> int:
        """File descriptor to wait for. It signals once: :meth:`receive` takes all that has come."""
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def receive(self, now_ns: int) -> bool:
        """Process clients' messages. False: there may be more."""
        for parts in self._listener.receive(_TURN_FRAMES_MAX):
            self._received(parts, now_ns)
        return self._listener.has_all

    def _received(self, parts: list[zmq.Frame], now_ns: int) -> None:
        try:
            name = self._listener.caller_of(parts[0])
        except PermissionError as error:
            self._drop(str(error))
            return
        if len(parts) != 2:
            self._drop(f"a message of {len(parts) - 1} parts or more, 1 was expected")
            return
        route = parts[0].bytes
        try:
            request = decode_request(parts[1].bytes)
        except RemoteProtocolError as error:
            self._drop(str(error))
            return
        if self.publishing is not None:
            self.publishing.take(route, name, request, now_ns)
        else:
            self._send(route, encode(Refused(getattr(request, "stream", 0), "nothing is published here yet", True)))

    def _drop(self, what: str) -> None:
        self.malformed += 1
        left_out = self._warnings.admit("malformed", time.monotonic_ns())
        if left_out is not None:
            logger.warning("at %s: %s; dropped (%d more since the last warning)", self.endpoint, what, left_out)

    def turn(self) -> float:
        """Do all that is due now, and return after how many seconds to come again, unless something comes."""
        now_s = time.monotonic()
        is_read = self.receive(int(now_s * 1e9))
        if self.publishing is None:
            return limits.BEAT_S if is_read else 0.0
        if now_s >= self._due_s():
            self._flush(int(now_s * 1e9))
            self._flushed_s = time.monotonic()
            busy_s = limits.FLUSH_PAUSES * (self._flushed_s - now_s)
            self._pause_s = max(limits.FLUSH_S_MIN, min(busy_s, limits.FLUSH_S_MAX))
            is_read = self.receive(int(now_s * 1e9))  # sending may have taken in the news that something has come
        return max(0.0, self._due_s() - time.monotonic()) if is_read else 0.0

    def _due_s(self) -> float:
        """Time of the next flush."""
        is_dirty = self.publishing is not None and self.publishing.is_dirty
        return self._flushed_s + (self._pause_s if is_dirty else limits.BEAT_S)

    def _flush(self, now_ns: int) -> None:
        """Send all that may be sent."""
        publishing = self.publishing
        if publishing is None:
            return
        publishing.flush(now_ns)
        outgoing, publishing.outgoing = publishing.outgoing, []
        for route, data in outgoing:
            if not self._send(route, data):
                publishing.lost(route)

    def _send(self, route: bytes, data: bytes) -> bool:
        """Send a message; False: the connection is gone, or has no room."""
        try:
            self._socket.send_multipart((route, data), _NOBLOCK, copy=len(data) < 4096)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._listener.close(limits.CLOSE_LINGER_MS)


# From a table's handlers to the publisher in the same process. A replay has no publisher: then this does nothing.
#
# Handlers of a table that is being undone or recovered feed once more what they fed before; its numbers are known.


class Feed:
    """Rows on their way from the table's handlers to its publisher. ``begun``: the table as it was when the publisher
    began, once its handler has said so.
    """

    def __init__(self) -> None:
        self.begun: tuple[str, Entries] | None = None
        self.has_forwarders = False
        self._rows: deque[Sequence[Row]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def begin(self, table: str, entries: Entries) -> None:
        if self.begun is None:
            self.begun = (table, entries.copy())
            self._rows.clear()
        os.eventfd_write(self._wake, 1)

    def put(self, rows: Sequence[Row]) -> None:
        self._rows.append(rows)
        os.eventfd_write(self._wake, 1)

    def take(self) -> list[Row]:
        """Take all rows that have come. Some may be known."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        rows: list[Row] = []
        while self._rows:
            rows.extend(self._rows.popleft())
        return rows


_feeds: dict[int, Feed] = {}  # by the log of an instance: an undo makes another object of the class


def open_feed(table: Any) -> Feed:
    """Open the feed of the instance ``table``, which has one publisher in its life."""
    feed = _feeds[table._immortal_context.committer_id] = Feed()
    return feed


def feed_of(table: Any) -> Feed | None:
    return _feeds.get(table._immortal_context.committer_id)


# The publisher in the process of a table's app: a thread beside its handlers, which feed it.


_SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
_PRESENCES_MAX = 1000  # of one message


def run_publisher(table: Any, says: Any, listen: str, blocking_s: float) -> None:
    """Publish until the process ends. ``says``: impulses to ``table``. Raises CloneError, Disconnected."""
    name = table._immortal_context.instance_name
    home = _home()
    feed = open_feed(table)
    publisher = Publisher(listen, home=home, identity=name if has_keys(home, name) else "")
    says.publisher_begins(_place(publisher, 0, blocking_s))
    _TablePublisher(name, publisher, feed, says, blocking_s).run()


def _home() -> Path:
    """Return the registry folder: the app's secret is in it, in the folder of the instance."""
    secret_file = os.environ.get(_SECRET_FILE_VARIABLE)
    return home_of(Path(secret_file).absolute().parent.parent if secret_file else None)


def has_keys(home: Path, name: str) -> bool:
    try:
        return pair_of(home / name, name) is not None
    except (NotConnectable, PermissionError):
        return True  # there are some, and what is wrong with them is said where they are used


class _TablePublisher:
    def __init__(self, name: str, publisher: Publisher, feed: Feed, says: Any, blocking_s: float) -> None:
        self._name = name
        self._publisher = publisher
        self._feed = feed
        self._says = says
        self._blocking_s = blocking_s
        self._said_held: list[str] = []
        self._said_s = float("-inf")

    def run(self) -> None:
        publisher, feed = self._publisher, self._feed
        poll = select.poll()
        poll.register(publisher.fileno(), select.POLLIN)
        poll.register(feed.fileno(), select.POLLIN)
        while True:
            self._take_rows()
            wait_s = publisher.turn()
            if publisher.publishing is not None:
                self._report(publisher.publishing, time.monotonic())
            poll.poll(1000 * min(wait_s, limits.PRESENCE_S))

    def _take_rows(self) -> None:
        rows = self._feed.take()
        publishing = self._publisher.publishing
        if publishing is None:
            if self._feed.begun is None:
                return
            table, entries = self._feed.begun
            key = secrets.token_hex(4)
            publishing = Publication(key, table, entries, blocking_s=self._blocking_s, owner=self._name)
            self._publisher.publishing = publishing
        number = publishing.entries.number
        publishing.publish([row for row in rows if row.number > number])

    def _report(self, publishing: Publication, now_s: float) -> None:
        """Report to the table which clients came and went, and which hold up writers."""
        held = publishing.held_by
        has_news = publishing.joined or publishing.left or held != self._said_held
        pause_s = limits.PRESENCE_S if has_news else limits.BEAT_S
        if now_s < self._said_s + pause_s or not (has_news or self._feed.has_forwarders):
            return
        self._said_s = now_s
        joined, left = drain_presences(publishing)
        place = _place(self._publisher, len(publishing), self._blocking_s)
        self._says.publisher_says(joined, left, held, place)
        self._said_held = held


def _place(publisher: Publisher, streams: int, blocking_s: float) -> Place:
    return Place(publisher.endpoint, "", streams, is_table=True, may_block=blocking_s > 0)


def drain_presences(publishing: Publication) -> tuple[list[Presence], list[str]]:
    """Take the clients that came and those that went, as many as one message holds. Those that came leave first."""
    joined = [publishing.joined.pop(stream) for stream in list(publishing.joined)[:_PRESENCES_MAX]]
    if publishing.joined:
        return joined, []
    left, publishing.left = publishing.left[:_PRESENCES_MAX], publishing.left[_PRESENCES_MAX:]
    return joined, left
