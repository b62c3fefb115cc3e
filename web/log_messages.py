"""Messages of a log, in pages from any place on; no page reads a whole large log.

Records are described by the code of `immortal log show`; here they are only split into messages.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, structs

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.instances import own_logs
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.coordinator.log.identity import logged_time_ns, verify_value
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.log.reader import LogReader
from immortal.presenters.records import describe_record
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.trailer import BatchKind, BatchSource
from immortal.replay import ReplayError
from immortal.replay.app_process import method_names
from immortal.web import WebError

LIMIT_MAX = 500
SCAN_S = 1.0  # time for one page; after it the page tells how far it has read
BACK_RECORDS = 4  # records read at once on the way back, at first; then twice as many each time
BACK_RECORDS_MAX = 4096
FIND_RECORDS_MAX = 2000  # between two records with messages of one stream, in a search
WORDS_CHARACTERS = 400  # of a message in a list
_NO_INPUT = ("RECORD_TIME", "INSTANCE_NAME")  # not counted as messages: immortal.coordinator.log.record_contents

At = tuple[int, int]
"""Place of a message: its record, and its index in the record, both from 0."""


class Message(Struct):
    """Logged message. ``kind``: call, answer, exception, initial, other, or damaged.

    ``source``: the sender: an instance, "~" and a client's ID, "" for itself, None for nobody (impulses, first start).
    ``position``: in the source's stream. ``latency_ns``: from sending to the log. ``text``: its arguments as JSON.
    """

    sequence_id: int
    index: int
    time_ns: int
    kind: str
    source: str | None
    position: int
    sent_ns: int
    method: str
    rpc_type: str
    size_bytes: int
    text: str
    described: dict[str, Any]
    problem: str = ""

    @property
    def latency_ns(self) -> int | None:
        return self.time_ns - self.sent_ns if self.sent_ns > 0 and self.kind != "damaged" else None

    @property
    def words(self) -> str:
        return str(self.described.get("in_words") or f"{self.method}  {self.text}".rstrip())


class Wanted(Struct, frozen=True):
    """Filter of messages on a page. The values "" and 0 accept any message."""

    method: str = ""
    pattern: str = ""
    size_min_bytes: int = 0
    latency_min_ns: int = 0

    @property
    def is_all(self) -> bool:
        return self == Wanted()


class Filter:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._method = wanted.method.lower()
        self._pattern = re.compile(wanted.pattern) if wanted.pattern else None

    def matches(self, message: Message) -> bool:
        wanted = self._wanted
        if message.problem:
            return wanted.is_all
        if self._method and self._method not in message.method.lower():
            return False
        if message.size_bytes < wanted.size_min_bytes:
            return False
        if wanted.latency_min_ns and (message.latency_ns or 0) < wanted.latency_min_ns:
            return False
        return self._pattern is None or self._pattern.search(message.text) is not None


class Page(Struct):
    """Page of messages. ``looked_from``, ``looked_to``: the first and the last record that was read.
    ``is_cut``: the time was up before the page was full. ``older``, ``newer``: starts of the next pages, or None."""

    messages: list[Message]
    first: int
    last: int
    looked_from: int
    looked_to: int
    is_cut: bool = False
    older: At | None = None
    newer: At | None = None


def messages_of(described: dict[str, Any]) -> Iterator[Message]:
    """Yield the messages of one record, which has the form of :func:`describe_record`."""
    sequence_id = described["sequence_id"]
    if "problem" in described:
        problem, size_bytes = described["problem"], described["size_bytes"]
        yield Message(sequence_id, 0, 0, "damaged", None, 0, 0, "", "", size_bytes, "", described, problem)
        return
    sources = iter(described["sources"])
    source: dict[str, Any] = {}
    left = index = 0
    for one in described["messages"]:
        if one["type"] in _NO_INPUT:
            continue
        while not left and (source := next(sources, {})):
            left = source["count"]
        place = source["count"] - left if source else 0
        left = max(0, left - 1)
        yield _message(described, one, index, source, place)
        index += 1


def _message(record: dict[str, Any], one: dict[str, Any], index: int, source: dict[str, Any], place: int) -> Message:
    inner = one.get("wraps", one)
    kind = {"call": "call", "raised": "exception"}.get(inner.get("kind", "other"), "answer")
    if one["type"] == "INITIAL_MESSAGE":
        kind = "initial"
    elif one["type"] != "RPC":
        kind = "other"
    method = inner.get("method") or (f"method {inner['method_id']}" if "method_id" in inner else inner["type"])
    sender = source.get("source") if source.get("kind") in ("stream", "client") else None
    return Message(
        record["sequence_id"],
        index,
        record["time_ns"],
        kind,
        sender,
        source.get("first_position", 0) + place,
        source.get("send_time_ns", 0),
        method,
        inner.get("rpc_type", ""),
        one["size_bytes"],
        _text(inner),
        inner,
    )


def _text(one: dict[str, Any]) -> str:
    for key in ("values", "value", "raised"):
        if key in one:
            shown = one[key] if key != "raised" else {"raised": one["raised"], "with": one["values"]}
            return json.dumps(shown, ensure_ascii=False)
    return str(one.get("arguments", one.get("data", "")))


def format_source(message: Message) -> str:
    if message.source is None:
        return {"initial": "the first start"}.get(message.kind, "from outside")
    if message.source == "":
        return "itself"
    return f"client {message.source[1:]}" if message.source.startswith(CLIENTS) else message.source


# --- pages -----------------------------------------------------------------------------------------------------------


def page_from(reader: LogReader, methods: Methods, wanted: Wanted, at: At, limit: int) -> Page:
    """Return a page of the first ``limit`` wanted messages from ``at`` on."""
    first, last = reader.ends()
    matches, found = Filter(wanted).matches, list[Message]()
    end_s, looked_to, is_cut = time.monotonic() + SCAN_S, at[0], False
    newer: At | None = None
    for message in _messages(reader, methods, max(at[0], first), last):
        looked_to = message.sequence_id
        if _at(message) < at:
            continue
        if len(found) == limit:
            newer = _at(message)
            break
        if matches(message):
            found.append(_slim(message))
        elif time.monotonic() > end_s:
            newer, is_cut = (message.sequence_id, message.index + 1), True
            break
    older = at if at > (first, 0) else None
    return Page(found, first, last, max(at[0], first), looked_to, is_cut, older, newer)


def page_before(reader: LogReader, methods: Methods, wanted: Wanted, at: At | None, limit: int) -> Page:
    """Return a page of the last ``limit`` wanted messages before ``at`` (None: before the end), the oldest first."""
    first, last = reader.ends()
    end = (last + 1, 0) if at is None else min(at, (last + 1, 0))
    matches, found = Filter(wanted).matches, list[Message]()
    end_s, count, upper = time.monotonic() + SCAN_S, BACK_RECORDS, end[0] if end[1] else end[0] - 1
    lower, is_cut = upper + 1, False
    while lower > first and len(found) < limit:
        if time.monotonic() > end_s:
            is_cut = True
            break
        lower = max(first, upper - count + 1)
        read = _messages(reader, methods, lower, min(last, upper + 1))  # the next record shows a gap
        found[:0] = [_slim(one) for one in read if one.sequence_id <= upper and _at(one) < end and matches(one)]
        upper, count = lower - 1, min(BACK_RECORDS_MAX, count * 2)
    kept = found[-limit:]
    older: At | None = (lower, 0) if lower > first else None
    if len(kept) < len(found):
        older = _at(kept[0])
    newer = None if end[0] > last else end
    return Page(kept, first, last, lower, end[0] if end[1] else end[0] - 1, is_cut, older, newer)


def message_at(reader: LogReader, methods: Methods, at: At) -> tuple[Message | None, dict[str, Any] | None]:
    """Return a message and its record; None for either if it does not exist."""
    for logged in reader.records(at[0], at[0]):
        described = describe_record(logged, reader.identity.committer_id, methods)
        return next((one for one in messages_of(described) if one.index == at[1]), None), described
    return None, None


def _messages(reader: LogReader, methods: Methods, first: int, last: int) -> Iterator[Message]:
    for logged in reader.records(first, last):
        yield from messages_of(describe_record(logged, reader.identity.committer_id, methods))


def _at(message: Message) -> At:
    return message.sequence_id, message.index


def _slim(message: Message) -> Message:
    """Return ``message`` with only the text that a list shows, so that a list does not hold 100 messages of 1 MiB."""
    words = message.words[:WORDS_CHARACTERS]
    return structs.replace(message, text=message.text[:WORDS_CHARACTERS], described={"in_words": words})


# --- across logs -----------------------------------------------------------------------------------------------------


def find_position(reader: LogReader, source: str, position: int) -> At | None:
    """Find the record with the message at ``position`` of the stream from ``source``; None if it is not in the log.

    A search by halves: records hold the positions of a stream in their order.
    """
    low, high = reader.ends()
    while low <= high:
        middle = (low + high) // 2
        found = next(_batches(reader, source, middle, min(high, middle + FIND_RECORDS_MAX)), None)
        if found is None or position < found[1].first_position:
            high = middle - 1
            continue
        record = found[0]
        for _, batch, index in _batches(reader, source, record, record):
            if batch.first_position <= position <= batch.last_position:
                return record, index + position - batch.first_position
        low = record + 1
    return None


def _batches(reader: LogReader, source: str, first: int, last: int) -> Iterator[tuple[int, BatchSource, int]]:
    """Yield the batches of a stream, each with its record and the index of its first message there."""
    for logged in reader.records(first, last):
        if logged.problem is not None:
            continue
        index = 0
        for batch in verify_value(logged.value, logged.sequence_id, reader.identity.committer_id)[1].batches:
            if batch.name == source and batch.kind in (BatchKind.STREAM, BatchKind.CLIENT):
                yield logged.sequence_id, batch, index
            index += batch.count


# --- times -----------------------------------------------------------------------------------------------------------


class Times:
    """Times of a log's records, read one by one: a search for a time reads some 20 of them."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self.first, self.last = reader.ends()
        self._known: dict[int, int] = {}

    def time_ns(self, sequence_id: int) -> int:
        """Return a record's time, in ns since the Unix epoch; 0 if the record is damaged or missing."""
        found = self._known.get(sequence_id)
        if found is None:
            with self._reader.view() as view:
                value = view.get("records", SEQUENCE_KEY.pack(sequence_id))
                committer_id = self._reader.identity.committer_id
                found = 0 if value is None else logged_time_ns(bytes(value), sequence_id, committer_id)
            self._known[sequence_id] = found
        return found

    def first_from(self, time_ns: int, low: int | None = None, high: int | None = None) -> int:
        """Return the first record at ``time_ns`` or later; ``high``, default one after the last, if there is none."""
        low = self.first if low is None else low
        high = self.last + 1 if high is None else high
        while low < high:
            middle = (low + high) // 2
            if self.time_ns(middle) < time_ns:
                low = middle + 1
            else:
                high = middle
        return low


# Readers of logs: one at a time for each log, since a process can't open a log twice; closed after the answer.


WAIT_S = 20.0
"""Longest wait for another request that reads the same log. Each reads a limited part of it."""


class Logs:
    """Readers of logs, one at a time for each log, and the method names of apps, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._methods: dict[str, Methods | str] = {}

    @contextmanager
    def locked(self, settings: InstanceSettings, wait_s: float = WAIT_S) -> Iterator[None]:
        """Lock a log against other requests of this process. Raises WebError if they go on for longer."""
        with self._lock:
            lock = self._locks[str(settings.log)]
        if not lock.acquire(timeout=wait_s):
            raise WebError(f"the log of {settings.name!r} is being read by other requests: try again", 503)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def reader(self, settings: InstanceSettings) -> Iterator[LogReader]:
        """Open a reader of the instance's log during the block. Raises WebError if there is no log yet, LogError."""
        if not log_exists(settings.log):
            raise WebError(f"{settings.name!r} has not been started yet: it has no log", 404)
        with self.locked(settings), own_logs.open_reader(settings, check=False) as reader:
            yield reader

    def methods(self, settings: InstanceSettings) -> tuple[Methods, str]:
        """Return the names of the class's methods, and the reason if there are none ("" otherwise)."""
        app = settings.app
        if app is None:
            return {}, 'its settings name no class (app = "module:Class"), so methods are shown by their numbers'
        found = self._methods.get(app)
        if found is None:
            try:
                found = method_names(app)
            except ReplayError as error:
                found = str(error).rstrip("\n").split("\n")[-1]
            self._methods[app] = found
        if isinstance(found, str):
            return {}, f"methods are shown by their numbers: {found}"
        return found, ""
