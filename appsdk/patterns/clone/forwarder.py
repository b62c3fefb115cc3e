"""Forwarder: a process between a table and its clients, which publishes its own copy. Forwarders of forwarders form a
tree.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections.abc import Sequence
from typing import Any, Unpack

import zmq

from immortal.appsdk.client import CallRefused, ClientError, ReachOptions, connect, with_timeout
from immortal.appsdk.client.discovery import home_of
from immortal.appsdk.client.shells import WatchedSockets
from immortal.appsdk.patterns.clone.frames import Policy
from immortal.appsdk.patterns.clone.model import (
    BEAT_S,
    MARK_BYTES_DEFAULT,
    MARK_BYTES_MAX,
    PRESENCE_S,
    STREAMS_MAX,
    CloneError,
    Entries,
    Place,
    Row,
    TableFull,
)
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.clone.publisher import PRESENCES_MAX, Publisher, drain_presences, has_keys, logger
from immortal.appsdk.patterns.clone.subscriber import Access, News, Options, Places, Replica, Subscriber
from immortal.appsdk.patterns.clone.table import Table

_CALL_S = 2.5


class Forwarder:
    """Forwarder that publishes ``table`` at ``listen`` until :meth:`stop`. It follows ``upstream``, or the table
    itself.

    ``identity``: the name whose keys it shows to both sides, entitled with ``relay=True``; by default the table.
    ``advertise``: its endpoint for clients; by default the one where it listens. ``blocking_s``: limit for a client
    that holds up writers by its policy; 0: forbidden. The others as in :func:`immortal.appsdk.client.connect`.

    Raises CloneError, ClientError.
    """

    def __init__(
        self,
        table: str,
        listen: str = "tcp://127.0.0.1:*",
        *,
        upstream: Sequence[str] = (),
        advertise: str = "",
        blocking_s: float = 0.0,
        **reach: Unpack[ReachOptions],
    ) -> None:
        self.id = secrets.token_hex(4)
        folder = home_of(reach.get("home"))
        self._identity = reach.get("identity") or (table if has_keys(folder, table) else "")
        self._blocking_s = blocking_s
        self._connector = connect(Table, table, timeout=None, **reach)
        insecure = reach.get("insecure", False)
        self._publisher = Publisher(listen, home=folder, identity=self._identity, insecure=insecure)
        self.endpoint = advertise or self._publisher.endpoint
        policy: Policy = "block" if blocking_s else "drop"
        mark_bytes = MARK_BYTES_MAX if policy == "drop" else MARK_BYTES_DEFAULT
        self._replica = Replica(Options(("",), 4 << 20, mark_bytes, policy, f"forwarder {self.id}", relay=True))
        self._access = Access(table, reach, tuple(upstream))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # of the publication, which the thread that reports to the table reads
        self._reported_held_by: list[str] = []  # as last reported
        self._reports_all = True  # the next report has all streams
        self._report_due = threading.Event()

    @property
    def number(self) -> int:
        """Number of the last update in the copy."""
        return self._replica.number

    def stop(self) -> None:
        """Stop the forwarder, from any thread or a signal handler."""
        self._stopping = True
        self._report_due.set()
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Publish until :meth:`stop`. Raises NotEntitled."""
        table = self._connector.__enter__()
        reporter = threading.Thread(
            target=self._report_streams, args=(table,), name=f"forwarder {self.id}", daemon=True
        )
        reporter.start()
        places = Places(self._access, table, only_tables=True)
        subscriber = Subscriber(self._context, self._replica, places.find, self._access.finder, time.monotonic())
        try:
            self._forward(subscriber)
        finally:
            self._stopping = True
            self._report_due.set()
            subscriber.close()
            self._publisher.close()
            reporter.join(2 * _CALL_S)
            self._connector.__exit__(None, None, None)
            self._context.term()

    def _forward(self, subscriber: Subscriber) -> None:
        publisher = self._publisher
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(publisher.fileno(), select.POLLIN)
        watched = WatchedSockets(poll.unregister, lambda descriptor: poll.register(descriptor, select.POLLIN))
        problem = ""
        while not self._stopping:
            with self._lock:
                now_s = time.monotonic()
                holds = publisher.publishing is not None and bool(publisher.publishing.held_by)
                news = subscriber.process(now_s, 0 if holds else 100)
                for one in news:
                    self._publish(one)
                wait_s = min(publisher.turn(), max(0.0, subscriber.next_deadline_s() - now_s), PRESENCE_S)
                if publisher.publishing is not None:
                    self._wake_reporter(publisher.publishing)
            if self._replica.ended:
                raise CloneError(f"{self._access.table!r} is not forwarded here: {self._replica.ended}")
            current = "" if self._replica.subtrees is not None else subscriber.problem
            if current and current != problem and self._replica.number:
                logger.warning("forwarder %s waits: %s", self.id, current)
            problem = current
            is_new = watched.update(() if holds else subscriber.sockets())
            for descriptor, _ in poll.poll(0 if is_new or len(news) >= 100 else 1000 * wait_s):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)

    def _publish(self, news: News) -> None:
        publisher, table = self._publisher, self._replica.table
        publishing = publisher.publishing
        if publishing is None or publishing.table != table or news.number < publishing.entries.number:
            entries = Entries(forgotten=self._replica.forgotten)
            for key, number, value in news.whole or ():
                entries.apply(Row(key, number, value))
            entries.number = news.number
            if publishing is None:
                publisher.publishing = Publication(
                    self.id, table, entries, blocking_s=self._blocking_s, owner=self._access.table
                )
            else:
                publishing.replace(table, entries)
            return
        rows = [Row(key, number, value) for key, number, value in news.changes]
        publishing.publish(rows, is_conflated=news.is_conflated, number=news.number)

    # --- reports to the table ----------------------------------------------------------------------------------------

    def _wake_reporter(self, publishing: Publication) -> None:
        if len(publishing.left) > STREAMS_MAX:  # the table is unreachable
            publishing.left.clear()
            self._reports_all = True
        if self._reports_all or publishing.joined or publishing.left or publishing.held_by != self._reported_held_by:
            self._report_due.set()

    def _report_streams(self, table: Any) -> None:
        """Report the streams to the table, in a separate thread, since the table can be unreachable."""
        has_reported = False
        while not self._stopping:
            self._report_due.wait(BEAT_S)
            self._report_due.clear()
            with self._lock:
                publishing = self._publisher.publishing
                if publishing is None or not (has_reported or self._reports_all):
                    continue
                begins, self._reports_all = self._reports_all, False
                if begins:
                    publishing.joined, publishing.left = {}, []
                joined, left = (publishing.present(), []) if begins else drain_presences(publishing)
                self._reported_held_by = held = publishing.held_by
                streams = len(publishing)
            place = Place(self.endpoint, self._identity, streams, may_block=self._blocking_s > 0)
            try:
                if not begins and not table.forwarder_known(self.id):
                    self._reports_all = True
                    continue
                for at in range(0, len(joined) or 1, PRESENCES_MAX):
                    page = joined[at : at + PRESENCES_MAX]
                    table.forwarder_says(self.id, place, page, left, held, begins and at == 0)
                has_reported = True
            except CallRefused as error:
                logger.error("forwarder %s: %r does not list it: %s", self.id, self._access.table, error)
            except (TableFull, ValueError) as error:
                self._reports_all = True
                logger.error("forwarder %s: the table refuses it: %s", self.id, error)
            except ClientError as error:
                if self._stopping:
                    return
                self._reports_all = True
                logger.warning("forwarder %s: the table was not told: %s", self.id, error)
            if not self._stopping:  # at most one report per PRESENCE_S
                time.sleep(PRESENCE_S)
        try:
            with_timeout(table, _CALL_S).forwarder_ends(self.id)
        except ClientError:
            return  # the table detects the end by itself
