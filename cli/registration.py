"""Commands register, unregister, registry and settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click
from msgspec import Struct

from immortal.cli.options import given_options, name_argument, pass_registry, register_options
from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.config.schema import Setting, settings_of
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import is_in_folder, log_of_instance
from immortal.protocol.command_line import Commands, FailedError, echo, echo_json, echo_lines, json_option
from immortal.protocol.shared_registry import Copy, as_role, database_of, is_url


@click.command()
@name_argument
@register_options
@pass_registry
def register(registry: Registry, /, name: str, **options: Any) -> None:
    """Create an instance: write its settings and make its keys."""
    from immortal.coordinator.operator import unregister as without  # needs ZeroMQ, whose loading takes long
    from immortal.coordinator.peers import keys

    given = given_options(options)
    if "app_send_mode" in given and "app_send_port" not in given:
        raise click.UsageError("--app-send-mode needs --app-send-port")
    settings = registry.register(name, with_log_key=True, **given)
    keys.create(settings.folder)
    own_logs.OwnLogs(settings.folder).create()
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
        does = "listens" if settings.app_send_mode is AppSendMode.LISTEN else "also connects"
        app += f" ({does} at {settings.app_send_address})"
        start = f"immortal coordinator {name}"
    if made:
        echo(made)
    echo(f"registered {name}: peers at {settings.peer}, app at {app}")
    place = _relative(registry.path(name)) if registry.copy is None else registry.copy.url
    echo(f"settings in {place}; start it with: {start}")


@click.command()
@name_argument
@click.option("--delete-log", is_flag=True, help="Also delete its log, and so its whole state, permanently.")
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
    """Create a new instance's log if other machines reach it; return what was done. Raises LogError."""
    place = place_of(settings.log)
    if not place.is_shared:
        return ""
    if place.exists():
        return f"uses the existing log {place.label}: 'immortal log diff' shows its instance"
    own_logs.open_log(settings).close()
    return f"made the log {place.label}"


def _relative(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


# registry: the shared parts of an instance on many machines, and a folder's registry as a database.


@click.group(cls=Commands)
def registry() -> None:
    """Manage a registry that many machines share."""


@registry.command()
@name_argument
@json_option
@pass_registry
def show(registry: Registry, name: str, as_json: bool) -> None:
    """Print an instance's shared settings, and the machines that have its keys."""
    registry.load(name)
    text = registry.path(name).read_text("utf-8")
    machines = [] if registry.copy is None else _shared(registry).machines(name)
    if as_json:
        found = [dict(zip(("machine", "host", "peer"), one, strict=True)) for one in machines]
        echo_json({"name": name, "settings": text, "machines": found})
        return
    echo_lines(text.splitlines())
    for machine, host, endpoint in machines:
        echo(f"# keys of {machine} on {host}{f', reached at {endpoint}' if endpoint else ''}")


@registry.command("set")
@name_argument
@click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
@pass_registry
def set_settings(registry: Registry, name: str, file: IO[str]) -> None:
    """Replace all settings of an instance with FILE or stdin. Other machines see them within two seconds."""
    before = registry.load(name).log
    settings = registry.replace(name, file.read())
    moved = "" if settings.log == before else f"; its log is {settings.log} from its next start on"
    echo(f"{name}: settings replaced{moved}")


@registry.command()
@name_argument
@click.argument("machine")
@pass_registry
def forget(registry: Registry, name: str, machine: str) -> None:
    """Revoke the keys that NAME has on MACHINE, as listed by 'immortal registry show NAME'."""
    if not _shared(registry).revoke_keys(name, machine):
        raise FailedError(f"{name!r} has no keys on machine {machine!r}: 'immortal registry show {name}' lists them")
    echo(f"{name}: the keys of {machine} are revoked")


@registry.command()
@click.option("--to", "url", required=True, metavar="URL", help="postgresql://USER@HOST/DATABASE")
@pass_registry
def copy(registry: Registry, url: str) -> None:
    """Copy the registry of this folder into a database.

    This copies settings, public keys and requested upgrades; logs stay in place. From then on, the folder is this
    machine's part of the shared registry.
    """
    if registry.copy is not None:
        raise RegistryError(f"{registry.home} is part of a registry in a database already, {registry.copy.url}")
    if not is_url(url):
        raise click.UsageError(f"--to {url}: expected postgresql://USER@HOST/DATABASE")
    names = registry.share(url)
    echo(f"{len(names)} instances and clients are in {url}: {', '.join(names) or 'none'}")
    echo(f"on this machine: IMMORTAL_HOME={url} IMMORTAL_LOCAL={registry.home}")


@registry.command()
@click.argument("role")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--at", "url", metavar="URL", help="Database, as its owner.  [default: the registry's or log's]")
@click.option("--remove", is_flag=True, help="Revoke the role's access to NAME.")
@pass_registry
def role(registry: Registry, role: str, names: Sequence[str], url: str | None, remove: bool) -> None:
    """Create a database role for the logs and settings of NAME only.

    Run this as the owner of the schema 'immortal', with the right to create roles. NAME uses ROLE after a restart.
    """
    for name in names:
        log = registry.load(name).log
        at = url or (log if registry.copy is None else registry.copy.url)
        place_of(log_of_instance(at.partition("#")[0], name)).restrict(role, [name], allowed=not remove)
        echo(f"the role {role} {'may no longer' if remove else 'may'} read and write {name}")
        if not remove and database_of(log) == database_of(log_of_instance(at.partition("#")[0], name)):
            log = registry.remember_log(name, as_role(log, role)).log
            echo(f"{name} uses its log as {log} from its next start on")
    if not remove:
        echo(f"give the role a password: psql -c '\\password {role}', as the owner; on its machine, use ~/.pgpass")


def _shared(registry: Registry) -> Copy:
    if registry.copy is None:
        raise RegistryError(
            f"{registry.home} is a registry of this machine only: this command needs one in a database"
            " (IMMORTAL_HOME=postgresql://...)"
        )
    return registry.copy


# settings: all settings of a file, from its schema.


_HEADINGS = ("setting", "value", "default", "meaning")


@click.command()
def settings() -> None:
    """Print what a settings file may contain, as a Markdown table."""
    for row in (_HEADINGS, ["---"] * len(_HEADINGS), *_rows(InstanceSettings)):
        echo(f"| {' | '.join(row)} |")


def _rows(schema: type[Struct], table: str = "") -> Iterator[tuple[str, str, str, str]]:
    for setting in settings_of(schema).values():
        name = f"{table}{setting.name}"
        if setting.schema is not None:
            yield from _rows(setting.schema, f"{name}.")
        else:
            yield f"`{name}`", _expected(setting), _without(setting), setting.text


def _expected(setting: Setting) -> str:
    if setting.is_table:
        return f"a table [{setting.name}], for each name {setting.each_value.expected}"
    unit = setting.about.get("unit")
    return f"{setting.expected} ({unit})" if unit else setting.expected


def _without(setting: Setting) -> str:
    return "required" if setting.is_required else "none" if setting.is_table else setting.default_text
