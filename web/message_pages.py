"""Pages of an instance's messages: the list, one message, the timeline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from itertools import accumulate
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.log.identity import Time, parse_moment
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.protocol.timings import FOLDER_NAME
from immortal.replay.trace.messages import Timings
from immortal.replay.trace.spans import handler_id
from immortal.web import WebError, log_search
from immortal.web.log_messages import LIMIT_MAX, At, Message, Page, Times, Wanted, format_source, message_at
from immortal.web.site import Site, as_place, checked_pattern, instance_page, number_of, settings_of, site_of, text_of

LIMIT = 100
SHOWN_CHARACTERS_MAX = 20_000  # characters of the arguments that a page shows; a link leads to all of them
LINE_CHARACTERS = 100  # characters up to which values stay on one line


def routes() -> list[Route]:
    return [
        Route("/i/{name}/messages", messages),
        Route("/i/{name}/m/{record:int}/{index:int}", message),
        Route("/i/{name}/m/{record:int}/{index:int}/arguments.json", arguments),
        Route("/i/{name}/timeline", shown),
        Route("/i/{name}/timeline.json", data),
    ]


def messages(request: Request) -> Response:
    """Show a page of messages, from a place on, or the last ones."""
    site, settings = site_of(request), settings_of(request)
    wanted, error = _wanted(request)
    limit = min(LIMIT_MAX, max(1, number_of(request, "limit", LIMIT) or LIMIT))
    at, back = _start_place(request, site, settings)
    found: Page | None = None
    if not error and wanted.pattern:
        home = str(site.registry.home)
        found = log_search.scan(log_search.Request(home, settings.name, wanted, limit, at, back))
    elif not error:
        found = log_search.page_of(site.logs, settings, wanted, at, limit, back=back)
    _, note = site.logs.methods(settings)
    filters = _filters(request)
    kept = {key: value for key, value in (*filters.items(), ("limit", text_of(request, "limit"))) if value}

    def link(**place: str) -> str:
        return f"/i/{settings.name}/messages?{urlencode({**kept, **place})}"

    return instance_page(
        request,
        "messages.html",
        "messages",
        422 if error else 200,
        found=found,
        error=error,
        note=note,
        source=format_source,
        filters=filters,
        older=link(before=_text(found.older)) if found and found.older else "",
        newer=link(at=_text(found.newer)) if found and found.newer else "",
        oldest=link(at="0"),
        newest=link(),
    )


def _filters(request: Request) -> dict[str, str]:
    return {key: request.query_params.get(key, "") for key in ("method", "re", "size", "latency")}


def _text(at: At) -> str:
    return f"{at[0]}:{at[1]}"


def _wanted(request: Request) -> tuple[Wanted, str]:
    """Return the filter of the request, and an error text if it can't be read."""
    try:
        pattern = checked_pattern(text_of(request, "re"))
    except WebError as error:
        return Wanted(), str(error)
    return _filter(request, pattern), ""


def _filter(request: Request, pattern: str) -> Wanted:
    latency_ms = number_of(request, "latency", 0) or 0
    return Wanted(text_of(request, "method"), pattern, number_of(request, "size", 0) or 0, latency_ms * 1_000_000)


def _start_place(request: Request, site: Site, settings: InstanceSettings) -> tuple[At | None, bool]:
    """Return the place where the page starts, and True if it goes back from there. Raises WebError.

    The parameter "at" is a place or a time.
    """
    before, at = text_of(request, "before").strip(), text_of(request, "at").strip()
    if before:
        record, index = as_place(before, "before")
        return (record, index or 0), True
    if not at:
        return None, True
    moment = at if ":" in at and "-" not in at else parse_moment(at)
    if isinstance(moment, Time):
        with site.logs.reader(settings) as reader:
            return (Times(reader).first_from(moment.ns), 0), False
    record, index = as_place(at)
    return (record, index or 0), False


# --- one message -----------------------------------------------------------------------------------------------------


def message(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    found, record, committer_id = _message(request, site, settings)
    noted = _timings(settings, committer_id, found, record)
    shown = _pretty(found)
    _, note = site.logs.methods(settings)
    return instance_page(
        request,
        "message.html",
        "messages",
        one=found,
        record=record,
        span=handler_id(settings.name, committer_id, found.sequence_id, found.index),
        noted=noted,
        source=format_source(found),
        shown=shown[:SHOWN_CHARACTERS_MAX].split("\n"),
        left=max(0, len(shown) - SHOWN_CHARACTERS_MAX),
        count=sum(batch["count"] for batch in record["sources"]) if "sources" in record else 0,
        note=note,
        test=_as_test(settings, found),
        calls=_as_calls(settings, found),
    )


def arguments(request: Request) -> Response:
    """Send all arguments of a message as a file."""
    site, settings = site_of(request), settings_of(request)
    found, *_ = _message(request, site, settings)
    name = f"{settings.name}-{found.sequence_id}-{found.index}.json"
    return Response(
        found.text.encode("utf-8", "backslashreplace"),
        media_type="application/json",
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )


def _message(request: Request, site: Site, settings: InstanceSettings) -> tuple[Message, dict[str, Any], int]:
    at = request.path_params["record"], request.path_params["index"]
    methods, _ = site.logs.methods(settings)
    with site.logs.reader(settings) as reader:
        first, last = reader.ends()
        committer_id = reader.identity.committer_id
        found, record = message_at(reader, methods, at) if at[0] <= last else (None, None)
    if found is None or record is None:
        why = f"it holds records {first} to {last}" if not first <= at[0] <= last else "that record has fewer messages"
        raise WebError(f"the log of {settings.name} has no message {at[1]} of record {at[0]}: {why}", 404)
    return found, record, committer_id


def _timings(
    settings: InstanceSettings, committer_id: int, found: Message, record: Mapping[str, Any]
) -> list[tuple[str, int]]:
    """List durations that the instance noted beside the log for a message: (name, ns)."""
    of_record = Timings(settings.folder / FOLDER_NAME, committer_id).record_timing(found.sequence_id)
    if of_record is None:
        return []
    begins = accumulate((batch["count"] for batch in record.get("sources", ())), initial=0)
    first = max(begin for begin in begins if begin <= found.index)  # of its batch
    timing = of_record.message_timing(found.index, first, found.time_ns, None if found.source else found.sent_ns)
    ends = {
        "Queue": (timing.arrived_ns, timing.began_ns or timing.given_ns),
        "Disk": (timing.submitted_ns, timing.durable_ns),
        "Handler": (timing.began_ns, timing.ended_ns),
    }
    return [(what, end - begin) for what, (begin, end) in ends.items() if begin is not None and end is not None]


def _pretty(message: Message) -> str:
    try:
        short = len(message.text) <= LINE_CHARACTERS
        return message.text if short else json.dumps(decoding.load_json(message.text), indent=2, ensure_ascii=False)
    except ValueError:  # bytes, for a message whose method has no name
        return message.text


def _as_test(settings: InstanceSettings, message: Message) -> str:
    """Return a test that fails if the present class handles this message, or one before it, differently."""
    module, _, cls = (settings.app or "module:Class").partition(":")
    name = settings.name.replace("-", "_")
    return (
        f"# immortal checkpoint {settings.name}; immortal log export {settings.name} tests/{settings.name}.log\n"
        f"from immortal.appsdk.testing import assert_replays\n"
        f"from {module} import {cls}\n\n\n"
        f"def test_{name}_does_what_it_did() -> None:\n"
        f"    # with record {message.sequence_id}, message {message.index}: {message.method}\n"
        f'    assert_replays("tests/{settings.name}.log", {cls})\n'
    )


def _as_calls(settings: InstanceSettings, message: Message) -> dict[str, str]:
    """Return code that repeats the call, as "client" (Python) and "command"; empty if that is impossible."""
    values = message.described.get("values")
    handler = message.method.rpartition(".")[2]
    if message.kind != "call" or not isinstance(values, list) or "method" not in message.described:
        return {}
    if not handler.isidentifier() or len(message.text) > SHOWN_CHARACTERS_MAX or '{"$' in message.text:
        return {}
    called = ", ".join(repr(value) for value in values)
    given = "".join(f" {shlex.quote(json.dumps(value, ensure_ascii=False))}" for value in values)
    return {
        "client": (
            f"from immortal.appsdk.client import connect\n\n"
            f'with connect("{settings.name}") as instance:\n'
            f"    instance.{handler}({called})\n"
        ),
        "command": f"immortal call {settings.name} {handler}{given}\n",
    }


# The timeline: lanes by instance, and messages from one to another.


LANES_MAX = 24
US = 1000  # ns
AROUND_US = 20_000  # shown on either side of the message that a link leads to


def shown(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    lanes = _lanes(site, settings.name, text_of(request, "lanes"))
    span = _span(site, lanes)
    around_ns = number_of(request, "around")
    view = number_of(request, "from"), number_of(request, "to")
    if around_ns is not None and span is not None:
        middle = max(0, around_ns - span[0]) // US
        view = max(0, middle - AROUND_US), middle + AROUND_US
    return instance_page(
        request,
        "timeline.html",
        "timeline",
        lanes=lanes,
        names=site.registry.names()[: LANES_MAX * 4],
        span=span,
        filters=_filters(request),
        view=view,
    )


def data(request: Request) -> Response:
    """Send ``lanes`` (comma-separated) as JSON: ``from``, ``to`` in µs after ``origin``, in ns since the Unix epoch."""
    site, settings = site_of(request), settings_of(request)
    lanes = _lanes(site, settings.name, text_of(request, "lanes"))
    origin_ns = number_of(request, "origin", 0) or 0
    from_ns = origin_ns + (number_of(request, "from", 0) or 0) * US
    to_ns = origin_ns + (number_of(request, "to", 0) or 0) * US
    if to_ns <= from_ns:
        raise WebError("an empty range: 'to' after 'from' was expected")
    wanted = _filter(request, checked_pattern(text_of(request, "re")))
    asked = log_search.Range(lanes, origin_ns, from_ns, to_ns, wanted)
    if wanted.pattern:
        return JSONResponse({"lanes": log_search.lanes(str(site.registry.home), asked)})
    return JSONResponse({"lanes": log_search.timeline_lanes(site.logs, site.settings, asked)})


def _lanes(site: Site, name: str, asked: str) -> list[str]:
    """Return the requested lanes, or this instance and those with which it has streams. Raises RegistryError."""
    known = site.registry.names()
    if asked:
        lanes = list(dict.fromkeys(asked.split(",")))[:LANES_MAX]
        for one in lanes:
            site.settings(one)
        return lanes
    status = site.fleet.row(name).status
    others = sorted({*status.get("inputs", {}), *status.get("outputs", {})} & set(known) - {name})
    return [name, *others][:LANES_MAX]


def _span(site: Site, lanes: list[str]) -> tuple[int, int] | None:
    found = []
    for name in lanes:
        try:
            with site.logs.reader(site.settings(name)) as reader:
                found.append(log_search.ends(reader))
        except ImmortalError:
            continue  # such as an instance never started; its lane shows the problem
    spans = [span for span in found if span is not None]
    return (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else None
