"""`immortal log`: all but copy --switch, key, encryption and upgrade only read, also beside a running coordinator."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import click
from msgspec.structs import asdict

from immortal.cli.log_diff import LogDiff
from immortal.cli.options import app_name, name_argument, pass_registry, progress_bar, settings_with_log
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.backend import Place
from immortal.coordinator.log.format import AUTHENTICATED_VERSION, ENCRYPTED_VERSION, FORMAT_VERSION
from immortal.coordinator.log.open import log_exists, open_reader, place_of
from immortal.coordinator.log.verify import Backup, back_up
from immortal.coordinator.log_url import is_in_folder, log_of_instance, split_url
from immortal.coordinator.operator import control
from immortal.presenters.records import describe_record, grouped_lines, record_lines
from immortal.protocol.command_line import Commands, FailedError, counted, echo, echo_json, echo_lines, json_option
from immortal.protocol.executions import open_index
from immortal.replay.app_process import methods_of
from immortal.replay.plan import RecordedLog

FORMATS = {FORMAT_VERSION: "plain", AUTHENTICATED_VERSION: "authenticated", ENCRYPTED_VERSION: "encrypted"}
RENEWED_WITHIN_S = 20.0  # by a running coordinator, which may ask a command for the key


@click.group(cls=Commands)
def log() -> None:
    """Show, check, copy or compare logs, and change their keys."""


@log.command()
@name_argument
@click.option("--from", "first", type=click.IntRange(min=0), help="Sequence ID of the first record to print.")
@click.option("--to", "last", type=click.IntRange(min=0), help="Sequence ID of the last record to print.")
@click.option("--limit", type=click.IntRange(min=1), help="Number of records to print, at most.")
@click.option(
    "--app",
    metavar="MODULE:CLASS",
    callback=app_name,
    help="Class used to name methods and decode arguments.  [default: the instance's own]",
)
@click.option("--by-execution", "groups", is_flag=True, help="Group messages by execution.")
@click.option("--audit", is_flag=True, help="Print the operators' actions instead of records.")
@json_option
@pass_registry
def show(
    registry: Registry,
    name: str,
    first: int | None,
    last: int | None,
    limit: int | None,
    app: str | None,
    groups: bool,
    audit: bool,
    as_json: bool,
) -> None:
    """Print records and their messages; damaged records are marked.

    --json prints one object per line. In decoded arguments, bytes are {"$bytes": HEX}, and floats that JSON has no
    form for are {"$float": "nan"}; "arguments" holds the first bytes in Python's notation.
    """
    if audit and (first, last, limit, app, groups) != (None, None, None, None, False):
        raise click.UsageError("--audit can be combined with --json only")
    if groups and as_json:
        raise click.UsageError("--by-execution prints text: it can't be combined with --json")
    if first is not None and last is not None and first > last:
        raise click.UsageError(f"--from {first} is after --to {last}")
    settings = settings_with_log(registry, name)
    if audit:
        _show_audit(settings, as_json)
        return
    methods = methods_of(settings.app, app)
    shown = 0
    with own_logs.open_reader(settings, check=False) as reader:
        whose = reader.identity.committer_id
        if groups:
            with open_index(settings.folder, name) as index:
                found = [describe_record(one, whose, methods) for one in islice(reader.records(first, last), limit)]
                shown = len(found)
                echo_lines(grouped_lines(found, index))
        for logged in () if groups else islice(reader.records(first, last), limit):
            described = describe_record(logged, whose, methods)
            if as_json:
                echo_json(described)
            else:
                echo_lines(record_lines(described))
            shown += 1
        summary = reader.summary() if not shown else None
    if summary is not None:
        kept = f"records {summary.first_sequence_id} to {summary.last_sequence_id}"
        kept = "no record" if summary.first_sequence_id > summary.last_sequence_id else kept
        echo(f"nothing to show: the log of {name} holds {kept}", err=True)


def _show_audit(settings: InstanceSettings, as_json: bool) -> None:
    with own_logs.open_reader(settings) as reader:
        entries = reader.audit()
        for problem in reader.problems:
            echo(f"warning: {problem}", err=True)
    for entry in entries:
        if as_json:
            said = {"time": time_text(entry.time_ns), "time_ns": entry.time_ns, "who": entry.who, "what": entry.what}
            echo_json(said)
        else:
            echo(f"{time_text(entry.time_ns)}  {entry.who}  {entry.what}")
    if not entries:
        echo(f"nothing to show: no operator has changed anything in the log of {settings.name}", err=True)


@log.command()
@name_argument
@json_option
@pass_registry
def verify(registry: Registry, name: str, as_json: bool) -> None:
    """Recompute every checksum, and report damage and its effect on recovery.

    Exit status: 0 if the log is sound, 1 if it is damaged.
    """
    settings = settings_with_log(registry, name)
    verification = own_logs.verify(settings)
    findings = []
    for finding in verification.findings():
        findings.append({"severity": finding.severity.value, "place": finding.place, "message": finding.message})
        if not as_json:
            echo(f"{finding.severity.value}: {finding.message}")
    if as_json:
        echo_json(
            {
                "name": name,
                "sound": verification.is_sound,
                "records": verification.records_checked,
                "size_bytes": verification.size_bytes_checked,
                "checkpoints": verification.checkpoints_checked,
                "first_sequence_id": verification.first_sequence_id,
                "last_sequence_id": verification.last_sequence_id,
                "recovery_checkpoint_id": verification.recovery_checkpoint_id,
                "authenticity": verification.authenticity,
                "findings": findings,
            }
        )
    else:
        verdict = "sound" if verification.is_sound else "DAMAGED"
        echo(
            f"{name}: {verdict}: {verification.records_checked} records"
            f" ({verification.first_sequence_id} to {verification.last_sequence_id},"
            f" {verification.size_bytes_checked} bytes), {verification.checkpoints_checked} checkpoints;"
            f" {verification.authenticity or 'nothing to be authenticated'}"
        )
    sys.exit(0 if verification.is_sound else 1)


@log.command()
@name_argument
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@pass_registry
def export(registry: Registry, name: str, file: Path) -> None:
    """Write the log to one new FILE that tests can replay (assert_replays).

    The instance may run. Run 'immortal checkpoint NAME' first, so that the file ends with a state to compare.
    """
    settings = settings_with_log(registry, name)
    with own_logs.open_reader(settings) as reader:
        recorded = RecordedLog.of(reader)
    try:
        size_bytes = recorded.write(file)
    except FileExistsError:
        raise click.UsageError(f"{file} is there already: give another name, or remove it first") from None
    except OSError as error:
        raise RegistryError(f"{file} can't be written: {error.strerror}") from None
    summary = recorded.summary()
    echo(
        f"{name}: records {summary.first_sequence_id} to {summary.last_sequence_id}, "
        f"{len(summary.checkpoints)} checkpoints: {size_bytes:,} bytes in {file}"
    )
    last = summary.checkpoints[-1].sequence_id if summary.checkpoints else -1
    if last < summary.last_sequence_id:
        echo(f"after record {last} it has calls to compare, but no state: run 'immortal checkpoint {name}' first")


@log.command()
@name_argument
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False))
@json_option
@pass_registry
def backup(registry: Registry, name: str, folder: Path, as_json: bool) -> None:
    """Back up the log of NAME into FOLDER; the coordinator may run.

    FOLDER must be new or empty, or hold an earlier backup of the same log: then only newer records are copied. Both
    log and backup are verified. A backup is a log: other commands read it, and an instance can start from it.
    """
    settings = settings_with_log(registry, name)
    made = back_up(own_logs.place_of(settings), name, folder, own_logs.read_keys(settings))
    if as_json:
        echo_json({"name": name, "folder": str(folder), **asdict(made)})
        return
    echo(f"{name}: {_kept_text(made)} in {folder}: verified")


@log.command()
@name_argument
@click.option(
    "--to", "target", required=True, metavar="URL", help="Database (postgresql://USER@HOST/DATABASE) or folder."
)
@click.option("--switch", is_flag=True, help="Use the copy from the next start on; NAME must be stopped.")
@json_option
@pass_registry
def copy(registry: Registry, name: str, target: str, switch: bool, as_json: bool) -> None:
    """Copy the log of NAME between a folder and a database.

    Both log and copy are verified. The coordinator may run: then the copy has the records written up to now. With
    --switch, NAME must be stopped, and uses the copy from its next start on.
    """
    settings = settings_with_log(registry, name)
    log = log_of_instance(target, name) if not is_in_folder(target) else os.path.abspath(split_url(target)[1])
    source, place = own_logs.place_of(settings), place_of(log)
    place.encryption_key = source.encryption_key
    if source.key == place.key:
        raise click.UsageError(f"{target} is the place of the log of {name} itself: give another one")
    if switch:
        control.refuse_running(settings.folder)
        if (holder := source.holder()) is not None:
            raise RegistryError(f"the log {source.label} is written by {holder}: stop it first")
    made = back_up(source, name, place, own_logs.read_keys(settings))
    if switch:
        control.refuse_running(settings.folder)
        with own_logs.open_reader(settings, check=False) as reader:
            if reader.summary().last_sequence_id != made.last_sequence_id:
                raise RegistryError(f"{name} ran during the copy: its log stays in {source.label}; try again")
        registry.remember_log(name, log)
    if as_json:
        echo_json({"name": name, "log": log, "switched": switch, **asdict(made)})
        return
    echo(f"{name}: {_kept_text(made)} in {place.label}: verified")
    if switch:
        echo(f"{name} uses this copy from its next start on; the log in {source.label} is unchanged: remove it once")
        echo("all is well, so that nothing starts from it")


def _kept_text(made: Backup) -> str:
    kept = f"records {made.first_sequence_id} to {made.last_sequence_id}"
    if made.last_sequence_id < made.first_sequence_id:
        kept = "no record"
    return f"{kept} ({made.records_copied} of them new), {counted(made.checkpoints, 'checkpoint')}"


@log.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--limit", type=click.IntRange(min=0), default=5, show_default=True, help="Differences of a kind to print, at most."
)
@json_option
@pass_registry
def diff(registry: Registry, first: str, second: str, limit: int, as_json: bool) -> None:
    """Compare two logs record by record.

    A and B are instances, log folders or URLs.

    Exit status: 0 if the logs are the same, 3 if they differ.
    """
    places = _log_place(registry, first), _log_place(registry, second)
    if places[0].key == places[1].key:
        raise click.UsageError(f"{first} and {second} are the same log, in {places[0].label}")
    with open_reader(places[0]) as ours, open_reader(places[1]) as theirs:
        with progress_bar("comparing") as progress:
            found = LogDiff((first, ours), (second, theirs), limit=limit, progress=progress)
        if as_json:
            echo_json(found.values())
        else:
            echo_lines(found.lines())
    sys.exit(0 if found.is_same else 3)


def _log_place(registry: Registry, name_or_log: str) -> Place:
    """Return the log of an instance, or the one that a folder or URL names. A registered name has priority."""
    if name_or_log not in registry.names():
        place = place_of(name_or_log)
        if place.exists():
            return place
        if not is_in_folder(name_or_log) or os.sep in name_or_log or os.path.isdir(name_or_log):
            raise RegistryError(f"there is no log in {place.label}: expected an instance or the folder of a log")
    return own_logs.place_of(settings_with_log(registry, name_or_log))


@log.command()
@name_argument
@click.option(
    "--rotate", is_flag=True, help="Make a new key for the next start; older copies of the log still need the old keys."
)
@click.option("--accept", is_flag=True, help="Trust the present log unchecked, and authenticate it with the key.")
@click.option("--off", is_flag=True, help="Remove the authentication of the log.")
@click.option("--yes", is_flag=True, help="With --accept or --off: do not ask for confirmation.")
@json_option
@pass_registry
def key(registry: Registry, name: str, rotate: bool, accept: bool, off: bool, yes: bool, as_json: bool) -> None:
    """Show or change the key that authenticates the log of NAME.

    With log_key = "file" in the settings, the next start makes a key. Stop the coordinator before --accept and --off.
    """
    if rotate + accept + off > 1:
        raise click.UsageError("give only one of --rotate, --accept and --off")
    settings = registry.load(name)
    if rotate:
        own_logs.add_key(settings)
    if accept or off:
        settings_with_log(registry, name)
        control.refuse_running(settings.folder)
    if accept:
        _confirm(yes, f"from here on, everything in the log of {name} is trusted, forged or not")
        own_logs.accept(settings)
    if off:
        if settings.log_key is not None:
            raise RegistryError(
                f"remove 'log_key' from {registry.path(name)} first: the next start would add the key again"
            )
        _confirm(yes, f"from here on, anybody with write access to the log of {name} can forge records")
        own_logs.remove_authentication(settings)
    _show_key(settings, as_json)


def _confirm(yes: bool, action: str) -> None:
    if not yes:
        echo(action, err=True)
        click.confirm("Do it?", abort=True, err=True)


def _show_key(settings: InstanceSettings, as_json: bool) -> None:
    ids = [one.id for one in own_logs.read_keys(settings)]
    marker = None
    if log_exists(settings.log):
        with open_reader(own_logs.place_of(settings), settings.name) as reader:
            marker = reader.marker
    path = own_logs.key_path(settings)
    if as_json:
        echo_json(
            {
                "name": settings.name,
                "log_key": settings.log_key,
                "file": str(path),
                "keys": ids,
                "authenticated_with": None if marker is None else marker.key_id,
                "first_sequence_id": None if marker is None else marker.first_sequence_id,
            }
        )
        return
    if marker is None:
        hint = "" if settings.log_key is None else ": the next start makes a key"
        echo(f"the log of {settings.name} is not authenticated{hint}")
    else:
        since = f", from record {marker.first_sequence_id} on" if marker.first_sequence_id else ""
        echo(f"the log of {settings.name} is authenticated with key {marker.key_id}{since}")
    for index, one in enumerate(ids):
        echo(f"  key {one}{'  in use' if index == 0 else ''}  in {path}")
    if marker is not None and marker.key_id not in ids:
        echo(f"  key {marker.key_id} is NOT in {path}: the log can't be checked")


@log.command()
@name_argument
@click.option("--renew", is_flag=True, help="Use the first key of 'encryption_key' from now on; NAME may run.")
@json_option
@pass_registry
def encryption(registry: Registry, name: str, renew: bool, as_json: bool) -> None:
    """Show the keys that encrypt the log of NAME, or change to a new key.

    --renew encrypts the data keys of the log with the new key. Put that key before the present one in
    'encryption_key': older copies of the log still need the present one.
    """
    settings = settings_with_log(registry, name)
    source = settings.encryption_key or ""
    if renew and not source:
        raise RegistryError(f"{registry.path(name)} has no 'encryption_key': add it, with the place of the new key")
    if renew:
        if control.running(settings.folder) is not None:
            control.query(settings.folder, "renew-key")
        else:
            with closing(own_logs.open_log(settings)) as store:
                store.trim(keep_checkpoints=None)
    with own_logs.open_reader(settings, check=False) as reader:
        if not reader.identity.is_encrypted:
            raise FailedError(f"the log of {name} is not encrypted")
        from immortal.coordinator.log.encryption import read_keys, wrapped_keys

        wanted, end_s = read_keys(source)[0].id if renew else "", time.monotonic() + RENEWED_WITHIN_S
        while True:
            with reader.view() as view:
                data_keys = {number: one.key_id for number, one in wrapped_keys(view).items()}
            if not renew or set(data_keys.values()) == {wanted}:
                break
            if time.monotonic() > end_s:
                raise FailedError(
                    f"{name} does not use key {wanted} after {RENEWED_WITHIN_S:.0f} s: see its coordinator's output"
                )
            time.sleep(0.05)
    if as_json:
        echo_json({"name": name, "keys": sorted(set(data_keys.values())), "data_keys": len(data_keys)})
    else:
        keys = " and ".join(sorted(set(data_keys.values())))
        echo(f"the log of {name} is encrypted: {counted(len(data_keys), 'data key')}, wrapped by {keys}")


@log.command()
@name_argument
@click.option("--check", is_flag=True, help="Change nothing; report whether this program can read the log.")
@pass_registry
def upgrade(registry: Registry, name: str, check: bool) -> None:
    """Upgrade the database schema for the log of NAME, and show the log's format.

    A log in a folder needs no upgrade. Run this as the owner of the schema, and first stop all instances with a log in
    this database: older versions of the program refuse the upgraded schema.
    """
    settings = registry.load(name)
    if not check and (said := place_of(settings.log).migrate()):
        echo(said)
    if log_exists(settings.log):
        with own_logs.open_reader(settings, check=False) as reader:
            version = reader.identity.format_version
        echo(f"the log of {name} has format {version} ({FORMATS[version]}): this program reads and writes it as it is")
    elif check:
        echo(f"{name} has no log yet: its first start makes one in this program's format")
