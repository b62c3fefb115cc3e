"""status: live instances are asked, the logs of stopped ones are read."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from immortal.cli.options import complete_instance, instance_name, name_argument, pass_registry
from immortal.coordinator.core.life_cycle.session import WORKS, Phase
from immortal.coordinator.instances.follower_places import FOLDER_NAME
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.presenters.handlers import format_waits
from immortal.presenters.status import _keys, age_text, format_unsaved, instance_status, multicasts, problems
from immortal.protocol.command_line import (
    FailedError,
    echo,
    echo_json,
    json_option,
    number_text,
    print_table,
    size_text,
)
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    pass


ASKED_AT_ONCE_MAX = 8
SLOW_COMMIT_MS = 50  # a disk that syncs takes 0.1 to 10 ms


@click.command()
@click.argument("name", required=False, callback=instance_name, shell_complete=complete_instance)
@json_option
@pass_registry
def status(registry: Registry, name: str | None, as_json: bool) -> None:
    """Show all instances, or one: phase, sequence ID, checkpoint, the positions of each stream, backlog."""
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
            for problem in problems(row):
                echo(problem)
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
    """The coordinator's, and that of the `immortal run` that would start it again."""
    supervisor = f" under {row['supervisor_pid']}" if "supervisor_pid" in row else ""
    return f"{number_text(row.get('pid'))}{supervisor}"


def _clients(row: dict[str, Any]) -> str:
    """Format the clients of an instance that was called from outside."""
    clients = row.get("clients") or {}
    if not clients.get("known"):
        return ""
    text = str(clients["known"])
    if clients.get("open_requests"):
        text += f", {clients['open_requests']} requests open"
    return f"{text}\n{clients['replies']} replies, {size_text(clients['replies_bytes'])}"


def _phase(row: dict[str, Any]) -> str:
    silent_s = row.get("app_silent_s") or 0
    hint = f" (the app has taken nothing for {silent_s:.0f} s)" if silent_s >= 5 and row.get("backlog_records") else ""
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


def _output(one: dict[str, Any]) -> str:
    acknowledged = one.get("acknowledged", 0)
    position = one.get("position", one.get("position_at_checkpoint"))
    text = str(acknowledged) if position is None or position <= acknowledged else f"{acknowledged} of {position}"
    if one.get("waiting_bytes"):
        text += f", {size_text(one['waiting_bytes'])} waiting"
    if one.get("spilled_bytes"):
        text += f", {size_text(one['spilled_bytes'])} of it on disk"
    return text


# health: whether an instance lives, and whether it is ready, as an exit status for probes.


SILENT_NS = 1_000_000_000  # who is waited for longer than that is named
_READY = frozenset(phase.value for phase in WORKS | {Phase.FOLLOWING})


@click.command()
@name_argument
@click.option("--live", "only_live", is_flag=True, help="The coordinator answers, whatever its app does.")
@click.option("--ready", is_flag=True, help="As without an option: it also works, or follows and keeps up.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=control.QUERY_TIMEOUT_S,
    show_default=True,
    help="How long to wait for the answer.",
)
@pass_registry
def health(registry: Registry, name: str, only_live: bool, ready: bool, timeout_s: float) -> None:
    """Say whether NAME is well: status 0, or 1 with the reason, for probes.

    Ready is an instance whose app works, and one that follows another process and keeps up. The coordinator alone is
    looked at, in this home: its peers may be down. One whose state can't be saved is ready, and it is said. Without an
    option its app is asked too, whom it waits for with ordered multicasts; that does not change the status.
    """
    if only_live and ready:
        raise click.UsageError("--live or --ready, not both")
    settings = registry.load(name)
    folder = _answering(settings.folder)
    status = control.query(folder, "status", timeout_s)
    phase, unsaved = str(status["phase"]), format_unsaved(status)
    if not only_live and phase not in _READY:
        raise FailedError(f"{name} is not ready: {phase}")
    echo(f"{name} is {'live' if only_live else 'ready'}: {phase}{f', and has {unsaved}' if unsaved else ''}")
    if not only_live and not ready:
        for one in multicasts(settings).get("multicasts", ()):
            if time.time_ns() - one["since_ns"] > SILENT_NS:
                echo(f"{name}: {format_waits(one)}")


def _answering(folder: Path) -> Path:
    """Return the folder that answers for the instance: its own, or its first follower's here if it does not run."""
    followers = sorted(folder.glob(f"{FOLDER_NAME}/*")) if control.running(folder) is None else ()
    return next((one for one in followers if control.running(one) is not None), folder)
