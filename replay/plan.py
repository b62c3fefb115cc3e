"""Plan of a replay: the requested part of a log, and the route through this log; the errors; a recorded log's file.

The file has all of a log that a replay reads, small enough to keep beside a program's tests.

    0-7 "IMMREC1\n" · 8-15 CRC-64/XZ of what follows, little endian · what follows: zlib of a MessagePack map

It is read whole into memory. It keeps records and trailers in the log's form, with their own check bytes.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field, structs
from msgspec.structs import replace

from immortal.coordinator.core.errors import LogError, LogFormatError
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSummary, VersionStart
from immortal.coordinator.log.identity import LogIdentity, check_value
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import opener, removed_on_error
from immortal.protocol.verdicts import Unsaved


class ReplayError(ImmortalError):
    """Raised if the replay could not be done: the message says why and what to do."""


class AppExitedError(ReplayError):
    """Raised if the app's process ended before the replay was complete, and not because a handler raised.

    ``fed_sequence_id``: the last record that it received. ``sequence_id``: the record at which it ends, if
    :func:`immortal.replay.host.find_end` has found it.
    """

    def __init__(self, message: str, exit_status: int | None) -> None:
        super().__init__(message)
        self.exit_status = exit_status  # as subprocess gives it, negative for a signal; None: not started by us
        self.fed_sequence_id = -1
        self.sequence_id: int | None = None


class StateUnsavedError(ReplayError):
    """Raised if the app's state at the end of the replay can't be saved: ``unsaved`` says since when."""

    def __init__(self, unsaved: Unsaved) -> None:
        since, why = "", f" ({unsaved.why})" if unsaved.why else ""
        if unsaved.sequence_id >= 0:
            method = f", {unsaved.method}" if unsaved.method else ""
            since, why = f" since record {unsaved.sequence_id}, message {unsaved.message_index}{method}", ""
        super().__init__(f"its state can't be saved{since}: {unsaved.text}{why}")
        self.unsaved = unsaved


class UpgradeFailedError(ReplayError):
    """Raised if the app's own upgrade of the state failed."""


# Other errors of this package.


class LogViewError(ImmortalError):
    """Raised if a log can't be shown as requested, or the process that shows it can't be reached."""


def unshowable_state_text(name: str, problem: str) -> str:
    """Return the error text for a state that can't be shown because other code than that of ``name`` made its log."""
    return (
        f"{name} never had the state that this replay gives: {problem}. Its code has changed without an upgrade, or"
        f" does what a replay can't repeat: see 'immortal verify {name}', or replay with the code that made the log"
    )


MAGIC = b"IMMREC1\n"
_FRONT_SIZE_BYTES = len(MAGIC) + 8


class _Contents(msgspec.Struct):
    identity: LogIdentity
    summary: LogSummary
    checkpoints: dict[int, bytes]  # blobs of checkpoints, by checkpoint ID
    values: list[bytes]  # from the summary's first record to its last


class RecordedLog:
    """:class:`RecordSource` over the contents of a recorded log's file."""

    def __init__(self, contents: _Contents) -> None:
        self.identity = contents.identity
        self.problems: list[str] = []
        self.trusts_pickle = False
        self._contents = contents

    @classmethod
    def of(cls, source: RecordSource) -> RecordedLog:
        """Copy what ``source`` has now. Raises LogError if it is damaged, or was trimmed meanwhile."""
        summary = source.summary()
        if source.problems:
            raise LogError("; ".join(source.problems))
        if summary.extensions is None:
            raise LogError("the log is empty: the instance has never completed its first start")
        checkpoints = {
            header.checkpoint_id: b"".join(source.checkpoint_chunks(header.checkpoint_id))
            for header in usable_checkpoints(summary)
        }
        summary = replace(summary, letters={})  # a replay does not use dead letters
        values = list(source.values(summary.first_sequence_id, summary.last_sequence_id))
        # A recovery sends a checkpoint's unacknowledged outputs again; a replay does not use them.
        headers = [replace(header, unacknowledged={}) for header in summary.checkpoints]
        return cls(_Contents(source.identity, replace(summary, checkpoints=headers), checkpoints, values))

    @classmethod
    def read(cls, path: Path) -> RecordedLog:
        """Read a recorded log's file. Raises LogFormatError if it is of another kind, or damaged; OSError."""
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            raise LogFormatError(
                f"{path} is not a recorded log (it begins with {data[:8]!r}): 'immortal log export NAME FILE' makes one"
            )
        packed = memoryview(data)[_FRONT_SIZE_BYTES:]
        if crc64(packed) != int.from_bytes(data[len(MAGIC) : _FRONT_SIZE_BYTES], "little"):
            raise LogFormatError(f"{path} is damaged: its check bytes are not those of its contents")
        try:
            contents = decoding.decode(zlib.decompress(packed), type=_Contents)
        except (decoding.DecodeError, zlib.error) as error:
            raise LogFormatError(f"{path} can't be read, perhaps it has another version: {error}") from None
        found = cls(contents)
        for sequence_id, value in enumerate(contents.values, contents.summary.first_sequence_id):
            check_value(value, sequence_id, found.identity.committer_id)
        return found

    def write(self, path: Path) -> int:
        """Write a new file; return its size in bytes. Raises OSError, such as FileExistsError."""
        packed = zlib.compress(msgspec.msgpack.encode(self._contents), 9)
        data = MAGIC + crc64(packed).to_bytes(8, "little") + packed
        with open(path, "xb", opener=opener) as file, removed_on_error(path):
            file.write(data)
        return len(data)

    def summary(self) -> LogSummary:
        return self._contents.summary

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        start = self._contents.summary.first_sequence_id
        end = None if last_sequence_id is None else max(0, last_sequence_id + 1 - start)
        yield from self._contents.values[max(0, first_sequence_id - start) : end]

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        """Yield the blob of a checkpoint in pieces. Raises LogError if the file has no such checkpoint."""
        blob = self._contents.checkpoints.get(checkpoint_id)
        if blob is None:
            raise LogError(f"the recorded log has no checkpoint {checkpoint_id}")
        yield blob


# Sharing of one log between replays in one process.


class SharedSource:
    """Reader shared by several threads: a log can't be opened twice in one process."""

    def __init__(self, source: RecordSource) -> None:
        self.identity = source.identity
        self.trusts_pickle = source.trusts_pickle
        self._source = source
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def summary(self) -> LogSummary:
        with self._lock:
            summary = self._source.summary()
            self.problems = self._source.problems
            return summary

    def values(self, first_sequence_id: int, last_sequence_id: int | None = None) -> Iterator[bytes]:
        return self._locked(self._source.values(first_sequence_id, last_sequence_id))

    def checkpoint_chunks(self, checkpoint_id: int) -> Iterator[bytes]:
        return self._locked(self._source.checkpoint_chunks(checkpoint_id))

    def _locked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


NO_CHECKPOINT = "the log has no sound checkpoint to begin at: 'immortal log verify' says what is damaged"

OWN_VERSION = 0
"""Value of ``ReplayPlan.upgrade_to``: the version of the app's own class, whatever that is."""


class ReplayPlan(Struct, frozen=True):
    """Request for a replay. Each field can be left open.

    ``checkpoint_id``: where to begin; None: the newest sound checkpoint from which ``last_sequence_id`` can be reached.
    ``last_sequence_id``: the last record; None: the last one of the log when the replay begins.
    ``last_message``: the last message of that record to replay, counted from 0.
    ``before_last``: begin before the last record in any case, so that it is replayed and not only reached.
    ``last_version``: the version of the state at the end; None: the one that handled ``last_sequence_id``, or without
    that the newest. It matters only if an upgrade follows directly after the last record.
    ``upgrade_to``: a what-if: this version (OWN_VERSION: the app's own) handles the records. It takes over directly
    after the checkpoint, and no upgrade of the log's past is repeated.
    ``follow``: wait for more records at the end of the log, until ``last_sequence_id`` (None: until stopped).
    """

    checkpoint_id: int | None = None
    last_sequence_id: int | None = None
    last_message: int | None = None
    before_last: bool = False
    last_version: int | None = None
    upgrade_to: int | None = None
    follow: bool = False


class Route(Struct, frozen=True):
    """Plan for one log, without open questions.

    ``last_sequence_id`` None: the replay follows the log until it is stopped. ``versions``: the upgrades on the way, in
    order. ``notes``: notes for the operator.
    """

    checkpoint: CheckpointHeader
    last_sequence_id: int | None
    last_message: int | None = None
    versions: Sequence[VersionStart] = ()
    upgrade_to: int | None = None
    notes: Sequence[str] = field(default_factory=list)

    @property
    def last_version(self) -> int:
        """Version whose code handles the last record, or takes over directly after it; not that of a what-if."""
        return self.versions[-1].version if self.versions else self.checkpoint.version

    @property
    def record_count(self) -> int | None:
        """Number of records to replay; None if there is no end."""
        return None if self.last_sequence_id is None else self.last_sequence_id - self.checkpoint.sequence_id


def route_until(route: Route, sequence_id: int) -> Route:
    """Return ``route`` with that record as its last one."""
    versions = [start for start in route.versions if start.sequence_id <= sequence_id]
    return structs.replace(route, last_sequence_id=sequence_id, last_message=None, versions=versions)


def plan_route(plan: ReplayPlan, source: RecordSource, summary: LogSummary) -> Route:
    """Turn a plan into a route through the log ``source``. Raises ReplayError if the log does not allow the plan."""
    if summary.extensions is None:
        raise ReplayError("the log is empty: the instance has never completed its first start")
    last = _last_sequence_id(plan, summary)
    latest = last
    if last is not None and (plan.before_last or plan.last_message is not None):
        latest = last - 1
    notes: list[str] = []
    if plan.checkpoint_id is None:
        notes += source.problems
        behind = plan.last_sequence_id if plan.last_version is None else None
        checkpoint = _newest_checkpoint(source, summary, latest, behind, notes)
    else:
        checkpoint = _given_checkpoint(plan.checkpoint_id, source, summary, latest)
    versions: list[VersionStart] = []
    if plan.upgrade_to is None:
        versions = _versions_on_the_way(summary.versions, checkpoint, last, plan)
    return Route(checkpoint, last, plan.last_message, versions, plan.upgrade_to, notes)


def plan_first(checkpoint_ids: Iterable[int], source: RecordSource, summary: LogSummary, plan: ReplayPlan) -> Route:
    """Plan a route like ``plan`` from the first of these checkpoints that the log allows; notes say why not from those
    before. Raises ReplayError if there is none."""
    problems: list[str] = []
    for checkpoint_id in checkpoint_ids:
        try:
            route = plan_route(replace(plan, checkpoint_id=checkpoint_id), source, summary)
        except ReplayError as error:
            problems.append(str(error))
        else:
            return replace(route, notes=[*route.notes, *problems])
    raise ReplayError(problems[0] if problems else NO_CHECKPOINT)


def _last_sequence_id(plan: ReplayPlan, summary: LogSummary) -> int | None:
    last = plan.last_sequence_id
    if last is None:
        return None if plan.follow else summary.last_sequence_id
    if last < 0:
        raise ReplayError(f"record {last} was asked for; records are counted from 0")
    if last > summary.last_sequence_id and not plan.follow:
        raise ReplayError(
            f"record {last} is not in the log: its last one is {summary.last_sequence_id} (--follow waits for it)"
        )
    return last


def usable_checkpoints(summary: LogSummary) -> list[CheckpointHeader]:
    """Return the checkpoints from which a replay can begin: every record after them is kept."""
    return [header for header in summary.checkpoints if header.sequence_id + 1 >= summary.first_sequence_id]


def _given_checkpoint(
    checkpoint_id: int, source: RecordSource, summary: LogSummary, latest: int | None
) -> CheckpointHeader:
    for header in usable_checkpoints(summary):
        if header.checkpoint_id != checkpoint_id:
            continue
        if latest is not None and header.sequence_id > latest:
            raise ReplayError(
                f"checkpoint {checkpoint_id} was taken {place_of(header)}: "
                f"a replay from it can't end at record {latest}; choose an earlier checkpoint"
            )
        problem = checkpoint_problem(source, header)
        if problem is not None:
            raise ReplayError(f"checkpoint {checkpoint_id} can't be used: {problem}; choose another one")
        return header
    kept = ", ".join(f"{header.checkpoint_id} ({place_of(header)})" for header in usable_checkpoints(summary))
    damaged = "".join(f"; {problem}" for problem in source.problems)
    raise ReplayError(
        f"there is no checkpoint {checkpoint_id} in the log to begin at; it holds {kept or 'none that can be used'}"
        f"{damaged}"
    )


def _newest_checkpoint(
    source: RecordSource, summary: LogSummary, latest: int | None, upgraded_at: int | None, notes: list[str]
) -> CheckpointHeader:
    """Return the newest sound checkpoint up to ``latest``. Directly after the record ``upgraded_at``, a checkpoint of
    an upgrade holds another state than the record's, so it comes last."""
    usable = usable_checkpoints(summary)
    within = [header for header in usable if latest is None or header.sequence_id <= latest]
    upgrades = {start.version for start in summary.versions if start.sequence_id == upgraded_at}
    within.sort(key=lambda header: header.sequence_id != upgraded_at or header.version not in upgrades)
    for header in reversed(within):
        problem = checkpoint_problem(source, header)
        if problem is None:
            return header
        notes.append(f"checkpoint {header.checkpoint_id} is left out: {problem}")
    if within or not usable:
        raise ReplayError(NO_CHECKPOINT + "".join(f"; {note}" for note in notes))
    oldest = usable[0]
    raise ReplayError(
        f"no checkpoint before that record is kept: the oldest one is {oldest.checkpoint_id}, "
        f"taken {place_of(oldest)} (--keep-log-days and --keep-log-mb of the instance say how much is kept)"
    )


def place_of(header: CheckpointHeader) -> str:
    """Return a checkpoint's place in the log, in words."""
    return f"after record {header.sequence_id}" if header.sequence_id >= 0 else "before record 0"


def checkpoint_problem(source: RecordSource, header: CheckpointHeader) -> str | None:
    """Check a checkpoint's blob; return the problem as text, or None if it is sound."""
    try:
        for _ in source.checkpoint_chunks(header.checkpoint_id):
            pass
    except LogError as error:
        return str(error)
    return None


def _versions_on_the_way(
    versions: Sequence[VersionStart], checkpoint: CheckpointHeader, last: int | None, plan: ReplayPlan
) -> list[VersionStart]:
    """Return the upgrades between the checkpoint and the end.

    A version can return after a downgrade. The checkpoint is from the last start of its own version at or before its
    record.
    """
    begun = 0
    for index, start in enumerate(versions):
        if start.sequence_id < checkpoint.sequence_id or (
            start.sequence_id == checkpoint.sequence_id and start.version == checkpoint.version
        ):
            begun = index + 1
    on_the_way = [start for start in versions[begun:] if last is None or start.sequence_id <= last]
    if last is None or (plan.last_sequence_id is None and plan.last_version is None):
        return on_the_way
    before_last = [start for start in on_the_way if start.sequence_id < last]
    at_last = on_the_way[len(before_last) :]
    if plan.last_version is not None:
        for index, start in enumerate(at_last):
            if start.version == plan.last_version:
                return [*before_last, *at_last[: index + 1]]
    return before_last
