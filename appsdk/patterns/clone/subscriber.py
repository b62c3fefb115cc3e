"""Replica of a part of a table, and the subscriber that connects it to one publisher after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from immortal.appsdk.client import ReachOptions, with_timeout
from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.client.errors import CallTimeout, ClientError, NotConnectable
from immortal.appsdk.client.transport import Dealer
from immortal.appsdk.patterns.clone import frames
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    CONNECT_S,
    FORWARDERS_MAX,
    LEASE_S,
    MARK_BYTES_DEFAULT,
    REQUEST_SIZE_BYTES_MAX,
    SILENCE_S,
    VALUE_SIZE_BYTES_MAX,
    WINDOW_BYTES_DEFAULT,
    Place,
)
from immortal.appsdk.patterns.clone.streams import EVERYTHING
from immortal.protocol.errors import RemoteProtocolError

ASK_S = 0.05  # first interval of a client's pings after its request, until it is sure that nothing was lost
ASK_GROWTH = 1.5
RETRY_S = 0.2  # between two attempts to find a publisher
RETRY_S_MAX = 2.0

_NOBLOCK = int(zmq.NOBLOCK)
_OPTIONS = {
    zmq.IMMEDIATE: 1,  # else a process that listens there later would get messages sent before
    zmq.MAXMSGSIZE: VALUE_SIZE_BYTES_MAX + REQUEST_SIZE_BYTES_MAX + (1 << 20),
    zmq.RECONNECT_IVL: 10,
    zmq.RECONNECT_IVL_MAX: 500,
    zmq.CONNECT_TIMEOUT: 1_000,
}
_BEHIND_S = 5.0  # if all publishers are behind the copy for so long, the copy is discarded
Context = zmq.Context[zmq.Socket[bytes]]
FindPlaces = Callable[[bool], Sequence[Place]]


# Copy of a part of a table, always equal to the table at one number. No I/O, no clock.


RowChange = tuple[str, int, bytes | None]  # key, number, value; None: the key is gone


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a client's stream."""

    subtrees: tuple[str, ...] = ("",)
    window_bytes: int = WINDOW_BYTES_DEFAULT
    mark_bytes: int = MARK_BYTES_DEFAULT
    policy: frames.Policy = "drop"
    label: str = ""
    relay: bool = False
    writes: str = ""


@dataclass(slots=True)
class Counts:
    """Counters of a copy. ``holes``: parts that did not fit the copy. ``whole``: copies from the beginning.
    ``resumed``: streams that continued the copy. ``dropped``: changes that were not sent singly.
    """

    holes: int = 0
    whole: int = 0
    resumed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Changes of a completed part. ``whole``: set if the part replaced the copy."""

    changes: Sequence[RowChange]
    number: int
    whole: Sequence[RowChange] | None = None
    is_conflated: bool = False


class Replica:
    """Copy of a table. ``values``: by key, MessagePack. ``number``: of the last update in it; ``table``: "" while there
    is no copy.

    ``subtrees``: those that it receives; None while it has no stream. ``ended``: why it gets no more updates.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.values: dict[str, bytes] = {}
        self.table = ""
        self.forgotten = 0  # see Activated
        self.number = 0
        self.subtrees: tuple[str, ...] | None = None
        self.counts = Counts()
        self.ended = ""
        self.problem = ""
        self.is_whole = False  # True when the present stream has completed the copy
        self.is_ahead = False  # True if the publisher refused it because the copy is newer
        self.stream = 0
        self._copied_subtrees: tuple[str, ...] = ()  # the subtrees of the copy
        self._stream_table = ""
        self._staged: list[RowChange] = []
        self._staged_after: int | None = None
        self.received_bytes = 0
        self._acknowledged_bytes = 0
        self._dropped = 0  # of this stream

    def activate(self, *, from_start: bool = False) -> frames.Activate:
        """Return the request for a new stream. ``from_start``: from the beginning, as if there were no copy."""
        self.stream += 1
        self.subtrees = None
        self.is_whole = False
        self._staged, self._staged_after = [], None
        self.received_bytes = self._acknowledged_bytes = self._dropped = 0
        options = self.options
        table, number = ("", 0) if from_start else (self.table, self.number)
        return frames.Activate(
            self.stream,
            list(options.subtrees),
            table,
            number,
            list(self._copied_subtrees),
            options.window_bytes,
            options.mark_bytes,
            options.policy,
            options.label,
            options.relay,
        )

    def handle_answer(self, answer: frames.Answer, size_bytes: int) -> News | bool:
        """Process a publisher's answer of ``size_bytes``. Returns its changes, or True to request a stream again."""
        if isinstance(answer, frames.Part):
            return self.subtrees is not None and self._apply_part(answer, size_bytes)
        if isinstance(answer, frames.Activated):
            if answer.stream == self.stream:
                self.subtrees, self._stream_table, self.problem = tuple(answer.subtrees), answer.table, ""
                self.forgotten = answer.forgotten
                self._staged, self._staged_after = [], None
        elif isinstance(answer, (frames.Refused, frames.Finished)) and answer.stream == self.stream:
            self.subtrees = None
            self.problem = answer.reason
            self.is_ahead = isinstance(answer, frames.Refused) and answer.is_behind
            if not answer.again:
                self.ended = answer.reason
            return answer.again
        elif isinstance(answer, frames.Dropped) and answer.stream == self.stream:
            self.counts.dropped += answer.count - self._dropped
            self._dropped = answer.count
        return False

    def _apply_part(self, part: frames.Part, size_bytes: int) -> News | bool:
        self.received_bytes += size_bytes
        if self._staged_after is not None:
            follows = part.after == self._staged_after
        else:
            follows = part.after == EVERYTHING or (part.after == self.number and self.table == self._stream_table)
        if not follows:
            self.counts.holes += 1
            self.subtrees = None  # parts in flight follow this one, which is not used
            return True
        if part.more:
            self._staged += part.changes
            self._staged_after = part.after
            return False
        changes: Sequence[RowChange] = [*self._staged, *part.changes] if self._staged else part.changes
        self._staged, self._staged_after = [], None
        whole = None
        if part.after == EVERYTHING:
            whole = changes
            changes = self._replace(changes, part.number)
        else:
            for key, _, value in changes:
                if value is not None:
                    self.values[key] = value
                else:
                    self.values.pop(key, None)
            if not self.is_whole:
                self.counts.resumed += 1
        self.is_whole = True
        self._copied_subtrees = self.subtrees or ()
        self.number = part.number
        return News(changes, part.number, whole, part.is_conflated)

    def _replace(self, changes: Sequence[RowChange], number: int) -> list[RowChange]:
        """Replace the copy and return the differences as changes."""
        self.counts.whole += 1
        before = self.values
        self.table = self._stream_table
        self.values = {key: value for key, _, value in changes if value is not None}
        gone: list[RowChange] = [(key, number, None) for key in before if key not in self.values]
        return [change for change in changes if before.get(change[0]) != change[2]] + gone

    def acknowledgement(self) -> int | None:
        """Return the number of the stream's received bytes if an acknowledgement is due, else None."""
        if self.received_bytes - self._acknowledged_bytes < self.options.window_bytes // 4:
            return None
        self._acknowledged_bytes = self.received_bytes
        return self.received_bytes


# Connection of a replica to a publisher.


class Subscriber:
    """Connection of a replica to a publisher. ``find``: returns the table's places (True: refresh them), or
    raises NotConnectable.

    ``finder_of``: returns endpoint and keys of one of these places.
    """

    def __init__(
        self, context: Context, replica: Replica, find: FindPlaces, finder_of: Callable[[Place], Finder], now_s: float
    ) -> None:
        self.replica = replica
        self.problem = "it was not tried yet"
        self._find = find
        self._finder_of = finder_of
        self._random = random.Random()  # noqa: S311 (so that not all clients retry at once)
        self._dealer = Dealer(context, _OPTIONS)
        self._monitor = self._dealer.monitor
        self._connections = 0  # count at the last request for a stream
        self._is_requested = False
        self._last_received_s = now_s
        self._pinged_s = now_s
        self._unanswered = 0  # number of pings
        self._has_all_parts = False  # True if all parts sent before the last ping have arrived
        self._tries = 0
        self._next_try_s = now_s
        self._failed_until_s: dict[str, float] = {}  # by endpoint
        self._ahead_since_s: float | None = None
        self.has_ended = False

    @property
    def endpoint(self) -> str:
        """Endpoint of the connection; "": none."""
        return self._endpoint if self._dealer.is_open else ""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets to wait for. They signal once: :meth:`process` takes all that has arrived, and can open
        others.
        """
        return [self._dealer.socket, self._monitor.socket] if self._dealer.is_open else []

    def next_deadline_s(self) -> float:
        if not self._dealer.is_open:
            return self._next_try_s
        silence_s = SILENCE_S if self.replica.subtrees is not None else CONNECT_S
        return min(self._pinged_s + self._pause_s, self._last_received_s + silence_s)

    @property
    def _pause_s(self) -> float:
        if self._has_all_parts and not self._unanswered:
            return BEAT_S
        return float(min(BEAT_S, ASK_S * ASK_GROWTH ** min(self._unanswered, 10)))

    def process(self, now_s: float, news_max: int = 1000) -> list[News]:
        """Process what has arrived and return at most ``news_max`` changes; the rest with the next call."""
        found: list[News] = []
        if self.replica.ended:
            self.close()
            return found
        if not self._dealer.is_open:
            if now_s < self._next_try_s:
                return found
            self._connect(now_s)
        self._check_connection(now_s)
        self._read(found, now_s, news_max)
        self._keep_alive(now_s, reads=news_max > 0)
        self._read(found, now_s, news_max)  # sending can have consumed the signal of an arrival
        return found

    def _read(self, found: list[News], now_s: float, news_max: int) -> None:
        while self._dealer.is_open and len(found) < news_max and self._dealer.has_unread():
            data = self._dealer.socket.recv(_NOBLOCK)
            self._last_received_s = now_s
            if (news := self._handle_answer(data, now_s)) is not None:
                found.append(news)

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self, now_s: float) -> None:
        try:
            places = list(self._find(self._tries > 0))
            if not places:
                raise NotConnectable("it is published nowhere yet")
            # A place that has not failed recently, if there is one; at random among the first two, to spread clients.
            fresh = [place for place in places if now_s >= self._failed_until_s.get(place.endpoint, 0.0)]
            found = self._finder_of(self._random.choice(fresh[:2] or places)).find()
            self._dealer.open(found.endpoints[0], found, self._tries)
        except NotConnectable as error:
            self.problem = str(error)
            self._retry(now_s)
            return
        self._monitor.problem = ""  # else it would be that of the earlier place
        self._connections = self._monitor.connections
        self._endpoint = found.endpoints[0]
        self._last_received_s = self._pinged_s = now_s
        self._is_requested = False

    def close(self) -> None:
        self._dealer.close()
        self.replica.subtrees = None

    def _retry(self, now_s: float) -> None:
        if self._dealer.is_open:
            self._failed_until_s[self._endpoint] = now_s + LEASE_S
            if len(self._failed_until_s) > FORWARDERS_MAX:
                self._failed_until_s.clear()
        self.close()
        pause_s = min(RETRY_S * 1.5 ** min(self._tries, 20), RETRY_S_MAX)
        self._tries += 1
        self._next_try_s = now_s + pause_s * (0.5 + self._random.random())

    def _check_connection(self, now_s: float) -> None:
        if not self._dealer.is_open:
            return
        monitor = self._monitor
        monitor.read_events()
        if self._is_requested and (not monitor.is_up or monitor.connections > self._connections):
            self._is_requested = False  # a broken connection can have been restored
            self.replica.subtrees = None
            self._last_received_s = now_s
        if not self._is_requested and monitor.is_up:
            self._connections = monitor.connections
            self._request_stream(now_s)
        elif monitor.is_unreachable:
            self.problem = f"{self._endpoint}: {monitor.problem}"
            self._retry(now_s)

    def _request_stream(self, now_s: float) -> None:
        behind_since_s = self._ahead_since_s
        request = self.replica.activate(from_start=behind_since_s is not None and now_s - behind_since_s > _BEHIND_S)
        self._is_requested = self._send(request)
        self._has_all_parts = False
        if self._is_requested:
            self._last_received_s = self._pinged_s = now_s
            self._unanswered = 0

    def _keep_alive(self, now_s: float, *, reads: bool) -> None:
        if not self._dealer.is_open:
            return
        if not reads and self._dealer.has_unread():
            self._last_received_s = now_s
        asks = self.replica.subtrees is None
        if now_s - self._last_received_s >= (CONNECT_S if asks else SILENCE_S):
            self.problem = f"{self._endpoint}: {self._monitor.problem or 'it does not answer'}"
            self._retry(now_s)
        elif now_s - self._pinged_s >= self._pause_s:
            self._pinged_s = now_s
            self._unanswered += 1
            self._send(frames.Ping(self.replica.stream, self.replica.received_bytes))

    def _send(self, request: frames.Request) -> bool:
        """Send a request; return False if there is no connection, or ZeroMQ has not completed it yet."""
        return self._dealer.send(frames.encode(request))

    # --- messages from the publisher ---------------------------------------------------------------------------------

    def _handle_answer(self, data: bytes, now_s: float) -> News | None:
        try:
            answer = frames.decode_answer(data)
        except RemoteProtocolError as error:
            self.problem = f"{self._endpoint} sends {error}"
            self._retry(now_s)
            return None
        if isinstance(answer, frames.Pong):
            self._unanswered = 0
            self._handle_pong(answer, now_s)
            return None
        if isinstance(answer, frames.Deactivated):
            self.has_ended = True
            return None
        came = self.replica.handle_answer(answer, len(data))
        if isinstance(came, News):
            self._tries = 0
            self._ahead_since_s = None
            self._acknowledge()
            return came
        if came:
            self._request_again(now_s)
        elif self.replica.ended:
            self.close()
        else:
            self._acknowledge()
        return None

    def _handle_pong(self, answer: frames.Pong, now_s: float) -> None:
        """Request a stream again if it is lost, or if parts sent before this answer are lost."""
        replica = self.replica
        if answer.stream != replica.stream:
            if replica.subtrees is not None or (self._is_requested and answer.stream == 0):
                self._request_stream(now_s)  # the publisher has lost the stream, or never got the request
        elif replica.subtrees is None or answer.total_bytes > replica.received_bytes:
            replica.counts.holes += 1
            self._request_stream(now_s)
        else:
            self._has_all_parts = True

    def _acknowledge(self) -> None:
        total_bytes = self.replica.acknowledgement()
        if total_bytes is not None:
            self._send(frames.Received(self.replica.stream, total_bytes))

    def _request_again(self, now_s: float) -> None:
        """Request a stream again after a hole, or after the publisher ended the stream."""
        if not self.replica.problem:
            self._request_stream(now_s)
            return
        self.problem = f"{self._endpoint}: {self.replica.problem}"
        if not self.replica.is_ahead:
            self._ahead_since_s = None
        elif self._ahead_since_s is None:
            self._ahead_since_s = now_s
        self._retry(now_s)

    # --- the end -----------------------------------------------------------------------------------------------------

    def deactivate(self) -> None:
        """Request the end of the stream; ``has_ended`` turns True when it is acknowledged."""
        if self._dealer.is_open and self.replica.subtrees is not None:
            self._send(frames.Deactivate(self.replica.stream))
        else:
            self.has_ended = True


# Places where a table is published: from the table, or given by hand.


@dataclass
class Access:
    """Options by which a client reaches a table and its publishers. ``reach``: of :func:`immortal.client.connect`.

    ``publishers``: endpoints, instead of those that the table names; ``NAME@tcp://...`` if they show NAME's keys.
    ``prefers_blocking``: of the places that the table names, prefer those where clients can hold up writers.
    """

    table: str
    reach: ReachOptions
    publishers: Sequence[str] = ()
    prefers_blocking: bool = False

    def finder(self, place: Place) -> Finder:
        reach: ReachOptions = {**self.reach, "endpoints": (place.endpoint,)}
        if place.identity:
            reach["server_keys"] = ()
        return Finder(place.identity or self.table, **reach)


@dataclass
class Places:
    """Publishers of a table. ``table``: a proxy of it; None: only publishers given by hand. ``only_tables``: leave out
    forwarders that the table names.
    """

    access: Access
    table: Any = None
    only_tables: bool = False
    _known: list[Place] = field(default_factory=list)

    def find(self, refresh: bool) -> Sequence[Place]:
        """Return the places of the publishers. Raises NotConnectable."""
        if self.access.publishers:
            return [_place(text) for text in self.access.publishers]
        if self._known and not refresh:
            return self._known
        try:
            found = with_timeout(self.table, CONNECT_S).places()
            found = [place for place in found if place.is_table or not self.only_tables]
            self._known = [place for place in found if place.may_block or not self.access.prefers_blocking] or found
        except (CallTimeout, NotConnectable) as error:
            if not self._known:  # the table is unreachable; its known forwarders can still work
                raise NotConnectable(str(error)) from None
        except ClientError as error:
            raise NotConnectable(f"{self.access.table!r} is no table of this version: {error}") from None
        return self._known


def _place(text: str) -> Place:
    name, at, endpoint = text.partition("@tcp://")
    return Place(f"tcp://{endpoint}", name) if at else Place(text)
