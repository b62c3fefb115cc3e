"""Orders of what-ifs and SQL queries, and the process that carries one out: ``python -m immortal.web.orders``.

The argument is what-if, fleet or sql. The order is JSON on stdin. A what-if writes lines of JSON with its progress,
{"progress": [DONE, TOTAL]}. The last line is the result: {"report": {...}} of a what-if, {"found": {...}} of a query,
or {"error": TEXT}.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config.values import check_app
from immortal.coordinator.core.output.output_check import OutputDivergenceError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time, parse_moment
from immortal.coordinator.log.open import log_exists
from immortal.pipeline.sql.opening import open_sql, wrong_query
from immortal.presenters.records import cell
from immortal.presenters.what_if import Report
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.replay import OWN_VERSION, AppCommand
from immortal.replay.app_process import OwnCode, code_at_end, code_environment
from immortal.replay.comparison import Side
from immortal.replay.what_if import plan_what_if, run_what_if, try_upgrade
from immortal.web import WebError

PROGRESS_S = 0.2
ROWS_SHOWN_MAX = 500
CELL_CHARACTERS_MAX = 300
HANDLER_S = 60.0  # for the messages of a record, under changed code of a fleet
EFFECTS = ("fail", "by-key")
MEMORY_MB = 2048  # of the process of a query; the query itself can have half of it

SendAnswer = Callable[[dict[str, Any]], None]


class FleetOrder(msgspec.Struct, frozen=True):
    """Order of a what-if for the fleet: the texts of its form. ``changes``: words such as ``shop=shop_v2:Shop``."""

    changes: str = ""
    code: str = ""
    begin: str = ""
    end: str = ""
    effects: str = EFFECTS[0]
    check: str = ""
    seeds: str = "1"

    def arguments(self, registry: Registry) -> dict[str, Any]:
        """Return arguments of :func:`immortal.replay.fleet.opening.what_if`, ``check`` still as a name.

        Raises ImmortalError for a text that is not what was expected.
        """
        changes: dict[str, str] = {}
        for word in self.changes.split():
            name, _, app = word.partition("=")
            if not app or name in changes:
                raise WebError(f"{word!r}: a service and its new class, each once, were expected: shop=shop_v2:Shop")
            if not log_exists(registry.load(name).log):
                raise WebError(f"{name!r} has not been started yet: it has no log")
            changes[name] = check_app(app)
        if not changes:
            raise WebError("a service and its new class were expected, such as shop=shop_v2:Shop")
        code = Path(self.code) if self.code else None
        code_environment(code)
        times = [parse_moment(text) if text else None for text in (self.begin, self.end)]
        if any(isinstance(time, int) for time in times):
            raise WebError("from, to: a time was expected, such as 2026-05-01T12:00, not a record's number")
        if self.effects not in EFFECTS:
            raise WebError(f"effects: {' or '.join(EFFECTS)} was expected, not {self.effects[:40]!r}")
        if self.check and ":" not in self.check:
            raise WebError(f"the check {self.check[:100]!r}: a function was expected, as module:function")
        if not re.fullmatch(r"[1-9][0-9]{0,3}", self.seeds):
            raise WebError(f"orders to try: a number from 1 to 9999 was expected, not {self.seeds[:40]!r}")
        begin_ns, to_ns = (time.ns if isinstance(time, Time) else None for time in times)
        given = {"code": code, "begin_ns": begin_ns, "to_ns": to_ns, "effects": self.effects, "check": self.check}
        return {"changes": changes, **given, "seeds": int(self.seeds)}


class Order(msgspec.Struct, frozen=True):
    """Order of a what-if. ``old_app`` "": the app that made the log. ``code``: a folder or a wheel with the new class.
    ``checkpoint_id``, ``last`` None: the oldest, the newest. ``fleet``: the order, if ``name`` is ""."""

    home: str
    name: str = ""
    new_app: str = ""
    old_app: str = ""
    checkpoint_id: int | None = None
    last: int | None = None
    upgrade: bool = False
    code: str = ""
    limit: int = 100
    fleet: FleetOrder | None = None


def run_what_if_order(order: Order, progress: Any) -> dict[str, Any]:
    """Run a what-if; return the values of `immortal what-if --json`, with its text. Raises ImmortalError."""
    registry = Registry(order.home)
    settings = registry.load(order.name)
    with own_logs.open_reader(settings) as reader, tempfile.TemporaryDirectory(prefix="immortal-") as folder:
        route = plan_what_if(reader, checkpoint_id=order.checkpoint_id, last_sequence_id=order.last)
        old = OwnCode(order.old_app) if order.old_app else code_at_end(settings, reader.summary(), route)
        apps = {
            Side.OLD: AppCommand.of(old.app, settings=settings, code=old.archive),
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
        if order.upgrade and order.checkpoint_id is None and not outcome.upgrade_error:
            outcome.upgrade_now_error = try_upgrade(reader, route, apps[Side.NEW], OWN_VERSION)
        report = Report(order.name, apps, outcome, reader, order.limit, blob_paths)
        lines = list(report.lines())
        return {**report.values(), "verdict": lines[-1], "lines": lines, "warnings": report.warnings}


def run_fleet_order(home: str, order: FleetOrder, progress: Any) -> dict[str, Any]:
    """Run a what-if for the fleet; return its report. Raises ImmortalError."""
    from immortal.presenters.what_if_fleet import fleet_report
    from immortal.replay.fleet.opening import load_function, what_if
    from immortal.replay.fleet.player import seal_process

    given = order.arguments(Registry(home))
    given["check"] = load_function(order.check) if order.check else None
    runs, run, first_ns, last_ns = given["seeds"] + bool(order.check), 0, 0, 0

    def advance(now_ns: int, end_ns: int) -> None:
        nonlocal run, first_ns, last_ns
        first_ns, last_ns, was_ns = first_ns or now_ns, now_ns, last_ns
        run = min(run + (now_ns < was_ns), runs - 1)
        progress(100 * run + min(100, 100 * (now_ns - first_ns) // max(1, end_ns - first_ns)), 100 * runs)

    seal_process(HANDLER_S)
    outcome = what_if(home, **given, details=True, progress=advance)
    if order.end and not outcome.is_different and not any(one.messages for one in outcome.services):
        raise WebError("to: the changed services have no message up to that time: give a later one")
    return fleet_report(outcome)


class SqlOrder(msgspec.Struct, frozen=True):
    """Order of an SQL query. ``at`` "": now. ``names`` (): all instances that have a log."""

    home: str
    query: str
    at: str = ""
    names: tuple[str, ...] = ()


class Found(msgspec.Struct):
    """Result of an SQL query. ``cuts``: (instance, its last record that was shown)."""

    columns: list[str]
    rows: list[list[str]]
    has_more: bool
    cuts: list[tuple[str, int]]


def run_query(order: SqlOrder) -> Found:
    """Run an SQL query and return its result. Raises ImmortalError."""
    at: int | Time | None = parse_moment(order.at) if order.at else None
    with open_sql(Registry(order.home), order.names, at, order.query) as database:
        import duckdb

        database.seal(MEMORY_MB // 2)
        try:
            statements = database.connection.extract_statements(order.query)
            if [one.type for one in statements] != [duckdb.StatementType.SELECT]:
                raise WebError("one query that only reads was expected, such as select ... from ...")
            made = database.run(order.query)
            rows = made.fetchmany(ROWS_SHOWN_MAX + 1)
        except duckdb.Error as error:
            raise wrong_query(error) from None
        return Found(
            [_clipped(name) for name in made.columns],
            [[_clipped(cell(value)) for value in row] for row in rows[:ROWS_SHOWN_MAX]],
            len(rows) > ROWS_SHOWN_MAX,
            [(name, cut.last) for name, cut in database.cuts.items()],
        )


def _clipped(text: str) -> str:
    """Clip a text and replace what JSON can't carry, such as half a surrogate pair."""
    shown = text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"
    return shown.encode("utf-8", "replace").decode()


def main(what: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # users' classes may print

    def send_answer(answer: dict[str, Any]) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    order = sys.stdin.buffer.read()
    if what == "sql":
        _answer_query(decoding.decode_json(order, type=SqlOrder), send_answer)
    else:
        _answer_what_if(decoding.decode_json(order, type=Order), send_answer)


def _answer_what_if(order: Order, send_answer: SendAnswer) -> None:
    sent_s = 0.0

    def progress(done: int, total: int | None) -> None:
        nonlocal sent_s
        if time.monotonic() - sent_s >= PROGRESS_S:
            sent_s = time.monotonic()
            send_answer({"progress": [done, total]})

    try:
        if order.fleet is not None:
            send_answer({"report": run_fleet_order(order.home, order.fleet, progress)})
        else:
            send_answer({"report": run_what_if_order(order, progress)})
    except OutputDivergenceError as error:
        text = f"{error}\nThe old code does not repeat what the log has. So there is nothing to compare with: give the"
        send_answer({"error": f"{text} code that made this log, or see 'immortal verify {order.name}'"})
    except (ImmortalError, OSError) as error:
        send_answer({"error": str(error)})


def _answer_query(order: SqlOrder, send_answer: SendAnswer) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        send_answer({"found": run_query(order)})
    except MemoryError:
        send_answer({"error": f"the query needs more than {MEMORY_MB} MiB of memory"})
    except (ImmortalError, OSError) as error:
        send_answer({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
