"""registry: what many machines share of an instance, and how a folder's registry gets into a database."""

from __future__ import annotations

from typing import IO

import click

from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.protocol.command_line import Commands, FailedError, echo, echo_json, json_option
from immortal.protocol.shared_home import Copy, is_url


@click.group(cls=Commands)
def registry() -> None:
    """Change what many machines share of an instance; bring a folder's registry into a database."""


@registry.command()
@name_argument
@json_option
@pass_registry
def show(registry: Registry, name: str, as_json: bool) -> None:
    """Print the settings of an instance as all machines have them, and on which machines it has keys."""
    registry.load(name)
    text = registry.path(name).read_text("utf-8")
    machines = [] if registry.copy is None else _shared(registry).machines(name)
    if as_json:
        found = [dict(zip(("machine", "host", "peer"), one, strict=True)) for one in machines]
        echo_json({"name": name, "settings": text, "machines": found})
        return
    for line in text.splitlines():
        echo(line)
    for machine, host, endpoint in machines:
        echo(f"# keys of {machine} on {host}{f', reached at {endpoint}' if endpoint else ''}")


@registry.command("set")
@name_argument
@click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
@pass_registry
def set_settings(registry: Registry, name: str, file: IO[str]) -> None:
    """Give an instance other settings: all of FILE, or of stdin. Machines see it within a second or two."""
    before = registry.load(name).log
    settings = registry.replace(name, file.read())
    moved = "" if settings.log == before else f"; its log is {settings.log} from its next start on"
    echo(f"{name}: has its new settings{moved}")


@registry.command()
@name_argument
@click.argument("machine")
@pass_registry
def forget(registry: Registry, name: str, machine: str) -> None:
    """The keys that NAME has on MACHINE, as 'registry show' has it, let nobody in any more."""
    if not _shared(registry).forget(name, machine):
        raise FailedError(f"{name!r} has no keys of a machine {machine!r}: 'immortal registry show {name}' lists them")
    echo(f"{name}: the keys of {machine} are forgotten")


@registry.command()
@click.option("--to", "url", required=True, metavar="URL", help="postgresql://USER@HOST/DATABASE")
@pass_registry
def copy(registry: Registry, url: str) -> None:
    """Bring the registry of this folder into a database; the folder is this machine's part of it from then on.

    Settings, public keys and upgrades that are asked for; logs stay where they are.
    """
    if registry.copy is not None:
        raise RegistryError(f"{registry.home} is part of a registry in a database already, {registry.copy.url}")
    if not is_url(url):
        raise click.UsageError(f"--to {url}: postgresql://USER@HOST/DATABASE was expected")
    names = registry.share(url)
    echo(f"{len(names)} instances and clients are in {url}: {', '.join(names) or 'none'}")
    echo(f"on this machine: IMMORTAL_HOME={url} IMMORTAL_LOCAL={registry.home}")


def _shared(registry: Registry) -> Copy:
    if registry.copy is None:
        raise RegistryError(
            f"{registry.home} is the registry of this machine alone: what machines share is in a database"
            " (IMMORTAL_HOME=postgresql://...)"
        )
    return registry.copy
