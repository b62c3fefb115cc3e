"""Commands for a running instance: checkpoint, upgrade, pause, resume, clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from immortal.cli.options import app_name, ask_coordinator, name_argument, pass_registry, timeout_option
from immortal.cli.project import project_with
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.instances.upgrade_mark import UpgradeMark
from immortal.coordinator.operator import control
from immortal.presenters.status import clock_problem, format_paused, format_resumed, format_unsaved, operator_name
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option

if TYPE_CHECKING:
    from immortal.coordinator.project.project import Project

POLL_S = 0.05
CHECKPOINT_TIMEOUT_S = 60.0


@click.command()
@name_argument
@timeout_option(CHECKPOINT_TIMEOUT_S)
@json_option
@pass_registry
def checkpoint(registry: Registry, name: str, timeout_s: float, as_json: bool) -> None:
    """Take a checkpoint of a running instance, and wait until it is durable."""
    taken = take_checkpoint(registry.load(name), timeout_s)
    if as_json:
        echo_json(taken)
    else:
        echo(
            f"{name}: checkpoint {taken['id']} taken, after record {taken['sequence_id']}: {taken['size_bytes']} bytes"
        )


def take_checkpoint(settings: InstanceSettings, timeout_s: float) -> dict[str, Any]:
    """Let a running instance take a checkpoint; return its description once it is durable. Raises FailedError."""
    name, folder = settings.name, settings.folder
    status = control.query(folder, "status")
    before, failures = _checkpoint_id(status), _failures(status)
    control.query(folder, "checkpoint")
    deadline_s = time.monotonic() + timeout_s
    while True:
        status = control.query(folder, "status")
        if _checkpoint_id(status) > before:
            taken: dict[str, Any] = status["checkpoint"]
            return taken
        if _failures(status) > failures:
            raise FailedError(f"{name} has {format_unsaved(status)}")
        if time.monotonic() > deadline_s:
            raise FailedError(
                f"no checkpoint of {name!r} within {timeout_s:g} s: it is in the phase {status['phase']!r}, "
                f"and takes one once its app answers ('immortal status {name}')"
            )
        time.sleep(POLL_S)


def _checkpoint_id(status: dict[str, Any]) -> int:
    taken = status.get("checkpoint")
    return taken["id"] if taken else 0


def _failures(status: dict[str, Any]) -> int:
    """Return how many checkpoints in a row failed because the state could not be saved."""
    unsaved = status.get("unsaved")
    return unsaved["failures"] if unsaved else 0


@click.command()
@name_argument
@click.argument("app", metavar="[MODULE:CLASS]", required=False, callback=app_name)
@click.option("--to", type=click.IntRange(min=1), help="Version to upgrade or downgrade to.")
@click.option("--cancel", is_flag=True, help="Cancel a requested or failed upgrade.")
@pass_registry
def upgrade(registry: Registry, name: str, app: str | None, to: int | None, cancel: bool) -> None:
    """Upgrade an instance to another version at its next start.

    MODULE:CLASS is the class that has both versions, by default the registered one; in a project, it is written into
    immortal.toml. A lower version is a downgrade. Without --to, the command shows the requested upgrade and the result
    of the last attempt.
    """
    settings = registry.load(name)
    if cancel:
        if to is not None or app is not None:
            raise click.UsageError("--cancel can't be combined with --to or MODULE:CLASS")
        known = upgrade_mark.read(settings.folder)
        upgrade_mark.clear(settings.folder)
        project = project_with(registry, name)
        if known is not None and known.app_before is not None and project is not None:
            project.set_app(name, known.app_before)
        forgotten = f"the upgrade to version {known.to} is cancelled" if known else "no upgrade is requested"
        echo(f"{name}: {forgotten}")
    elif to is None and app is None:
        echo(_state(settings))
    else:
        _mark(settings, to, app, project_with(registry, name))


def _mark(settings: InstanceSettings, to: int | None, app: str | None, project: Project | None) -> None:
    name = settings.name
    if to is None and project is None:
        raise click.UsageError("--to VERSION is missing: the version of this app")
    current = own_logs.log_version(settings)
    if current is None:
        raise FailedError(f"{name!r} has not been started yet: its first start takes the version of its app")
    if project is not None:
        service = project.service(name, app)
        to = to or service.version
        if not {current, to} <= {*service.versions}:
            known = ", ".join(map(str, service.versions))
            raise FailedError(f"{service.app} has the versions {known}, expected {current} (the log's) and {to}")
    assert to is not None
    if current == to:
        raise FailedError(f"{name!r} has version {to} already")
    before = project.set_app(name, app) if project is not None and app is not None else None
    upgrade_mark.write(settings.folder, UpgradeMark(to, app, app_before=before))
    holder = app or settings.app or "its app"
    echo(f"{name}: version {current} becomes version {to} at the next start, with {holder}")
    if before not in (None, app):
        echo(f"{name}: immortal.toml now names {app} instead of {before}")
    echo(_next_start(settings, "run" if project is None else "up"))


def _next_start(settings: InstanceSettings, command: str) -> str:
    """Return what an operator must do so that the next start upgrades. ``command``: starts a stopped instance."""
    name = settings.name
    if control.supervisor(settings.folder) is not None:
        return f"it is running; to upgrade it now: immortal restart {name}"
    running = control.running(settings.folder)
    if running is None:
        return f"start it with: immortal {command}{f' {name}' if command == 'run' else ''}"
    return f"it runs without 'immortal run': run 'immortal stop {name}', then start it and its app as before"


def _state(settings: InstanceSettings) -> str:
    mark = upgrade_mark.read(settings.folder)
    current = own_logs.log_version(settings)
    version = "not started yet" if current is None else f"version {current}"
    if mark is None:
        return f"{settings.name}: {version}; no upgrade is requested"
    if mark.pending:
        return f"{settings.name}: {version}; the next start upgrades it to version {mark.to}"
    return f"{settings.name}: {version}; the upgrade to version {mark.to} failed: {mark.problem}"


# pause, resume: an instance whose app gets no input for some time.


Values = dict[str, Any]


@click.command()
@name_argument
@json_option
@pass_registry
def pause(registry: Registry, name: str, as_json: bool) -> None:
    """Pause a running instance: new input is logged and waits.

    The app finishes the input that it has already. A restart ends the pause.
    """
    answer = _request(registry, name, "pause")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "paused": answer["paused"]})
    else:
        echo(f"{name}: {format_paused(answer)}")


@click.command()
@name_argument
@json_option
@pass_registry
def resume(registry: Registry, name: str, as_json: bool) -> None:
    """Resume a paused instance: it handles the input that has waited."""
    answer = _request(registry, name, "resume")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "was_paused": answer["paused"]})
    else:
        echo(f"{name}: {format_resumed(answer)}")


def _request(registry: Registry, name: str, verb: str) -> Values:
    not_running = f"{name!r} does not run, so there is nothing to {verb}: start it with 'immortal run {name}'"
    return ask_coordinator(registry.load(name), verb, {"who": operator_name()}, not_running=not_running)


# clock: the time of a running instance, and how it follows its machine's clock.


@click.command()
@name_argument
@click.option("--accept", is_flag=True, help="Trust the machine's clock: accept its jump now.")
@json_option
@pass_registry
def clock(registry: Registry, name: str, accept: bool, as_json: bool) -> None:
    """Show the clock of a running instance, and a jump that it holds back.

    If the machine's clock jumps, the instance accepts the new time only after a while (clock_hold_s in [tuning]).
    """
    folder = registry.load(name).folder
    answer = control.query(folder, "accept-clock" if accept else "clock")
    if as_json:
        echo_json(answer)
        return
    agrees = "the machine's clock agrees"
    echo(f"{name}: {time_text(answer['time_ns'])}; {clock_problem(answer) if answer['ahead_s'] else agrees}")
