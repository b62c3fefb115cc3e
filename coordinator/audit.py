"""Security audit: accepted and refused peers, and operators' commands, in one audit log for each instance.

The log has one line of JSON for each entry. The lines are chained by hashes.

<home>/counter/audit.log      mode 0600; the newest lines. When full, it becomes audit.log.1, and that audit.log.2 ...

So a changed or removed line shows: the next line does not fit. Removed last lines show if the hash of the newest line
was kept elsewhere. Entries that strangers can cause at any rate are counted, and written from time to time.

An Auditor writes news of a running coordinator to this log, once a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from immortal.coordinator.messenger import Counters, Role, Security
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError

FILE_NAME = "audit.log"
FILE_SIZE_BYTES_MAX = 8 << 20
OLD_FILES_MAX = 7
TEXT_CHARACTERS_MAX = 2000  # limit of one value
FIRST = "0" * 64  # previous hash in the very first line
TALLIES_MAX = 1000  # kinds of counted entries that are kept apart
TALLY_NS = 600_000_000_000  # between two lines of one kind


class AuditError(ImmortalError):
    """Raised if the audit log cannot be read."""


def path(folder: Path) -> Path:
    """Return the path of the newest file. ``folder`` is the instance's."""
    return folder / FILE_NAME


def _old_path(folder: Path, number: int) -> Path:
    return folder / f"{FILE_NAME}.{number}"


def paths(folder: Path) -> list[Path]:
    """Return the existing files of the audit log, oldest first."""
    old = [_old_path(folder, number) for number in range(OLD_FILES_MAX, 0, -1)]
    return [one for one in (*old, path(folder)) if one.exists()]


def remove(folder: Path) -> None:
    for one in paths(folder):
        one.unlink(missing_ok=True)


def hash_of(line: bytes) -> str:
    """Return the hash of a line without its line end, in hex."""
    return hashlib.blake2b(line, digest_size=32).hexdigest()


class AuditLog:
    """Audit log of one instance, for appending. Only the process that has the instance's log open writes to it.

    A failed write does not stop the coordinator: ``warn`` gets a text, and the next line has the number of lost lines.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        size_bytes_max: int = FILE_SIZE_BYTES_MAX,
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._clock_ns = clock_ns
        self._size_bytes_max = size_bytes_max
        self._descriptor: int | None = None
        self._size_bytes = self._lost = 0
        self._previous = FIRST
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def write(self, event: str, **fields: object) -> None:
        """Write one line."""
        self._try(event, fields, sync=False)

    def write_through(self, event: str, **fields: object) -> None:
        """Write one line and sync it, so that it survives power loss."""
        self._try(event, fields, sync=True)

    def _try(self, event: str, fields: dict[str, object], *, sync: bool) -> None:
        try:
            self._write(event, fields)
            if sync and self._descriptor is not None:
                os.fdatasync(self._descriptor)
        except OSError as error:
            if not self._lost:
                self._warn(f"{path(self._folder)} can't be written: {error.strerror}; what happens is not noted there")
            self._lost += 1
            self._close()

    def _write(self, event: str, fields: dict[str, object]) -> None:
        if self._descriptor is None:
            cut_bytes = self._open()
            if cut_bytes:  # a crash, or a full disk, had cut a line
                self._append("cut", {"bytes": cut_bytes})
        if self._size_bytes >= self._size_bytes_max:
            self._rotate()
        self._append(event, {**fields, "lost": self._lost} if self._lost else fields)
        self._lost = 0

    def _open(self) -> int:
        """Open the file after its last whole line. Return how many bytes of an unfinished line were cut off."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = path(self._folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(file, flags, 0o600)
        text = file.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.ftruncate(self._descriptor, whole)
        self._size_bytes = whole
        old = _old_path(self._folder, 1)
        before = text[:whole] or (old.read_bytes() if old.exists() else b"")
        self._previous = hash_of(before[:-1].rpartition(b"\n")[2]) if before else FIRST
        return len(text) - whole

    def _append(self, event: str, fields: dict[str, object]) -> None:
        assert self._descriptor is not None
        now_ns = self._clock_ns()
        when = datetime.fromtimestamp(now_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        values = {key: _clipped(value) for key, value in fields.items()}
        entry = {"time": when, "what": event, **values, "previous": self._previous}
        line = json.dumps(entry, separators=(",", ":")).encode()
        written = os.write(self._descriptor, line + b"\n")
        self._size_bytes += written
        if written <= len(line):
            raise OSError(28, "no space left on the device")
        self._previous = hash_of(line)

    def _rotate(self) -> None:
        self._close()
        for number in range(OLD_FILES_MAX - 1, 0, -1):
            if (old := _old_path(self._folder, number)).exists():
                old.replace(_old_path(self._folder, number + 1))
        path(self._folder).replace(_old_path(self._folder, 1))
        self._open()

    # --- entries that can occur at any rate --------------------------------------------------------------------------

    def count(self, event: str, subject: str, now_ns: int, count: int = 1, **fields: object) -> None:
        """Count ``count`` more occurrences. The first one writes a line at once; later ones are summed up, one line per
        TALLY_NS.

        ``fields``: of the last occurrence. ``now_ns``: monotonic.
        """
        key = event, subject
        if key not in self._tallies and len(self._tallies) >= TALLIES_MAX:
            key = event, ""
        tally = self._tallies.setdefault(key, _Tally())
        tally.count += count
        tally.fields = fields
        if now_ns >= tally.due_ns:
            self._write_tally(key, tally, now_ns)

    def settle(self, now_ns: int) -> None:
        """Write the counts that are due."""
        for key, tally in self._tallies.items():
            if tally.count and now_ns >= tally.due_ns:
                self._write_tally(key, tally, now_ns)

    def _write_tally(self, key: tuple[str, str], tally: _Tally, now_ns: int) -> None:
        count, tally.count = tally.count, 0
        tally.due_ns = now_ns + TALLY_NS
        self.write(key[0], **{"who": key[1] or "others", "count": count, **tally.fields})

    def close(self, **fields: object) -> None:
        """Write all open counts and a last line, then close the file."""
        for key, tally in self._tallies.items():
            if tally.count:
                self._write_tally(key, tally, tally.due_ns)
        self.write_through("stopped", **fields)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Tally(Struct):
    """Occurrences of one kind of entry since its last line. ``due_ns``: earliest time of the next line, monotonic."""

    count: int = 0
    due_ns: int = 0
    fields: dict[str, object] = field(default_factory=dict)


def _clipped(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        return f"{value[:TEXT_CHARACTERS_MAX]}... ({len(value)} characters)"
    return value


class Line(Struct, frozen=True):
    """Line of the audit log. ``problem``: why it can't follow the line before; "" if it does."""

    file: Path
    number: int  # in its file, from 1
    hash: str
    entry: dict[str, Any]
    problem: str = ""


def lines(folder: Path) -> Iterator[Line]:
    """Read all kept lines, oldest first, and check each against the line before. Raises AuditError."""
    previous: str | None = None
    for file in paths(folder):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise AuditError(f"{file} cannot be read: {error.strerror}") from None
        whole, _, rest = text.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
            try:
                entry = decoding.load_json(line)
            except ValueError:
                entry = None
            problem = ""
            if not isinstance(entry, dict):
                entry, problem = {}, "is no line of an audit log"
            elif previous is not None and entry.get("previous") != previous:
                problem = "does not fit the line before it"
            elif previous is None and file == path(folder) and entry.get("previous") != FIRST:
                problem = "is not the first that was written: those before are gone"
            previous = hash_of(line)
            yield Line(file, number, previous, entry, problem)
        if rest and file != path(folder):
            yield Line(file, whole.count(b"\n") + 2, hash_of(rest), {}, "was not written to its end")


READ_ONLY = frozenset({"status", "peers", "clients", "clock", "handlers"})  # verbs that change nothing


class Auditor:
    """Auditor of one coordinator. Clocks are monotonic, in ns."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._has_started = False
        self._counts: Counter[tuple[str, str]] = Counter()  # count at the last call, by (event, subject)
        self._callers: dict[str, list[str]] = {}
        self._limited: list[str] = []

    def started(self, **fields: object) -> None:
        self._has_started = True
        self._log.write_through("started", **fields)

    def observe(
        self,
        counters: Counters,
        security: Security | None,
        limited: Mapping[str, object],
        refusals: Mapping[str, Mapping[str, int]],
        impostors: int,
        now_ns: int,
    ) -> None:
        """Write entries for what has changed since the last call.

        ``limited``: callers with limited permissions. ``refusals``: numbers of refusals by kind and caller.
        """
        self._write_changes(security, sorted(limited))
        if security is not None:
            for key, count in counters.let_in_by.items():
                name = security.callers.get(key, "")
                self._count("let in", f"{name} {key}".strip(), count, now_ns)
        for name, count in counters.refused_by.items():
            self._count("refused: its role does not send that", name, count, now_ns)
        for event, by_caller in refusals.items():
            for name, count in by_caller.items():
                self._count(event, name, count, now_ns)
        last = counters.last_refused
        self._count("refused: no key, or nobody's", "strangers", counters.strangers_refused, now_ns, last)
        self._count("dropped: a key that may not call any more", "strangers", counters.strangers_dropped, now_ns)
        self._count("dropped: another's name", "impostors", impostors, now_ns)
        self._log.settle(now_ns)

    def _count(self, event: str, subject: str, count: int, now_ns: int, last: str = "") -> None:
        new = count - self._counts[event, subject]
        if new > 0:
            self._counts[event, subject] = count
            self._log.count(event, subject, now_ns, new, **({"last": last} if last else {}))

    def _write_changes(self, security: Security | None, limited: list[str]) -> None:
        """Write the keys, roles and permissions if they have changed."""
        callers: dict[str, list[str]] = {}
        roles = {} if security is None else security.roles
        for key, name in () if security is None else security.callers.items():
            callers.setdefault(f"{name} ({roles.get(key, Role.INSTANCE)})", []).append(key)
        if (callers, limited) != (self._callers, self._limited):
            self._callers, self._limited = callers, limited
            self._log.write_through("may call from now on", callers=callers, limited=limited)

    def write_verb(self, user: str, verb: str, argument: str) -> None:
        """Write that an operator has asked for ``verb``, unless the verb only reads."""
        if verb not in READ_ONLY:
            self._log.write_through("operator", who=user, verb=verb, argument=argument)

    def close(self, **fields: object) -> None:
        if self._has_started:
            self._log.close(**fields)
