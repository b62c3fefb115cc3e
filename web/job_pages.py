"""Pages of what-ifs and SQL queries, which run as jobs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from urllib.parse import quote

from anyio import to_thread
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import ConfigError
from immortal.coordinator.config.values import check_app
from immortal.web import WebError
from immortal.web.jobs import Found, Order, SqlOrder
from immortal.web.rendering import page, render
from immortal.web.site import Site, form_of, instance_page, place_in, settings_of, site_of, stream


def routes() -> list[Route]:
    return [
        Route("/i/{name}/what-if", what_if),
        Route("/i/{name}/what-if", start, methods=["POST"]),
        Route("/i/{name}/what-if/{id}", result),
        Route("/i/{name}/what-if/{id}/cancel", cancel, methods=["POST"]),
        Route("/live/i/{name}/what-if/{id}", result_live),
        Route("/sql", sql),
        Route("/sql", ask, methods=["POST"]),
    ]


def what_if(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    with site.logs.reader(settings) as reader:
        summary = reader.summary()
    return instance_page(
        request,
        "what_if.html",
        "what-if",
        app=settings.app or "",
        checkpoints=[one for one in summary.checkpoints if one.sequence_id + 1 >= summary.first_sequence_id],
        last=summary.last_sequence_id,
        jobs=site.jobs.of(settings.name),
    )


async def start(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    form = await form_of(request)
    job = site.jobs.start(
        Order(
            str(site.registry.home),
            settings.name,
            _app(form.get("new_app", ""), "the new class"),
            _app(form["old_app"], "the old class") if form.get("old_app", "").strip() else "",
            _number(form.get("from", ""), "from"),
            _number(form.get("to", ""), "to"),
            "upgrade" in form,
            form.get("code", "").strip(),
        )
    )
    return RedirectResponse(f"/i/{quote(settings.name)}/what-if/{job.id}", 303)


def _app(text: str, what: str) -> str:
    try:
        app = check_app(text.strip())
    except ConfigError as error:
        raise WebError(f"{what}: {error}") from None
    return app


def _number(text: str, name: str) -> int | None:
    return place_in(text.strip(), name)[0] if text.strip() else None


def result(request: Request) -> Response:
    settings_of(request)
    job = site_of(request).jobs.job(request.path_params["id"])
    return instance_page(request, "what_if_result.html", "what-if", job=job)


def result_live(request: Request) -> EventSourceResponse:
    site, settings = site_of(request), settings_of(request)

    def look() -> Iterator[tuple[str, str]]:
        job = site.jobs.job(request.path_params["id"])
        yield "job", render("_what_if.html", site=site, name=settings.name, job=job)

    return stream(request, look)


async def cancel(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    await form_of(request)
    site.jobs.cancel(request.path_params["id"])
    return RedirectResponse(f"/i/{quote(settings.name)}/what-if/{request.path_params['id']}", 303)


# SQL over the logs and states of all instances: the output of `immortal sql`, as a page.


QUERY_CHARACTERS_MAX = 20_000


def sql(request: Request) -> Response:
    return _page(site_of(request), SqlOrder("", ""))


async def ask(request: Request) -> Response:
    """Run the query of a form. No URL can have a query: a link that somebody sends would run it."""
    site, form = site_of(request), await form_of(request)
    names = tuple(dict.fromkeys(form.get("names", "").replace(",", " ").split()))
    order = SqlOrder(str(site.registry.home), form.get("query", "").strip(), form.get("at", "").strip(), names)
    return await to_thread.run_sync(lambda: _asked(site, order))


def _asked(site: Site, order: SqlOrder) -> Response:
    try:
        if not order.query:
            raise WebError("a query was expected, such as select * from instances")
        if len(order.query) > QUERY_CHARACTERS_MAX:
            raise WebError(f"it has {len(order.query)} characters: at most {QUERY_CHARACTERS_MAX} were expected")
        return _page(site, order, found=site.sql.run(order))
    except WebError as error:
        return _page(site, order, problem=str(error))


def _page(site: Site, order: SqlOrder, found: Found | None = None, problem: str = "") -> Response:
    names = [word for name in order.names for word in ("--instance", name)]
    command = ["immortal", "sql", order.query, *names, *(["--at", order.at] if order.at else [])]
    return page("sql.html", site=site, order=order, found=found, problem=problem, command=shlex.join(command))
