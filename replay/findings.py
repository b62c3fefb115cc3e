"""The differences that a comparison finds: counted all, the first of them kept in full."""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from immortal.coordinator.core.formatting import CallText
from immortal.coordinator.log.record_contents import rpc_of, shown_arguments
from immortal.protocol import decoding
from immortal.protocol.extensions import decode_numbers, pack_numbers
from immortal.protocol.messages import IncomingRpc, RpcKind
from immortal.protocol.safe_output import safe_repr
from immortal.protocol.system_methods import EFFECT_METHOD_ID
from immortal.replay.comparison import Difference, Key, Kind


class Finding(Struct, frozen=True):
    """``key``: the input that made the calls, (record, message); for apps that do not tell, (place in the stream, 0).

    ``number`` counts the differences of the stream, so that findings have an order of their own.
    """

    key: Key
    destination: str
    number: int
    kind: Kind
    old: CallText | None
    new: CallText | None
    arguments: Sequence[ArgumentPair] = ()  # of a call that both make

    @property
    def order(self) -> tuple[Key, str, int]:
        return self.key, self.destination, self.number


class Findings:
    """Differences that were found. ``first``: the first ``limit`` of them in the order of the log.

    ``counts``: (destination, method ID, RpcKind) to how often each kind was found. A changed call counts for the method
    that it was. Of calls, only the beginning of their arguments is kept. ``is_msgpack``: whether arguments are
    MessagePack, as the SDK's are.
    """

    def __init__(self, limit: int) -> None:
        self.counts: dict[tuple[str, int, int], Counter[Kind]] = {}
        self.first: list[Finding] = []
        self.is_msgpack = True
        self._limit = limit
        self._numbers: Counter[str] = Counter()

    def add(self, difference: Difference) -> None:
        """Raises RemoteProtocolError for a message that is none."""
        destination = difference.destination
        old, new = (None if one is None else rpc_of(one) for one in (difference.old, difference.new))
        counted = old or new
        if counted is not None:
            counts = self.counts.setdefault((destination, counted.method_id, counted.kind), Counter())
            counts[difference.kind] += 1
        self._numbers[destination] += 1
        order = (difference.key, destination, self._numbers[destination])
        if len(self.first) < self._limit or (self.first and order < self.first[-1].order):
            pairs = pair_arguments(old, new, is_msgpack=self.is_msgpack)
            finding = Finding(*order, difference.kind, self._call(old), self._call(new), pairs)
            insort(self.first, finding, key=lambda each: each.order)
            del self.first[self._limit :]

    def _call(self, rpc: IncomingRpc | None) -> CallText | None:
        return None if rpc is None else CallText.of(rpc, is_msgpack=self.is_msgpack)

    def count(self, kind: Kind) -> int:
        return sum(counts[kind] for counts in self.counts.values())

    @property
    def total(self) -> int:
        return sum(counts.total() for counts in self.counts.values())


# Which run of an ``async def`` handler an input goes to: it comes with a number that the handler has drawn.


NUMBERS_MAX = 200_000  # the last ones: some 30 MB


class Executions:
    """Numbers that a replay has told, by whom they were drawn."""

    def __init__(self) -> None:
        self._began: dict[int, Key] = {}  # of a handler
        self._owners: dict[int, int] = {}  # the handler that drew a number

    def drawn(self, sequence_id: int, data: bytes) -> None:
        for draw in decode_numbers(data).draws:
            if draw.task:
                self._owners[draw.number] = draw.task
            else:
                self._began[draw.number] = sequence_id, draw.detail
        for known in (self._began, self._owners):
            while len(known) > NUMBERS_MAX:
                del known[next(iter(known))]

    def of(self, message: bytes) -> Key | None:
        """Return which input began the handler that waited for ``message``, an answer or the result of an effect."""
        rpc = rpc_of(message)
        if rpc.kind == RpcKind.CALL and rpc.method_id != EFFECT_METHOD_ID:
            return None
        try:
            number = decoding.decode_shown(rpc.arguments, type=list[Any])[0]
        except (decoding.DecodeError, IndexError):
            return None
        return self._began.get(self._owners.get(number, 0)) if isinstance(number, int) else None


# Numbers that the old code has drawn, on their way to the new code, which is to draw the same for what it does alike.
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


# Two calls of one method beside one another, argument by argument.


ARGUMENTS_MAX = 50  # that are told apart
VALUE_CHARACTERS_MAX = 200


class ArgumentPair(Struct, frozen=True):
    """In words; None where that call has no such argument. ``differs``: the whole values, not what is shown."""

    old: str | None
    new: str | None
    differs: bool


def pair_arguments(old: IncomingRpc | None, new: IncomingRpc | None, *, is_msgpack: bool) -> list[ArgumentPair]:
    """Pair the arguments of two calls by position; empty unless both call one method with a MessagePack array."""
    if old is None or new is None or not is_msgpack or (old.method_id, old.kind) != (new.method_id, new.kind):
        return []
    before, after = (shown_arguments(one) if one.kind == RpcKind.CALL else None for one in (old, new))
    if before is None or after is None:
        return []
    return [
        ArgumentPair(_shown(before, index), _shown(after, index), before[index : index + 1] != after[index : index + 1])
        for index in range(min(ARGUMENTS_MAX, max(len(before), len(after))))
    ]


def _shown(values: list[object], index: int) -> str | None:
    if index >= len(values):
        return None
    text = safe_repr(values[index])
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[: VALUE_CHARACTERS_MAX - 3]}..."
