"""Find the logs that a user names, and read their records in bounded pieces beside a live writer.

A user gives URLs of logs, databases and archives, log folders, folders of an instance, a registry's home, or patterns
of them. A worker of Spark keeps logs open for later tasks.
"""

from __future__ import annotations

import glob
import itertools
import os
import struct
import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.authentication import Macs, authenticate_records, forged_record
from immortal.coordinator.log.backend import View
from immortal.coordinator.log.format import INT, META_TRIMMED, SEQUENCE_KEY
from immortal.coordinator.log.identity import first_and_last_sequence_id, meta_value, read_identity
from immortal.coordinator.log.open import log_exists, open_reader, place_of
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import first_record_at
from immortal.coordinator.log_url import FOLDERS, split_url
from immortal.pipeline.decode import PADDING, Values
from immortal.pipeline.errors import LogChangedError, SourceError
from immortal.protocol import decoding
from immortal.protocol.varint import Readable


def paths_of(options: Mapping[str, str]) -> list[str]:
    """Return the paths in the options path (separated by commas) and paths (a JSON list, as load([...]) writes it)."""
    paths = [part.strip() for part in options.get("path", "").split(",")]
    if listed := options.get("paths"):
        try:
            values = decoding.load_json(listed)
        except ValueError:
            values = None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise SourceError(f"option paths: {listed!r}: a JSON list of strings was expected")
        paths += values
    return [path for path in paths if path]


def folder_of(url: str) -> str:
    """Return the folder of a ``file://`` URL, as Spark writes paths; any other text unchanged."""
    return url.removeprefix("file://")


def log_folders(paths: list[str], *, may_be_none: bool = False) -> list[str]:
    """Return every log at ``paths``, folders absolute, sorted, each once. Raises SourceError if there is none."""
    if not paths:
        raise SourceError("no path was given: load() takes log folders, or a registry's home")
    found: dict[str, str] = {}
    for given in paths:
        if given.startswith("file:/") and not given.startswith("file://"):
            given = f"file://{given.removeprefix('file:')}"  # as catalogs write it
        path = folder_of(given)
        if split_url(path)[0] != FOLDERS or ("#" in given and path != given):
            found |= {url: url for url in _urls(given, may_be_none=may_be_none)}
            continue
        matches = _matches(path)
        folders = [folder for match in matches for folder in _folders(Path(match))]
        if not folders and path != given and os.path.isdir(path):
            folders += _urls(given, may_be_none=True)
        if not folders and not may_be_none:
            raise SourceError(_nothing_at(path, matches))
        for folder in folders:
            if isinstance(folder, str):
                found.setdefault(folder, folder)
            else:
                found.setdefault(os.path.realpath(folder), os.path.abspath(folder))
    return sorted(found.values())


def _matches(path: str) -> list[str]:
    return sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]


def _urls(url: str, *, may_be_none: bool) -> list[str]:
    """Return the logs that are in no folder: the named one, or all of a database or archive. Raises SourceError."""
    try:
        place = place_of(url)
        names = place.instances()
        if names is None:
            if not place.exists():
                raise SourceError(f"there is no log {url}")
            return [url]
    except LogError as error:
        raise SourceError(str(error)) from None
    if not names and not may_be_none:
        raise SourceError(f"there is no log of any instance in {url}")
    return [f"{url.rstrip('/')}#{name}" for name in names]


def _nothing_at(path: str, matches: list[str]) -> str:
    if not matches:
        return f"nothing matches {path}"
    if not os.path.exists(matches[0]):
        return f"there is no folder {path}"
    if not os.path.isdir(matches[0]):
        return f"{path} is a file: a log folder, or a registry's home, was expected"
    expected = "a log folder, the URL of a log or of an archive, or a registry's home"
    return f"there is no log in {path}: {expected}, was expected"


def _folders(path: Path) -> Iterator[Path | str]:
    """Yield log folders, and the URLs of logs that are in none."""
    if not path.is_dir():
        return
    if log_exists(path):
        yield path
        return
    if log_exists(path / "log"):
        yield path / "log"
        return
    try:
        entries = sorted(path.iterdir())
    except OSError:  # not readable
        return
    for entry in entries:
        if entry.suffix == ".toml" and not entry.name.startswith("."):
            log = registered_log(entry)
            try:
                exists = log_exists(log)
            except LogError:  # opening it says what is wrong
                exists = True
            if exists:  # an instance that was never started has none
                yield log
        elif entry.is_dir() and log_exists(entry / "log"):
            yield entry / "log"


def registered_apps(paths: list[str]) -> dict[str, str]:
    """Return the app of each instance whose settings are in a home, or beside a log, of ``paths``."""
    found = {}
    for path in paths:
        for match in _matches(os.path.abspath(folder_of(path).removeprefix("file:"))):
            for settings in (
                *Path(match).glob("*.toml"),
                Path(f"{match}.toml"),
                Path(f"{os.path.dirname(match)}.toml"),
            ):
                if app := _setting(settings, "app"):
                    found[settings.stem] = app
    return found


def _setting(settings: Path, name: str) -> str | None:
    """Return a text from an instance's settings (immortal.coordinator.config writes them); None without one."""
    try:
        value = tomllib.loads(settings.read_text()).get(name)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, str) else None


def registered_log(settings: Path) -> Path | str:
    """Return the log that an instance's settings name: a folder or a URL."""
    log = _setting(settings, "log")
    if log is None:
        return settings.with_suffix("") / "log"
    scheme, location = split_url(log)
    return settings.parent / location if scheme == FOLDERS else log


# One view covers at most this much: it holds back the writer's free pages, and all of it is in memory.
PIECE_SIZE_BYTES = 16 << 20
PIECE_ROWS_MAX = 50_000
SMALL_SIZE_BYTES = 16 << 10  # smaller values are copied faster by LMDB than taken from its memory
OPEN_LOGS_MAX = 64  # each takes two file descriptors


NO_LIMIT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LogRange:
    """Records ``first`` to ``end`` - 1 of a log, as they were when the range was created.

    ``end`` NO_LIMIT: to the log's end when it is read. ``size_bytes``: about how much it takes on disk.
    """

    folder: str
    instance: str
    committer_id: int
    first: int
    end: int
    size_bytes: int = field(default=0, compare=False)

    def part(self, first: int, end: int) -> LogRange:
        """Return the part from ``first`` to ``end`` - 1; empty where there is none."""
        first, end = max(first, self.first), min(end, self.end)
        size_bytes = self.size_bytes * max(0, end - first) // max(1, self.end - self.first)
        return replace(self, first=first, end=end, size_bytes=size_bytes)


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that should be there and are not."""

    first: int
    reason: str


_open: OrderedDict[tuple[str, str], tuple[tuple[int, object], LogReader]] = OrderedDict()  # by Place.key


def open_shared(folder: str) -> LogReader:
    """Return the log, opened once in this process, as LMDB requires. It stays open for later tasks.

    Raises the errors of :func:`immortal.coordinator.log.open_reader`.
    """
    place = place_of(folder)
    version = (os.getpid(), place.version())
    known = _open.pop(place.key, None)
    if known is not None and known[0] == version and _is_same(known[1], version[1]):
        _open[place.key] = known
        return known[1]
    if known is not None and known[0][0] == os.getpid():  # otherwise it is the parent's, copied by fork
        known[1].close()
    log = open_reader(place)
    if version[1] is not None or place.is_shared:
        _open[place.key] = (version, log)
        while len(_open) > OPEN_LOGS_MAX:
            _open.popitem(last=False)[1][1].close()
    return log


def _is_same(log: LogReader, version: object) -> bool:
    """Return True if this is still the same log; if no version tells, compare the log's identity."""
    if version is not None:
        return True
    try:
        with log.view() as view:
            return read_identity(view, log.where, None) == log.identity
    except LogError:  # opening it again will say what is wrong
        return False


def close_shared() -> None:
    """Close every log that this process has open."""
    while _open:
        _open.popitem()[1][1].close()


def whole_range(folder: str) -> LogRange:
    """Return the range of all records that the log has now. Raises as :func:`open_shared`."""
    return range_of(open_shared(folder), folder)


def require_one_each(ranges: Iterable[LogRange]) -> list[LogRange]:
    """Return the ranges. Raises SourceError if two logs belong to one instance."""
    found: dict[str, LogRange] = {}
    for each in ranges:
        other = found.setdefault(each.instance, each)
        if other is not each:
            raise SourceError(f"{other.folder} and {each.folder} are both logs of {each.instance!r}: give one")
    return list(found.values())


def range_of(log: LogReader, folder: str) -> LogRange:
    """Return the range of all records that an open log has now."""
    with log.view() as view:
        first, last = first_and_last_sequence_id(view)
        size_bytes = view.size("records")[0]
    return LogRange(folder, log.identity.instance_name, log.identity.committer_id, first, last + 1, size_bytes)


def open_range(wanted: LogRange) -> LogReader:
    """Return the log of the range ``wanted``. Raises LogChangedError if another log has taken its place."""
    try:
        log = open_shared(wanted.folder)
    except LogError as error:
        if log_exists(wanted.folder):
            raise
        raise LogChangedError(f"the log in {wanted.folder} was removed while it was read") from error
    if log.identity.committer_id != wanted.committer_id:
        raise LogChangedError(
            f"the log in {wanted.folder} was replaced while it was read: it had committer {wanted.committer_id},"
            f" now it has {log.identity.committer_id}; run it again"
        )
    return log


def read_range(wanted: LogRange) -> Iterator[Values | Gap]:
    """Yield all values of the range in order, unchecked, and a Gap for missing records at their place.

    Raises LogChangedError if records were trimmed away after the range was created.
    """
    log = open_range(wanted)
    try:
        yield from read_open(log, wanted if wanted.end != NO_LIMIT else replace(wanted, end=log.ends()[1] + 1))
    finally:
        log.release()


def read_open(log: LogReader, wanted: LogRange) -> Iterator[Values | Gap]:
    """Read a range of an open log, as :func:`read_range`. Raises ForgedLogError too if the log has a key."""
    expected = wanted.first
    are_small = True  # the next values are expected to be as large as the last ones
    while expected < wanted.end:
        with log.view(copies=are_small) as view:
            values = _piece(view, expected, wanted.end)
            if values is not None and log.macs is not None:
                _authenticate(view, log.macs, values)
        if values is None:
            yield _gap(log, wanted, expected, wanted.end - 1)
            return
        log.count_bytes_touched(len(values.raw))
        are_small = len(values.raw) < len(values.sequence_ids) * SMALL_SIZE_BYTES
        parts = [part for part in _contiguous(values) if part.sequence_ids[0] >= expected]
        if not parts:  # a damaged key led back: reading can't continue
            yield _gap(log, wanted, expected, wanted.end - 1)
            return
        for part in parts:
            first = int(part.sequence_ids[0])
            if first < expected:
                continue
            if first > expected:
                yield _gap(log, wanted, expected, first - 1)
            yield part
            expected = first + len(part.sequence_ids)


def _authenticate(view: View, macs: Macs, values: Values) -> None:
    rows = [(sequence_id, values.value(index)) for index, sequence_id in enumerate(values.sequence_ids.tolist())]
    are = authenticate_records(view, macs, rows)
    if not all(are):
        raise forged_record(rows[are.index(False)][0])


def _gap(log: LogReader, wanted: LogRange, first: int, last: int) -> Gap:
    with log.view() as view:
        trimmed = meta_value(view, META_TRIMMED, INT)
    if trimmed is not None and trimmed >= first:
        raise LogChangedError(
            f"the log of {wanted.instance!r} in {wanted.folder} was trimmed up to record {trimmed} while record {first}"
            " was to be read: run it again, or let the instance keep more checkpoints (keep_checkpoints)"
        )
    return Gap(first, f"record {first} is missing" if first == last else f"records {first} to {last} are missing")


def _piece(view: View, first: int, end: int) -> Values | None:
    """Return the next values: about PIECE_SIZE_BYTES, at least one value if there is one; None if there is none."""
    keys: list[Readable] = []
    found: list[Readable] = []
    rest_bytes = PIECE_SIZE_BYTES
    rows_max = min(PIECE_ROWS_MAX, end - first)  # later rows are not even fetched
    for key, value in view.scan("records", SEQUENCE_KEY.pack(first)):
        keys.append(key)
        found.append(value)
        rest_bytes -= len(value)
        if rest_bytes <= 0 or len(keys) == rows_max:
            break
    joined = b"".join(keys)
    if len(joined) != SEQUENCE_KEY.size * len(keys):
        raise struct.error(f"a key behind record {first} is no sequence ID")
    sequence_ids = np.frombuffer(joined, ">u8").astype(np.int64)
    outside = np.flatnonzero(sequence_ids >= end)
    count = int(outside[0]) if outside.size else len(sequence_ids)
    if not count:
        return None
    del found[count:]
    ends = np.cumsum(np.fromiter(map(len, found), np.int64, count))
    starts = np.concatenate(([0], ends[:-1]))
    return Values(b"".join((*found, PADDING)), sequence_ids[:count], starts, ends)


def _contiguous(values: Values) -> Iterator[Values]:
    """Cut ``values`` at each sequence ID that does not follow the one before."""
    cuts = np.flatnonzero(np.diff(values.sequence_ids) != 1) + 1
    if not cuts.size:
        yield values
        return
    for first, end in itertools.pairwise([0, *cuts.tolist(), len(values.sequence_ids)]):
        part = slice(first, end)
        yield Values(values.raw, values.sequence_ids[part], values.start[part], values.end[part])


# Estimates from a few reads of a log: the record at a moment.


def within_time(wanted: LogRange, first_ns: int, last_ns: int) -> LogRange:
    """Leave out the records before ``first_ns``, and those after ``last_ns``, in ns since the Unix epoch."""
    if (first_ns, last_ns) == (0, NO_LIMIT):
        return wanted
    log = open_range(wanted)
    first, end = wanted.first, min(wanted.end, log.ends()[1] + 1)
    begin = first_record_at(log, first_ns, first, end) if first_ns else first
    stop = first_record_at(log, last_ns + 1, first, end) if last_ns != NO_LIMIT else end
    return wanted.part(begin, stop)
