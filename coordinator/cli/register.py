"""register, unregister."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.cli.setting_options import register_options, said
from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log_url import is_in_folder
from immortal.protocol.command_line import echo


@click.command()
@name_argument
@register_options
@pass_registry
def register(registry: Registry, /, name: str, **options: Any) -> None:
    """Write the settings of a new instance, and make its keys."""
    from immortal.coordinator.instances import own_logs
    from immortal.coordinator.operator import unregister as without  # needs ZeroMQ, whose loading takes long
    from immortal.coordinator.peers import keys

    given = said(options)
    if "app_send_mode" in given and "app_send_port" not in given:
        raise click.UsageError("--app-send-mode needs --app-send-port, the port that it is about")
    settings = registry.register(name, **given)
    keys.make(settings.folder)
    own_logs.OwnLogs(settings.folder).begin()
    made = ""
    if not is_in_folder(settings.log):
        try:
            made = _make_log(settings)
        except BaseException:
            without.unregister(registry, name)
            raise
    app = " and ".join(settings.app_addresses)
    start = f"immortal run {name} MODULE:CLASS"
    if settings.app_send_port is not None:
        does = "listens" if settings.app_send_mode is AppSendMode.LISTEN else "connects, too,"
        app += f" ({does} at {settings.app_send_address})"
        start = f"immortal coordinator {name}"
    if made:
        echo(made)
    echo(f"registered {name}: peers at {settings.peer}, app at {app}")
    place = _relative(registry.path(name)) if registry.copy is None else registry.copy.url
    echo(f"settings in {place}; start it with: {start}")


@click.command()
@name_argument
@click.option("--delete-log", is_flag=True, help="Delete its log as well: its whole state, for good.")
@pass_registry
def unregister(registry: Registry, name: str, delete_log: bool) -> None:
    """Remove an instance's settings; its log stays unless --delete-log is given."""
    from immortal.coordinator.operator import unregister as without  # needs ZeroMQ, whose loading takes long

    log = without.unregister(registry, name, delete_log=delete_log)
    kept = ""
    if not is_in_folder(log):
        kept = "" if delete_log else f"; its log stays in {log}"
    elif Path(log).exists():
        kept = f"; its log stays in {_relative(Path(log))}"
    echo(f"unregistered {name}{kept}")


def _make_log(settings: InstanceSettings) -> str:
    """The log of an instance that is new, where other machines reach it; what was done. Raises LogError."""
    from immortal.coordinator.instances import own_logs
    from immortal.coordinator.log.open import place_of

    place = place_of(settings.log)
    if not place.is_shared:
        return ""
    if place.exists():
        return f"takes the log that is there, {place.where}: 'immortal log diff' says whose it is"
    own_logs.open_log(settings).close()
    return f"made the log {place.where}"


def _relative(path: Path) -> str:
    """As a person would write it, where that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
