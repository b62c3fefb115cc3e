"""What if other code had handled the log?"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from immortal.coordinator.config import ConfigError
from immortal.coordinator.config.values import check_app
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.live import stream
from immortal.coordinator.web.rendering import page, render
from immortal.coordinator.web.requests import form_of, place_in, settings_of, site_of
from immortal.coordinator.web.what_if_job import Order


def routes() -> list[Route]:
    return [
        Route("/i/{name}/what-if", what_if),
        Route("/i/{name}/what-if", start, methods=["POST"]),
        Route("/i/{name}/what-if/{id}", result),
        Route("/i/{name}/what-if/{id}/cancel", cancel, methods=["POST"]),
        Route("/live/i/{name}/what-if/{id}", result_live),
    ]


def what_if(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    with site.logs.reader(settings) as reader:
        summary = reader.summary()
    return page(
        "what_if.html",
        site=site,
        tab="what-if",
        name=settings.name,
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
            cone="cone" in form,
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
    site, settings = site_of(request), settings_of(request)
    job = site.jobs.job(request.path_params["id"])
    return page("what_if_result.html", site=site, tab="what-if", name=settings.name, job=job)


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
