"""Doing something: a page that says what will happen, and a form that does it."""

from __future__ import annotations

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.coordinator.cli.peers import consequences, live_peers
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.web.actions import ACTIONS, Action, do
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.requests import form_of, settings_of, site_of, text_of
from immortal.protocol.errors import ImmortalError


def routes() -> list[Route]:
    return [Route("/i/{name}/do/{action}", confirm), Route("/i/{name}/do/{action}", act, methods=["POST"])]


def _action(request: Request) -> Action:
    """Raises WebError for one that there is not, or may not be done here."""
    if not site_of(request).allow_actions:
        raise WebError("this page only shows: 'immortal web --allow-actions' lets it do something", 403)
    found = ACTIONS.get(request.path_params["action"])
    if found is None:
        raise WebError(f"there is no action {request.path_params['action'][:40]!r}", 404)
    return found


def confirm(request: Request) -> Response:
    action, site, settings = _action(request), site_of(request), settings_of(request)
    given = {field.name: text_of(request, field.name) for field in action.fields if field.is_given}
    for name, value in given.items():
        if not value:
            raise WebError(f"{name}= is missing")
    return page(
        "action.html",
        site=site,
        tab="overview",
        name=settings.name,
        action=action,
        key=request.path_params["action"],
        given=given,
        warnings=_warnings(action, settings, given.get("peer", "")),
        said="",
    )


def _warnings(action: Action, settings: InstanceSettings, peer: str) -> list[str]:
    if action.verb != "reset-peer":
        return []
    known = (live_peers(settings) or {}).get(peer)
    return [] if known is None else list(consequences(settings.name, peer, known))


async def act(request: Request) -> Response:
    action, site, settings = _action(request), site_of(request), settings_of(request)
    form = await form_of(request)
    said, problem = "", ""
    try:
        said = await to_thread.run_sync(lambda: do(settings, action, form))
    except ImmortalError as error:
        problem = str(error)
    return page(
        "done.html",
        409 if problem else 200,
        site=site,
        tab="overview",
        name=settings.name,
        action=action,
        said=said,
        problem=problem,
    )
