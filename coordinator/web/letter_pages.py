"""The dead letters of an instance: what failed, why, and a hand to try or drop each."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.coordinator.cli.dead_letters import letter_rows
from immortal.coordinator.operator import control
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.requests import settings_of, site_of

LETTERS_SHOWN_MAX = 200


def routes() -> list[Route]:
    return [Route("/i/{name}/dead-letters", letters)]


def letters(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    with site.logs.reader(settings) as reader:
        count = len(reader.summary().letters)
        found = letter_rows(reader, LETTERS_SHOWN_MAX)
    return page(
        "dead_letters.html",
        site=site,
        tab="overview",
        name=settings.name,
        letters=found,
        count=count,
        may_act=site.allow_actions and control.running(settings.folder) is not None,
    )
