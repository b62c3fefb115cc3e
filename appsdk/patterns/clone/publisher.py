"""Publisher's socket, the feed from the table's handlers, and the publisher thread in the table's process."""

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
from immortal.appsdk.patterns.clone.frames import Refused, Request, decode_request, encode
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    PRESENCE_S,
    REQUEST_SIZE_BYTES_MAX,
    CloneError,
    Entries,
    Place,
    Presence,
    Row,
)
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.listener import Listener

# One frame has the changes of some time: under load, a frame for each would cost most. The pause is FLUSH_PAUSES times
# the time of the last sending, so a publisher spends a fifth of its time with sending.
FLUSH_PAUSES = 4
FLUSH_S_MIN = 0.0002
FLUSH_S_MAX = 0.02
CLOSE_LINGER_MS = 100  # as the messenger's: ZeroMQ can end the process if it is cut off in a message

logger = logging.getLogger("immortal.clone")

_TURN_FRAMES_MAX = 1000  # received before other work has its turn
_OPTIONS = {
    zmq.MAXMSGSIZE: REQUEST_SIZE_BYTES_MAX,
    zmq.SNDHWM: 65_536,  # frames to one client: its window is the real limit
    zmq.BACKLOG: 4096,  # connections that the kernel holds: after a crash all clients return at once
    zmq.ROUTER_MANDATORY: 1,
    zmq.HANDSHAKE_IVL: 10_000,  # ms: all clients can connect at the same time
}


class Publisher:
    """Publisher that listens until :meth:`close`. ``publishing``: the present publication; None: nothing yet.

    ``identity``: the name whose keys in the registry folder ``home`` it shows; then it admits only callers with keys of
    that folder. "": it admits everybody who reaches ``endpoint``, which must be on this machine unless ``insecure`` is
    True. Raises CloneError.
    """

    def __init__(self, endpoint: str, *, home: Path, identity: str = "", insecure: bool = False) -> None:
        self.publishing: Publication | None = None
        self._flushed_s = self._pause_s = 0.0
        self._listener = Listener(
            endpoint, _OPTIONS, decode_request, logger, CloneError, home=home, identity=identity, insecure=insecure
        )
        self.endpoint = self._listener.endpoint

    def fileno(self) -> int:
        """Return the descriptor to wait for. It signals once: :meth:`receive` takes all that has arrived."""
        descriptor = self._listener.socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def receive(self, now_ns: int) -> bool:
        """Process clients' messages; return False if there may be more."""

        def handle(route: bytes, name: str, request: Request) -> None:
            if self.publishing is not None:
                self.publishing.handle_request(route, name, request, now_ns)
            else:
                refused = Refused(getattr(request, "stream", 0), "nothing is published here yet", True)
                self._listener.send(route, encode(refused))

        return self._listener.receive(_TURN_FRAMES_MAX, handle)

    def turn(self) -> float:
        """Do all that is due now, and return the seconds until the next call, unless the descriptor signals."""
        now_s = time.monotonic()
        is_read = self.receive(int(now_s * 1e9))
        if self.publishing is None:
            return BEAT_S if is_read else 0.0
        if now_s >= self._due_s():
            self.publishing.flush(int(now_s * 1e9))
            outgoing, self.publishing.outgoing = self.publishing.outgoing, []
            for route, data in outgoing:
                if not self._listener.send(route, data):
                    self.publishing.end_stream_of(route)
            self._flushed_s = time.monotonic()
            busy_s = FLUSH_PAUSES * (self._flushed_s - now_s)
            self._pause_s = max(FLUSH_S_MIN, min(busy_s, FLUSH_S_MAX))
            is_read = self.receive(int(now_s * 1e9))  # sending can have consumed the signal of an arrival
        return max(0.0, self._due_s() - time.monotonic()) if is_read else 0.0

    def _due_s(self) -> float:
        is_dirty = self.publishing is not None and self.publishing.is_dirty
        return self._flushed_s + (self._pause_s if is_dirty else BEAT_S)

    def close(self) -> None:
        self._listener.close(CLOSE_LINGER_MS)


# Feed from a table's handlers to the publisher in the same process. A replay has no publisher: then it does nothing.
#
# Handlers that are undone or recovered put the same rows again; the publisher knows their numbers.


class Feed:
    """Rows in transit from the table's handlers to its publisher. ``initial_table``: the table at its start,
    set by a handler.
    """

    def __init__(self) -> None:
        self.initial_table: tuple[str, Entries] | None = None
        self.has_forwarders = False
        self._rows: deque[Sequence[Row]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def start(self, table: str, entries: Entries) -> None:
        if self.initial_table is None:
            self.initial_table = (table, entries.copy())
            self._rows.clear()
        os.eventfd_write(self._wake, 1)

    def add(self, rows: Sequence[Row]) -> None:
        self._rows.append(rows)
        os.eventfd_write(self._wake, 1)

    def drain(self) -> list[Row]:
        """Take all rows that have arrived. The publisher can know some of them."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        rows: list[Row] = []
        while self._rows:
            rows.extend(self._rows.popleft())
        return rows


_feeds: dict[int, Feed] = {}  # by the instance's committer ID: an undo creates another object of the class


def feed_of(table: Any) -> Feed | None:
    return _feeds.get(table._immortal_context.committer_id)


# Publisher in the process of a table's app: a thread beside its handlers.


_SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
PRESENCES_MAX = 1000  # of one message


def has_keys(home: Path, name: str) -> bool:
    try:
        return pair_of(home / name, name) is not None
    except (NotConnectable, PermissionError):
        return True  # there are keys; the code that uses them reports the problem


class TablePublisher:
    """Publisher of ``table``, one in the life of its process. ``table_impulses``: impulses to it. Raises CloneError."""

    def __init__(self, table: Any, table_impulses: Any, listen: str, blocking_s: float) -> None:
        self._name = name = table._immortal_context.instance_name
        secret_file = os.environ.get(_SECRET_FILE_VARIABLE)  # it is in the instance's folder in the registry folder
        home = home_of(Path(secret_file).absolute().parent.parent if secret_file else None)
        self._feed = _feeds[table._immortal_context.committer_id] = Feed()
        self._publisher = Publisher(listen, home=home, identity=name if has_keys(home, name) else "")
        self._table_impulses = table_impulses
        self._blocking_s = blocking_s
        self._reported_held_by: list[str] = []
        self._reported_s = float("-inf")

    def run(self) -> None:
        """Publish until the process ends. Raises Disconnected."""
        publisher, feed = self._publisher, self._feed
        self._table_impulses.publisher_begins(self._place(0))
        poll = select.poll()
        poll.register(publisher.fileno(), select.POLLIN)
        poll.register(feed.fileno(), select.POLLIN)
        while True:
            self._publish_new_rows()
            wait_s = publisher.turn()
            if publisher.publishing is not None:
                self._report(publisher.publishing, time.monotonic())
            poll.poll(1000 * min(wait_s, PRESENCE_S))

    def _publish_new_rows(self) -> None:
        rows = self._feed.drain()
        publishing = self._publisher.publishing
        if publishing is None:
            if self._feed.initial_table is None:
                return
            table, entries = self._feed.initial_table
            key = secrets.token_hex(4)
            publishing = Publication(key, table, entries, blocking_s=self._blocking_s, owner=self._name)
            self._publisher.publishing = publishing
        number = publishing.entries.number
        publishing.publish([row for row in rows if row.number > number])

    def _report(self, publishing: Publication, now_s: float) -> None:
        """Report to the table the clients that joined and left, and those that hold up writers."""
        held = publishing.held_by
        has_news = publishing.joined or publishing.left or held != self._reported_held_by
        pause_s = PRESENCE_S if has_news else BEAT_S
        if now_s < self._reported_s + pause_s or not (has_news or self._feed.has_forwarders):
            return
        self._reported_s = now_s
        joined, left = drain_presences(publishing)
        self._table_impulses.publisher_says(joined, left, held, self._place(len(publishing)))
        self._reported_held_by = held

    def _place(self, streams: int) -> Place:
        return Place(self._publisher.endpoint, "", streams, is_table=True, may_block=self._blocking_s > 0)


def drain_presences(publishing: Publication) -> tuple[list[Presence], list[str]]:
    """Take the clients that joined and left, as many as fit into one message; joined ones first."""
    joined = [publishing.joined.pop(stream) for stream in list(publishing.joined)[:PRESENCES_MAX]]
    if publishing.joined:
        return joined, []
    left, publishing.left = publishing.left[:PRESENCES_MAX], publishing.left[PRESENCES_MAX:]
    return joined, left
