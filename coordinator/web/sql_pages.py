"""SQL over the logs and states of all instances: what `immortal sql` prints, as a page."""

from __future__ import annotations

import shlex

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.requests import form_of, site_of
from immortal.coordinator.web.site import Site
from immortal.coordinator.web.sql_job import Found, Order

QUERY_CHARACTERS_MAX = 20_000


def routes() -> list[Route]:
    return [Route("/sql", sql), Route("/sql", ask, methods=["POST"])]


def sql(request: Request) -> Response:
    return _page(site_of(request), Order("", ""))


async def ask(request: Request) -> Response:
    """A query never comes by an address: one that somebody sends would run it."""
    site, form = site_of(request), await form_of(request)
    names = tuple(dict.fromkeys(form.get("names", "").replace(",", " ").split()))
    order = Order(str(site.registry.home), form.get("query", "").strip(), form.get("at", "").strip(), names)
    return await to_thread.run_sync(lambda: _asked(site, order))


def _asked(site: Site, order: Order) -> Response:
    try:
        if not order.query:
            raise WebError("a query was expected, such as select * from instances")
        if len(order.query) > QUERY_CHARACTERS_MAX:
            raise WebError(f"it has {len(order.query)} characters: at most {QUERY_CHARACTERS_MAX} were expected")
        return _page(site, order, found=site.sql.run(order))
    except WebError as error:
        return _page(site, order, problem=str(error))


def _page(site: Site, order: Order, found: Found | None = None, problem: str = "") -> Response:
    names = [word for name in order.names for word in ("--instance", name)]
    command = ["immortal", "sql", order.query, *names, *(["--at", order.at] if order.at else [])]
    return page("sql.html", site=site, order=order, found=found, problem=problem, command=shlex.join(command))
