"""Commands that show what runs: status, health; ps and logs of a project.

Live instances answer themselves; the logs of stopped ones are read.
"""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import (
    complete_instance,
    instance_name,
    instance_names,
    name_argument,
    pass_registry,
    timeout_option,
)
from immortal.cli.project import project_of, project_option
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances.registry import FOLDER_NAME, Registry, UnknownInstanceError
from immortal.coordinator.operator import control
from immortal.coordinator.project.run_lock import holder
from immortal.presenters.operations import format_waits
from immortal.presenters.status import READY, _keys, age_text, format_unsaved, instance_status, problems, waits
from immortal.protocol.command_line import (
    FailedError,
    echo,
    echo_json,
    echo_lines,
    json_option,
    number_text,
    print_table,
    size_text,
)
from immortal.protocol.safe_output import printable

ASKED_AT_ONCE_MAX = 8
SLOW_COMMIT_MS = 50  # a disk that syncs takes 0.1 to 10 ms


@click.command()
@click.argument("name", required=False, callback=instance_name, shell_complete=complete_instance)
@json_option
@pass_registry
def status(registry: Registry, name: str | None, as_json: bool) -> None:
    """Show all instances, or NAME: phase, record, checkpoint, streams.

    Exit status: 0, or 1 if an instance has an error.
    """
    names = [registry.load(name).name] if name is not None else registry.names()
    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as pool:
        rows = list(pool.map(lambda one: instance_status(registry, one), names))
    if as_json:
        echo_json(rows if name is None else rows[0])
    elif not rows:
        echo(f"nothing is registered in {registry.home}")
    else:
        _print_table(rows)
        for row in rows:
            echo_lines(problems(row))
        for client in registry.client_names(registry.names()) if name is None else ():
            for reminder in _keys(registry.home / client).get("key_reminders", ()):
                echo(f"{client}: {reminder}")
    sys.exit(1 if any("error" in row for row in rows) else 0)


def _print_table(rows: list[dict[str, Any]]) -> None:
    heads = ["instance", "state", "pid", "record", "backlog", "checkpoint", "inputs", "outputs"]
    if any(_clients(row) for row in rows):
        heads.append("clients")
    cells = (
        (
            str(row["name"]),
            _phase(row),
            _pids(row),
            number_text(row.get("sequence_id")),
            number_text(row.get("backlog_records")),
            _checkpoint(row.get("checkpoint")),
            "\n".join(
                f"{printable(peer)} {number_text(one.get('position'))}" for peer, one in row.get("inputs", {}).items()
            ),
            "\n".join(f"{printable(to)} {_output(one)}" for to, one in row.get("outputs", {}).items()),
            _clients(row),
        )[: len(heads)]
        for row in rows
    )
    print_table(heads, cells, right=("pid", "record", "backlog"))


def _pids(row: dict[str, Any]) -> str:
    """Format the coordinator's process ID, and that of the `immortal run` that would restart it."""
    supervisor = f" under {row['supervisor_pid']}" if "supervisor_pid" in row else ""
    return f"{number_text(row.get('pid'))}{supervisor}"


def _clients(row: dict[str, Any]) -> str:
    clients = row.get("clients") or {}
    if not clients.get("known"):
        return ""
    text = str(clients["known"])
    if clients.get("open_requests"):
        text += f", {clients['open_requests']} requests open"
    return f"{text}\n{clients['replies']} replies, {size_text(clients['replies_bytes'])}"


def _phase(row: dict[str, Any]) -> str:
    silent_s = row.get("app_silent_s") or 0
    hint = f" (the app has read nothing for {silent_s:.0f} s)" if silent_s >= 5 and row.get("backlog_records") else ""
    commit_ms = row.get("commit_ms") or 0
    if commit_ms >= SLOW_COMMIT_MS:
        hint += f" (its disk is slow: a commit takes {commit_ms:.0f} ms)"
    version = f", version {row['version']}" if (row.get("version") or 1) != 1 else ""
    return f"{row['state']}{version}{hint}"


def _checkpoint(checkpoint: dict[str, Any] | None) -> str:
    if not checkpoint:
        return "-"
    size = size_text(checkpoint["size_bytes"])
    return f"{checkpoint['id']} after record {checkpoint['sequence_id']}, {size}, {age_text(checkpoint['age_s'])} ago"


def _output(output: dict[str, Any]) -> str:
    acknowledged = output.get("acknowledged", 0)
    position = output.get("position", output.get("position_at_checkpoint"))
    text = str(acknowledged) if position is None or position <= acknowledged else f"{acknowledged} of {position}"
    if output.get("waiting_bytes"):
        text += f", {size_text(output['waiting_bytes'])} waiting"
    if output.get("spilled_bytes"):
        text += f", {size_text(output['spilled_bytes'])} on disk"
    return text


# health: an exit status for probes: does an instance live, and is it ready?


SILENT_NS = 1_000_000_000  # a process that is waited for longer is named


@click.command()
@name_argument
@click.option("--live", "only_live", is_flag=True, help="Check only that the coordinator answers.")
@click.option("--ready", is_flag=True, help="Check that NAME is ready; do not ask its app.")
@timeout_option(control.QUERY_TIMEOUT_S, "Seconds to wait for the answer.")
@pass_registry
def health(registry: Registry, name: str, only_live: bool, ready: bool, timeout_s: float) -> None:
    """Check whether NAME is ready, for probes.

    An instance is ready if its app works, or if it follows another process and keeps up; also if its state can't be
    saved, which is printed. Only the coordinator in this home is checked: peers may be down. Without an option, the app
    is also asked which members its ordered multicasts wait for; this does not change the exit status.

    Exit status: 0 if ready, or live with --live; 1 if not, with the reason.
    """
    if only_live and ready:
        raise click.UsageError("--live or --ready, not both")
    settings = registry.load(name)
    folder = _answering(settings.folder)
    status = control.query(folder, "status", timeout_s)
    phase, unsaved = str(status["phase"]), format_unsaved(status)
    if not only_live and phase not in READY:
        raise FailedError(f"{name} is not ready: {phase}")
    echo(f"{name} is {'live' if only_live else 'ready'}: {phase}{f', and has {unsaved}' if unsaved else ''}")
    if not only_live and not ready:
        for one in waits(settings).get("multicasts", ()):
            if time.time_ns() - one["since_ns"] > SILENT_NS:
                echo(f"{name}: {format_waits(one)}")


def _answering(folder: Path) -> Path:
    """Return the folder that answers for the instance: its own, or its first follower's here if it does not run."""
    followers = sorted(folder.glob(f"{FOLDER_NAME}/*")) if control.running(folder) is None else ()
    return next((one for one in followers if control.running(one) is not None), folder)


# ps: the services of a project, running or not.


_COLUMNS = {
    "service": "name",
    "state": "state",
    "up": "up",
    "pid": "pid",
    "record": "record",
    "backlog": "backlog",
}
_COLUMNS |= {"app": "app", "version": "version", "peers at": "peer"}


@click.command()
@project_option
@json_option
@click.pass_context
def ps(ctx: click.Context, path: Path | None, as_json: bool) -> None:
    """List all services of a project and their state, running or not."""
    project, registry = project_of(ctx, path)
    found = holder(project.home)
    names = [*dict.fromkeys([*project.names(), *registry.names()])]
    with ThreadPoolExecutor(ASKED_AT_ONCE_MAX) as pool:
        rows = list(pool.map(lambda name: _service_row(registry, name), names))
    if as_json:
        keeper_row = None if found is None else {"command": found.what, "pid": found.pid}
        echo_json({"project": project.name(), "keeper": keeper_row, "services": rows})
        return
    _print_services(rows)
    if found is not None:
        echo(f"by '{found.what}', process {found.pid}")


def _service_row(registry: Registry, name: str) -> dict[str, Any]:
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


def _print_services(rows: list[dict[str, Any]]) -> None:
    shown = [row | {"up": None if row.get("up_s") is None else age_text(row["up_s"])} for row in rows]
    cells = [["-" if row.get(key) is None else str(row[key]) for key in _COLUMNS.values()] for row in shown]
    print_table([*_COLUMNS], cells, right=("up", "pid", "record", "backlog", "version"))
    for row in rows:
        echo_lines(row.get("problems", ()))


# logs: the output of a project's services in the background.


_POLL_S = 0.2


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=instance_names, shell_complete=complete_instance)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--tail", "count", type=click.IntRange(min=0), help="Number of last lines of each service.")
@project_option
@click.pass_context
def logs(ctx: click.Context, names: tuple[str, ...], follow: bool, count: int | None, path: Path | None) -> None:
    """Show the output of services under 'immortal up', by time.

    Without NAME, all services are shown. Times are UTC. The last 40 MiB of each service are kept, in
    HOME/NAME/output.log and older files beside it.
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
        console.write_line(name, text if of_coordinator else f"{at} {'':<7} {text}", of_coordinator, at)

    with contextlib.suppress(KeyboardInterrupt) if follow else contextlib.nullcontext():
        for name, line in merge_by_time(tails, count):
            show(name, line)
        while follow:
            time.sleep(_POLL_S)
            for tail in tails:
                for line in tail.new_lines():
                    show(tail.name, line)
