"""Command run: an instance's coordinator and app under one supervisor."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

import click
import msgspec

from immortal.cli.options import (
    app_name,
    follow_option,
    given_options,
    log_output_options,
    name_argument,
    pass_registry,
    promote_option,
    start_option,
    trust_pickle_option,
)
from immortal.coordinator.config import InstanceSettings, override
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances import upgrade_mark
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.operator import control
from immortal.protocol import personal_keys, redaction
from immortal.protocol.command_line import echo
from immortal.protocol.errors import ImmortalError


@click.command()
@name_argument
@click.argument("app", metavar="[MODULE:CLASS]", required=False, callback=app_name)
@click.option("--restart", is_flag=True, help="Restart both if the coordinator dies, and the app if it dies.")
@click.option(
    "-i/-I",
    "--interactive/--no-interactive",
    default=None,
    help="Connect the app to the terminal's input, as for a debugger.  [default: if this is a terminal]",
)
@click.option("--strict", is_flag=True, help="Refuse an app whose handlers do what a replay can't repeat.")
@start_option("peer")
@start_option("insecure")
@start_option("allow_data_loss")
@promote_option
@follow_option
@start_option("replay_check")
@start_option("metrics")
@trust_pickle_option
@click.option(
    "--embedded", is_flag=True, help="Run coordinator and app in this one process, for debuggers and development."
)
@log_output_options
@pass_registry
def run(
    registry: Registry,
    /,
    name: str,
    app: str | None,
    restart: bool,
    interactive: bool | None,
    strict: bool,
    promote: bool,
    follow: bool,
    trust_pickle: bool,
    embedded: bool,
    log_format: str,
    log_level: Level,
    **options: Any,
) -> None:
    """Run an instance: its coordinator and its app, in two processes.

    The default for MODULE:CLASS is the app of the last run. 'immortal stop NAME', SIGTERM or Ctrl-C stop both processes
    cleanly, with a checkpoint; 'immortal restart NAME' restarts them. A second Ctrl-C ends them at once, even if the
    app is in a debugger.

    If another process runs the instance, --follow makes these two keep up with its log and take over when its
    coordinator is gone. If none does, they run the instance at once. With a log in PostgreSQL, --follow is the default
    while another process has the log.

    Exit status: 0 after a clean stop, 1 after an error, 4 if another process now writes the log, 70 if a handler
    stopped the app.
    """
    from immortal.coordinator.instances.registry import claim_place, follower_settings
    from immortal.coordinator.log.open import place_of
    from immortal.coordinator.notices import configure
    from immortal.coordinator.peers.keys import ensure_machine_keys
    from immortal.coordinator.peers.security import check_start
    from immortal.coordinator.service.children import (
        PYTHON,
        Command,
        Role,
        app_command,
        app_stdin,
        coordinator_command,
        supervised_settings,
    )
    from immortal.coordinator.service.process import STATUS_FENCED, acquire_start_slot
    from immortal.coordinator.service.supervisor import Supervisor

    settings = registry.load(name)
    _refuse_two_ports(settings)
    is_shared = not is_in_folder(settings.log) and not embedded and place_of(settings.log).is_shared
    follow = follow or (is_shared and place_of(settings.log).is_live())
    if not follow:
        control.refuse_running(settings.folder)
    mark = upgrade_mark.read(settings.folder)
    upgrading = mark is not None and mark.pending
    app = app or (mark.app if mark is not None and upgrading else None) or settings.app
    if app is None:
        raise RegistryError(f"{name!r} has not been run yet: give its app ('immortal run {name} MODULE:CLASS')")
    if embedded:
        if restart or follow or promote or trust_pickle or log_format != "human" or given_options(options):
            raise click.UsageError("--embedded can be combined with --strict and --log-level only")
        _become_embedded(settings, app, strict=strict, log_level=log_level)
    on_started = (lambda: None) if follow else acquire_start_slot(registry.home)
    if mark is not None and upgrading:
        upgrade_mark.write(settings.folder, msgspec.structs.replace(mark, app=app))  # registered once it is durable
    elif not follow:
        settings = registry.remember_app(name, app)
    own = supervised_settings(override(settings, **given_options(options)))
    if ensure_machine_keys(own, registry):
        echo(f"{name}: made keys for this machine")
    registry.refuse_open_folder(name)
    check_start(own)  # fail now, as the coordinator would fail at each restart
    place = claim_place(own) if follow else None
    at = own if place is None else follower_settings(own, place.folder)
    now = app

    def commands() -> dict[Role, Command]:
        """Return the commands, with the app of a requested upgrade, otherwise with the registered app."""
        nonlocal now, upgrading
        with contextlib.suppress(ImmortalError):  # unchanged: the coordinator reads the same file and reports it
            mark = upgrade_mark.read(settings.folder)
            upgrading = mark is not None and mark.pending
            now = (mark.app if mark is not None and upgrading else None) or registry.load(name).app or now
        return {
            Role.COORDINATOR: coordinator_command(
                own,
                log_format=log_format,
                log_level=log_level,
                promote=promote,
                trust_pickle=trust_pickle,
                place=None if place is None else place.folder,
            ),
            Role.APP: app_command(
                at, now, strict=strict, log_format=log_format, log_level=log_level, folder=own.folder
            ),
        }

    def on_upgrade_failed() -> bool:
        upgrade_mark.mark_failed(settings.folder, "the app gave it up: see its output")
        return upgrading

    log = configure(name, level=log_level, log_format=log_format)
    announced = control.supervised(settings.folder)
    supervisor = Supervisor(
        commands,
        log,
        restart=restart,
        on_upgrade_failed=on_upgrade_failed,
        announced=announced,
        on_started=on_started,
        follows=follow,
        follows_next=is_shared,
        app_stdin=app_stdin(interactive),
    )
    status = supervisor.run()
    if status == STATUS_FENCED and restart and is_shared and not follow:
        os.execv(PYTHON[0], [*PYTHON, "-m", "immortal", *sys.argv[1:], "--follow"])
    sys.exit(status)


def _become_embedded(settings: InstanceSettings, app: str, *, strict: bool, log_level: str) -> NoReturn:
    """Replace this process by one that runs coordinator and app, at the same terminal."""
    from immortal.coordinator.service.children import PYTHON

    home = str(settings.folder.parent)
    arguments = [settings.name, app, "--home", home, "--log-level", log_level]
    environment = {
        **os.environ,
        **personal_keys.environment(),
        **redaction.environment(),
        **({"IMMORTAL_STRICT": "1"} if strict else {}),
    }
    environment.setdefault("PYTHONHASHSEED", "0")
    environment["IMMORTAL_LOG_LEVEL"] = log_level  # of immortal.logger
    os.execve(sys.executable, [*PYTHON, "-m", "immortal.appsdk.embedded", *arguments], environment)


def _refuse_two_ports(settings: InstanceSettings) -> None:
    if settings.app_send_port is not None:
        raise RegistryError(
            f"{settings.name!r} is for an app with two ports (app_send_port), and 'immortal run' starts apps with one:"
            f" run 'immortal coordinator {settings.name}' and start the app yourself, or remove app_send_port"
        )
