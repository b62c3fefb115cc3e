"""Pages for the login and for the fleet: all instances at a glance."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from immortal.web.auth import COOKIE_AGE_S, LOGIN_PATH, cookie_name, origin_of
from immortal.web.fleet import Row
from immortal.web.rendering import page, render
from immortal.web.site import LOOK_S, Site, site_of, stream, text_of

WARM_UP_S = 1.0  # for the first look at all instances, before the URL is printed


def routes() -> list[Route]:
    return [
        Route("/", fleet),
        Route("/live/fleet", fleet_live),
        Route(LOGIN_PATH, login),
    ]


def warm_up(site: Site) -> None:
    """Look at all instances, and load what the first page needs, so that it comes fast."""
    site.fleet.look(0.0)
    page("login.html", site=site, wrong=False)
    page("fleet.html", site=site, **_shown(site.fleet.rows(), "", ""))
    site.fleet.look(WARM_UP_S)


def login(request: Request) -> Response:
    """Let the browser in if it has the right token; without a token, ask for it."""
    site = site_of(request)
    given = request.query_params.get("token", "")
    if site.token.lets_look(given.strip()):
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
    return page("fleet.html", site=site_of(request), **_view(site_of(request), request))


def fleet_live(request: Request) -> EventSourceResponse:
    site = site_of(request)

    names: list[str] | None = None

    def look() -> Iterator[tuple[str, str]]:
        nonlocal names
        site.fleet.look(LOOK_S)
        view = _view(site, request)
        before, names = names, [row.name for row in view["rows"]]
        yield "tiles", render("_tiles.html", **view)
        if before is not None and before != names:  # instances were added or removed
            yield "rows", render("_rows.html", **view)
        for row in view["rows"]:
            yield f"row-{row.name}", str(row.cells)

    return stream(request, look)


def _view(site: Site, request: Request) -> dict[str, Any]:
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
