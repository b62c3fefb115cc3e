"""keys: the CURVE keys of an instance, and whose keys let their owners call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coordinator import control
from coordinator import keys as key_files
from coordinator.cli.common import echo, echo_json, json_option, name_argument, pass_registry
from coordinator.config import InstanceSettings
from coordinator.keys import KeysError
from coordinator.messenger import KeyPair
from coordinator.peer_security import KeyBook
from coordinator.registry import Registry

_MADE = "made keys"
_ROTATED = "added a key: once all peers know it, 'immortal keys {name} --retire' puts it in the place of the first"
_RETIRED = "retired the first key, for good"


@click.command()
@name_argument
@click.option("--make", is_flag=True, help="Make keys where there are none, and write the public file anew.")
@click.option("--rotate", is_flag=True, help="Add a key. Peers accept both from then on; the first stays in use.")
@click.option("--retire", is_flag=True, help="Remove the first key, for good; the added one takes its place.")
@click.option("--client", is_flag=True, help="NAME is no instance: a client that calls some.")
@json_option
@pass_registry
def keys(registry: Registry, name: str, make: bool, rotate: bool, retire: bool, client: bool, as_json: bool) -> None:
    """Show the public keys of an instance and of those that may call it, and where they come from.

    Running coordinators see changes within a second or two; they go on meanwhile.
    """
    if make + rotate + retire > 1:
        raise click.UsageError("--make, --rotate and --retire go one at a time")
    if client and registry.path(name).exists():
        raise click.UsageError(f"{name!r} is an instance: leave --client out")
    folder = registry.home / name if client else registry.load(name).folder
    done = ""
    if make:
        key_files.make(folder)
        done = _MADE
    elif rotate:
        key_files.rotate(folder)
        done = _ROTATED.format(name=name)
    elif retire:
        key_files.retire(folder)
        done = _RETIRED
    if client:
        _show_client(name, folder, done, as_json=as_json)
        return
    settings = registry.load(name)
    pairs = key_files.read_pairs(settings.folder)
    callers = _callers(registry, settings)
    if as_json:
        echo_json(_json(settings, pairs, callers))
    else:
        if done:
            echo(f"{name}: {done}")
        _print(registry, settings, pairs, callers)


def _show_client(name: str, folder: Path, done: str, *, as_json: bool) -> None:
    pairs = key_files.read_pairs(folder)
    if as_json:
        echo_json({"name": name, "keys": [pair.public for pair in pairs]} | _files(folder))
        return
    if done:
        echo(f"{name}: {done}")
    if not pairs:
        echo(f"{name} has no keys ('immortal keys {name} --make --client')")
    _print_pairs(name, folder, pairs)


def _files(folder: Path) -> dict[str, str]:
    return {
        "public_file": str(key_files.public_path(folder)),
        "secret_file": str(key_files.secret_path(folder)),
    }


def _callers(registry: Registry, settings: InstanceSettings) -> list[dict[str, Any]]:
    book = KeyBook(registry)
    rows: list[dict[str, Any]] = []
    for name in book.callers(settings, registry.names()):
        if name in settings.peer_keys:
            origin = f"[peer_keys] in {registry.path(settings.name)}"
        else:
            origin = str(key_files.public_path(registry.home / name))
        row: dict[str, Any] = {"name": name, "keys": [], "from": origin}
        try:
            row["keys"] = list(book.keys_of(settings, name))
        except KeysError as error:
            row["error"] = str(error)
        rows.append(row)
    return rows


def _json(settings: InstanceSettings, pairs: tuple[KeyPair, ...], callers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": settings.name,
        "keys": [pair.public for pair in pairs],
        **_files(settings.folder),
        "allow": None if settings.allow is None else list(settings.allow),
        "callers": callers,
    }


def _print_pairs(name: str, folder: Path, pairs: tuple[KeyPair, ...]) -> None:
    for pair, state in zip(pairs, ("in use", "to be used next"), strict=False):
        echo(f"{name}: {pair.public}  {state}")
    if pairs:
        echo(f"  public in {key_files.public_path(folder)}")
        echo(f"  secret in {key_files.secret_path(folder)}")


def _print(
    registry: Registry, settings: InstanceSettings, pairs: tuple[KeyPair, ...], callers: list[dict[str, Any]]
) -> None:
    name = settings.name
    if not pairs:
        echo(f"{name} has no keys: its peers reach it in plain ('immortal keys {name} --make')")
    _print_pairs(name, settings.folder, pairs)
    if pairs and key_files.read_public_keys(settings.folder) != tuple(pair.public for pair in pairs):
        echo(f"  the public file differs: 'immortal keys {name} --make' writes it anew")
    who = "every instance of the registry" if settings.allow is None else f"allow in {registry.path(name)}"
    echo(f"callers: {who}")
    for row in callers:
        if "error" in row:
            echo(f"  {row['name']}: {row['error']}")
        elif row["keys"]:
            echo(f"  {row['name']}: {', '.join(row['keys'])}  from {row['from']}")
        else:
            refused = ", and so may not call" if pairs else ""
            echo(f"  {row['name']}: no key{refused}")
    running = control.running(settings.folder)
    if running is not None and pairs:
        echo(f"its coordinator runs, as process {running.pid}")
