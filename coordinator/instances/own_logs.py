"""Logs that this home created: a list of them, their keys, and the refusal of pickled states of other logs.

<home>/counter/keys/log_key     a key in hex on each line, the current one first; mode 0600, in a folder of mode 0700
<home>/counter/keys/own_logs    a log on each line: its committer ID, its creation time in ns, "authenticated" if it is

So a log that replaced the instance's own log is recognised, and no log without authentication can replace an
authenticated one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immortal.coordinator.config import LOG_KEY_FILE, InstanceSettings, write_atomically
from immortal.coordinator.core.errors import DamagedCheckpointError, LogError
from immortal.coordinator.core.interfaces import LogStore, LogSummary
from immortal.coordinator.log.authentication import (
    LogKey,
    LogKeyError,
    not_authenticated_message,
    read_key_file,
    reason_of,
)
from immortal.coordinator.log.backend import Options, Place, StandbyRegistration
from immortal.coordinator.log.identity import LogIdentity
from immortal.coordinator.log.open import create_log, log_exists
from immortal.coordinator.log.open import open_log as open_log_folder
from immortal.coordinator.log.open import open_reader as open_folder_reader
from immortal.coordinator.log.open import place_of as place_of_log
from immortal.coordinator.log.store import RowLogStore
from immortal.protocol.state_envelope import PICKLE, serializer_of

if TYPE_CHECKING:
    from immortal.coordinator.log.reader import LogReader, RecordSource
    from immortal.coordinator.log.verify import LogVerification
    from immortal.coordinator.notices import Notices


class PickleRefusedError(LogError):
    """Raised if a state written by pickle is in a log that this home did not make."""


def refuse_pickle(source: RecordSource, checkpoint_ids: Iterable[int]) -> None:
    """Raise PickleRefusedError if ``source`` is not trusted and pickle wrote one of these checkpoints."""
    if not source.trusts_pickle:
        refuse_pickle_in(source.checkpoint_chunks, checkpoint_ids, source.identity.instance_name)


def refuse_pickle_in(
    chunks_of: Callable[[int], Iterator[bytes]], checkpoint_ids: Iterable[int], instance_name: str
) -> None:
    """Raise PickleRefusedError if pickle wrote one of these checkpoints of a log that is not trusted."""
    for checkpoint_id in checkpoint_ids:
        try:
            serializer = serializer_of(chunks_of(checkpoint_id))
        except DamagedCheckpointError:
            continue  # it can't be restored either
        if serializer == PICKLE:
            raise PickleRefusedError(
                f"checkpoint {checkpoint_id} of the log of {instance_name!r} was written by pickle, and this home did"
                " not make that log: reading it can run code that somebody put into it. If you trust all who could"
                " write it as much as the app's own code, use --trust-pickle (in tests trust_pickle=True); see"
                " docs/how-to/security.md, 'Logs of others'"
            )


# In an instance's folder: Parquet files for SQL queries on its log (immortal.pipeline.sql.parquet_cache).
COLUMNS_FOLDER_NAME = "columns"
FOLDER_NAME = "keys"  # it also has the key pairs of immortal.coordinator.peers.keys
KEY_FILE_NAME = "log_key"
OWN_LOGS_FILE_NAME = "own_logs"
_AUTHENTICATED = "authenticated"
HOLDER_REFRESH_S = 1.0  # between look-ups of the holder's name, which read a list of all locks


def had_log(settings: InstanceSettings) -> bool:
    """Return True if this home created a log of this instance. (After its registration the list of logs is empty.)"""
    path = settings.folder / FOLDER_NAME / OWN_LOGS_FILE_NAME
    return path.exists() and path.stat().st_size > 0


class OwnLogs:
    """List of the logs that this home created for one instance, in a file. ``folder``: the instance's folder."""

    def __init__(self, folder: Path) -> None:
        """Read the file. Raises LogKeyError if it cannot be read."""
        self.path = folder / FOLDER_NAME / OWN_LOGS_FILE_NAME
        self.is_kept = True
        """True if the file exists; without it, any log in place counts as the instance's own."""
        self._logs: dict[tuple[int, int], bool] = {}
        try:
            lines = self.path.read_text("ascii").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            self.is_kept = False
            return
        except (OSError, UnicodeDecodeError) as error:
            raise LogKeyError(f"{self.path} cannot be read: {reason_of(error)}") from None
        for line in lines:
            match line.split():
                case [committer_id, created_ns, *rest] if rest in ([], [_AUTHENTICATED]):
                    with contextlib.suppress(ValueError):
                        self._logs[int(committer_id), int(created_ns)] = bool(rest)
                        continue
            raise LogKeyError(
                f"{self.path} has an invalid line: {line[:80]!r}; restore the file, or write the log's committer ID and"
                " creation time in ns into it, as 'immortal log diff' shows them"
            )

    @property
    def any_authenticated(self) -> bool:
        return any(self._logs.values())

    def has(self, identity: LogIdentity) -> bool:
        return not self.is_kept or (identity.committer_id, identity.created_ns) in self._logs

    def add(self, identity: LogIdentity, *, authenticated: bool) -> None:
        """Add a log that was created here. Raises LogKeyError."""
        place = identity.committer_id, identity.created_ns
        if self.is_kept and self._logs.get(place) == authenticated:
            return
        self._logs[place] = authenticated
        self._write()

    def forget_authentication(self) -> None:
        """Mark all logs as not authenticated. Raises LogKeyError."""
        self._logs = dict.fromkeys(self._logs, False)
        self._write()

    def create(self) -> None:
        """Create the file: from now on a log that it does not list is somebody else's. Raises LogKeyError."""
        if not self.is_kept:
            self._write()

    def _write(self) -> None:
        lines = [
            f"{committer_id} {created_ns}{f' {_AUTHENTICATED}' if authenticated else ''}\n"
            for (committer_id, created_ns), authenticated in self._logs.items()
        ]
        _write_private(self.path, "".join(lines))
        self.is_kept = True


def place_of(settings: InstanceSettings) -> Place:
    """Return the place of the instance's log, with the source of the key that encrypts it. Raises LogError."""
    place = place_of_log(settings.log)
    place.encryption_key = settings.encryption_key or ""
    return place


def key_path(settings: InstanceSettings) -> Path:
    """Return the path of the file with the log's keys; the file may not exist."""
    if settings.log_key is None or settings.log_key == LOG_KEY_FILE:
        return settings.folder / FOLDER_NAME / KEY_FILE_NAME
    return Path(settings.log_key)


def read_keys(settings: InstanceSettings) -> tuple[LogKey, ...]:
    """Read the keys of the instance's log, the one in use first; none if there is no file. Raises LogKeyError."""
    remedy = f"and if others could have read it, 'immortal log key {settings.name} --rotate'"
    try:
        return read_key_file(key_path(settings), remedy)
    except (FileNotFoundError, NotADirectoryError):
        return ()


def add_key(settings: InstanceSettings) -> tuple[LogKey, ...]:
    """Create a new key and use it; older keys stay for the copies that need them. Raises LogKeyError."""
    keys = (LogKey.new(), *read_keys(settings))
    _write_private(key_path(settings), "".join(f"{key.secret.hex()}\n" for key in keys))
    return keys


def remove(folder: Path) -> None:
    """Delete the file of keys and the list of own logs; ``folder`` is the instance's."""
    for name in (KEY_FILE_NAME, OWN_LOGS_FILE_NAME):
        (folder / FOLDER_NAME / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER_NAME).rmdir()


def open_log(settings: InstanceSettings, place: Place | None = None) -> RowLogStore:
    """Open the instance's log for writing; create it if there is none. With ``log_key`` set, it is authenticated.

    ``place``: the place of the log, if the caller has it already. Raises LogError.
    """
    log = place or place_of(settings)
    own = OwnLogs(settings.folder)
    keys = read_keys(settings)
    wanted = settings.log_key is not None or own.any_authenticated
    exists = log_exists(log)
    if wanted and not keys and not (exists and (own.any_authenticated or _is_authenticated(settings))):
        keys = add_key(settings)
    options = {**_shared_options(settings), "allow_data_loss": settings.allow_data_loss}
    if not exists:
        store = create_log(log, settings.name, keys=keys if wanted else (), **options)
    else:
        used = keys if wanted or (keys and _is_authenticated(settings)) else ()
        store = open_log_folder(log, settings.name, keys=used, adopt=not own.any_authenticated, **options)
    try:
        if wanted and store.macs is None:
            raise LogKeyError(not_authenticated_message(settings.name))
        if not exists or own.has(store.identity):
            own.add(store.identity, authenticated=store.macs is not None)
    except BaseException:
        store.close()
        raise
    return store


def adopt_log(settings: InstanceSettings, store: RowLogStore, *, trust_pickle: bool) -> None:
    """Add the log of ``store`` to the instance's own logs, since a coordinator begins to write it.

    Raises PickleRefusedError if it was not listed and has a state written by pickle, unless ``trust_pickle``.
    """
    own = OwnLogs(settings.folder)
    if not (own.has(store.identity) or trust_pickle):
        ids = [header.checkpoint_id for header in store.summary().checkpoints]
        refuse_pickle_in(lambda checkpoint_id: stored_chunks(store, checkpoint_id), ids, settings.name)
    own.add(store.identity, authenticated=store.macs is not None)


def stored_chunks(store: LogStore, checkpoint_id: int) -> Iterator[bytes]:
    """Yield the chunks of a checkpoint in order."""
    index = 0
    while chunk := store.read_checkpoint_chunk(checkpoint_id, index):
        yield chunk
        index += 1


def open_reader(settings: InstanceSettings, *, trust_pickle: bool = False, check: bool = True) -> LogReader:
    """Open the instance's log for reading, and check it with its key if it has one.

    ``trust_pickle``: trust pickled states even if this home did not make the log. ``check``: check its small tables
    now. Raises LogError.
    """
    own = OwnLogs(settings.folder)
    reader = open_folder_reader(place_of(settings), settings.name, keys=read_keys(settings), check=check)
    if own.any_authenticated and reader.macs is None:
        reader.close()
        raise LogKeyError(not_authenticated_message(settings.name))
    reader.trusts_pickle = trust_pickle or own.has(reader.identity)
    return reader


def log_version(settings: InstanceSettings) -> int | None:
    """Return the version of the instance's state by its log; None before its first start. Raises LogError."""
    summary = summary_of(settings)
    return summary.versions[-1].version if summary is not None and summary.versions else None


def summary_of(settings: InstanceSettings) -> LogSummary | None:
    """Read the summary of the instance's log; None before its first start. Raises LogError."""
    if not log_exists(settings.log):
        return None
    with open_reader(settings) as reader:
        return reader.summary()


def verify(settings: InstanceSettings) -> LogVerification:
    """Verify the instance's log with its keys; see :func:`immortal.coordinator.log.verify.verify_log`."""
    from immortal.coordinator.log.verify import verify_log

    own = OwnLogs(settings.folder)
    keys = read_keys(settings)
    return verify_log(place_of(settings), settings.name, keys=keys, must_be_authentic=own.any_authenticated)


def accept(settings: InstanceSettings) -> LogKey:
    """Authenticate the log's present contents with the current key, on an operator's order. Raises LogError."""
    keys = read_keys(settings) or add_key(settings)
    with contextlib.closing(open_log_folder(place_of(settings), settings.name, keys=keys, accept=True)) as store:
        OwnLogs(settings.folder).add(store.identity, authenticated=True)
    return keys[0]


def remove_authentication(settings: InstanceSettings) -> None:
    """Remove the authentication of the log; the keys stay. Raises LogError."""
    with contextlib.closing(open_log_folder(place_of(settings), settings.name, accept=True)) as store:
        OwnLogs(settings.folder).forget_authentication()
        store.remove_authentication()


class InstanceLog:
    """Access to the log of ``settings``.

    ``trust_pickle``: allow states written by pickle even if another home created the log.
    """

    def __init__(self, settings: InstanceSettings, log: Notices, *, trust_pickle: bool) -> None:
        self._settings = settings
        self._log = log
        self._trust_pickle = trust_pickle
        self._place = place_of(settings)
        self._reader: LogReader | None = None  # the last one
        self._holder = "another process"  # last known name
        self._looked_up_s: float | None = None  # time of the last look-up of the holder

    @property
    def is_shared(self) -> bool:
        """True if other machines can reach the log."""
        return self._place.is_shared

    def open_store(self) -> RowLogStore:
        """Open the log for writing, or create a new one.

        Raises LogLockedError if another process has it, LogError, PickleRefusedError.
        """
        log = self._log
        if self._reader is not None:
            self._place.sequence_id_required_min = max(
                self._place.sequence_id_required_min, self._reader.sequence_id_read_max
            )
        store = open_log(self._settings, self._place)
        try:
            adopt_log(self._settings, store, trust_pickle=self._trust_pickle)
            if store.macs is not None:
                marker = store.macs.marker
                log.info("the log is authenticated", key=marker.key_id, from_record=marker.first_sequence_id or None)
            if (opened := self._place.restrict_access()) is not None:
                log.warning(opened)
            for line in store.repairs:
                log.warning(line)
        except BaseException:
            store.close()
            raise
        return store

    def open_reader(self) -> LogReader | None:
        """Open the log for reading beside its writer; None if there is no log yet. Raises LogError."""
        if not self._place.exists():
            return None
        self._reader = open_reader(self._settings, trust_pickle=self._trust_pickle)
        return self._reader

    def follow(self, nudge: Callable[[], None]) -> StandbyRegistration | None:
        """Register as a standby, as :meth:`Place.follow` specifies."""
        return self._place.follow(Options(**_shared_options(self._settings)), nudge)

    def holder(self) -> str | None:
        """Return a description of the process that writes the log; None: no process does."""
        if not self._place.is_live():
            self._looked_up_s = None
            return None
        if self._looked_up_s is None or time.monotonic() - self._looked_up_s >= HOLDER_REFRESH_S:
            self._looked_up_s = time.monotonic()
            self._holder = self._place.holder() or self._holder
        return self._holder


def _shared_options(settings: InstanceSettings) -> dict[str, Any]:
    """Return the options of a log that matter to other machines."""
    return {
        "lease_s": settings.lease_s,
        "endpoint": settings.peer,
        "checkpoints_to": settings.checkpoints_to or "",
    }


def _is_authenticated(settings: InstanceSettings) -> bool:
    with open_folder_reader(place_of(settings), settings.name) as reader:
        return reader.marker is not None


def _write_private(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, text.encode(), mode=0o600)
    except OSError as error:
        raise LogKeyError(f"{path} cannot be written: {error.strerror}") from None
