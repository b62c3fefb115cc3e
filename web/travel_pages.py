"""Pages about any moment of a log: the state there, a message's cause, its changes and its consequences.

A path (``balances[3]``) only reads; an expression is code. So expressions are accepted only from forms, with a token of
one of our pages, and never from a URL: a link from somebody else can run no code except the app's.
"""

from __future__ import annotations

import shlex
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.log.open import log_exists
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.errors import ImmortalError
from immortal.replay import ReplayError
from immortal.replay.trace.spans import moment_path
from immortal.replay.why import Explainer
from immortal.web import WebError
from immortal.web.log_messages import find_position, format_source, message_at
from immortal.web.rendering import chart, render
from immortal.web.site import Site, as_place, form_of, instance_page, number_of, place_of, settings_of, site_of, text_of

LINKED_MAX = 20  # messages made by one message that are searched for in other logs
WATCH_RECORDS = 2000
WHY_TIMEOUT_S = 20.0  # after it no more messages are followed

Values = dict[str, Any]


def routes() -> list[Route]:
    return [
        Route("/i/{name}/travel", travel),
        Route("/i/{name}/travel/find", find, methods=["POST"]),
        Route("/i/{name}/travel/evaluate", evaluate, methods=["POST"]),
        Route("/i/{name}/travel/changed", changed),
        Route("/i/{name}/travel/watch", watch),
        Route("/i/{name}/travel/why", why),
        Route("/i/{name}/travel/note", note, methods=["POST"]),
        Route("/i/{name}/travel/again", again, methods=["POST"]),
        Route("/i/{name}/m/{record:int}/{index:int}/replayed", replayed),
        Route("/i/{name}/m/{record:int}/{index:int}/followed", followed),
    ]


def travel(request: Request) -> Response:
    """Show the moment that ``at`` names, else the newest one."""
    site, settings = site_of(request), settings_of(request)
    at, path = place_of(request), text_of(request, "path")
    moment, problem, record, note, status = None, "", None, "", 200
    try:
        overview = _ask_explorer(site, settings, "overview", **({} if at is None else {"record": at[0]}))
        note = site.travel.code_of(settings.name, at[0] if at else None).note
    except ReplayError as error:
        overview, problem, status = {"first": None, "last": -1}, str(error), 422
    if problem:
        pass
    elif overview["first"] is None or overview["first"] > overview["last"]:
        problem = "there is no record to replay yet"
    else:
        place = at or (overview["last"], None)
        try:
            moment = _ask_explorer(site, settings, "moment", record=place[0], index=place[1], path=path)
        except ReplayError as error:
            problem, status = str(error), 422
    if moment is not None:
        with site.logs.reader(settings) as reader:
            _, record = message_at(reader, {}, (moment["record"], moment["index"]))
    return instance_page(
        request,
        "travel.html",
        "travel",
        status,
        overview=overview,
        moment=moment,
        time_ns=record["time_ns"] if record and "time_ns" in record else None,
        path=path,
        problem=problem,
        note=note,
        at=at or (overview["last"], 0),
        notes=site.notes.of_instance(settings.name),
    )


async def find(request: Request) -> Response:
    """Redirect to the next or the previous moment at which a condition holds."""
    site, settings = site_of(request), settings_of(request)
    form, record, index = await _form_at(request)
    back = form.get("way") == "back"
    handler, expression = form.get("handler", ""), form.get("expression", "")
    asked = {"record": record, "index": index, "handler": handler, "expression": expression, "back": back}
    found = await to_thread.run_sync(lambda: _ask_explorer(site, settings, "find", **asked))
    if found["at"] is not None:
        return _redirect_to_moment(request, *found["at"])
    how = "so far, up to" if found["is_cut"] else "up to"
    lines = [f"No such moment {how} record {found['looked']}."]
    if found["raised"]:
        lines.append(f"The expression raised {found['raised']}.")
    return HTMLResponse(render("_said.html", lines=lines))


async def _form_at(request: Request) -> tuple[dict[str, str], int, int]:
    """Return the fields of a form about a moment, and the moment: a record, and a message in it."""
    form = await form_of(request)
    record, index = as_place(form.get("at", ""))
    return form, record, index or 0


def _redirect_to_moment(request: Request, record: int, index: int) -> Response:
    path = moment_path(request.path_params["name"], record, index)
    if "hx-request" in request.headers:
        return Response(headers={"HX-Redirect": path})
    return RedirectResponse(path, 303)


async def evaluate(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    form, record, index = await _form_at(request)
    expression = form.get("expression", "").strip()
    if not expression:
        raise WebError("an expression was expected")
    answer = await to_thread.run_sync(
        lambda: _ask_explorer(site, settings, "evaluate", record=record, index=index, expression=expression)
    )
    if "raised" in answer:
        return HTMLResponse(render("_said.html", lines=[f"It raised {answer['raised']}"]))
    return HTMLResponse(
        render("_evaluated.html", node=answer["value"], name=settings.name, at=f"{record}:{index}", links=False)
    )


def changed(request: Request) -> Response:
    """Show when a value was last written."""
    site, settings = site_of(request), settings_of(request)
    record, index = _required_place(request)
    path = text_of(request, "path")
    found = _ask_explorer(site, settings, "last_change", record=record, index=index, path=path)
    return HTMLResponse(render("_changed.html", name=settings.name, path=path, found=found))


def watch(request: Request) -> Response:
    """Show the changes of a value over records, up to this one."""
    site, settings = site_of(request), settings_of(request)
    record, _ = _required_place(request)
    path = text_of(request, "path")
    first = number_of(request, "from")
    overview = _ask_explorer(site, settings, "overview")
    begin = max(overview["first"] or 0, record - WATCH_RECORDS if first is None else first)
    last = min(overview["last"], number_of(request, "to", record) or record)
    if begin > last:
        raise WebError(f"there are no records from {begin} to {last}")
    found = _ask_explorer(site, settings, "watch", path=path, first=begin, last=last)
    points = found["points"]
    changes = [
        one for before, one in zip([None, *points], points, strict=False) if before is None or before[1] != one[1]
    ]
    return HTMLResponse(
        render(
            "_watched.html",
            name=settings.name,
            svg=chart(path, points),
            changes=changes[-100:],
            found=found,
            first=begin,
            last=points[-1][0],
        )
    )


def why(request: Request) -> Response:
    """Show the chain of messages that led to a value; with ``minimal``, also the fewest inputs that lead to it."""
    site, settings = site_of(request), settings_of(request)
    record, index = _required_place(request)
    path, minimal = text_of(request, "path"), bool(text_of(request, "minimal"))
    explainer = Explainer(site.registry, site.travel, limit_s=WHY_TIMEOUT_S)
    found, fewest, test, problem = None, None, "", ""
    try:
        found = explainer.explain(settings.name, path, record, index)
        if minimal:
            fewest = explainer.minimal(found)
            test = fewest.test_source()
    except ReplayError as error:
        problem = str(error)
    command = ["immortal", "why", settings.name, path, "--at", f"{record}:{index}", *(["--minimal"] if minimal else [])]
    return instance_page(
        request,
        "why.html",
        "travel",
        422 if found is None else 200,
        path=path,
        at=f"{record}:{index}",
        found=found,
        fewest=fewest,
        test=test,
        problem=problem,
        command=shlex.join(command),
    )


async def note(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    form, record, index = await _form_at(request)
    site.notes.add(settings.name, record, index, form.get("text", ""))
    return _redirect_to_moment(request, record, index)


async def again(request: Request) -> Response:
    """Replay the log anew, with the present code, and show the same moment."""
    site, settings = site_of(request), settings_of(request)
    _, record, index = await _form_at(request)
    await to_thread.run_sync(lambda: site.travel.end(settings.name))
    return _redirect_to_moment(request, record, index)


def replayed(request: Request) -> Response:
    """Show one message: its cause, its changes, and the messages that it caused in other logs."""
    site, settings = site_of(request), settings_of(request)
    at = request.path_params["record"], request.path_params["index"]
    moment = _ask_explorer(site, settings, "moment", record=at[0], index=at[1])
    with site.logs.reader(settings) as reader:
        message, _ = message_at(reader, {}, at)
    return HTMLResponse(
        render(
            "_replayed.html",
            name=settings.name,
            moment=moment,
            **_linked_outputs(site, settings, moment),
            cause=None if message is None else _cause(site, settings, message.source, message.position),
            source="" if message is None else format_source(message),
        )
    )


def followed(request: Request) -> Response:
    """Show only the messages that one message caused: so a page can follow calls from service to service."""
    site, settings = site_of(request), settings_of(request)
    moment = _ask_explorer(
        site, settings, "moment", record=request.path_params["record"], index=request.path_params["index"]
    )
    return HTMLResponse(render("_followed.html", **_linked_outputs(site, settings, moment)))


def _linked_outputs(site: Site, settings: InstanceSettings, moment: Values) -> Values:
    made = [_followed(site, settings, one) for one in moment["made"][:LINKED_MAX]]
    return {"made": made, "made_more": moment["made_count"] - len(made)}


def _followed(site: Site, settings: InstanceSettings, output: Values) -> Values:
    """Find a message that an app sent in the log of its receiver."""
    destination = output["destination"] or settings.name
    if destination.startswith(CLIENTS):
        return {**output, "name": None, "at": None, "problem": "an answer to a client"}
    try:
        with site.logs.reader(site.settings(destination)) as reader:
            source = "" if destination == settings.name else settings.name
            at = find_position(reader, source, output["position"])
    except ImmortalError as error:
        return {**output, "name": None, "at": None, "problem": str(error)}
    return {**output, "name": destination, "at": at, "problem": "" if at else "not in its log, or no longer kept"}


def _cause(site: Site, settings: InstanceSettings, source: str | None, position: int) -> Values | None:
    """Find the message that caused this one, in the log of the sender; None if no instance sent this one."""
    if source is None or source.startswith(CLIENTS):
        return None
    sender = source or settings.name
    try:
        found: Values = _ask_explorer(
            site, site.settings(sender), "origin", destination="" if not source else settings.name, position=position
        )
    except ImmortalError as error:
        return {"name": sender, "at": None, "problem": str(error).split("\n")[0]}
    return {"name": sender, **found, "problem": "" if found["at"] else "its log does not reach back that far"}


def _ask_explorer(site: Site, settings: InstanceSettings, method: str, **given: Any) -> Values:
    if not log_exists(settings.log):
        raise WebError(f"{settings.name!r} has not been started yet: it has no log", 404)
    answer: Values = site.travel.ask(settings.name, method, **given)
    return answer


def _required_place(request: Request) -> tuple[int, int]:
    at = place_of(request)
    if at is None:
        raise WebError("a moment was expected: at=312:0")
    return at[0], at[1] or 0
