"""Export of spans as OTLP JSON, to a file (one request per line) or an endpoint (one per POST), or for Perfetto.

https://opentelemetry.io/docs/specs/otlp/ and https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ describe
OTLP JSON. OpenTelemetry's SDK is not used: it is for programs that time themselves, and it draws span IDs at
random.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from immortal.replay.plan import LogViewError
from immortal.replay.trace.messages import Executed
from immortal.replay.trace.spans import Span, Spans

SPANS_MAX = 512  # per request
TIMEOUT_S = 30.0
_INTERNAL, _CLIENT, _PRODUCER, _CONSUMER = 1, 3, 4, 5
_KINDS = {"call": _PRODUCER, "handler": _CONSUMER, "effect": _CLIENT}  # others are internal
_TRACES_PATH = "/v1/traces"

Send = Callable[[bytes], None]


def send_all(spans: Iterable[Span], send: Send) -> int:
    """Send all spans, SPANS_MAX per request, and return their number."""
    count, rest = 0, iter(spans)
    while some := list(islice(rest, SPANS_MAX)):
        send(request_of(some))
        count += len(some)
    return count


def request_of(spans: Iterable[Span]) -> bytes:
    by_instance: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        by_instance[span.instance].append(_span(span))
    resources = [
        {
            "resource": {"attributes": _attributes({"service.name": instance})},
            "scopeSpans": [{"scope": {"name": "immortal"}, "spans": some}],
        }
        for instance, some in by_instance.items()
    ]
    return msgspec.json.encode({"resourceSpans": resources})


def _span(span: Span) -> dict[str, Any]:
    parent = {} if span.parent_id is None else {"parentSpanId": span.parent_id}
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **parent,
        "name": span.name,
        "kind": _KINDS.get(span.kind, _INTERNAL),
        "startTimeUnixNano": str(span.start_ns),  # OTLP JSON has 64-bit numbers as strings
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }


def _attributes(values: Mapping[str, str | int]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]


def into_file(file: IO[bytes]) -> Send:
    def send(request: bytes) -> None:
        file.write(request + b"\n")

    return send


def to_endpoint(url: str) -> Send:
    """Return a sender to the endpoint ``url`` (OTLP's path by default). It raises LogViewError on failure."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise LogViewError(f"{url!r} is no endpoint: a URL such as http://127.0.0.1:4318 was expected")
    if parts.path in ("", "/"):
        url = urlunsplit(parts._replace(path=_TRACES_PATH))

    def send(request: bytes) -> None:
        asked = urllib.request.Request(url, request, {"Content-Type": "application/json"})  # noqa: S310 (http, https)
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310
                answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", "replace")
            raise LogViewError(f"{url} refuses the spans: status {error.code} {error.reason}: {said}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise LogViewError(f"{url} takes no spans: {reason}; what it took before stays there") from None

    return send


# Messages and their spans as trace events, which Perfetto's viewer reads (https://ui.perfetto.dev).
#
# Each instance is a process with a lane "handled", a slice for each message, and a lane "to NAME" for each receiver, a
# slice for each batch sent there; arrows lead from a batch to each of its messages. Spans with a length are bars of
# their own: calls on their way, handlers whose answer a caller waited for, and noted queues and commits.
#
# A log does not say how long a handler ran: a slice of "handled" takes its share of the time until the next record, at
# most WIDTH_NS_MAX. If the handler's times were noted, the slice shows these.
#
# The format is Perfetto's JSON, which can be written event by event; Perfetto sorts it.


WIDTH_NS_MAX = 10_000
BATCH_WIDTH_NS = 1_000
_HANDLED = 1  # the thread ID of the lane "handled"
_CATEGORIES = {"call": "on its way", "handler": "waited for"}  # others are called as their kind
_DAY_NS = 86_400_000_000_000

Event = dict[str, Any]


def write(messages: Iterable[Executed], spans: Spans, to: IO[bytes]) -> int:
    """Write messages and spans as trace events, and return the number of messages."""
    events = _TraceEvents()
    encode = msgspec.json.Encoder().encode
    count = 0
    to.write(b'{"displayTimeUnit":"ns","traceEvents":[')
    separator = b"\n"

    def write_all(batch: Iterable[Event]) -> None:
        nonlocal separator
        for event in batch:
            for one in (*events.pop_names(), event):
                to.write(separator + encode(one))
                separator = b",\n"

    for message in messages:
        count += 1
        write_all(events.events_of(message))
        for span in spans.spans_of(message):
            write_all(events.bar(span))
    for span in spans.rest():
        write_all(events.bar(span))
    to.write(b'\n],"otherData":' + encode({"time_zero": events.time_zero}) + b"}\n")
    return count


class _TraceEvents:
    def __init__(self) -> None:
        self._zero_ns: int | None = None
        self._lanes: dict[str | tuple[str, str], int] = {}  # IDs: of an instance's process, a stream's thread
        self._names: list[Event] = []
        self._batch_at: dict[tuple[str, str], int] = {}
        self._committed: dict[str, int] = {}  # the last record of each instance whose commit is shown
        self._record_end: dict[str, tuple[int, int]] = {}  # (record, place of its next message's slice)

    @property
    def time_zero(self) -> str | None:
        return None if self._zero_ns is None else datetime.fromtimestamp(self._zero_ns // 10**9, UTC).isoformat()

    def pop_names(self) -> list[Event]:
        """Return and clear the names of new lanes."""
        names, self._names = self._names, []
        return names

    def events_of(self, message: Executed) -> Iterator[Event]:
        """Yield a message's slice, the arrow to it, and the slice of its batch."""
        if self._zero_ns is None:
            # Doubles hold no ns since 1970. Messages sent more than a day before are shown at the earliest time.
            self._zero_ns = message.time_ns // _DAY_NS * _DAY_NS - _DAY_NS
        timing = message.timing
        width_ns = max(min(WIDTH_NS_MAX if message.width_ns is None else message.width_ns, WIDTH_NS_MAX), 1)
        record, at_ns = self._record_end.get(message.instance, (-1, 0))
        if record != message.sequence_id:
            at_ns = message.time_ns
        if timing is not None and timing.began_ns is not None:
            at_ns, width_ns = timing.began_ns, max((timing.ended_ns or 0) - timing.began_ns, 1)
        self._record_end[message.instance] = message.sequence_id, at_ns + width_ns
        receiver = {"pid": self._process(message.instance), "tid": _HANDLED}
        stream = message.caller, message.instance
        sender = {"pid": self._process(message.caller), "tid": self._thread(stream)}
        if self._batch_at.get(stream) != message.sent_ns:
            self._batch_at[stream] = message.sent_ns
            yield {"ph": "X", "name": f"to {message.instance}", **self._at(message.sent_ns, BATCH_WIDTH_NS), **sender}
        arguments = {
            "record": message.sequence_id,
            "message": message.index,
            "from": message.caller,
            "position": message.position,
            "size_bytes": message.size_bytes,
        }
        name = message.effect_text or message.method
        yield {"ph": "X", "name": name, **self._at(at_ns, width_ns), **receiver, "args": arguments}
        arrow = {"cat": "call", "name": "call", "id": f"{message.instance}/{message.sequence_id}:{message.index}"}
        yield {"ph": "s", **arrow, **self._at(message.sent_ns), **sender}
        yield {"ph": "f", "bp": "e", **arrow, **self._at(at_ns), **receiver}

    def bar(self, span: Span) -> Iterator[Event]:
        if span.end_ns <= span.start_ns or (span.kind == "handler" and not span.is_answered):
            return
        if span.kind == "commit":  # one bar for all messages of a record
            record = int(span.attributes["immortal.record"])
            if self._committed.get(span.instance) == record:
                return
            self._committed[span.instance] = record
        front = {
            "cat": _CATEGORIES.get(span.kind, span.kind),
            "name": span.name,
            "id": span.span_id,
            "pid": self._process(span.instance),
            "tid": _HANDLED,
        }
        yield {"ph": "b", **front, **self._at(span.start_ns), "args": {**span.attributes, "trace": span.trace_id}}
        yield {"ph": "e", **front, **self._at(span.end_ns)}

    def _at(self, time_ns: int, width_ns: int | None = None) -> Event:
        at = {"ts": max(time_ns - (self._zero_ns or 0), 0) / 1_000}
        return at if width_ns is None else {**at, "dur": width_ns / 1_000}

    def _process(self, instance: str) -> int:
        number = self._lanes.get(instance)
        if number is None:
            number = self._lanes[instance] = len(self._lanes) + _HANDLED + 1
            self._name("process_name", number, 0, instance)
            self._name("thread_name", number, _HANDLED, "handled")
        return number

    def _thread(self, stream: tuple[str, str]) -> int:
        number = self._lanes.get(stream)
        if number is None:
            number = self._lanes[stream] = len(self._lanes) + _HANDLED + 1
            self._name("thread_name", self._process(stream[0]), number, f"to {stream[1]}")
        return number

    def _name(self, kind: str, process: int, thread: int, name: str) -> None:
        self._names.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})
