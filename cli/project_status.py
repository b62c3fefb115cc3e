"""ps: the page of all that runs."""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import complete_instance, instance_name
from immortal.cli.project import project_of, project_option
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances.registry import Registry
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option, print_table

_COLUMNS = {"service": "name", "state": "state", "up": "up", "pid": "pid", "record": "record", "backlog": "backlog"}
_COLUMNS |= {"app": "app", "version": "version", "peers at": "peer"}


@click.command()
@project_option
@json_option
@click.pass_context
def ps(ctx: click.Context, path: Path | None, as_json: bool) -> None:
    """Show all services of a project: what runs, since when, and what does not."""
    from immortal.coordinator.project.run_lock import holder

    project, registry = project_of(ctx, path)
    found = holder(project.home)
    names = [*dict.fromkeys([*project.names(), *registry.names()])]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda name: _row(registry, name), names))
    if as_json:
        keeper_row = None if found is None else {"command": found.what, "pid": found.pid}
        echo_json({"project": project.name(), "keeper": keeper_row, "services": rows})
        return
    _print(rows)
    if found is not None:
        echo(f"by '{found.what}', process {found.pid}")


def _row(registry: Registry, name: str) -> dict[str, Any]:
    from immortal.coordinator.instances.registry import UnknownInstanceError
    from immortal.coordinator.operator import control
    from immortal.presenters.status import instance_status, problems

    try:
        settings = registry.load(name)
    except UnknownInstanceError:
        return {"name": name, "state": "not registered yet"}
    status = instance_status(registry, name)
    running = control.running(settings.folder)
    row = {
        "name": name,
        "state": status["state"],
        "up_s": None if running is None else round(max(0.0, time.time() - running.started_ns / 1e9), 3),
        "pid": status.get("supervisor_pid") or status.get("pid"),
        "record": status.get("sequence_id"),
        "backlog": status.get("backlog_records"),
        "app": settings.app,
        "version": status.get("version"),
        "peer": settings.peer,
        "problems": problems(status),
    }
    return row | ({"error": status["error"]} if "error" in status else {})


def _print(rows: list[dict[str, Any]]) -> None:
    shown = [row | {"up": _age(row.get("up_s"))} for row in rows]
    cells = [["-" if row.get(key) is None else str(row[key]) for key in _COLUMNS.values()] for row in shown]
    print_table([*_COLUMNS], cells, right=("up", "pid", "record", "backlog", "version"))
    for row in rows:
        for problem in row.get("problems", ()):
            echo(problem)


def _age(age_s: float | None) -> str | None:
    if age_s is None:
        return None
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"


# logs: what the services of a project that runs in the background have said.


_POLL_S = 0.2


def _names(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(instance_name(ctx, parameter, one) for one in value)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=_names, shell_complete=complete_instance)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--tail", "count", type=click.IntRange(min=0), help="The last lines of each only.")
@project_option
@click.pass_context
def logs(ctx: click.Context, names: tuple[str, ...], follow: bool, count: int | None, path: Path | None) -> None:
    """Show what the services have said under 'immortal up', all or those named, by time.

    Times are UTC. The last 40 MiB of each are kept, in HOME/NAME/output.log and the files before it.
    """
    from immortal.coordinator.project.output import Console, Tail, merge_by_time

    project, registry = project_of(ctx, path)
    known = [*dict.fromkeys([*project.names(), *registry.names()])]
    if unknown := [name for name in names if name not in known]:
        raise FailedError(f"there is no service {unknown[0]!r}; there are: {', '.join(known)}")
    tails = [Tail(project.home, name) for name in names or known]
    console = Console([tail.name for tail in tails], sys.stdout)

    def show(name: str, line: str) -> None:
        at, _, rest = line.partition(" ")
        level, _, text = rest.partition(" ")
        of_coordinator: Level | None = level if level in ("debug", "info", "warning", "error") else None  # type: ignore[assignment]
        console.line(name, text if of_coordinator else f"{at} {'':<7} {text}", of_coordinator, at)

    with contextlib.suppress(KeyboardInterrupt) if follow else contextlib.nullcontext():
        for name, line in merge_by_time(tails, count):
            show(name, line)
        while follow:
            time.sleep(_POLL_S)
            for tail in tails:
                for line in tail.new_lines():
                    show(tail.name, line)
