"""Pages of what-ifs, of an instance and of the fleet, and SQL queries, which run as jobs."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from anyio import to_thread
from msgspec import convert
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import ConfigError
from immortal.coordinator.config.values import check_app
from immortal.protocol.distribution import add_extra
from immortal.protocol.errors import ImmortalError
from immortal.web import WebError
from immortal.web.orders import EFFECTS, FleetOrder, Found, Order, SqlOrder
from immortal.web.rendering import page, render
from immortal.web.site import Site, as_place, form_of, instance_page, settings_of, site_of, stream, text_of


def routes() -> list[Route]:
    return [
        Route("/i/{name}/what-if", what_if),
        Route("/i/{name}/what-if", start, methods=["POST"]),
        Route("/i/{name}/what-if/{id}", result),
        Route("/i/{name}/what-if/{id}/cancel", cancel, methods=["POST"]),
        Route("/live/i/{name}/what-if/{id}", result_live),
        Route("/what-if", what_if_fleet),
        Route("/what-if", start_fleet, methods=["POST"]),
        Route("/what-if/{id}", result),
        Route("/what-if/{id}/cancel", cancel, methods=["POST"]),
        Route("/what-if/{id}/{number:int}.svg", picture),
        Route("/live/what-if/{id}", result_live),
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
        jobs=site.jobs.of_instance(settings.name),
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
    return RedirectResponse(f"{_base(settings.name)}/{job.id}", 303)


def what_if_fleet(request: Request) -> Response:
    """Show the form, filled as for the what-if whose ID is ``like``."""
    site, like = site_of(request), text_of(request, "like")
    order = site.jobs.job("", like).order.fleet if like else None
    return _fleet_form(site, order or FleetOrder())


async def start_fleet(request: Request) -> Response:
    site, form = site_of(request), await form_of(request)
    order = convert({name: text.strip() for name, text in form.items()}, FleetOrder)
    return await to_thread.run_sync(lambda: _started(site, order))


def _started(site: Site, order: FleetOrder) -> Response:
    try:
        order.arguments(site.registry)
        if find_spec("matplotlib") is None:
            raise WebError(f"its charts need matplotlib: {add_extra('spark')}")
        job = site.jobs.start(Order(str(site.registry.home), fleet=order))
    except (ImmortalError, OSError) as error:
        return _fleet_form(site, order, str(error))
    return RedirectResponse(f"{_base('')}/{job.id}", 303)


def _fleet_form(site: Site, order: FleetOrder, problem: str = "") -> Response:
    names, jobs = site.registry.names(), site.jobs.of_instance("")
    shown: dict[str, Any] = {"order": order, "problem": problem, "names": names, "effects": EFFECTS, "jobs": jobs}
    return page("what_if_fleet.html", site=site, **shown)


def picture(request: Request) -> Response:
    """Send a chart. It is a file of its own since the page's policy forbids the styles in it."""
    report = site_of(request).jobs.job("", request.path_params["id"]).report
    parts, number = report["parts"] if report else [], request.path_params["number"]
    if not (number < len(parts) and parts[number]["chart"]):
        raise WebError("there is no such chart", 404)
    return Response(parts[number]["chart"], media_type="image/svg+xml")


def _app(text: str, name: str) -> str:
    try:
        app = check_app(text.strip())
    except ConfigError as error:
        raise WebError(f"{name}: {error}") from None
    return app


def _number(text: str, name: str) -> int | None:
    return as_place(text.strip(), name)[0] if text.strip() else None


# The result of a what-if; its instance's name is "" for the fleet.


def _base(name: str) -> str:
    return f"/i/{quote(name)}/what-if" if name else "/what-if"


def _job_values(request: Request) -> dict[str, Any]:
    site, name = site_of(request), request.path_params.get("name", "")
    job = site.jobs.job(name, request.path_params["id"])
    return {"site": site, "name": name, "base": _base(name), "job": job}


def result(request: Request) -> Response:
    return page("what_if_result.html", tab="what-if", **_job_values(request))


def result_live(request: Request) -> EventSourceResponse:
    return stream(request, lambda: [("job", render("_what_if.html", **_job_values(request)))])


async def cancel(request: Request) -> Response:
    await form_of(request)
    found = _job_values(request)
    found["site"].jobs.cancel(found["job"].id)
    return RedirectResponse(f"{found['base']}/{found['job'].id}", 303)


# SQL over the logs and states of all instances: the output of `immortal sql`, as a page.


QUERY_CHARACTERS_MAX = 20_000


def sql(request: Request) -> Response:
    return _page(site_of(request), SqlOrder("", ""))


async def ask(request: Request) -> Response:
    """Run the query of a form. No URL can have a query: a link that somebody sends would run it."""
    site, form = site_of(request), await form_of(request)
    names = tuple(dict.fromkeys(form.get("names", "").replace(",", " ").split()))
    order = SqlOrder(str(site.registry.home), form.get("query", "").strip(), form.get("at", "").strip(), names)
    return await to_thread.run_sync(lambda: _sql_response(site, order))


def _sql_response(site: Site, order: SqlOrder) -> Response:
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
