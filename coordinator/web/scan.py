"""``python -m immortal.coordinator.web.scan``: messages that match a regular expression, found in a process of its own.

An expression may take longer than anybody waits, and holds up the whole process meanwhile. So this one is ended.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.logs import Logs
from immortal.coordinator.web.messages import At, Page, Wanted, page_before, page_from
from immortal.coordinator.web.timeline import Range, lanes_of
from immortal.protocol import decoding

SCAN_S_MAX = 4.0


class Request(msgspec.Struct, tag="page"):
    home: str
    name: str
    wanted: Wanted
    limit: int
    at: At | None
    back: bool


class Lanes(msgspec.Struct, tag="lanes"):
    home: str
    asked: Range


def scan(request: Request) -> Page:
    """Raises WebError where it takes too long."""
    return decoding.decode_json(_asked(request, request.wanted.pattern), type=Page)


def lanes(home: str, asked: Range) -> list[dict[str, Any]]:
    """As :func:`immortal.coordinator.web.timeline.lanes_of`. Raises WebError where it takes too long."""
    return decoding.decode_json(_asked(Lanes(home, asked), asked.wanted.pattern), type=list[dict[str, Any]])


def _asked(request: Request | Lanes, pattern: str) -> bytes:
    command = [sys.executable, "-P", "-m", "immortal.coordinator.web.scan"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(request), capture_output=True, timeout=SCAN_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise WebError(
            f"the expression {pattern[:100]!r} takes too long: give a simpler one, or also a method", 422
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise WebError(f"the log can't be searched: {said}", 500)
    return done.stdout


def page_of(logs: Logs, settings: InstanceSettings, wanted: Wanted, at: At | None, limit: int, *, back: bool) -> Page:
    methods, _ = logs.methods(settings)
    with logs.reader(settings) as reader:
        if back or at is None:
            return page_before(reader, methods, wanted, at, limit)
        return page_from(reader, methods, wanted, at, limit)


def main() -> None:
    request = decoding.decode_json(sys.stdin.buffer.read(), type=Request | Lanes)
    registry = Registry(request.home)
    found: Any
    if isinstance(request, Lanes):
        found = lanes_of(Logs(), registry.load, request.asked)
    else:
        settings = registry.load(request.name)
        found = page_of(Logs(), settings, request.wanted, request.at, request.limit, back=request.back)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
