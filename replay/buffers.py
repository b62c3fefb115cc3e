"""A queue of output batches that goes on in a temporary file when it gets long."""

from __future__ import annotations

import struct
import tempfile
import threading
from collections import deque
from itertools import groupby
from typing import IO

import msgspec

from immortal.protocol import decoding
from immortal.protocol.extensions import pack_numbers
from immortal.replay.comparison import Key, Outputs

_SIZE = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(tuple[list[tuple[Key, int]], bytes, int]).decode


class MemoryBudget:
    """Limit in bytes on what several spools together keep in memory."""

    def __init__(self, size_bytes_max: int) -> None:
        self.size_bytes_max = size_bytes_max
        self.used_bytes = 0


class SpillingQueue:
    """First in, first out. Beyond the budget, what is appended waits on disk; the file is gone with its last batch."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._memory: deque[Outputs] = deque()
        self._file: IO[bytes] | None = None
        self._file_count = 0
        self._read_offset = self._write_offset = 0

    def append(self, batch: Outputs, /) -> None:
        budget = self._budget
        if self._file is None and budget.used_bytes + batch.size_bytes <= budget.size_bytes_max:
            self._memory.append(batch)
            budget.used_bytes += batch.size_bytes
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="immortal-")  # noqa: SIM115 (it is closed when it is read)
            self._read_offset = self._write_offset = 0
        runs = [(key, len(list(same))) for key, same in groupby(batch.keys)]
        data = _encode((runs, batch.payload, batch.first_position))
        self._file.seek(self._write_offset)
        self._file.write(_SIZE.pack(len(data)))
        self._file.write(data)
        self._write_offset += _SIZE.size + len(data)
        self._file_count += 1

    def popleft(self) -> Outputs:
        if self._memory:
            batch = self._memory.popleft()
            self._budget.used_bytes -= batch.size_bytes
            return batch
        if self._file is None:
            raise IndexError("pop from an empty spool")
        self._file.seek(self._read_offset)
        (size_bytes,) = _SIZE.unpack(self._file.read(_SIZE.size))
        runs, payload, first_position = _decode(self._file.read(size_bytes))
        self._read_offset += _SIZE.size + size_bytes
        self._file_count -= 1
        if not self._file_count:
            self._file.close()
            self._file = None
        return Outputs([key for key, count in runs for _ in range(count)], payload, first_position)

    def __len__(self) -> int:
        return len(self._memory) + self._file_count


# What the old code draws of numbers, on its way to the new code, which is to draw the same for what it does alike.
#
# The new code gets a record once it is known what the old code has drawn in it: so the old code goes ahead.


AHEAD_SIZE_BYTES_MAX = 16 << 20  # of numbers that the new code has not got yet: beyond it the old code ...
PAUSE_S = 0.05  # ... pauses so long at each message
MESSAGE_SIZE_BYTES = 100  # about what a message takes in memory beside its bytes


class DrawnNumbersQueue:
    """For two threads: the old code's tells, the new code's asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()  # (record, data of a Numbers message)
        self._size_bytes = 0
        self._known_sequence_id = -1  # what was drawn up to this record
        self._is_all_known = False
        self._is_told = False
        self._is_begun = False

    def drawn(self, sequence_id: int, data: bytes, *, complete: bool) -> None:
        """The old code says so. ``complete``: there are no more of this record, nor of any before it."""
        with self._changed:
            self._is_told = True
            if complete:
                self._known_sequence_id = sequence_id
                return
            self._waiting.append((sequence_id, data))
            self._size_bytes += len(data) + MESSAGE_SIZE_BYTES
            self._changed.wait_for(lambda: self._size_bytes <= AHEAD_SIZE_BYTES_MAX, PAUSE_S)

    def end(self) -> None:
        """Nothing more comes, or nothing at all: the old code tells no numbers."""
        with self._changed:
            self._is_all_known = True

    def before(self, sequence_id: int) -> list[bytes] | None:
        """The data of the Numbers messages that the new code is to get before this record; None: not known yet.

        It gets one in any case before its first record: then it knows that it is to draw the same.
        """
        with self._changed:
            if not self._is_all_known and self._known_sequence_id < sequence_id:
                return None
            found = []
            while self._waiting and self._waiting[0][0] <= sequence_id:
                data = self._waiting.popleft()[1]
                self._size_bytes -= len(data) + MESSAGE_SIZE_BYTES
                found.append(data)
            if self._is_told and not self._is_begun:
                self._is_begun = True
                found = found or [pack_numbers(sequence_id)]
            self._changed.notify_all()
            return found
