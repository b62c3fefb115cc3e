"""Spans as OTLP's JSON: one ExportTraceServiceRequest a line in a file, or one a POST to an endpoint.

https://opentelemetry.io/docs/specs/otlp/ and https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ have the
form. It is written here: OpenTelemetry's SDK is for programs that time themselves, and IDs of its
spans are drawn.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from immortal.sight.errors import SightError
from immortal.sight.trace.spans import Span

SPANS_MAX = 512  # in a request
TIMEOUT_S = 30.0
_INTERNAL, _CLIENT, _PRODUCER, _CONSUMER = 1, 3, 4, 5
_KINDS = {
    "call": _PRODUCER,
    "handler": _CONSUMER,
    "effect": _CLIENT,
    "timer": _INTERNAL,
    "queue": _INTERNAL,
    "commit": _INTERNAL,
}
_TRACES_PATH = "/v1/traces"

Send = Callable[[bytes], None]


def send_all(spans: Iterable[Span], send: Send) -> int:
    """Gives the number of spans."""
    count = 0
    waiting: list[Span] = []
    for span in spans:
        waiting.append(span)
        count += 1
        if len(waiting) == SPANS_MAX:
            send(request_of(waiting))
            waiting.clear()
    if waiting:
        send(request_of(waiting))
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
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),  # 64-bit numbers are strings there
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
    """``url``: of the endpoint; without a path that of OTLP is taken. Raises SightError where it does not take them."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SightError(f"{url!r} is no endpoint: a URL such as http://127.0.0.1:4318 was expected")
    if parts.path in ("", "/"):
        url = urlunsplit(parts._replace(path=_TRACES_PATH))

    def send(request: bytes) -> None:
        asked = urllib.request.Request(url, request, {"Content-Type": "application/json"})  # noqa: S310 (http, https)
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310
                answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", "replace")
            raise SightError(f"{url} refuses the spans: status {error.code} {error.reason}: {said}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise SightError(f"{url} takes no spans: {reason}; what it took before stays there") from None

    return send
