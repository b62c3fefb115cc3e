"""Pages of the fleet and of one instance: its state, streams, waiting handlers, dead letters and queries; the login."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from anyio import to_thread
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from immortal.appsdk.client import CallRaised, ClientError, connect
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.operator import control
from immortal.coordinator.operator.control import ControlError
from immortal.presenters.fleet import Row, unacknowledged
from immortal.presenters.operations import (
    dead_letter_rows,
    describe_wait_end,
    format_caller,
    format_wait,
    place_in_words,
    with_times,
)
from immortal.protocol import decoding, redaction
from immortal.protocol.extensions import QUERIES
from immortal.protocol.safe_output import printable_json_text
from immortal.web import WebError
from immortal.web.auth import COOKIE_AGE_S, LOGIN_PATH, cookie_name, origin_of
from immortal.web.rendering import cells, page, render
from immortal.web.site import LOOK_S, Site, form_of, instance_page, settings_of, site_of, stream, text_of

ASK_S = 1.5  # an app that does not answer in this time is shown as busy
HANDLERS_SHOWN_MAX = 200
FAILED_SHOWN_MAX = 20

Values = dict[str, Any]


def routes() -> list[Route]:
    return [
        Route("/", fleet),
        Route("/live/fleet", fleet_live),
        Route(LOGIN_PATH, login),
        Route("/i/{name}", instance),
        Route("/live/i/{name}", instance_live),
        Route("/i/{name}/handlers/{task:int}", handler),
        Route("/i/{name}/dead-letters", letters),
        Route("/i/{name}/queries", queries),
        Route("/i/{name}/queries", ask, methods=["POST"]),
    ]


def instance(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    return instance_page(request, "instance.html", "overview", **_view(site, settings))


def instance_live(request: Request) -> EventSourceResponse:
    site, settings = site_of(request), settings_of(request)

    def render_pieces() -> Iterator[tuple[str, str]]:
        yield "overview", render("_overview.html", site=site, name=settings.name, **_view(site, settings))

    return stream(request, render_pieces)


def handler(request: Request) -> Response:
    """Show a waiting handler: its arguments, its steps, the lines at which it waits."""
    settings = settings_of(request)
    number = request.path_params["task"]
    answer = control.query(settings.folder, "handlers", 10.0, argument={"task": number})
    found = with_times(answer.get("handler"))
    waits = [] if found is None else [_wait(settings.name, found, wait) for wait in found["waits"]]
    return instance_page(
        request,
        "handler.html",
        "overview",
        404 if found is None else 200,
        number=number,
        one=found,
        waits=waits,
        caller=None if found is None else format_caller(found),
        problem=answer.get("error"),
    )


def _view(site: Site, settings: InstanceSettings) -> Values:
    row = site.fleet.row(settings.name)
    waiting = _handlers(settings)
    return {
        "row": row,
        "settings": settings,
        "streams": _streams(row.status, _query_coordinator(settings, "peers").get("peers", {})),
        **waiting,
        "kinds": Counter(kind for one in waiting["handlers"] for kind in one["kinds"]),
        "letters": row.status.get("letters") or {},
        "clients": row.status.get("clients") or {},
        "callers": _query_coordinator(settings, "clients").get("clients", []),
        "failed": _failed(site, settings),
        "verdicts": {kind: count for kind, count in (row.status.get("verdicts") or {}).items() if count},
    }


def _failed(site: Site, settings: InstanceSettings) -> list[Values]:
    try:
        with site.logs.reader(settings) as reader:
            verdicts = reader.last_verdicts(FAILED_SHOWN_MAX)
    except (LogError, WebError):  # there is none yet, or the page says elsewhere what is wrong with it
        return []
    return [
        {
            "record": one.sequence_id,
            "message": one.message_index,
            "method": one.method,
            "caller": "its handler" if one.step else format_caller({"caller": one.caller}),
            "why": ": ".join(filter(None, (one.type_name, one.text))),
        }
        for one in verdicts
    ]


def _streams(status: Values, peers: Values) -> list[Values]:
    """Return the streams to and from each other instance, and the instance itself."""
    inputs, outputs = status.get("inputs", {}), status.get("outputs", {})
    found = []
    for name in sorted({*inputs, *outputs}, key=lambda name: (name != status["name"], name)):
        to, peer = outputs.get(name, {}), peers.get(name, {})
        found.append(
            dict.fromkeys(("state", "waiting_bytes", "spilled_bytes", "window_bytes"))
            | to
            | {
                "name": name,
                "is_self": name == status["name"],
                "made": to.get("position", to.get("position_at_checkpoint")),
                "unacknowledged": unacknowledged(to),
                "received": inputs.get(name, {}).get("position"),
                "endpoint": peer.get("endpoint") or "",
                "error": to.get("error") or peer.get("error"),
            }
        )
    return found


def _query_coordinator(settings: InstanceSettings, verb: str) -> Values:
    """Return what an instance that runs tells; {} if it does not."""
    try:
        return control.query(settings.folder, verb, ASK_S)
    except ControlError:
        return {}


def _handlers(settings: InstanceSettings) -> Values:
    """Return the page's values about waiting handlers, their number or the problem, and handlers with a schedule."""
    found: Values = {"handlers": [], "handlers_count": 0, "handlers_problem": "", "schedules": []}
    try:
        answer = control.query(settings.folder, "handlers", ASK_S)
    except control.NotRunningError:
        return found
    except ControlError as error:
        return found | {"handlers_problem": str(error)}
    if "handlers" not in answer:
        return found | {"handlers_problem": str(answer.get("error", "the app gives no list of handlers"))}
    found |= {"handlers_count": answer["count"], "schedules": answer.get("schedules", [])}
    found["handlers"] = [
        {
            "id": one["id"],
            "handler": f"{one['handler']}{one['arguments']}",
            "caller": format_caller(one),
            "since": one["since_ns"],
            "waits": [format_wait(wait) for wait in one["waits"]],
            "kinds": [wait["kind"] for wait in one["waits"]],
            "at": [place_in_words(frames[-1]) for frames in one["at"] if frames],
            "cancelled": bool(one["cancelled"]),
        }
        for one in with_times(answer["handlers"][:HANDLERS_SHOWN_MAX])
    ]
    return found


def _wait(name: str, handler: Values, wait: Values) -> Values:
    return {
        "kind": wait["kind"],
        "text": format_wait(wait),
        "ends": describe_wait_end(name, handler["id"], wait),
        "event": wait.get("event"),
        "is_between_attempts": bool(wait.get("failure")),
    }


# Dead letters of an instance: what failed, why, and actions to retry or drop each.


LETTERS_SHOWN_MAX = 200


def letters(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    with site.logs.reader(settings) as reader:
        count = len(reader.summary().letters)
        found = dead_letter_rows(reader, LETTERS_SHOWN_MAX)
    return instance_page(
        request,
        "dead_letters.html",
        "overview",
        letters=found,
        count=count,
        may_act=site.allow_actions and control.running(settings.folder) is not None,
    )


# Queries of a running instance: the present result of one of its read-only methods.


ANSWER_S = 10.0
SHOWN_CHARACTERS_MAX = 20_000


def queries(request: Request) -> Response:
    return _query_page(request)


async def ask(request: Request) -> Response:
    form = await form_of(request)
    return await to_thread.run_sync(lambda: _query_response(request, form.get("query", ""), form.get("arguments", "")))


def _query_response(request: Request, query: str, text: str) -> Response:
    answer, problem = "", ""
    try:
        answer = _answer(site_of(request), settings_of(request), query, _arguments(text))
    except (WebError, ClientError, TypeError) as error:
        problem = str(error)
    return _query_page(request, query=query, arguments=text, answer=answer, problem=problem)


def _arguments(text: str) -> list[Any]:
    try:
        found = decoding.parse_json_argument(text.strip() or "[]")
    except ValueError as error:
        raise WebError(f"{text[:60]!r} is not a JSON list of arguments: {error}") from None
    if not isinstance(found, list):
        raise WebError(f'{text[:60]!r}: a list of all arguments was expected, such as ["ann", 5]')
    return found


def _answer(site: Site, settings: InstanceSettings, query: str, arguments: list[Any]) -> str:
    """Call a query and return its result as JSON. Raises WebError, ClientError, TypeError."""
    if not query.isidentifier() or query.startswith("_"):
        raise WebError(f"{query[:60]!r}: the name of a query was expected")
    with connect(settings.name, home=site.registry.home, timeout=ANSWER_S) as instance:
        try:
            value = getattr(instance.query, query)(*arguments)
        except CallRaised as error:
            raise WebError(f"the query raised {error}") from None
    encoded = msgspec.json.encode(value)
    if redaction.may_apply(query):
        encoded = msgspec.json.encode(redaction.result(query, decoding.load_json(encoded)), enc_hook=str)
    return printable_json_text(msgspec.json.format(encoded, indent=2).decode())


def _query_page(
    request: Request, query: str = "", arguments: str = "", answer: str = "", problem: str = ""
) -> Response:
    methods, why = site_of(request).logs.methods(settings_of(request))
    return instance_page(
        request,
        "queries.html",
        "queries",
        queries=sorted(name.rpartition(".")[2] for (to, _), name in methods.items() if to == QUERIES),
        why=why,
        query=query,
        arguments=arguments,
        answer=answer[:SHOWN_CHARACTERS_MAX],
        left_out=max(0, len(answer) - SHOWN_CHARACTERS_MAX),
        problem=problem,
    )


# The fleet: the login, and all instances at a glance.


WARM_UP_S = 1.0  # for the first look at all instances, before the URL is printed


def warm_up(site: Site) -> None:
    """Ask all instances for their status and load the templates, so that the first page is fast."""
    site.fleet.refresh(0.0)
    page("login.html", site=site, wrong=False)
    page("fleet.html", site=site, **_shown(site.fleet.rows(), "", ""))
    site.fleet.refresh(WARM_UP_S)


def login(request: Request) -> Response:
    """Give the browser a cookie if it has the right token; otherwise ask for the token."""
    site = site_of(request)
    given = request.query_params.get("token", "")
    if site.token.may_read(given.strip()):
        response: Response = RedirectResponse("/", 303)
        scheme, host = request.app.state.scheme, request.headers.get("host", "")
        response.set_cookie(
            cookie_name(scheme, host),
            site.token.cookie(origin_of(scheme, host), time.time()),
            max_age=COOKIE_AGE_S,
            httponly=True,
            samesite="lax",
            secure=scheme == "https",
        )
        return response
    return page("login.html", 401 if given else 200, site=site, wrong=bool(given))


def fleet(request: Request) -> Response:
    return page("fleet.html", site=site_of(request), **_fleet_view(site_of(request), request))


def fleet_live(request: Request) -> EventSourceResponse:
    site = site_of(request)

    names: list[str] | None = None

    def render_pieces() -> Iterator[tuple[str, str]]:
        nonlocal names
        site.fleet.refresh(LOOK_S)
        view = _fleet_view(site, request)
        before, names = names, [row.name for row in view["rows"]]
        yield "tiles", render("_tiles.html", **view)
        if before is not None and before != names:  # instances were added or removed
            yield "rows", render("_rows.html", **view)
        for row in view["rows"]:
            yield f"row-{row.name}", cells(row)

    return stream(request, render_pieces)


def _fleet_view(site: Site, request: Request) -> dict[str, Any]:
    return _shown(site.fleet.rows(), text_of(request, "show"), text_of(request, "q"))


def _shown(rows: list[Row], show: str, wanted: str) -> dict[str, Any]:
    counts = Counter(_group(row) for row in rows)
    shown = [
        row
        for row in rows
        if wanted.lower() in row.name.lower()
        and (not show or show == _group(row) or (show == "problems" and row.problems))
    ]
    return {
        "rows": shown,
        "total": len(rows),
        "show": show,
        "q": wanted,
        "counts": {
            "running": counts["running"],
            "stopped": counts["stopped"],
            "problems": sum(bool(row.problems) for row in rows),
        },
    }


def _group(row: Row) -> str:
    return "stopped" if row.tone == "off" else "running" if "pid" in row.status else "other"
