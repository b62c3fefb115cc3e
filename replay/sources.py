"""File with all of a log that a replay reads, small enough to be kept beside the tests of a program.

    0-7 "IMMREC1\\n" · 8-15 CRC-64/XZ of what follows, little endian · what follows: zlib of a MessagePack map

It is read whole into memory. Records and trailers are kept as the log has them, so their own check bytes are too.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from immortal.coordinator.core.errors import LogError, LogFormatError
from immortal.coordinator.core.interfaces import LogSummary
from immortal.coordinator.log import LogIdentity, check_value
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.files import opener
from immortal.replay.plan import usable_checkpoints

MAGIC = b"IMMREC1\n"
_FRONT_SIZE_BYTES = len(MAGIC) + 8


class _Contents(msgspec.Struct):
    identity: LogIdentity
    summary: LogSummary
    checkpoints: dict[int, bytes]  # blobs of checkpoints, by checkpoint ID
    values: list[bytes]  # from the summary's first record to its last


class RecordedLog:
    """:class:`RecordSource` over the contents of such a file."""

    def __init__(self, contents: _Contents) -> None:
        self.identity = contents.identity
        self.problems: list[str] = []
        self.trusts_pickle = False
        self._contents = contents

    @classmethod
    def of(cls, source: RecordSource) -> RecordedLog:
        """Copy what ``source`` keeps now. Raises LogError for what is damaged, or was trimmed meanwhile."""
        summary = source.summary()
        if source.problems:
            raise LogError("; ".join(source.problems))
        if summary.extensions is None:
            raise LogError("the log is empty: the instance has never completed its first start")
        checkpoints = {
            header.checkpoint_id: b"".join(source.checkpoint_chunks(header.checkpoint_id))
            for header in usable_checkpoints(summary)
        }
        summary = replace(summary, letters={})  # of what nobody waits for a replay makes nothing
        values = list(source.values(summary.first_sequence_id, summary.last_sequence_id))
        # What a checkpoint has unacknowledged is to be sent again by a recovery: a replay has no use for it.
        headers = [replace(header, unacknowledged={}) for header in summary.checkpoints]
        return cls(_Contents(source.identity, replace(summary, checkpoints=headers), checkpoints, values))

    @classmethod
    def read(cls, path: Path) -> RecordedLog:
        """Read such a file. Raises LogFormatError if it is another kind of file, or damaged; OSError."""
        data = path.read_bytes()
        if not data.startswith(MAGIC):
            raise LogFormatError(
                f"{path} is no recorded log (it begins with {data[:8]!r}): 'immortal log export NAME FILE' makes one"
            )
        packed = memoryview(data)[_FRONT_SIZE_BYTES:]
        if crc64(packed) != int.from_bytes(data[len(MAGIC) : _FRONT_SIZE_BYTES], "little"):
            raise LogFormatError(f"{path} is damaged: its check bytes are not those of its contents")
        try:
            contents = decoding.decode(zlib.decompress(packed), type=_Contents)
        except (decoding.DecodeError, zlib.error) as error:
            raise LogFormatError(f"{path} can't be read, perhaps it is of another version: {error}") from None
        found = cls(contents)
        for sequence_id, value in enumerate(contents.values, contents.summary.first_sequence_id):
            check_value(value, sequence_id, found.identity.committer_id)
        return found

    def write(self, path: Path) -> int:
        """Write a new file; return its size in bytes. Raises OSError, FileExistsError among them."""
        packed = zlib.compress(msgspec.msgpack.encode(self._contents), 9)
        data = MAGIC + crc64(packed).to_bytes(8, "little") + packed
        with open(path, "xb", opener=opener) as file:
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


# A log that two replays in one process share.


class SharedSource:
    """One reader for several threads: a log can't be opened twice in one process."""

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
