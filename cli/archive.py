"""Commands archive and restore: a log to object storage, and back from it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from immortal.cli.options import Moment, complete_instance, instance_name, pass_registry, settings_with_log
from immortal.coordinator.config import ConfigError, InstanceSettings, check_instance_name
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time
from immortal.coordinator.log.open import log_exists, place_of
from immortal.coordinator.operator import control
from immortal.presenters.status import age_text
from immortal.protocol import distribution
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, json_option, size_text
from immortal.protocol.errors import ImmortalError

if TYPE_CHECKING:
    from immortal.coordinator.archive.archive import Archive
    from immortal.coordinator.archive.format import Moment as ArchivedMoment
    from immortal.coordinator.objects.store import Objects

_MIB = 1 << 20
_KEY_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("name", required=False, callback=instance_name, shell_complete=complete_instance)
@click.option("--to", "url", required=True, metavar="URL", help="s3://BUCKET/PATH, gs://, az:// or file:///PATH.")
@click.option("--once", is_flag=True, help="Archive what is new, then exit.")
@click.option("--show", is_flag=True, help="Show what is archived and what is not yet; of all instances without NAME.")
@click.option(
    "--every-s", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
    help="Seconds between two uploads.",
)  # fmt: skip
@click.option(
    "--segment-mb", type=click.FloatRange(min=0.01, max=1024), default=16.0, show_default=True,
    help="Also upload when the log has grown by this many MiB: about the size of one object.",
)  # fmt: skip
@click.option(
    "--keep-days", type=click.FloatRange(min=0), help="Keep every moment of the last days; delete older ones."
)
@click.option(
    "--keep-mb", type=click.IntRange(min=0), help="Largest size of the archive, unless the newest moment needs more."
)
@click.option(
    "--key-file", type=_KEY_FILE, metavar="FILE", help="File with the age keys to encrypt for; public keys suffice."
)
@click.option(
    "--anew", is_flag=True, help="Continue although the archive has another history of this log: this log is right."
)
@json_option
@pass_registry
def archive(
    registry: Registry,
    name: str | None,
    url: str,
    once: bool,
    show: bool,
    every_s: float,
    segment_mb: float,
    keep_days: float | None,
    keep_mb: int | None,
    key_file: Path | None,
    anew: bool,
    as_json: bool,
) -> None:
    """Copy the log of NAME to object storage as it grows, or show what is there.

    Runs until Ctrl-C or SIGTERM, also beside a running instance. If the store is unreachable, the command waits.
    Credentials come from the environment, as for the store's own tools (AWS_ACCESS_KEY_ID and others).
    """
    if show:
        _show(registry, name, url, as_json)
        return
    if name is None:
        raise click.UsageError("give the NAME of an instance, or --show")
    if as_json and not once:
        raise click.UsageError("--json needs --once or --show")
    settings = settings_with_log(registry, name)
    there = _archive(url, name, key_file)
    from immortal.coordinator.archive.follower import Follower, Options
    from immortal.coordinator.archive.format import Retention

    over = threading.Event()
    follower = Follower(
        there,
        lambda: own_logs.open_reader(settings),
        place_of(settings.log).version,
        Options(every_s, int(segment_mb * _MIB), Retention(keep_days, keep_mb), anew),
        over.wait,
        lambda text: echo(f"{name}: {text}", err=True),
    )
    if once:
        made = follower.archive_once()
        last = made or _last(there)
        if as_json:
            echo_json({"name": name, "url": url, "new": made is not None, **_described(last)})
        else:
            echo(f"{name}: {'archived' if made else 'nothing new'}: {_in_words(last)}, in {there.objects.location}")
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *of: over.set())
    echo(f"{name}: archiving to {there.objects.location}, every {every_s:g} s", err=True)
    follower.run()
    found = there.last()
    echo(f"{name}: ended{'' if found is None else f': {_in_words(found[0])}'}", err=True)


def _archive(url: str, name: str, key_file: Path | None, *, make: bool = True) -> Archive:
    """Return the archive of an instance. Raises FailedError if the optional packages for archives are missing."""
    try:
        from immortal.coordinator.archive.archive import Archive, Cipher
    except ImportError as error:
        raise _missing(error) from None
    cipher = None if key_file is None else Cipher.from_file(key_file)
    return Archive(_objects(url, make=make).below(name), cipher)


def _objects(url: str, *, make: bool) -> Objects:
    try:
        from immortal.coordinator.objects.store import Objects, store_of
    except ImportError as error:
        raise _missing(error) from None
    return Objects(store_of(url, create=make), url.rstrip("/"))


def _missing(error: ImportError) -> FailedError:
    return FailedError(f"archives need the extra archive ({error}): {distribution.add_extra('archive')}")


def _last(archive: Archive) -> ArchivedMoment:
    found = archive.last()
    if found is None:
        raise FailedError(f"there is no archive in {archive.objects.location}")
    return found[0]


def _in_words(moment: ArchivedMoment) -> str:
    records = f"records {moment.first_sequence_id} to {moment.last_sequence_id}"
    if moment.last_sequence_id < moment.first_sequence_id:
        records = f"no record behind {moment.last_sequence_id}"
    return f"{records}, {counted(len(moment.checkpoints), 'checkpoint')}, of {time_text(moment.time_ns)}"


def _described(moment: ArchivedMoment) -> dict[str, Any]:
    return {
        "moment": moment.number,
        "first_sequence_id": moment.first_sequence_id,
        "last_sequence_id": moment.last_sequence_id,
        "checkpoints": len(moment.checkpoints),
        "time": time_text(moment.time_ns),
        "time_ns": moment.time_ns,
        "taken": time_text(moment.taken_ns),
        "taken_ns": moment.taken_ns,
        "encrypted": moment.encrypted,
    }


# --- contents of an archive -------------------------------------------------------------------------------------------


def _show(registry: Registry, name: str | None, url: str, as_json: bool) -> None:
    if name is not None:
        _show_one(registry, name, _archive(url, name, None, make=False), as_json)
        return
    names = _names(url)
    if not names:
        raise FailedError(f"there is no archive in {url}")
    failed = 0
    for one in names:
        try:
            _show_one(registry, one, _archive(url, one, None, make=False), as_json)
        except (ImmortalError, FailedError) as error:  # an error of one archive hides no other archive
            failed += 1
            echo(f"{one}: {error}", err=True)
    if failed:
        raise FailedError(f"{failed} of {counted(len(names), 'archive')} could not be read whole")


def _names(url: str) -> list[str]:
    """Return the names of the instances that have an archive at ``url``; folders with other names are left out."""
    names = []
    for folder in _objects(url, make=False).folders():
        with contextlib.suppress(ConfigError):
            names.append(check_instance_name(folder))
    return names


def _show_one(registry: Registry, name: str, stored_archive: Archive, as_json: bool) -> None:
    moments = stored_archive.moments()
    if not moments:
        raise FailedError(f"there is no archive in {stored_archive.objects.location}")
    size_bytes = sum(stored.size_bytes for stored in stored_archive.objects.listed())
    oldest, last = moments[0], moments[-1]
    risk = _at_risk(registry, name, last)
    if as_json:
        said = {"name": name, "url": stored_archive.objects.location, "moments": len(moments), "size_bytes": size_bytes}
        said |= {"oldest": _described(oldest), "newest": _described(last)}
        echo_json({**said, "at_risk": risk})
        return
    echo(f"{name}: {_in_words(last)}")
    echo(f"  taken {time_text(last.taken_ns)}{', encrypted' if last.encrypted else ''}")
    echo(
        f"  {counted(len(moments), 'moment')}, the oldest up to record {oldest.last_sequence_id} of"
        f" {time_text(oldest.time_ns)}; {size_text(size_bytes)}"
    )
    if risk is None:
        echo("  at risk: unknown, since its log is on another machine; at most what was acknowledged since that time")
    else:
        echo(f"  at risk: {counted(risk['records'], 'record')}, the oldest {risk['seconds']:.1f} s old")


def _at_risk(registry: Registry, name: str, last: ArchivedMoment) -> dict[str, Any] | None:
    """Count the records and seconds that only the log has, not the archive; None if the log is not on this machine."""
    from immortal.coordinator.archive.archiver import unarchived

    if name not in registry.names():
        return None
    settings = registry.load(name)
    if not log_exists(settings.log):
        return None
    with own_logs.open_reader(settings, check=False) as reader:
        found = unarchived(reader, last.last_sequence_id, time.time_ns())
    return {"records": found.records_count, "seconds": found.seconds}


# --- restore ----------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("url", metavar="URL")
@click.argument("name", required=False, callback=instance_name, shell_complete=complete_instance)
@click.option(
    "--until", type=Moment(), metavar="RECORD|TIME",
    help="Restore the last archived moment up to this record or time (UTC by default).  [default: the newest]",
)  # fmt: skip
@click.option(
    "--key-file", type=_KEY_FILE, metavar="FILE", help="File with the secret age key of an encrypted archive."
)
@json_option
@pass_registry
def restore(
    registry: Registry, url: str, name: str | None, until: int | Time | None, key_file: Path | None, as_json: bool
) -> None:
    """Restore a log from an archive, as of its end or of an earlier moment.

    The log is created at the place that the settings of NAME give. NAME is needed if the archive at URL has several
    logs, and must be registered here: the archive contains no settings and no keys. An existing log is never
    overwritten. All restored data is verified.
    """
    name = name or _only_name(url)
    settings = registry.load(name)
    there = _archive(url, name, key_file, make=False)
    from immortal.coordinator.archive.archive import restore as bring_back
    from immortal.coordinator.archive.format import index_of

    _refuse_to_overwrite(settings)
    moments = there.moments()
    if not moments:
        raise FailedError(f"there is no archive in {there.objects.location}")
    index = index_of(
        moments,
        until_ns=until.ns if isinstance(until, Time) else None,
        until_record=until if isinstance(until, int) else None,
    )
    place = own_logs.place_of(settings)
    restored = bring_back(there, name, moments, index, place, own_logs.read_keys(settings))
    moment = moments[index]
    if as_json:
        said = {"name": name, "log": settings.log, "objects": restored.objects_count, **_described(moment)}
        echo_json({**said, "committer_id": moment.committer_id, "authenticated": restored.authenticated})
        return
    echo(f"{name}: {_in_words(moment)}, in {place.label}")
    age_s = max(0.0, (time.time_ns() - moment.taken_ns) / 1e9)
    begun, taken = time_text(moment.created_ns), time_text(moment.taken_ns)
    echo(f"  of the log {moment.committer_id}, begun {begun}; archived {taken}, {age_text(age_s)} ago")
    how = "by the key of its log" if restored.authenticated else "by its check bytes"
    echo(f"  proved, {how}: every record, checkpoint and table is as it was archived")
    unproved = "that this is the newest moment: whoever may write the archive can remove moments"
    if not restored.authenticated:
        unproved += "; and who wrote it: the log has no key"
    echo(f"  not proved: {unproved}")
    behind = moments[-1].last_sequence_id - moment.last_sequence_id
    if behind > 0:
        echo(f"{counted(behind, 'later record')} of the archive are left out, up to {time_text(moments[-1].time_ns)}")
    echo(f"what {name} acknowledged after record {moment.last_sequence_id} is lost; its peers know what that was")
    echo(f"make sure that {name} runs nowhere else, then start it: 'immortal run {name}'. If a peer refuses it,")
    echo(f"'immortal peers reclaim {name}' lists what was lost and lets it continue")


def _only_name(url: str) -> str:
    names = _names(url)
    if len(names) == 1:
        return names[0]
    if not names:
        raise FailedError(f"there is no archive in {url}")
    raise click.UsageError(f"{url} has archives of {', '.join(names)}: give the NAME of one")


def _refuse_to_overwrite(settings: InstanceSettings) -> None:
    control.refuse_running(settings.folder)
    if log_exists(settings.log):
        raise FailedError(
            f"{settings.name} has a log already, in {settings.log}: nothing was done; move it away first, and keep it"
            " until all is well"
        )
