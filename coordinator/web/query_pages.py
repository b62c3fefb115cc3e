"""Queries of an instance that runs: what one of its read-only methods says now."""

from __future__ import annotations

from typing import Any

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.appsdk.client import CallRaised, ClientError, connect
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.requests import form_of, settings_of, site_of
from immortal.coordinator.web.site import Site
from immortal.protocol import decoding
from immortal.protocol.extensions import QUERIES
from immortal.protocol.shown import printable_json_text

ANSWER_S = 10.0
SHOWN_CHARACTERS_MAX = 20_000


def routes() -> list[Route]:
    return [
        Route("/i/{name}/queries", queries),
        Route("/i/{name}/queries", ask, methods=["POST"]),
    ]


def queries(request: Request) -> Response:
    return _page(site_of(request), settings_of(request))


async def ask(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    form = await form_of(request)
    return await to_thread.run_sync(lambda: _asked(site, settings, form.get("query", ""), form.get("arguments", "")))


def _asked(site: Site, settings: InstanceSettings, query: str, text: str) -> Response:
    answer, problem = "", ""
    try:
        answer = _answer(site, settings, query, _arguments(text))
    except (WebError, ClientError, TypeError) as error:
        problem = str(error)
    return _page(site, settings, query=query, arguments=text, answer=answer, problem=problem)


def _arguments(text: str) -> list[Any]:
    try:
        found = decoding.given_json(text.strip() or "[]")
    except ValueError as error:
        raise WebError(f"{text[:60]!r} is no list of arguments in JSON: {error}") from None
    if not isinstance(found, list):
        raise WebError(f'{text[:60]!r}: a list of all arguments was expected, such as ["ann", 5]')
    return found


def _answer(site: Site, settings: InstanceSettings, query: str, arguments: list[Any]) -> str:
    """As JSON. Raises WebError, ClientError, TypeError."""
    if not query.isidentifier() or query.startswith("_"):
        raise WebError(f"{query[:60]!r}: the name of a query was expected")
    with connect(settings.name, home=site.registry.home, timeout=ANSWER_S) as instance:
        try:
            value = getattr(instance.query, query)(*arguments)
        except CallRaised as error:
            raise WebError(f"it raised {error}") from None
    return printable_json_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _page(
    site: Site, settings: InstanceSettings, query: str = "", arguments: str = "", answer: str = "", problem: str = ""
) -> Response:
    methods, why = site.logs.methods(settings)
    return page(
        "queries.html",
        site=site,
        tab="queries",
        name=settings.name,
        queries=sorted(name.rpartition(".")[2] for (to, _), name in methods.items() if to == QUERIES),
        why=why,
        query=query,
        arguments=arguments,
        answer=answer[:SHOWN_CHARACTERS_MAX],
        left_out=max(0, len(answer) - SHOWN_CHARACTERS_MAX),
        problem=problem,
    )
