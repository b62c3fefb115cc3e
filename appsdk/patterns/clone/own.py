"""The publisher in the process of a table's app: a thread beside its handlers, which feed it."""

from __future__ import annotations

import os
import secrets
import select
import time
from pathlib import Path
from typing import Any

from immortal.appsdk.client.errors import NotConnectable
from immortal.appsdk.client.places import home_of, pair_of
from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.feeds import Feed, open_feed
from immortal.appsdk.patterns.clone.publisher import Publisher
from immortal.appsdk.patterns.clone.publishing import Publishing
from immortal.appsdk.patterns.clone.records import Place, Presence

_SECRET_FILE_VARIABLE = "IMMORTAL_APP_SECRET_FILE"  # noqa: S105 (a name)
_PRESENCES_MAX = 1000  # of one message


def run_publisher(table: Any, says: Any, listen: str, blocking_s: float) -> None:
    """Until the process ends. ``says``: impulses to ``table``. Raises CloneError, Disconnected."""
    name = table._immortal_context.instance_name
    home = _home()
    feed = open_feed(table)
    publisher = Publisher(listen, home=home, identity=name if has_keys(home, name) else "")
    says.publisher_begins(_place(publisher, 0, blocking_s))
    _Own(name, publisher, feed, says, blocking_s).run()


def _home() -> Path:
    """The registry folder: the secret of the app is in it, in the folder of the instance."""
    secret_file = os.environ.get(_SECRET_FILE_VARIABLE)
    return home_of(Path(secret_file).absolute().parent.parent if secret_file else None)


def has_keys(home: Path, name: str) -> bool:
    try:
        return pair_of(home / name, name) is not None
    except (NotConnectable, PermissionError):
        return True  # there are some, and what is wrong with them is said where they are used


class _Own:
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
            publishing = Publishing(key, table, entries, blocking_s=self._blocking_s, owner=self._name)
            self._publisher.publishing = publishing
        number = publishing.entries.number
        publishing.publish([row for row in rows if row.number > number])

    def _report(self, publishing: Publishing, now_s: float) -> None:
        """Who came, who went, who holds up writers, to the table."""
        held = publishing.held_by
        has_news = publishing.joined or publishing.left or held != self._said_held
        pause_s = limits.PRESENCE_S if has_news else limits.BEAT_S
        if now_s < self._said_s + pause_s or not (has_news or self._feed.has_forwarders):
            return
        self._said_s = now_s
        joined, left = take_presences(publishing)
        place = _place(self._publisher, len(publishing), self._blocking_s)
        self._says.publisher_says(joined, left, held, place)
        self._said_held = held


def _place(publisher: Publisher, streams: int, blocking_s: float) -> Place:
    return Place(publisher.endpoint, "", streams, is_table=True, may_block=blocking_s > 0)


def take_presences(publishing: Publishing) -> tuple[list[Presence], list[str]]:
    """Who came and who went, as many as one message takes: those that went were there before."""
    joined = [publishing.joined.pop(stream) for stream in list(publishing.joined)[:_PRESENCES_MAX]]
    if publishing.joined:
        return joined, []
    left, publishing.left = publishing.left[:_PRESENCES_MAX], publishing.left[_PRESENCES_MAX:]
    return joined, left
