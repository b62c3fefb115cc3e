"""The timeline: lanes by instance, and messages from one to another."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from immortal.coordinator.web import scan, timeline
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.messages import Wanted
from immortal.coordinator.web.rendering import page
from immortal.coordinator.web.requests import checked_pattern, number_of, settings_of, site_of, text_of
from immortal.coordinator.web.site import Site
from immortal.protocol.errors import ImmortalError

LANES_MAX = 24
US = 1000  # ns
AROUND_US = 20_000  # to either side of a message that a link leads to


def routes() -> list[Route]:
    return [Route("/i/{name}/timeline", shown), Route("/i/{name}/timeline.json", data)]


def shown(request: Request) -> Response:
    site, settings = site_of(request), settings_of(request)
    lanes = _lanes(site, settings.name, text_of(request, "lanes"))
    span = _span(site, lanes)
    around_ns = number_of(request, "around")
    view = number_of(request, "from"), number_of(request, "to")
    if around_ns is not None and span is not None:
        middle = max(0, around_ns - span[0]) // US
        view = max(0, middle - AROUND_US), middle + AROUND_US
    fields = {key: request.query_params.get(key, "") for key in ("method", "re", "size", "latency")}
    return page(
        "timeline.html",
        site=site,
        tab="timeline",
        name=settings.name,
        lanes=lanes,
        names=site.registry.names()[: LANES_MAX * 4],
        span=span,
        filters=fields,
        view=view,
    )


def data(request: Request) -> Response:
    """``from`` and ``to`` in µs behind ``origin``, which is in ns since the Unix epoch; ``lanes`` by comma."""
    site, settings = site_of(request), settings_of(request)
    lanes = _lanes(site, settings.name, text_of(request, "lanes"))
    origin_ns = number_of(request, "origin", 0) or 0
    from_ns = origin_ns + (number_of(request, "from", 0) or 0) * US
    to_ns = origin_ns + (number_of(request, "to", 0) or 0) * US
    if to_ns <= from_ns:
        raise WebError("an empty range: 'to' behind 'from' was expected")
    latency_ns = (number_of(request, "latency", 0) or 0) * 1_000_000
    pattern = checked_pattern(text_of(request, "re"))
    wanted = Wanted(text_of(request, "method"), pattern, number_of(request, "size", 0) or 0, latency_ns)
    asked = timeline.Range(lanes, origin_ns, from_ns, to_ns, wanted)
    if pattern:
        return JSONResponse({"lanes": scan.lanes(str(site.registry.home), asked)})
    return JSONResponse({"lanes": timeline.lanes_of(site.logs, site.settings, asked)})


def _lanes(site: Site, name: str, asked: str) -> list[str]:
    """This one, and those that it talks to, unless it is said which. Raises RegistryError for one that is not there."""
    known = site.registry.names()
    if asked:
        lanes = list(dict.fromkeys(asked.split(",")))[:LANES_MAX]
        for one in lanes:
            site.settings(one)
        return lanes
    status = site.fleet.row(name).status
    others = sorted({*status.get("inputs", {}), *status.get("outputs", {})} & set(known) - {name})
    return [name, *others][:LANES_MAX]


def _span(site: Site, lanes: list[str]) -> tuple[int, int] | None:
    """The first and the last time of all lanes, ns."""
    found = []
    for name in lanes:
        try:
            with site.logs.reader(site.settings(name)) as reader:
                found.append(timeline.ends(reader))
        except ImmortalError:
            continue  # never started, say; its lane will tell
    spans = [span for span in found if span is not None]
    return (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else None
