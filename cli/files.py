"""Command files: contents of files, which calls and states name by handles; and the removal of what no log names."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import click
import msgspec

from immortal.appsdk.effects.stored_files import STORE_VARIABLE, StoredFile, file_store, store_file
from immortal.cli.options import pass_registry, settings_with_log
from immortal.coordinator.config.schema import FILES_FOLDER_NAME
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.format import ALL_TABLES, CRC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.identity import check_value, first_and_last_sequence_id
from immortal.coordinator.log.reader import LogReader
from immortal.protocol import decoding
from immortal.protocol.command_line import Commands, FailedError, counted, echo, echo_json, json_option, size_text

_DAY_S = 86_400
_NAME = re.compile(rb"sha256-[0-9a-f]{64}")
_NAME_SIZE_BYTES = 71
_FILE = click.Path(path_type=Path)


class _HandleType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Parameter type of a handle in JSON, as 'put' and 'immortal call' print it."""

    name = "handle"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> StoredFile:
        try:
            return decoding.decode_json(value, type=StoredFile)
        except decoding.DecodeError as error:
            self.fail(f'{value!r}: {{"name": "sha256-...", "size_bytes": ...}} was expected: {error}', param, ctx)


@click.group(cls=Commands)
@pass_registry
def files(registry: Registry) -> None:
    """Store files for calls, read them, and remove files that no log refers to.

    'put' and 'get' use the store in IMMORTAL_FILE_STORE, by default HOME/.files.
    """
    os.environ.setdefault(STORE_VARIABLE, str(registry.home / FILES_FOLDER_NAME))


@files.command()
@click.argument("file", type=_FILE)
def put(file: Path) -> None:
    """Store FILE and print its handle: immortal call vault keep "$(immortal files put FILE)"."""
    echo(msgspec.json.encode(store_file(file)).decode())


@files.command()
@click.argument("handle", type=_HandleType())
@click.argument("file", type=_FILE)
def get(handle: StoredFile, file: Path) -> None:
    """Check the content of HANDLE and write it to FILE."""
    handle.save(file)


@files.command()
@click.option(
    "--older-than-days", "days", type=click.FloatRange(min=0), default=7.0, show_default=True,
    help="Keep files stored within these days: a call that names one may be under way.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be removed, without removing it.")
@json_option
@pass_registry
def gc(registry: Registry, days: float, dry_run: bool, as_json: bool) -> None:
    """Remove files that no record, checkpoint or waiting call in the logs of this home refers to.

    The instances may be running. Other logs, backups and archives are not searched. If a log can't be read, nothing is
    removed.
    """
    before_s = time.time() - days * _DAY_S
    everything = [settings_with_log(registry, name) for name in registry.names()]
    with contextlib.ExitStack() as opened:
        used = _names_in([opened.enter_context(own_logs.open_reader(settings)) for settings in everything])
    told = []
    for place in sorted({settings.files_place for settings in everything}):
        store = file_store(place)
        found = store.listed()
        unused = [one for one in found if one.name not in used and one.stored_s < before_s]
        for one in unused if not dry_run else ():
            store.remove_before(one.name, before_s)
        size_bytes = sum(one.size_bytes for one in unused)
        told.append({"store": place, "files": len(found), "unused": len(unused), "unused_size_bytes": size_bytes})
        if not as_json:
            what = "would be removed" if dry_run else "removed"
            echo(f"{place}: {counted(len(found), 'file')}; {what}: {len(unused)}, {size_text(size_bytes)}")
    if as_json:
        echo_json({"dry_run": dry_run, "stores": told})


def _names_in(readers: list[LogReader]) -> set[str]:
    """Return the names of files in the logs.

    A handle can go from a log that is not read yet to one that was read. So the records that came meanwhile are read
    after all logs: at that moment each handle that is in a log has been seen.
    """
    used: set[str] = set()
    lasts = [_collect(reader, used) for reader in readers]
    for reader, last in zip(readers, lasts, strict=True):
        _collect(reader, used, last + 1)
    return used


def _collect(reader: LogReader, used: set[str], first: int | None = None) -> int:
    """Add the names in all tables, or in the records from ``first`` on; return the last record's ID.

    Raises FailedError, DamagedLogError.
    """
    with reader.view() as view:
        kept, last = first_and_last_sequence_id(view)
        if first is not None and kept > first:
            raise FailedError(f"{reader.where} was trimmed while it was read: nothing was removed; try again")
        for table in ALL_TABLES if first is None else ("records",):
            rest = b""  # a piece of a checkpoint can end in the middle of a name
            for key, value in view.scan(table, SEQUENCE_KEY.pack(first or 0) if table == "records" else b""):
                if table == "records":
                    check_value(value, SEQUENCE_KEY.unpack(key)[0], reader.identity.committer_id)
                elif not value:  # it could not be decrypted
                    raise FailedError(f"{reader.where} is damaged in {table!r}: nothing was removed")
                piece = rest + value[CRC_SIZE_BYTES:]
                used.update(name.decode() for name in _NAME.findall(piece))
                rest = piece[-_NAME_SIZE_BYTES:]
    reader.release()
    return last
