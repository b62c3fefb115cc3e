"""``python -m immortal.coordinator.web.what_if_job``: one what-if, in a process of its own.

Its order is JSON on stdin. A line of JSON says how far it is, {"progress": [DONE, TOTAL]}; the last one what came out,
{"report": {...}} or {"error": TEXT}.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.cli.what_if import cone_of
from immortal.coordinator.cli.what_if_report import Report
from immortal.coordinator.core.output_check import OutputDivergenceError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.replay import OWN_VERSION, AppCommand
from immortal.replay.apps import default_app
from immortal.replay.compare import Side
from immortal.replay.what_if import plan_what_if, run_what_if

PROGRESS_S = 0.2


class Order(msgspec.Struct, frozen=True):
    """``old_app`` "": the one that made the log. ``code``: a folder or a wheel with the new class.
    ``checkpoint_id``, ``last`` None: the oldest, the newest."""

    home: str
    name: str
    new_app: str
    old_app: str = ""
    checkpoint_id: int | None = None
    last: int | None = None
    upgrade: bool = False
    code: str = ""
    limit: int = 100
    cone: bool = False


def run(order: Order, progress: Any) -> dict[str, Any]:
    """What `immortal what-if --json` prints, and its last line as "verdict". Raises ImmortalError."""
    registry = Registry(order.home)
    settings = registry.load(order.name)
    with own_logs.open_reader(settings) as reader, tempfile.TemporaryDirectory(prefix="immortal-") as folder:
        route = plan_what_if(reader, checkpoint_id=order.checkpoint_id, last_sequence_id=order.last)
        old_app = order.old_app or default_app(order.name, settings.app, reader.summary(), route.last_version)
        apps = {
            Side.OLD: AppCommand.of(old_app, settings=settings),
            Side.NEW: AppCommand.of(order.new_app, settings=settings, code=Path(order.code) if order.code else None),
        }
        blob_paths = {side: Path(folder, side.value) for side in Side}
        outcome = run_what_if(
            reader,
            route,
            apps,
            upgrade_to=OWN_VERSION if order.upgrade else None,
            limit=order.limit,
            blob_paths=blob_paths,
            progress=progress,
        )
        cone = cone_of(registry, order.name, outcome, reader) if order.cone else None
        report = Report(order.name, apps, outcome, reader, order.limit, blob_paths, cone)
        lines = list(report.lines())
        return {**report.values(), "verdict": lines[-1], "lines": lines, "warnings": report.warnings}


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints
    order = decoding.decode_json(sys.stdin.buffer.read(), type=Order)
    said_s = 0.0

    def say(what: dict[str, Any]) -> None:
        answers.write(msgspec.json.encode(what) + b"\n")
        answers.flush()

    def progress(done: int, total: int | None) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            say({"progress": [done, total]})

    try:
        say({"report": run(order, progress)})
    except OutputDivergenceError as error:
        text = f"{error}\nThe old code does not do again what it did, so there is nothing to compare with: give the one"
        say({"error": f"{text} that made this log, or see 'immortal verify {order.name}'"})
    except ImmortalError as error:
        say({"error": str(error)})


if __name__ == "__main__":
    main()
