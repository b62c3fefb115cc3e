"""Pages of an instance's executions: a search, one execution with its timeline, and actions on one or many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from msgspec import structs
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.identity import Time, parse_moment
from immortal.presenters.executions import chosen, execution_row, execution_states, execution_view, order_for
from immortal.presenters.operations import format_wait
from immortal.protocol.errors import ImmortalError
from immortal.protocol.executions import (
    STATES,
    Execution,
    ExecutionsError,
    Query,
    key_of_id,
    label_of,
    open_index,
)
from immortal.web.actions import Action, Field, ask, carry_out, json, number, reason, require_actions
from immortal.web.rendering import render
from immortal.web.site import instance_page, number_of, settings_of, site_of, text_of

SHOWN_MAX = 100
SEARCH_TIMEOUT_S = 10.0
FILTERS = ("where", "handler", "state", "text", "caller", "since")


def routes() -> list[Route]:
    return [
        Route("/i/{name}/executions", executions),
        Route("/i/{name}/executions/do/{verb}", confirm),
        Route("/i/{name}/executions/do/{verb}", act, methods=["POST"]),
        Route("/i/{name}/executions/{id}", execution),
        Route("/i/{name}/executions/{id}/states", states),
    ]


def executions(request: Request) -> Response:
    """Show the newest executions that match the form. URL parameters ``began``, ``before``: only older ones than it."""
    settings = settings_of(request)
    filters = {key: text_of(request, key) for key in FILTERS}
    found: list[Execution] = []
    problem, older = "", ""
    try:
        query = _query(filters)
        if (began := number_of(request, "began")) is not None:
            query.before = began, key_of_id(text_of(request, "before"))
        query.limit = SHOWN_MAX + 1
        with open_index(settings.folder, settings.name, SEARCH_TIMEOUT_S) as index:
            found = index.find(query)
    except (ExecutionsError, LogError) as error:
        problem = str(error)
    if len(found) > SHOWN_MAX:
        found.pop()
        older = f"?{urlencode({**filters, 'began': found[-1].began_ns, 'before': found[-1].id})}"
    return instance_page(
        request,
        "executions.html",
        "executions",
        filters=filters,
        states=STATES,
        found=[(one, execution_row(one)) for one in found],
        problem=problem,
        older=older,
        orders=ORDERS,
        query=urlencode({key: value for key, value in filters.items() if value}),
    )


def _query(filters: Mapping[str, str]) -> Query:
    since = parse_moment(filters["since"]) if filters["since"] else None
    if isinstance(since, int):
        raise ExecutionsError(f"{since}: a time was expected, such as 2026-11-28T16:30, or 2h for two hours ago")
    return Query(
        where=tuple(label_of(one) for one in filters["where"].split()),
        handler=filters["handler"],
        state=filters["state"],
        caller=filters["caller"] or None,
        text=filters["text"],
        since_ns=since.ns if isinstance(since, Time) else None,
    )


def execution(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    view = execution_view(site.registry, settings, key_of_id(request.path_params["id"]))
    one = view["execution"]
    verbs = [verb for verb in ORDERS if (verb == "restart" or one.state == "waiting") and one.key > 0]
    return instance_page(
        request,
        "execution.html",
        "executions",
        **view,
        row=execution_row(one),
        waits_for=[(wait["step"], format_wait(wait)) for wait in view["waits"]],
        orders={verb: ORDERS[verb] for verb in verbs},
    )


def states(request: Request) -> Response:
    """Show the state before an execution and after it."""
    site, settings = site_of(request), settings_of(request)
    with open_index(settings.folder, settings.name) as index:
        found = index.get(key_of_id(request.path_params["id"]))
    if found is None:
        raise ExecutionsError(f"{settings.name!r} has no such execution")
    told = execution_states(site.travel, settings.name, found)
    return HTMLResponse(render("_states.html", name=settings.name, one=found, **told))


# --- actions on executions -------------------------------------------------------------------------------------------


def _arguments(name: str, given: str) -> list[Any] | None:
    arguments = json(name, given)
    if arguments is not None and not isinstance(arguments, list):
        raise ExecutionsError('a list of all arguments was expected, such as [17, "tea"]')
    return arguments


_REASON = Field("reason", "Reason, for the handlers and their callers", reason)
ORDERS = {
    "cancel": Action(
        "cancel",
        "Cancel executions",
        "Cancel",
        "'Cancelled' is raised at the line where each waits; it cleans up and ends. Callers get CallCancelled.",
        (_REASON,),
    ),
    "signal": Action(
        "signal",
        "Send an event to waiting executions",
        "Signal",
        "Like immortal.signal(event, value), but for these executions alone.",
        (Field("event", "Event"), Field("value", "Value, as JSON", json, placeholder="null")),
    ),
    "terminate": Action(
        "terminate",
        "Terminate executions",
        "Terminate",
        "For executions that ignore their cancellation: each ends at the line where it waits; no further code runs, "
        "not even a 'finally'. Callers get CallCancelled.",
        (_REASON,),
    ),
    "restart": Action(
        "restart",
        "Restart executions",
        "Restart",
        "Starts a new execution for each, without a caller. It repeats the calls and effects from the given step on; "
        "earlier steps keep their results.",
        (
            Field("from_step", "From step", lambda name, given: number(name, given or "1"), placeholder="1"),
            Field("arguments", "Other arguments, as JSON", _arguments, placeholder='[17, "tea"]'),
        ),
    ),
}


def confirm(request: Request) -> Response:
    """Show a form that confirms an action on executions: on those that ``ids`` lists, or that a search finds."""
    action, settings = require_actions(request, ORDERS, "verb"), settings_of(request)
    query = _query({key: text_of(request, key) for key in FILTERS})
    found = chosen(settings, action.verb, query, text_of(request, "ids").split())
    if not found:
        raise ExecutionsError(f"{action.verb}: no execution matches")
    title = f"{action.title}: {len(found):,}"
    return instance_page(
        request,
        "action.html",
        "executions",
        action=structs.replace(action, title=title),
        target=f"executions/do/{action.verb}",
        given={"ids": " ".join(one.id for one in found), "event": text_of(request, "event")},
        warnings=[],
        preview=[execution_row(one) for one in found[:SHOWN_MAX]],
        preview_more=max(0, len(found) - SHOWN_MAX),
    )


async def act(request: Request) -> Response:
    return await carry_out(request, ORDERS, "verb", "executions", _do)


def _do(settings: InstanceSettings, action: Action, form: Mapping[str, str]) -> tuple[list[str], list[str]]:
    said, problems = list[str](), list[str]()
    given = action.request(form)
    for one in chosen(settings, action.verb, Query(), form.get("ids", "").split()):
        try:
            request = order_for(settings, action.verb, one, given)
            said.append(f"{one.id}: {action.done(ask(settings, action.verb, request))}")
        except ImmortalError as error:
            problems.append(f"{one.id}: {error}")
    return said, problems
