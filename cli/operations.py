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
    """Let a running instance take a checkpoint now, and wait until it is durable."""
    taken = take_checkpoint(registry.load(name), timeout_s)
    if as_json:
        echo_json(taken)
    else:
        echo(
            f"{name}: checkpoint {taken['id']} taken, behind record {taken['sequence_id']}: {taken['size_bytes']} bytes"
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
                f"and takes one as soon as its app answers ('immortal status {name}')"
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
@click.option("--to", type=click.IntRange(min=1), help="The version to reach.")
@click.option("--cancel", is_flag=True, help="Forget an upgrade that was asked for, or that failed.")
@pass_registry
def upgrade(registry: Registry, name: str, app: str | None, to: int | None, cancel: bool) -> None:
    """Mark an instance: at its next start the app's state and code become those of another version.

    MODULE:CLASS is the class that holds both versions, by default the one that is registered. A lower version is a
    downgrade. Without --to it says what is asked for, and how the last attempt ended. In a project, MODULE:CLASS is
    written into its immortal.toml, which says what runs.
    """
    settings = registry.load(name)
    if cancel:
        if to is not None or app is not None:
            raise click.UsageError("--cancel goes with no other option")
        known = upgrade_mark.read(settings.folder)
        upgrade_mark.clear(settings.folder)
        project = project_with(registry, name)
        if known is not None and known.app_before is not None and project is not None:
            project.set_app(name, known.app_before)
        forgotten = f"the upgrade to version {known.to} is forgotten" if known else "no upgrade is asked for"
        echo(f"{name}: {forgotten}")
    elif to is None and app is None:
        echo(_state(settings))
    else:
        _mark(settings, to, app, project_with(registry, name))


def _mark(settings: InstanceSettings, to: int | None, app: str | None, project: Project | None) -> None:
    name = settings.name
    if to is None and project is None:
        raise click.UsageError("--to VERSION is missing: the version that this app brings")
    current = own_logs.log_version(settings)
    if current is None:
        raise FailedError(f"{name!r} has not been started yet: it begins with whatever version it is run with")
    if project is not None:
        service = project.service(name, app)
        to = to or service.version
        if not {current, to} <= {*service.versions}:
            known = ", ".join(map(str, service.versions))
            raise FailedError(f"{service.app} has the versions {known}, expected {current}, as the log has, and {to}")
    assert to is not None
    if current == to:
        raise FailedError(f"{name!r} is of version {to} already")
    before = project.set_app(name, app) if project is not None and app is not None else None
    upgrade_mark.write(settings.folder, UpgradeMark(to, app, app_before=before))
    holder = app or settings.app or "its app"
    echo(f"{name}: version {current} becomes version {to} at the next start, with {holder}")
    if before not in (None, app):
        echo(f"{name}: immortal.toml names {app} now, and not {before}")
    echo(_next_start(settings, "run" if project is None else "up"))


def _next_start(settings: InstanceSettings, command: str) -> str:
    """Return what an operator must do so that the next start upgrades. ``command``: starts a stopped instance."""
    name = settings.name
    if control.supervisor(settings.folder) is not None:
        return f"it runs now; for that start: immortal restart {name}"
    running = control.running(settings.folder)
    if running is None:
        return f"start it with: immortal {command}{f' {name}' if command == 'run' else ''}"
    return f"it runs now, without 'immortal run': 'immortal stop {name}', then start it and its app as before"


def _state(settings: InstanceSettings) -> str:
    mark = upgrade_mark.read(settings.folder)
    current = own_logs.log_version(settings)
    version = "not started yet" if current is None else f"version {current}"
    if mark is None:
        return f"{settings.name}: {version}; no upgrade is asked for"
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
    """Let a running instance take no more input: it is logged, and waits until the instance is resumed.

    What the app was given before, it finishes. A restart ends the pause.
    """
    answer = _ask(registry, name, "pause")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "paused": answer["paused"]})
    else:
        echo(f"{name}: {format_paused(answer)}")


@click.command()
@name_argument
@json_option
@pass_registry
def resume(registry: Registry, name: str, as_json: bool) -> None:
    """Let an instance that is paused go on with what its log has for it."""
    answer = _ask(registry, name, "resume")
    if as_json:
        echo_json({"name": name, "changed": answer["changed"], "was_paused": answer["paused"]})
    else:
        echo(f"{name}: {format_resumed(answer)}")


def _ask(registry: Registry, name: str, verb: str) -> Values:
    not_running = f"{name!r} does not run, so there is nothing to {verb}: 'immortal run {name}'"
    return ask_coordinator(registry.load(name), verb, {"who": operator_name()}, not_running=not_running)


# clock: the time of a running instance, and how it follows its machine's clock.


@click.command()
@name_argument
@click.option("--accept", is_flag=True, help="The machine's clock is right: take its jump now.")
@json_option
@pass_registry
def clock(registry: Registry, name: str, accept: bool, as_json: bool) -> None:
    """Show the time of a running instance, and whether a jump of its machine's clock is held back.

    A jump is taken by itself once it has stood for a while (clock_hold_s in [tuning]).
    """
    folder = registry.load(name).folder
    answer = control.query(folder, "accept-clock" if accept else "clock")
    if as_json:
        echo_json(answer)
        return
    agrees = "the machine's clock agrees"
    echo(f"{name}: {time_text(answer['time_ns'])}; {clock_problem(answer) if answer['ahead_s'] else agrees}")
