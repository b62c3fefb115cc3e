"""Comparison of two runs over the same inputs: which of their outputs differ.

Outputs arrive from both sides in batches, in any interleaving. Each destination's outputs are aligned by their keys: if
both sides have messages of one key, these are compared in order. A key is the input that caused a message
((sequence ID, message index)), or, for apps that do not report it, the message's own place ((position, 0)). Keys never
decrease within a stream. Messages are equal if their bytes are. Compared messages are dropped at once; messages that
only one side has so far wait in a queue.
"""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from enum import Enum
from itertools import groupby
from typing import IO, NamedTuple

import msgspec
from msgspec import Struct, field

from immortal.coordinator.log.record_contents import rpc_of
from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import decode_message

WINDOW_MESSAGES_MAX = 64  # of one key, compared together: an alignment costs up to the cube of it
WINDOW_SIZE_BYTES_MAX = 1 << 20
SINGLE_MESSAGES = 16  # messages compared singly after a difference, before whole batches are tried again
KEY_SIZE_BYTES = 100  # approximate memory of a key
MEMORY_BYTES_MAX = 64 << 20

Key = tuple[int, int]


class Side(Enum):
    OLD = "old"
    NEW = "new"

    @property
    def other(self) -> Side:
        return Side.NEW if self is Side.OLD else Side.OLD


class Kind(Enum):
    ADDED = "added"  # only the new side has the message
    MISSING = "missing"  # only the old side has it
    CHANGED = "changed"  # both have a message in that place, with different bytes


class Difference(Struct, frozen=True):
    """Difference of one message. ``old`` and ``new``: whole RPC messages in incoming form; None if a side has none.

    ``position``: of the old message in its stream, as in the log; 0 if there is none.
    """

    kind: Kind
    destination: str
    key: Key
    old: bytes | None
    new: bytes | None
    position: int = 0


class Outputs(Struct, frozen=True):
    """Consecutive messages of one stream, packed one after the other, with the key of each."""

    keys: list[Key]
    payload: bytes
    first_position: int = 1

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return len(self.payload) + KEY_SIZE_BYTES * len(self.keys)


_SIZE = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
_decode = decoding.Decoder(tuple[list[tuple[Key, int]], bytes, int]).decode


class MemoryBudget:
    """Limit in bytes on the memory of several queues together."""

    def __init__(self, size_bytes_max: int) -> None:
        self.size_bytes_max = size_bytes_max
        self.used_bytes = 0


class SpillingQueue:
    """Queue that spills to disk beyond its budget. The file is removed with its last batch."""

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


class Comparison:
    """Comparison of two sides: :meth:`add` their outputs, then :meth:`finish` each. ``report`` gets each difference.

    ``equal_count`` is the number of messages that are equal on both sides. ``memory_bytes_max``: of
    waiting outputs, all streams together; more spills to disk.
    """

    def __init__(self, report: Callable[[Difference], None], memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.equal_count = 0
        self.pending_size_bytes = dict.fromkeys(Side, 0)
        """Approximate memory of the outputs that only one side has so far, by side."""
        self._report = report
        self._budget = MemoryBudget(memory_bytes_max)
        self._streams: dict[str, dict[Side, _Stream]] = {}
        self._end_by_side: dict[Side, _End] = {}

    def add(self, side: Side, destination: str, batch: Outputs) -> None:
        """Add the next messages of ``side`` to ``destination``."""
        if not batch.keys:
            return
        streams = self._streams.get(destination)
        if streams is None:
            streams = self._streams[destination] = {each: _Stream(SpillingQueue(self._budget)) for each in Side}
        streams[side].append(batch)
        self.pending_size_bytes[side] += batch.size_bytes
        self._advance(destination, streams)

    def finish(self, side: Side, *, complete: bool = True, before: Key | None = None) -> None:
        """Note that ``side`` has no more outputs. If it is not ``complete``, it was cut short: surplus outputs of the
        other side are no differences, except those with keys below ``before``, up to which this side is complete.
        """
        self._end_by_side[side] = _End(complete, before)
        for destination, streams in self._streams.items():
            self._advance(destination, streams)

    def _advance(self, destination: str, streams: dict[Side, _Stream]) -> None:
        size_bytes = {side: stream.size_bytes for side, stream in streams.items()}
        old, new = streams[Side.OLD], streams[Side.NEW]
        singles = 0
        while True:
            old_key, new_key = old.head(), new.head()
            if old_key is None or new_key is None:
                if not self._drop_surplus(destination, streams):
                    break
            elif old_key < new_key:
                position = old.position
                self._report(Difference(Kind.MISSING, destination, old_key, old.pop(), None, position))
            elif new_key < old_key:
                self._report(Difference(Kind.ADDED, destination, new_key, None, new.pop()))
            elif singles == 0 and (count := equal_prefix(old, new)):
                self.equal_count += count
            elif old.peek() == new.peek():
                old.skip(1)
                new.skip(1)
                self.equal_count += 1
                singles = max(0, singles - 1)
            else:
                singles = SINGLE_MESSAGES
                if not self._compare_group(destination, old_key, old, new):
                    break
        for side, stream in streams.items():
            self.pending_size_bytes[side] += stream.size_bytes - size_bytes[side]

    def _drop_surplus(self, destination: str, streams: dict[Side, _Stream]) -> bool:
        """Take a message that only one side has, if the other side is at its end; return False if none was taken."""
        for side, stream in streams.items():
            key = stream.head()
            end = self._end_by_side.get(side.other)
            if key is None or end is None:
                continue
            position, message = stream.position, stream.pop()
            if end.covers(key):
                if side is Side.OLD:
                    self._report(Difference(Kind.MISSING, destination, key, message, None, position))
                else:
                    self._report(Difference(Kind.ADDED, destination, key, None, message))
            return True
        return False

    def _compare_group(self, destination: str, key: Key, old: _Stream, new: _Stream) -> bool:
        """Compare the messages of ``key``, whose first ones differ; return False if more must arrive to align them."""
        old_window, old_whole = old.window(key, Side.OLD in self._end_by_side)
        new_window, new_whole = new.window(key, Side.NEW in self._end_by_side)
        if old_whole is None or new_whole is None:
            return False
        old_count = new_count = 0
        positions = list(old.loose_positions)
        for kind, old_message, new_message in aligned(old_window, new_window, whole=old_whole and new_whole):
            position = 0 if old_message is None else positions[old_count]
            old_count += old_message is not None
            new_count += new_message is not None
            if kind is None:
                self.equal_count += 1
            else:
                self._report(Difference(kind, destination, key, old_message, new_message, position))
        old.skip(old_count)
        new.skip(new_count)
        return True


class _End(Struct, frozen=True):
    complete: bool
    before: Key | None

    def covers(self, key: Key) -> bool:
        """Return True if that side had reached ``key``, so that it would have sent a message of this key."""
        return self.complete or (self.before is not None and key < self.before)


class _Stream(Struct):
    """Messages of one side to one destination that are not compared yet."""

    queue: SpillingQueue
    size_bytes: int = 0
    batch: Outputs = Outputs([], b"")  # the first one, read up to ``index`` and ``offset``
    index: int = 0
    offset: int = 0
    loose: deque[bytes] = field(default_factory=deque)  # messages cut out of it, all of one key; they are first
    loose_key: Key = (0, 0)
    loose_positions: deque[int] = field(default_factory=deque)

    def append(self, batch: Outputs) -> None:
        self.queue.append(batch)
        self.size_bytes += batch.size_bytes

    def head(self) -> Key | None:
        """Return the key of the next message; None if there is none at the moment."""
        return self.loose_key if self.loose else self._next_key()

    def peek(self) -> bytes:
        if not self.loose:
            self._loosen()
        return self.loose[0]

    @property
    def position(self) -> int:
        """Position of the next message."""
        return self.loose_positions[0] if self.loose else self.batch.first_position + self.index

    def pop(self) -> bytes:
        message = self.peek()
        self.skip(1)
        return message

    def skip(self, count: int) -> None:
        """Drop the first ``count`` messages, which must be loose."""
        for _ in range(count):
            self.size_bytes -= len(self.loose.popleft()) + KEY_SIZE_BYTES
            self.loose_positions.popleft()

    def window(self, key: Key, finished: bool) -> tuple[list[bytes], bool | None]:
        """Return the first messages of ``key``, and True if these are all, False if not, None if more can arrive."""
        size_bytes = sum(map(len, self.loose))
        while self._next_key() == key:
            if len(self.loose) >= WINDOW_MESSAGES_MAX or size_bytes >= WINDOW_SIZE_BYTES_MAX:
                return list(self.loose), False
            size_bytes += self._loosen()
        ended = finished or self._next_key() is not None
        return list(self.loose), True if ended else None

    def _loosen(self) -> int:
        """Cut the next message out of its batch; return its size in bytes. Call only after :meth:`_next_key`."""
        batch = self.batch
        start, end = self.offset, decode_message(batch.payload, self.offset)[2]
        self.loose.append(batch.payload[start:end])
        self.loose_positions.append(batch.first_position + self.index)
        self.loose_key = batch.keys[self.index]
        self.index, self.offset = self.index + 1, end
        return end - start

    def _next_key(self) -> Key | None:
        """Return the key of the message after the loose ones."""
        if self.index < len(self.batch.keys):
            return self.batch.keys[self.index]
        if not len(self.queue):
            return None
        self.batch, self.index, self.offset = self.queue.popleft(), 0, 0
        return self.batch.keys[0]


def equal_prefix(old: _Stream, new: _Stream) -> int:
    """Take the rest of the shorter first batch from both sides if all its messages are equal; return their number.

    Each message begins with its size, so the bytes are compared without finding the messages.
    """
    first, second = old.batch, new.batch
    if old.loose or new.loose:
        return 0
    if len(second.keys) - new.index < len(first.keys) - old.index:
        old, new, first, second = new, old, second, first
    count = len(first.keys) - old.index
    rest = memoryview(first.payload)[old.offset :]
    if not second.payload.startswith(rest, new.offset):
        return 0
    if first.keys[old.index :] != second.keys[new.index : new.index + count]:
        return 0
    for stream in (old, new):
        stream.index += count
        stream.offset += len(rest)
        stream.size_bytes -= len(rest) + KEY_SIZE_BYTES * count
    return count


class _Pair(NamedTuple):
    kind: Kind | None  # None: equal
    old: bytes | None
    new: bytes | None


def aligned(old: list[bytes], new: list[bytes], *, whole: bool) -> Iterator[_Pair]:
    """Align the messages of two sides for one input, in pairs.

    If they are not the ``whole`` of the input's messages, it stops where the rest can be aligned later.
    """
    if len(old) == len(new) == 1:  # by far the most frequent case: the caller found that they differ
        yield _Pair(Kind.CHANGED, old[0], new[0])
        return
    steps = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    if not whole:
        anchors = [index for index, step in enumerate(steps) if step[0] == "equal" and step[2] > len(old) // 2]
        steps = steps[: anchors[-1] + 1] if anchors else steps
    for tag, old_start, old_end, new_start, new_end in steps:
        if tag == "equal":
            for message in old[old_start:old_end]:
                yield _Pair(None, message, message)
        else:
            yield from _unequal(old[old_start:old_end], new[new_start:new_end])


def _unequal(old: list[bytes], new: list[bytes]) -> Iterator[_Pair]:
    """Align messages of which none is equal: pair calls of the same method, then the others in order."""
    old_methods, new_methods = (list(map(method_of, messages)) for messages in (old, new))
    steps = SequenceMatcher(None, old_methods, new_methods, autojunk=False).get_opcodes()
    for _, old_start, old_end, new_start, new_end in steps:
        paired = min(old_end - old_start, new_end - new_start)
        for index in range(paired):
            yield _Pair(Kind.CHANGED, old[old_start + index], new[new_start + index])
        for message in old[old_start + paired : old_end]:
            yield _Pair(Kind.MISSING, message, None)
        for message in new[new_start + paired : new_end]:
            yield _Pair(Kind.ADDED, None, message)


def method_of(message: bytes) -> int | None:
    """Return the method ID of a whole RPC message in incoming form; None if it is damaged."""
    try:
        return rpc_of(message).method_id
    except RemoteProtocolError:
        return None
