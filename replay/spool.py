"""A queue of output batches that goes on in a temporary file when it gets long."""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from itertools import groupby
from typing import IO

import msgspec

from immortal.protocol import decoding
from immortal.replay.compare import Key, Outputs

_SIZE = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(tuple[list[tuple[Key, int]], bytes, int]).decode


class MemoryBudget:
    """What several spools together may keep in memory, in bytes."""

    def __init__(self, size_bytes_max: int) -> None:
        self.size_bytes_max = size_bytes_max
        self.used_bytes = 0


class Spool:
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
