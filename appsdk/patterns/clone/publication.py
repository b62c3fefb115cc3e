"""Rules of a publisher: which client gets which change, and when. No I/O, no clock.

publish(rows)   takes changed rows               outgoing   frames for clients
take(...)       takes a client's request         joined     streams that have begun
flush(now_ns)   sends as much as there is room   left       streams that have ended
"""

from __future__ import annotations

from collections.abc import Sequence

from immortal.appsdk.patterns.clone import frames
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    ENTITLED,
    MARK_BYTES_MAX,
    SECOND_NS,
    SILENCE_S,
    STREAMS_MAX,
    Entitlement,
    Entitlements,
    Entries,
    Presence,
    Row,
    check_subtrees,
)
from immortal.appsdk.patterns.clone.streams import EVERYTHING, Stream, Views
from immortal.protocol import decoding

REPORT_S = 0.1  # between two reports for operators, each of which lists all clients
WINDOW_BYTES_MIN = 4 << 10
WINDOW_BYTES_MAX = 64 << 20
MARK_BYTES_MIN = 4 << 10
WALKS_MAX = 64  # clients that catch up at once: each has a list of rows
LABEL_SIZE_BYTES_MAX = 128  # of a client's name for itself

_ENTITLED = ENTITLED + "/"


class Publication:
    """State of a publisher. ``name``: unique among publishers. ``blocking_s``: limit for a slow client that holds up
    writers; 0: none can.

    ``owner``: the name of the table.
    """

    def __init__(self, name: str, table: str, entries: Entries, *, blocking_s: float, owner: str = "") -> None:
        self.name = name
        self.table = table
        self.entries = entries
        self.outgoing: list[tuple[bytes, bytes]] = []
        self.joined: dict[str, Presence] = {}  # by the stream's ID
        self.left: list[str] = []  # ended streams that were reported as joined
        self.ended_slow = 0
        self.ended_silent = 0
        self._blocking_s = blocking_s
        self._owner = owner
        self._streams: dict[bytes, Stream] = {}
        self._views = Views()
        self._entitlements = _entitlements(self._owner, entries)
        self._count = 0  # of all streams so far
        self._walking: set[str] = set()  # streams with their own list of rows
        self.is_dirty = True  # flush() has work to do
        self._last_beat_ns = 0
        self._reported_ns = -SECOND_NS
        self._rights_changed = False

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held_by(self) -> list[str]:
        """Clients that hold up writers."""
        return [
            f"{stream.request.label or stream.name or 'a client'} ({stream.id})"
            for stream in self._streams.values()
            if stream.over_since_ns is not None
        ]

    # --- the table ---------------------------------------------------------------------------------------------------

    def publish(self, rows: Sequence[Row], *, is_conflated: bool = False, number: int = 0) -> None:
        """Publish rows, in order and newer than all before. ``number``: the update up to which the table is then known;
        0: that of the last row.
        """
        apply = self.entries.apply
        for row in rows:
            apply(row)
            if row.key.startswith(_ENTITLED):
                self._entitlements.set(row.key[len(_ENTITLED) :], _entitlement(row))
                self._rights_changed = True
        self.entries.number = max(self.entries.number, number)
        self._views.add(rows, is_conflated=is_conflated)
        self.is_dirty = True

    def replace(self, table: str, entries: Entries) -> None:
        """Publish another table: all streams end, and can begin again."""
        for stream in list(self._streams.values()):
            self._end(stream, "the table is another one now", again=True)
        self.table, self.entries = table, entries
        self._entitlements = _entitlements(self._owner, entries)

    # --- clients -----------------------------------------------------------------------------------------------------

    def handle_request(self, route: bytes, name: str, request: frames.Request, now_ns: int) -> None:
        """Process a request of a client that shows the key of ``name``."""
        if isinstance(request, frames.Activate):
            self._activate(route, name, request, now_ns)
            return
        stream = self._streams.get(route)
        if isinstance(request, (frames.Received, frames.Ping, frames.Deactivate)):
            if stream is None or stream.request.stream != request.stream or stream.name != name:
                if isinstance(request, frames.Deactivate):
                    self._send(route, frames.Deactivated(request.stream))
                elif isinstance(request, frames.Ping):
                    self._send(route, frames.Pong(0))
                return
            stream.last_seen_ns = now_ns
            if not isinstance(request, frames.Deactivate):
                self.is_dirty |= isinstance(request, frames.Received) or not stream.has_room
                stream.received(request.total_bytes)
                if isinstance(request, frames.Ping):
                    self._send(route, frames.Pong(request.stream, stream.sent_bytes))
            else:
                self._send(route, frames.Deactivated(request.stream))
                self._remove_stream(stream)
            return
        if now_ns < self._reported_ns + REPORT_S * SECOND_NS:
            return  # the operator's tool asks again
        if not name or self._entitlements.may_relay(name) or not len(self._entitlements):
            self._reported_ns = now_ns
            self._send(route, self.report())
        else:
            self._send(route, frames.Refused(0, f"{name!r} may not look at others", again=False))

    def _activate(self, route: bytes, name: str, request: frames.Activate, now_ns: int) -> None:
        if (before := self._streams.get(route)) is not None:
            self._remove_stream(before)
        try:
            _check(request, may_block=self._blocking_s > 0)
            visible = self._visible(name, request)
        except ValueError as error:
            self._send(route, frames.Refused(request.stream, str(error), again=False))
            return
        has_copy = request.table == self.table and request.number > 0
        after = request.number if has_copy and tuple(request.had) == visible else EVERYTHING
        if has_copy and request.number > self.entries.number:
            self._send(
                route,
                frames.Refused(
                    request.stream, f"update {request.number} has not come here yet", again=True, is_behind=True
                ),
            )
            return
        if len(self._streams) >= STREAMS_MAX:
            reason = f"there are {STREAMS_MAX} clients, which is as many as may be: ask another forwarder"
            self._send(route, frames.Refused(request.stream, reason, again=True))
            return
        self._count += 1
        view = self._views.acquire(visible, self.entries.number)
        stream = Stream(f"{self.name}.{self._count}", route, name, request, view, after, now_ns)
        self._streams[route] = stream
        self._send(route, frames.Activated(request.stream, self.table, list(visible), self.entries.forgotten))
        self.joined[stream.id] = Presence(stream.id, name, request.label, self.name, visible)
        self.is_dirty = True

    def end_stream_of(self, route: bytes) -> None:
        """End the stream whose connection is gone."""
        if (stream := self._streams.get(route)) is not None:
            self._remove_stream(stream)

    def report(self) -> frames.Report:
        streams = [stream.report() for stream in self._streams.values()]
        number, rows = self.entries.number, len(self.entries.rows)
        return frames.Report(self.table, number, rows, "", self.ended_slow, self.ended_silent, streams)

    def present(self) -> list[Presence]:
        """Return all present clients, for a table that has lost them."""
        return [
            Presence(one.id, one.name, one.request.label, self.name, one.view.visible) for one in self._streams.values()
        ]

    # --- time --------------------------------------------------------------------------------------------------------

    def flush(self, now_ns: int) -> None:
        """Send changes to the clients that have room, and apply the policies of slow ones."""
        self.is_dirty = False
        if self._rights_changed:
            self._rights_changed = False
            self._check_rights()
        number = self.entries.number
        beat = now_ns - self._last_beat_ns >= BEAT_S * SECOND_NS
        if beat:
            self._last_beat_ns = now_ns
            since_ns = now_ns - int(SILENCE_S * SECOND_NS)
            for stream in [one for one in self._streams.values() if one.last_seen_ns < since_ns]:
                self.ended_silent += 1
                self._end(stream, f"nothing was heard for {SILENCE_S:g} s", again=True)
        joining = {stream.view for stream in self._streams.values() if stream.is_waiting}
        for view in self._views:
            if beat or view in joining or view.pending:
                view.encode_pending(number)
        for stream in list(self._streams.values()):
            self._advance(stream, now_ns)
        self._trim()

    def _advance(self, stream: Stream, now_ns: int) -> None:
        route = stream.route

        def send(data: bytes) -> None:
            self.outgoing.append((route, data))

        if stream.is_waiting and stream.has_room and len(self._walking) < WALKS_MAX:
            walk = stream.view.walk(self.entries, stream.after)
            stream.start(walk)
            if not walk.is_shared:
                self._walking.add(stream.id)
        stream.pump(send)
        if stream.walk is None and stream.id in self._walking:
            self._walking.remove(stream.id)
            self.is_dirty = True  # the next stream can walk
        if stream.is_waiting:
            self.is_dirty |= stream.has_room and len(self._walking) < WALKS_MAX
        if stream.waiting_bytes > stream.request.mark_bytes:
            self._apply_slow_policy(stream, now_ns)
        elif stream.over_since_ns is not None and stream.waiting_bytes <= stream.request.mark_bytes // 2:
            stream.over_since_ns = None

    def _apply_slow_policy(self, stream: Stream, now_ns: int) -> None:
        """Apply the policy of a stream whose waiting bytes exceed its high-water mark."""
        policy = stream.request.policy
        if policy == "drop":
            stream.drop()
            return
        if policy == "block":
            if stream.over_since_ns is None:
                stream.over_since_ns = now_ns
            if now_ns - stream.over_since_ns < self._blocking_s * SECOND_NS and stream.waiting_bytes <= MARK_BYTES_MAX:
                return
        self.ended_slow += 1
        waiting_kib, mark_kib = stream.waiting_bytes >> 10, stream.request.mark_bytes >> 10
        reason = f"too slow: {waiting_kib} KiB wait for it, its high-water mark is {mark_kib} KiB"
        if policy == "block":
            reason += f"; it held up others for {self._blocking_s:g} s"
        self._end(stream, reason, again=False)

    def _check_rights(self) -> None:
        """Check all streams against new entitlements. A client that now sees another part gets all of it again."""
        for stream in list(self._streams.values()):
            try:
                visible = self._visible(stream.name, stream.request)
            except ValueError as error:
                self._end(stream, str(error), again=False)
                continue
            if visible != stream.view.visible:
                self._stop_walking(stream)
                self._views.release(stream.view)
                stream.restart(self._views.acquire(visible, self.entries.number))
                activated = frames.Activated(stream.request.stream, self.table, list(visible), self.entries.forgotten)
                self._send(stream.route, activated)

    def _visible(self, name: str, request: frames.Activate) -> tuple[str, ...]:
        """Return the subtrees that a client gets. Raises ValueError if it may not have the stream."""
        subtrees = check_subtrees(request.subtrees)
        visible = self._entitlements.visible(name, subtrees, relay=request.relay)
        who = repr(name) if name else "who shows no key"
        if not visible and request.relay:
            raise ValueError(f"{who} is no forwarder here: entitle it with relay=True")
        if not visible:
            raise ValueError(f"{who} may see nothing of {', '.join(map(repr, subtrees)) or 'no subtree at all'}")
        if request.policy == "block" and not self._entitlements.may_block(name):
            raise ValueError(
                f"{who} may not hold up writers: ask for 'drop' or 'disconnect', or have it entitled with "
                f"may_block=True"
            )
        return visible

    def _trim(self) -> None:
        needed = {view: view.end for view in self._views}
        walking = set()
        for stream in self._streams.values():
            needed[stream.view] = min(needed[stream.view], stream.first_needed)
            if stream.walk is not None:
                walking.add(stream.view)
        for view, index in needed.items():
            view.trim(index)
            if view not in walking:
                view.snapshot = None

    # --- the end of a stream -----------------------------------------------------------------------------------------

    def _end(self, stream: Stream, reason: str, *, again: bool) -> None:
        self._send(stream.route, frames.Finished(stream.request.stream, reason, again))
        self._remove_stream(stream)

    def _remove_stream(self, stream: Stream) -> None:
        del self._streams[stream.route]
        self._stop_walking(stream)
        self._views.release(stream.view)
        if self.joined.pop(stream.id, None) is None:  # else it was never reported
            self.left.append(stream.id)

    def _stop_walking(self, stream: Stream) -> None:
        stream.walk = None
        if stream.id in self._walking:
            self._walking.remove(stream.id)
            self.is_dirty = True

    def _send(self, route: bytes, answer: frames.Answer) -> None:
        self.outgoing.append((route, frames.encode(answer)))
        self.is_dirty = True


def _check(request: frames.Activate, *, may_block: bool) -> None:
    """Check a client's request for a stream. Raises ValueError."""
    if not WINDOW_BYTES_MIN <= request.window_bytes <= WINDOW_BYTES_MAX:
        raise ValueError(
            f"a window of {request.window_bytes} bytes: {WINDOW_BYTES_MIN} to {WINDOW_BYTES_MAX} were expected"
        )
    if not MARK_BYTES_MIN <= request.mark_bytes <= MARK_BYTES_MAX:
        raise ValueError(
            f"a high-water mark of {request.mark_bytes} bytes: {MARK_BYTES_MIN} to {MARK_BYTES_MAX} were expected"
        )
    if len(request.label.encode("utf-8", "surrogatepass")) > LABEL_SIZE_BYTES_MAX:
        raise ValueError(f"a label of more than {LABEL_SIZE_BYTES_MAX} bytes")
    if not request.label.isprintable():
        raise ValueError(f"label {request.label!r}: printable text was expected")
    if request.number < 0:
        raise ValueError(f"update {request.number}: they are numbered from 1 on")
    if request.policy == "block" and not may_block:
        raise ValueError("policy 'block': nobody may hold up writers here; ask for 'drop' or 'disconnect'")


def _entitlement(row: Row) -> Entitlement | None:
    return None if row.value is None else decoding.decode(row.value, type=Entitlement)


def _entitlements(owner: str, entries: Entries) -> Entitlements:
    found = Entitlements(owner)
    for key, row in entries.rows.items():
        if key.startswith(_ENTITLED):
            found.set(key[len(_ENTITLED) :], _entitlement(row))
    return found
