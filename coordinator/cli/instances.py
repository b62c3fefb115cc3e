"""register, unregister, run, coordinator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from coordinator import control
from coordinator.cli.common import app_name, log_options, name_argument, pass_registry
from coordinator.config import (
    KEEP_CHECKPOINTS_DEFAULT,
    KEEP_CHECKPOINTS_MAX,
    LOG_TRIGGER_MB_DEFAULT,
    LOG_TRIGGER_MB_MAX,
    InstanceSettings,
)
from coordinator.registry import Registry, RegistryError


class _OrWord(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A whole number in a range, or one word, which stands for None."""

    def __init__(self, word: str, least: int, most: int) -> None:
        self.name = f"integer or {word}"
        self._word = word
        self._range = click.IntRange(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == self._word:
            return None
        try:
            return int(self._range.convert(value, param, ctx))
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, and is not {self._word!r} either", param, ctx)


@click.command()
@name_argument
@click.option(
    "--peer", required=True, metavar="ENDPOINT", help="Where peers reach it: tcp://127.0.0.1:* takes a free port."
)
@click.option("--app-port", type=_OrWord("*", 1, 65535), default="*", show_default=True, help="Where its app connects.")
@click.option(
    "--log", type=click.Path(file_okay=False, path_type=Path), help="The log's folder.  [default: HOME/NAME/log]"
)
@click.option(
    "--keep-checkpoints",
    type=_OrWord("all", 1, KEEP_CHECKPOINTS_MAX),
    default=str(KEEP_CHECKPOINTS_DEFAULT),
    show_default=True,
    help="How many are kept, with the log after the oldest of them; all: for time travel.",
)
@click.option(
    "--log-trigger-mb",
    type=click.IntRange(1, LOG_TRIGGER_MB_MAX),
    default=LOG_TRIGGER_MB_DEFAULT,
    show_default=True,
    help="A checkpoint is taken after so much log.",
)
@pass_registry
def register(
    registry: Registry,
    name: str,
    peer: str,
    app_port: int | None,
    log: Path | None,
    keep_checkpoints: int | None,
    log_trigger_mb: int,
) -> None:
    """Write the settings of a new instance."""
    settings = registry.register(
        name, peer, app_port=app_port, log=log, keep_checkpoints=keep_checkpoints, log_trigger_mb=log_trigger_mb
    )
    click.echo(f"registered {name}: peers at {settings.peer}, app at {settings.app_host}:{settings.app_port}")
    click.echo(f"settings in {_relative(registry.path(name))}; start it with: immortal run {name} MODULE:CLASS")


@click.command()
@name_argument
@click.option("--delete-log", is_flag=True, help="Delete its log as well: its whole state, for good.")
@pass_registry
def unregister(registry: Registry, name: str, delete_log: bool) -> None:
    """Remove an instance's settings; its log stays unless --delete-log is given."""
    log = registry.unregister(name, delete_log=delete_log)
    kept = f"; its log stays in {_relative(log)}" if log.exists() else ""
    click.echo(f"unregistered {name}{kept}")


@click.command()
@name_argument
@click.argument("app", metavar="[MODULE:CLASS]", required=False, callback=app_name)
@click.option("--restart", is_flag=True, help="When one of the two dies, start both again; they recover.")
@log_options
@pass_registry
def run(registry: Registry, name: str, app: str | None, restart: bool, log_format: str, log_level: str) -> None:
    """Run an instance: its coordinator and its app, as two processes that live and die together.

    Without MODULE:CLASS it is the one of the last run. SIGTERM or Ctrl-C stops both cleanly, with a checkpoint.
    """
    from coordinator.logs import configure
    from coordinator.supervisor import Role, Supervisor, app_command, coordinator_command

    settings = registry.load(name)
    app = app or settings.app
    if app is None:
        raise RegistryError(f"{name!r} has not been run yet: say what its app is ('immortal run {name} MODULE:CLASS')")
    _refuse_running(settings)
    settings = registry.remember_app(name, app)
    commands = {
        Role.COORDINATOR: coordinator_command(settings, log_format=log_format, log_level=log_level),
        Role.APP: app_command(settings, app),
    }
    events = configure(name, level=log_level, log_format=log_format)
    sys.exit(Supervisor(commands, events, restart=restart).run())


@click.command()
@name_argument
@log_options
@pass_registry
def coordinator(registry: Registry, name: str, log_format: str, log_level: str) -> None:
    """Run a coordinator alone, for an app that is started by other means (see IMMORTAL_APP_ADDRESS)."""
    from coordinator.logs import configure
    from coordinator.runtime import run_coordinator

    settings = registry.load(name)
    configure(name, level=log_level, log_format=log_format)
    sys.exit(run_coordinator(settings, registry))


def _refuse_running(settings: InstanceSettings) -> None:
    found = control.running(settings.folder)
    if found is not None:
        raise RegistryError(f"the coordinator of {settings.name!r} runs already, as process {found.pid}: stop it first")


def _relative(path: Path) -> str:
    """As a person would write it, where that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
