"""Table as an instance: ``immortal run prices immortal.patterns.clone:Table``. It numbers every change."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from heapq import heapify, heappop, heappush
from typing import ClassVar

import msgspec

import immortal
from immortal.appsdk.errors import Cancelled
from immortal.appsdk.handlers.decorators import impulse, initial, on_primary, query, rpc
from immortal.appsdk.handlers.definition import ANYBODY
from immortal.appsdk.handlers.proxy import Impulses
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    ENTITLED,
    EVERYBODY,
    FORWARDERS_MAX,
    LEASE_S,
    PRESENT,
    STREAMS_MAX,
    Change,
    Entitlement,
    Entries,
    Place,
    Presence,
    Row,
    Status,
    TableFull,
    Written,
    check_change,
    check_key,
    check_subtrees,
    covers,
    encode,
    may_be_seen,
)
from immortal.appsdk.patterns.clone.publisher import TablePublisher, feed_of
from immortal.protocol import decoding

ROWS_MAX = 1_000_000
SIZE_BYTES_MAX = 512 << 20  # of keys and values: each publisher and the checkpoint hold them in memory
CHANGES_MAX = 10_000  # of one update
ENTITLED_MAX = 10_000  # names
EXPIRED_MAX = 1000  # expired rows deleted in one step: other messages are handled in between
ALARMS_MAX = 10_000  # steps of one run of the alarm; a new run keeps its history short
ROOM_S = 5.0  # for which a held-up writer waits before it asks again
BLOCKING_S = 10.0  # limit for a client that holds up writers; then its stream is ended

_ALARM = "alarm"
_LOOKS = -1  # instead of the alarm's time: the alarm handler is about to check the deadlines
_OWN = "own"  # instead of a forwarder's ID: the publisher of the table's app


class Forwarding(msgspec.Struct):
    """Forwarder, or the table's own publisher. ``heard_ns``: in the table's listening time, ``listened_ns``."""

    place: Place
    heard_ns: int
    held_by: list[str] = []
    streams: list[str] = []


ROLES = {
    ANYBODY: ["places"],  # publishers check what each client can see
    "reader": ["status"],
    "writer": ["update", "update_below", "room"],
    "forwarder": ["forwarder_says", "forwarder_known", "forwarder_ends"],
    "administrator": ["entitle", "disentitle", "entitled", "status"],
}


class Table(Immortal, roles=ROLES):
    """Table of keys and values. ``listen``: where it is published; clients elsewhere need an address of the
    machine there, and keys. ``blocking_s``: limit for a client that holds up writers by its policy; 0: forbidden.
    """

    listen: ClassVar[str] = "tcp://127.0.0.1:*"
    blocking_s: ClassVar[float] = BLOCKING_S

    table: uuid.UUID | None
    entries: Entries
    deadlines: Deadlines  # by the instance's time
    forwarders: dict[str, Forwarding]
    listened_ns: int  # time that it has listened to forwarders: its down time makes nobody silent
    looked_ns: int
    alarm_ns: int  # time of the alarm; 0: it is not set
    waiting: list[int]  # held-up writers, by the number of their wait
    waits: int

    def __init__(self) -> None:
        self.table = None
        self.entries = Entries()
        self.deadlines = Deadlines()
        self.waiting = []
        self.waits = 0
        self.forwarders = {}
        self.listened_ns = self.looked_ns = 0
        self.alarm_ns = _LOOKS

    # --- writers -----------------------------------------------------------------------------------------------------

    @rpc(raises=[ValueError, TableFull])
    def update(self, changes: list[Change]) -> Written:
        """Apply all changes or none, one after the other."""
        if not 1 <= len(changes) <= CHANGES_MAX:
            raise ValueError(f"{len(changes)} changes: 1 to {CHANGES_MAX} were expected")
        for change in changes:
            check_change(change)
        self._check_room(changes)
        now_ns = immortal.now_ns()
        with self._publishing() as rows:
            for change in changes:
                self._set_row(rows, change.key, change.value, now_ns + round(change.ttl_s * 1e9) if change.ttl_s else 0)
        return Written(self.entries.number, not self._held_by())

    @rpc(raises=[ValueError, TableFull])
    def update_below(self, subtree: str, changes: list[Change]) -> Written:
        """Apply changes like ``update``, for a writer that may write only in ``subtree``."""
        for change in changes:
            if not covers(subtree, change.key):
                raise ValueError(f"key {change.key!r} is not in {subtree!r}, which this client says that it writes to")
        return self.update(changes)

    @rpc
    async def room(self) -> bool:
        """Wait until no client holds up writers, some seconds at most. Returns True if none does."""
        wait = await immortal.step(self.wait_for_room)
        if not wait:
            return True
        came = await immortal.race(immortal.event(_room(wait)), immortal.sleep(timedelta(seconds=ROOM_S)))
        if came.index == 0 or await immortal.step(self.stop_waiting, wait):
            return came.index == 0
        await immortal.event(_room(wait))  # the signal came at the same moment, and would be kept
        return True

    @rpc
    def wait_for_room(self) -> int:
        """Return the number of the wait; 0: there is room. A step of :meth:`room`."""
        if not self._held_by():
            return 0
        self.waits += 1
        self.waiting.append(self.waits)
        return self.waits

    @rpc
    def stop_waiting(self, wait: int) -> bool:
        """End a wait and return True if it was still open. A step of :meth:`room`."""
        if wait not in self.waiting:
            return False
        self.waiting.remove(wait)
        return True

    @rpc(raises=[ValueError, TableFull])
    def entitle(self, name: str, subtrees: list[str], relay: bool = False, may_block: bool = False) -> None:
        """Let the owner of the key ``name`` see these subtrees, and nothing else; "*": all names without their own
        entitlement.

        ``relay``: it is a forwarder. ``may_block``: it can hold up writers. As soon as one name is entitled, others see
        nothing.
        """
        if name != EVERYBODY:
            check_key(name)
        if "/" in name:
            raise ValueError(f"name {name!r}: one without '/' was expected")
        reduced = check_subtrees(subtrees)
        for subtree in reduced:
            if not may_be_seen(subtree):
                raise ValueError(f"subtree {subtree!r}: of the table's own, only {PRESENT!r} can be seen by others")
        key = f"{ENTITLED}/{name}"
        if key not in self.entries.rows and sum(one.startswith(ENTITLED) for one in self.entries.rows) >= ENTITLED_MAX:
            raise TableFull(f"{ENTITLED_MAX} names are entitled, which is as many as may be")
        with self._publishing() as rows:
            self._set_row(rows, key, encode(Entitlement(reduced, relay, may_block)), 0)

    @rpc
    def disentitle(self, name: str) -> bool:
        """Remove the entitlement of ``name`` and return True if it had one."""
        key = f"{ENTITLED}/{name}"
        if key not in self.entries.rows:
            return False
        with self._publishing() as rows:
            self._set_row(rows, key, None, 0)
        return True

    # --- readers -----------------------------------------------------------------------------------------------------

    @query
    def places(self) -> list[Place]:
        """Return the places where the table is published, those with the fewest clients first."""
        return sorted(
            (one.place for one in self.forwarders.values() if one.place.endpoint), key=lambda one: one.streams
        )

    @query
    def entitled(self) -> dict[str, Entitlement]:
        return {
            key[len(ENTITLED) + 1 :]: decoding.decode(row.value, type=Entitlement)
            for key, row in self.entries.rows.items()
            if key.startswith(ENTITLED) and row.value is not None
        }

    @query
    def status(self) -> Status:
        entries = self.entries
        present = sum(len(one.streams) for one in self.forwarders.values())
        places = [one.place for one in self.forwarders.values()]
        return Status(
            entries.number, len(entries.rows), entries.size_bytes, len(entries.gone), present, places, self._held_by()
        )

    # --- publishers --------------------------------------------------------------------------------------------------

    @on_primary
    def publish(self, impulses: Impulses) -> None:
        """Run the publisher in the app's own process."""
        TablePublisher(self, impulses.to(self), self.listen, self.blocking_s).run()

    @impulse
    def publisher_begins(self, place: Place) -> None:
        """Begin with the app's own publisher, which knows no earlier streams."""
        now_ns = immortal.now_ns()
        self.looked_ns = now_ns  # the table's down time makes nobody silent
        with self._publishing() as rows:
            self._remove_streams(rows, _OWN)
        self.forwarders[_OWN] = Forwarding(place, self.listened_ns)
        feed = feed_of(self)
        if feed is not None:
            feed.start(str(self.table), self.entries)

    @impulse
    def publisher_says(self, joined: list[Presence], left: list[str], held_by: list[str], place: Place) -> None:
        self._apply_report(_OWN, place, joined, left, held_by)

    @rpc(raises=[TableFull, ValueError])
    def forwarder_says(
        self, forwarder: str, place: Place, joined: list[Presence], left: list[str], held_by: list[str], begins: bool
    ) -> None:
        """Process a forwarder's report, sent once a second. ``begins``: it reports all its streams again."""
        if forwarder not in self.forwarders and len(self.forwarders) >= FORWARDERS_MAX:
            raise TableFull(f"there are {FORWARDERS_MAX} forwarders, which is as many as may be")
        name = place.identity  # clients will trust its keys
        if name and name != self._immortal_context.instance_name:
            row = self.entries.rows.get(f"{ENTITLED}/{name}")
            if row is None or row.value is None or not decoding.decode(row.value, type=Entitlement).relay:
                raise ValueError(f"{name!r} is no forwarder here: entitle it with relay=True")
        if begins:
            with self._publishing() as rows:
                self._remove_streams(rows, forwarder)
        self._apply_report(forwarder, place, joined, left, held_by)

    @rpc
    def forwarder_ends(self, forwarder: str) -> None:
        with self._publishing() as rows:
            self._remove_streams(rows, forwarder)
        self.forwarders.pop(forwarder, None)
        self._signal_room()

    @rpc
    def forwarder_known(self, forwarder: str) -> bool:
        """Return True if the forwarder is known, and so need not report all its streams."""
        return forwarder in self.forwarders

    def _apply_report(
        self, forwarder: str, place: Place, joined: list[Presence], left: list[str], held_by: list[str]
    ) -> None:
        now_ns = immortal.now_ns()
        self.listened_ns += min(max(0, now_ns - self.looked_ns), int(BEAT_S * 1e9))
        self.looked_ns = now_ns
        known = self.forwarders.setdefault(forwarder, Forwarding(place, self.listened_ns))
        known.place, known.heard_ns, known.held_by = place, self.listened_ns, held_by
        with self._publishing() as rows:
            for one in joined[:STREAMS_MAX]:
                key = f"{PRESENT}/{one.stream}"
                if key not in self.entries.rows:
                    known.streams.append(one.stream)
                    self._set_row(rows, key, encode(one), 0)
            gone = [stream for stream in left if f"{PRESENT}/{stream}" in self.entries.rows]
            for stream in gone:
                self._set_row(rows, f"{PRESENT}/{stream}", None, 0)
            if gone:
                ended = set(gone)
                known.streams = [stream for stream in known.streams if stream not in ended]
        since_ns = self.listened_ns - int(LEASE_S * 1e9)
        for name in [name for name, one in self.forwarders.items() if one.heard_ns < since_ns and name != _OWN]:
            with self._publishing() as rows:
                self._remove_streams(rows, name)
            del self.forwarders[name]
        self._signal_room()
        feed = feed_of(self)
        if feed is not None:
            feed.has_forwarders = len(self.forwarders) > 1

    def _remove_streams(self, rows: list[Row], forwarder: str) -> None:
        known = self.forwarders.get(forwarder)
        if known is not None:
            for stream in known.streams:
                self._set_row(rows, f"{PRESENT}/{stream}", None, 0)
            known.streams, known.held_by = [], []

    def _held_by(self) -> list[str]:
        return [name for one in self.forwarders.values() for name in one.held_by]

    def _signal_room(self) -> None:
        if self.waiting and not self._held_by():
            for wait in self.waiting:
                immortal.signal(_room(wait))
            self.waiting = []

    # --- rows --------------------------------------------------------------------------------------------------------

    def _check_room(self, changes: list[Change]) -> None:
        """Check that changes fit into the table. Raises TableFull."""
        entries = self.entries
        if all(change.value is None for change in changes):
            return
        more_bytes = sum(len(change.key) + len(change.value or b"") for change in changes)
        if len(entries.rows) + len(changes) <= ROWS_MAX and entries.size_bytes + more_bytes <= SIZE_BYTES_MAX:
            return
        new = {change.key for change in changes if change.value is not None} - entries.rows.keys()
        if len(entries.rows) + len(new) > ROWS_MAX or entries.size_bytes + more_bytes > SIZE_BYTES_MAX:
            raise TableFull(
                f"{len(entries.rows)} rows with {entries.size_bytes} bytes are there, at most {ROWS_MAX} and "
                f"{SIZE_BYTES_MAX} are possible: delete some first"
            )

    @contextmanager
    def _publishing(self) -> Iterator[list[Row]]:
        """Collect changed rows in a block, and publish them at its end."""
        rows: list[Row] = []
        yield rows
        if rows:
            feed = feed_of(self)
            if feed is not None:
                feed.add(rows)
            self._set_alarm()

    def _set_row(self, rows: list[Row], key: str, value: bytes | None, expires_ns: int) -> None:
        row = Row(key, self.entries.number + 1, value, expires_ns)
        self.entries.apply(row)
        rows.append(row)
        self.deadlines.set(key, expires_ns)

    # --- time --------------------------------------------------------------------------------------------------------

    @initial
    def begin(self) -> None:
        self.table = immortal.uuid4()
        self.alarm.fork()

    @rpc(limit=1)
    async def alarm(self) -> None:
        """Sleep until a row expires, then delete it, in an endless loop."""
        for _ in range(ALARMS_MAX):
            try:
                sleep_ns = await immortal.step(self.expire)
                if sleep_ns:
                    duration = timedelta(microseconds=-(-sleep_ns // 1000))
                    await immortal.race(immortal.event(_ALARM), immortal.sleep(duration))
                else:
                    await immortal.event(_ALARM)
            except Cancelled:
                continue  # without this handler no row would ever expire
        immortal.continue_as()

    @rpc
    def expire(self) -> int:
        """Delete expired rows, and return the nanoseconds until the next one expires; 0: there is none."""
        now_ns = immortal.now_ns()
        self.alarm_ns = _LOOKS
        with self._publishing() as rows:
            for key in self.deadlines.pop_due(now_ns, EXPIRED_MAX):
                self._set_row(rows, key, None, 0)
        self.alarm_ns = self.deadlines.next_ns()
        return max(1, self.alarm_ns - now_ns) if self.alarm_ns else 0

    def _set_alarm(self) -> None:
        due_ns = self.deadlines.next_ns()
        if due_ns and self.alarm_ns != _LOOKS and (not self.alarm_ns or due_ns < self.alarm_ns):
            self.alarm_ns = _LOOKS
            immortal.signal(_ALARM)


def _room(wait: int) -> str:
    return f"room {wait}"


# Expiry times of keys. No I/O, no clock.


class Deadlines(msgspec.Struct):
    """Deadlines of keys. ``at_ns``: by key. The heap can have outdated entries, which are ignored."""

    at_ns: dict[str, int] = {}
    heap: list[tuple[int, str]] = []

    def set(self, key: str, at_ns: int) -> None:
        """Set the deadline of a key; 0 removes it."""
        if not at_ns:
            self.at_ns.pop(key, None)
            return
        self.at_ns[key] = at_ns
        heappush(self.heap, (at_ns, key))
        if len(self.heap) > 2 * len(self.at_ns) + 100:
            self.heap = [(at_ns, key) for key, at_ns in self.at_ns.items()]
            heapify(self.heap)

    def next_ns(self) -> int:
        """Return the next deadline; 0 if there is none."""
        heap = self.heap
        while heap and self.at_ns.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else 0

    def pop_due(self, now_ns: int, count_max: int) -> list[str]:
        """Remove and return the keys whose deadline is over, earliest first."""
        due: list[str] = []
        while len(due) < count_max and 0 < self.next_ns() <= now_ns:
            _, key = heappop(self.heap)
            del self.at_ns[key]
            due.append(key)
        return due
