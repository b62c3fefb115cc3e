"""Creates and opens logs by URL. Only this module knows which backends exist.

``lmdb:PATH``, or only a path, is a log in a folder; ``postgresql://...#NAME`` is one in a database; ``memory:NAME`` is
one in this process, for tests. ``s3://...#NAME`` and similar URLs are archives, which are only read. A backend of
another package is an entry point of the group ``immortal.log_backends``: its name is the scheme, its value
(``module:Class``) a :class:`immortal.coordinator.log.backend.Place`. docs/decisions/0027 has the reasons.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from immortal.coordinator.core.errors import LogError, require
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.authentication import LogKey, LogKeyError
from immortal.coordinator.log.backend import ENCRYPTION_KEY_VARIABLE, LEASE_S, Backend, Options, Place
from immortal.coordinator.log.identity import LogIdentity, meta_row
from immortal.coordinator.log.store import RowLogStore
from immortal.coordinator.log_url import FOLDERS, split_url

if TYPE_CHECKING:
    from immortal.coordinator.log.reader import LogReader

BACKENDS = {
    "lmdb": "immortal.coordinator.log.backends.lmdb:LmdbPlace",
    "memory": "immortal.coordinator.log.backends.memory:MemoryPlace",
    "postgresql": "immortal.coordinator.log.backends.postgres:PostgresPlace",
}
ARCHIVES = {
    "s3": "immortal.coordinator.archive.place:S3Archive",
    "gs": "immortal.coordinator.archive.place:GoogleArchive",
    "az": "immortal.coordinator.archive.place:AzureArchive",
    "file": "immortal.coordinator.archive.place:FolderArchive",
}
ENTRY_POINTS = "immortal.log_backends"


Log: TypeAlias = str | os.PathLike[str] | Place
"""Log given as a URL, a path, or the place that either means."""


def place_of(log: Log) -> Place:
    """Parse a log's URL or path into its place. Raises LogError for an unknown scheme."""
    if isinstance(log, str):
        scheme, location = split_url(log)
    elif isinstance(log, os.PathLike):
        scheme, location = FOLDERS, os.fspath(log)
    else:
        return log
    if not location:
        raise LogError(f"{log!r} is not a log: a path was expected, or {scheme}: followed by a place")
    return backend_of(scheme)(location)


@functools.cache
def backend_of(scheme: str) -> type[Place]:
    """Return the backend's class for logs with this URL scheme. Raises LogError."""
    known = BACKENDS.get(scheme) or ARCHIVES.get(scheme)
    if known is not None:
        module, _, name = known.partition(":")
        return cast(type[Place], getattr(importlib.import_module(module), name))
    from importlib.metadata import entry_points  # imported here: our own backends don't need it

    found = entry_points(group=ENTRY_POINTS)
    for point in found.select(name=scheme):
        try:
            return cast(type[Place], point.load())
        except Exception as error:
            raise LogError(f"the backend {point.value!r} of logs {scheme}: cannot be loaded: {error}") from error
    schemes = ", ".join(f"{each}:" for each in sorted({*BACKENDS, *found.names}))
    raise LogError(
        f"no backend for logs {scheme}: is known, only {schemes} (for a folder of that name write lmdb:{scheme}:...)"
    )


def log_exists(log: Log) -> bool:
    """Return True if the log exists. Raises LogError."""
    return place_of(log).exists()


def is_locked(log: Log) -> bool:
    """Return True while a process writes this log. Raises LogError."""
    return place_of(log).is_live()


def create_log(
    log: Log,
    instance_name: str,
    *,
    committer_id: int | None = None,
    first_sequence_id: int = 0,
    map_size_bytes: int | None = None,
    map_size_bytes_max: int | None = None,
    keys: Sequence[LogKey] = (),
    allow_data_loss: bool = False,
    lease_s: float = LEASE_S,
    endpoint: str = "",
    checkpoints_to: str = "",
) -> RowLogStore:
    """Create a new log and open it for writing. Without ``committer_id`` a random one is drawn.

    ``first_sequence_id``: earlier records count as trimmed. ``allow_data_loss``: create it even if a crash of its
    server could lose acknowledged input. ``lease_s``, ``endpoint``, ``checkpoints_to``: see :class:`Options`.

    ``keys``: the first one authenticates the log. Remains of an interrupted creation do not count. Raises
    LogFormatError if there is already a log, LogFullError.
    """
    if committer_id is None:
        committer_id = secrets.randbelow(log_format.COMMITTER_ID_MAX) + 1
    require(0 < committer_id <= log_format.COMMITTER_ID_MAX, f"{committer_id} is no committer ID")
    require(bool(instance_name), "an instance needs a name")
    log_format.name_key(instance_name)
    place = place_of(log)
    options = Options(map_size_bytes, map_size_bytes_max, allow_data_loss, lease_s, endpoint, checkpoints_to)
    version = log_format.FORMAT_VERSION
    if place.encryption_key:
        from immortal.coordinator.log import encryption  # imported here, as below: most logs are not encrypted

        encryption.read_keys(place.encryption_key)  # without it no log is made
        version = log_format.ENCRYPTED_VERSION
    identity = LogIdentity(version, instance_name, committer_id, time.time_ns())
    rows = identity.rows()
    if first_sequence_id:
        rows.append(meta_row(log_format.META_TRIMMED, first_sequence_id - 1))
    backend = place.create(identity, rows, options)
    return _store(place, backend, keys, adopt=True)


def open_log(
    log: Log,
    instance_name: str,
    *,
    map_size_bytes: int | None = None,
    map_size_bytes_max: int | None = None,
    keys: Sequence[LogKey] = (),
    adopt: bool = False,
    accept: bool = False,
    allow_data_loss: bool = False,
    lease_s: float = LEASE_S,
    endpoint: str = "",
    checkpoints_to: str = "",
) -> RowLogStore:
    """Open a log for writing.

    ``keys``: possible keys, the current one first; a log with an older one of them gets the current one. ``adopt``:
    authenticate a log that has no key, as it is. ``accept``: authenticate any log, on an operator's order.

    Raises LogKeyError (no key for it, or none in it), ForgedLogError (written without the key), LogFormatError (no log,
    not a log, truncated, newer format), LogLockedError, LogIdentityError, DamagedLogError.
    """
    place = place_of(log)
    options = Options(map_size_bytes, map_size_bytes_max, allow_data_loss, lease_s, endpoint, checkpoints_to)
    backend = place.open(instance_name, options)
    return _store(place, backend, keys, adopt=adopt, accept=accept)


def _store(
    place: Place, backend: Backend, keys: Sequence[LogKey], *, adopt: bool = False, accept: bool = False
) -> RowLogStore:
    """Return a store that owns the backend; close the backend if that fails."""
    try:
        return RowLogStore(with_encryption(place, backend), keys, adopt=adopt, accept=accept)
    except BaseException:
        backend.close_uncleanly()
        raise


def with_encryption(place: Place, backend: Backend) -> Backend:
    """Wrap ``backend`` in one that encrypts and decrypts, if its log is encrypted. Raises LogKeyError."""
    if backend.identity.is_encrypted:
        from immortal.coordinator.log import encryption

        return encryption.encrypted_backend(backend, place.encryption_key, writes=True)
    require_encrypted(place, backend.identity)
    return backend


def require_encrypted(place: Place, identity: LogIdentity) -> None:
    """Raise LogKeyError if ``place`` has an encryption key, and its log with this identity is not encrypted."""
    if place.encryption_key and not identity.is_encrypted:
        name = identity.instance_name
        raise LogKeyError(
            f"the log of {name!r} is not encrypted, but its settings have an 'encryption_key': remove that setting to"
            f" restore or start it; to encrypt the log, set it again and use 'immortal log copy {name} --to FOLDER"
            " --switch'"
        )


def open_reader(
    log: Log, instance_name: str | None = None, *, keys: Sequence[LogKey] | None = None, check: bool = True
) -> LogReader:
    """Open a log for reading only, also while a coordinator in another process writes it.

    ``keys``: possible keys; None: authenticity is not checked. ``check``: also check the small tables now; each record
    and chunk is checked when it is read.

    Raises LogKeyError and ForgedLogError like :func:`open_log`, LogFormatError, LogIdentityError, DamagedLogError,
    LogLockedError if this process already has it open.
    """
    from immortal.coordinator.log.reader import LogReader  # imported here, as in immortal.coordinator.log

    place = place_of(log)
    backend = place.open_reader(instance_name)
    reader = LogReader(backend)
    try:
        if backend.identity.is_encrypted:
            from immortal.coordinator.log import encryption

            source = place.encryption_key or os.environ.get(ENCRYPTION_KEY_VARIABLE, "")
            reader = LogReader(encryption.encrypted_backend(backend, source, writes=False))
        if keys is not None:
            reader.authenticate(keys, check=check)
    except BaseException:
        reader.close()
        raise
    return reader
