"""Map of the fleet as SVG: services as boxes, callers left of callees, and the streams between them as lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.presenters.fleet import Row, Stream, streams
from immortal.web.rendering import page, render
from immortal.web.site import LOOK_S, number_of, site_of, stream

BOX_WIDTH, BOX_HEIGHT = 200, 86
COLUMN_WIDTH, ROW_HEIGHT, MARGIN = 360, 106, 50  # a line back to the first column bends in the margin
ROWS_MIN = 6  # a column with fewer boxes is not split
ZOOMS_PERCENT = (0, 50, 75, 100, 150)  # 0: all of it in the box


def routes() -> list[Route]:
    return [Route("/map", show), Route("/live/map", live)]


def show(request: Request) -> Response:
    zoom = number_of(request, "zoom", 100)
    return page("map.html", site=site_of(request), zooms=ZOOMS_PERCENT, **_view(request), chosen=zoom)


def live(request: Request) -> EventSourceResponse:
    def render_pieces() -> Iterator[tuple[str, str]]:
        site_of(request).fleet.refresh(LOOK_S)
        view = _view(request)
        yield "map", render("_map.html", **view)
        yield "streams", render("_streams.html", **view)

    return stream(request, render_pieces)


def _view(request: Request) -> dict[str, Any]:
    rows = site_of(request).fleet.rows()
    found = streams(rows)
    known = {row.name: row for row in rows}
    names = tuple(sorted({*known, *(one.source for one in found), *(one.to for one in found)}))
    shown = [one for one in found if one.has_calls is not False or one.problem]  # answers go with the line of the calls
    places = layout(names, tuple(sorted((one.source, one.to) for one in shown)))
    at = {name: (MARGIN + column * COLUMN_WIDTH, MARGIN + row * ROW_HEIGHT) for name, (column, row) in places.items()}
    return {
        "boxes": [(known.get(name) or Row(name, "elsewhere", "off"), *at[name]) for name in names],
        "lines": [_line(one, at) for one in shown],
        "streams": found,
        "width": max((x for x, _ in at.values()), default=0) + BOX_WIDTH + MARGIN,
        "height": max((y for _, y in at.values()), default=0) + BOX_HEIGHT + MARGIN,
        "box": (BOX_WIDTH, BOX_HEIGHT),
        "zoom": min(200, number_of(request, "zoom", 100) or 0) / 100,
    }


def _line(stream: Stream, at: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return a stream as a curve from the right side of its sender to the left side of its receiver."""
    x, to_x = at[stream.source][0] + BOX_WIDTH, at[stream.to][0]
    y, to_y = at[stream.source][1] + BOX_HEIGHT // 2, at[stream.to][1] + BOX_HEIGHT // 2
    bend = max(60, (to_x - x) // 2)
    curve = f"M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}m-7-4l7 4l-7 4"  # with the head of an arrow
    thickness = round(1 + math.log10(1 + (stream.rate or 0.0)), 1)
    return {"stream": stream, "curve": curve, "thickness": thickness, "x": (x + to_x) // 2, "y": (y + to_y) // 2}


@lru_cache(4)
def layout(names: tuple[str, ...], calls: tuple[tuple[str, str], ...]) -> dict[str, tuple[int, int]]:
    """Return the column and the row of each service: callees are right of their callers, except in a cycle of calls.

    A column with many services is split into several, and those without calls come last.
    """
    callers: dict[str, dict[str, None]] = {name: {} for name in names}
    for caller, callee in calls:
        callers[callee][caller] = None
    layers: defaultdict[int, list[str]] = defaultdict(list)
    depths: dict[str, int] = {}
    linked = {name for call in calls for name in call}
    for name in _in_order(callers):
        depths[name] = (
            1 + max((depths[caller] for caller in callers[name]), default=-1) if name in linked else len(names)
        )
        layers[depths[name]].append(name)
    rows_max = max(ROWS_MIN, math.ceil(math.sqrt(2 * len(names))))
    columns: list[list[str]] = []
    rows: dict[str, float] = {}
    for _, layer in sorted(layers.items()):
        heights = {name: sum(rows[one] for one in callers[name]) / max(1, len(callers[name])) for name in layer}
        layer.sort(key=lambda name: (heights[name], name))
        rows |= {name: float(row) for row, name in enumerate(layer)}
        columns += [layer[start : start + rows_max] for start in range(0, len(layer), rows_max)]
    return {name: (number, row) for number, column in enumerate(columns) for row, name in enumerate(column)}


def _in_order(callers: dict[str, dict[str, None]]) -> list[str]:
    """Return all services, callers first; remove one call of each cycle from ``callers``."""
    while True:
        try:
            return list(TopologicalSorter(callers).static_order())
        except CycleError as error:
            caller, callee = error.args[1][:2]  # in the cycle, each calls the next
            del callers[callee][caller]
