"""Commands keys and audit: an instance's CURVE keys and its callers' keys; the log of admissions and operators."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import instance_name, name_argument, pass_registry
from immortal.coordinator import audit as audit_log
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.permissions import ANYTHING
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.messenger import KeyPair, Role
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys as key_files
from immortal.coordinator.peers.keys import KeysError
from immortal.coordinator.peers.security import Keyring
from immortal.protocol.command_line import echo, echo_json, echo_lines, json_option

_MADE = "made keys"
_ROTATED = "added a key: once all peers know it, run 'immortal keys {name} --retire' to replace the first key"
_RETIRED = "removed the first key"


@click.command()
@click.argument("name", required=False, callback=instance_name)
@click.option("--make", is_flag=True, help="Create missing keys, and rewrite the public key file.")
@click.option("--rotate", is_flag=True, help="Add a key. Peers accept both; the first stays in use.")
@click.option("--retire", is_flag=True, help="Remove the first key; the added one replaces it.")
@click.option("--client", is_flag=True, help="NAME is a client, not an instance.")
@click.option("--operator", is_flag=True, help="NAME is an operator, not an instance.")
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="Last day on which the new key is valid.")
@click.option(
    "--fleet",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Apply to all members listed in this file, instead of NAME.",
)
@click.option("--check", is_flag=True, help="With --fleet: only report missing, foreign, shared or expired keys.")
@json_option
@pass_registry
def keys(
    registry: Registry,
    name: str | None,
    make: bool,
    rotate: bool,
    retire: bool,
    client: bool,
    operator: bool,
    expires: datetime | None,
    fleet: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Show the public keys of an instance and of its callers, and the file of each.

    Running coordinators pick up changes within two seconds, without a restart.
    """
    if make + rotate + retire > 1:
        raise click.UsageError("--make, --rotate and --retire can't be combined")
    if fleet is not None:
        if name is not None or rotate or retire or client or operator or expires or make == check:
            raise click.UsageError(
                "--fleet FILE needs --make or --check, and can't be combined with other options but --json"
            )
        _fleet(fleet, make=make, as_json=as_json)
        return
    if name is None or check:
        raise click.UsageError("--check needs --fleet" if check else "Missing argument 'NAME', or --fleet FILE.")
    if expires is not None and not (make or rotate):
        raise click.UsageError("--expires needs --make or --rotate")
    last_day = None if expires is None else expires.date()
    if client and operator:
        raise click.UsageError("--client and --operator can't be combined")
    role = Role.CLIENT if client else Role.OPERATOR if operator else Role.INSTANCE
    if role is not Role.INSTANCE and registry.path(name).exists():
        raise click.UsageError(f"{name!r} is an instance: omit --{role}")
    folder = registry.load(name).folder if role is Role.INSTANCE else registry.home / name
    done = ""
    if make:
        key_files.create(folder, role, last_day)
        done = _MADE
    elif rotate:
        key_files.rotate(folder, last_day)
        done = _ROTATED.format(name=name)
    elif retire:
        key_files.retire(folder)
        done = _RETIRED
    if role is not Role.INSTANCE:
        _show_other(name, role, folder, done, as_json=as_json)
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


def _fleet(file: Path, *, make: bool, as_json: bool) -> None:
    from immortal.coordinator.peers import fleet_keys

    fleet, today = fleet_keys.read(file), key_files.today()
    done = list(fleet_keys.create_missing(fleet, today)) if make else []
    problems = list(fleet_keys.problems(fleet, today))
    if as_json:
        echo_json({"done": done, "problems": problems})
    else:
        echo_lines((*done, *problems))
        if not problems:
            echo(f"{len(fleet.members)} members in {len(fleet.homes)} folders: all keys match")
    sys.exit(1 if problems else 0)


def _show_other(name: str, role: Role, folder: Path, done: str, *, as_json: bool) -> None:
    pairs = key_files.read_pairs(folder)
    if as_json:
        echo_json({"name": name, "role": role, "keys": [pair.public for pair in pairs]} | _files(folder))
        return
    if done:
        echo(f"{name}: {done}")
    if not pairs:
        echo(f"{name} has no keys ('immortal keys {name} --make --{role}')")
    _print_pairs(name, folder, pairs)


def _files(folder: Path) -> dict[str, str]:
    return {
        "public_file": str(key_files.public_path(folder)),
        "secret_file": str(key_files.secret_path(folder)),
    }


def _callers(registry: Registry, settings: InstanceSettings) -> list[dict[str, Any]]:
    book = Keyring(registry)
    rows: list[dict[str, Any]] = []
    registered = registry.names()
    for name in book.callers(settings, registered):
        if name in settings.peer_keys or name in settings.client_keys:
            table = "peer_keys" if name in settings.peer_keys else "client_keys"
            origin = f"[{table}] in {registry.path(settings.name)}"
        else:
            origin = str(key_files.public_path(registry.home / name))
        methods = settings.permissions.get(name, ANYTHING).methods
        row: dict[str, Any] = {"name": name, "role": None, "keys": [], "from": origin}
        row["methods"] = None if methods is None else sorted(methods)
        try:
            row["role"] = book.role_of(settings, registered, name)
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
    dates = {known.key: known for known in key_files.read_public_file(folder).keys}
    for pair, state in zip(pairs, ("in use", "used next"), strict=False):
        known = dates.get(pair.public) or key_files.PublicKey(pair.public)
        made = f", made {known.made}" if known.made else ""
        expires = f", expires {known.expires}" if known.expires else ""
        echo(f"{name}: {pair.public}  {state}{made}{expires}")
    if pairs:
        echo(f"  public in {key_files.public_path(folder)}")
        echo(f"  secret in {key_files.secret_path(folder)}")


def _print(
    registry: Registry, settings: InstanceSettings, pairs: tuple[KeyPair, ...], callers: list[dict[str, Any]]
) -> None:
    name = settings.name
    if not pairs:
        echo(f"{name} has no keys: its connections are not encrypted ('immortal keys {name} --make')")
    _print_pairs(name, settings.folder, pairs)
    announced, own = key_files.read_public_keys(settings.folder), tuple(pair.public for pair in pairs)
    if pairs and not (announced == own if registry.copy is None else set(own) <= set(announced)):
        echo(f"  the public file differs: run 'immortal keys {name} --make' to rewrite it")
    who = "every instance of the registry" if settings.allow is None else f"allow in {registry.path(name)}"
    echo(f"callers: {who}")
    for row in callers:
        if "error" in row:
            echo(f"  {row['name']}: {row['error']}")
        elif row["keys"]:
            role = "" if row["role"] == Role.INSTANCE else f" ({row['role']})"
            may = "" if row["methods"] is None else f"; may call {', '.join(row['methods']) or 'nothing'}"
            echo(f"  {row['name']}{role}: {', '.join(row['keys'])}  from {row['from']}{may}")
        else:
            refused = ", so its calls are refused" if pairs else ""
            echo(f"  {row['name']}: no key{refused}")
    running = control.running(settings.folder)
    if running is not None and pairs:
        echo(f"its coordinator is running as process {running.pid}")


# audit: admitted and refused callers, operators' actions, and whether a line was changed later.


_FRONT = ("time", "what", "previous")


@click.command()
@name_argument
@click.option("--verify", is_flag=True, help="Only check that no line was changed or removed.")
@click.option("--head", metavar="HASH", help="With --verify: also check that the line with this hash exists.")
@json_option
@pass_registry
def audit(registry: Registry, name: str, verify: bool, head: str | None, as_json: bool) -> None:
    """Show admitted and refused callers of NAME, and what its operators did.

    Each line contains the hash of the previous line. Exit status: 1 if a hash does not match.
    """
    if head is not None and not verify:
        raise click.UsageError("--head needs --verify")
    folder = registry.load(name).folder
    count, newest, first_problem, head_found = 0, "", "", head is None
    for line in audit_log.lines(folder):
        count, newest = count + 1, line.hash
        head_found = head_found or line.hash == head
        if line.problem and not first_problem:
            first_problem = f"{line.file}, line {line.number}: it {line.problem}"
        if verify:
            continue
        if as_json:
            echo_json({**line.entry, "hash": line.hash, **({"problem": line.problem} if line.problem else {})})
        else:
            echo(_in_words(line))
    if not first_problem and not head_found:
        first_problem = f"no line has the hash {head}: lines were removed, or the hash is of another instance"
    if verify and as_json:
        echo_json({"sound": not first_problem, "lines": count, "head": newest, "problem": first_problem or None})
    elif first_problem:
        echo(f"error: {first_problem}", err=True)
    elif verify:
        echo(f"sound: {count} lines; the newest has the hash {newest}" if count else "sound: no lines yet")
    elif not count:
        echo(f"nothing to show: {name} has no audit log yet", err=True)
    sys.exit(1 if first_problem else 0)


def _in_words(line: audit_log.Line) -> str:
    entry: dict[str, Any] = line.entry
    fields = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _FRONT)
    problem = f"  ({line.problem})" if line.problem else ""
    return f"{entry.get('time', '?')}  {entry.get('what', '?')}  {fields}{problem}"
