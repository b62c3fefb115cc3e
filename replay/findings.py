"""Findings of a comparison of two runs: differences, counted by method; the random numbers that both runs draw."""

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
    """Difference between the calls of two runs, in a form to be shown.

    ``key``: the input that caused the calls, (record, message), or (position, 0) if unknown. ``number`` counts the
    differences of the stream, so that findings have a fixed order."""

    key: Key
    destination: str
    number: int
    kind: Kind
    old: CallText | None
    new: CallText | None
    arguments: Sequence[ArgumentPair] = ()  # of a call that both sides have

    @property
    def order(self) -> tuple[Key, str, int]:
        return self.key, self.destination, self.number


class Findings:
    """Collected differences. ``first``: the first ``limit`` of them in the order of the log.

    ``counts``: (destination, method ID, RpcKind) to the number of differences of each kind. A changed call counts for
    its old method. Only the beginning of a call's arguments is kept. ``is_msgpack``: arguments are MessagePack, as the
    SDK's are.
    """

    def __init__(self, limit: int) -> None:
        self.counts: dict[tuple[str, int, int], Counter[Kind]] = {}
        self.first: list[Finding] = []
        self.is_msgpack = True
        self._limit = limit
        self._numbers: Counter[str] = Counter()

    def add(self, difference: Difference) -> None:
        """Count a difference; keep it if it is among the first. Raises RemoteProtocolError for a damaged message."""
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
        return None if rpc is None else CallText.from_rpc(rpc, is_msgpack=self.is_msgpack)

    def count(self, kind: Kind) -> int:
        return sum(counts[kind] for counts in self.counts.values())

    @property
    def total(self) -> int:
        return sum(counts.total() for counts in self.counts.values())


# Execution of an ``async def`` handler that an input belongs to: the input has a number that the handler drew.


NUMBERS_MAX = 200_000  # the last ones: some 30 MB


class Executions:
    """Index of the random numbers that a replay reported, the handlers that drew them, and the handlers' inputs."""

    def __init__(self) -> None:
        self._start_keys: dict[int, Key] = {}  # handler to the input that began it
        self._owners: dict[int, int] = {}  # number to the handler that drew it

    def add(self, sequence_id: int, data: bytes) -> None:
        for draw in decode_numbers(data).draws:
            if draw.task:
                self._owners[draw.number] = draw.task
            else:
                self._start_keys[draw.number] = sequence_id, draw.detail
        for known in (self._start_keys, self._owners):
            while len(known) > NUMBERS_MAX:
                del known[next(iter(known))]

    def input_of(self, message: bytes) -> Key | None:
        """Return the input that began the handler waiting for ``message`` (an answer or an effect's result)."""
        rpc = rpc_of(message)
        if rpc.kind == RpcKind.CALL and rpc.method_id != EFFECT_METHOD_ID:
            return None
        try:
            number = decoding.decode_shown(rpc.arguments, type=list[Any])[0]
        except (decoding.DecodeError, IndexError):
            return None
        return self._start_keys.get(self._owners.get(number, 0)) if isinstance(number, int) else None


# Random numbers on their way from the old code to the new code, which must draw the same for the same actions.
#
# The new code gets a record only after the old code has reported its draws in it: so the old code runs ahead.


AHEAD_SIZE_BYTES_MAX = 16 << 20  # of numbers that the new code has not got yet: above it the old code ...
PAUSE_S = 0.05  # ... pauses this long at each message
MESSAGE_SIZE_BYTES = 100  # approximate memory of a message beside its bytes


class DrawnNumbersQueue:
    """Queue of Numbers messages between two threads: the old code's thread adds, the new code's thread takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()  # (record, data of a Numbers message)
        self._size_bytes = 0
        self._known_sequence_id = -1  # all draws up to this record are known
        self._is_all_known = False
        self._are_numbers_given = False
        self._has_started = False

    def add(self, sequence_id: int, data: bytes, *, complete: bool) -> None:
        """Add numbers that the old code drew. ``complete``: no more numbers follow for this record or earlier ones."""
        with self._changed:
            self._are_numbers_given = True
            if complete:
                self._known_sequence_id = sequence_id
                return
            self._waiting.append((sequence_id, data))
            self._size_bytes += len(data) + MESSAGE_SIZE_BYTES
            self._changed.wait_for(lambda: self._size_bytes <= AHEAD_SIZE_BYTES_MAX, PAUSE_S)

    def end(self) -> None:
        """Note that no more numbers arrive, or none at all because the old code reports none."""
        with self._changed:
            self._is_all_known = True

    def pop_until(self, sequence_id: int) -> list[bytes] | None:
        """Return the Numbers messages that the new code needs before this record; None: not known yet.

        Before its first record there is always one, which tells the new code to draw the same numbers.
        """
        with self._changed:
            if not self._is_all_known and self._known_sequence_id < sequence_id:
                return None
            found = []
            while self._waiting and self._waiting[0][0] <= sequence_id:
                data = self._waiting.popleft()[1]
                self._size_bytes -= len(data) + MESSAGE_SIZE_BYTES
                found.append(data)
            if self._are_numbers_given and not self._has_started:
                self._has_started = True
                found = found or [pack_numbers(sequence_id)]
            self._changed.notify_all()
            return found


# Arguments of two calls of one method, side by side.


ARGUMENTS_MAX = 50  # arguments that are compared singly
VALUE_CHARACTERS_MAX = 200


class ArgumentPair(Struct, frozen=True):
    """Argument of two calls, as text; None if that call has no such argument. ``differs`` compares the whole values."""

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
