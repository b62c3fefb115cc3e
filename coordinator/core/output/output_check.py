"""Check that a replay makes the same outputs: it compares the messages of one stream with the marks in the log.

A record's trailer has the stream's position when the record was sealed, and the running checksum of all messages up to
there. A replay can make messages before or after their mark is read, so each waits for the other. Only the last mark
that is reached is compared: if it fits, so do all before it.

If a mark does not fit, ``on_divergence`` decides: it raises, or from there on messages are only counted (a running
checksum can't fit again). For calls to oneself the log also has the contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import OutputBatch, OutputMark
from immortal.protocol.batch import offset_after
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import decode_incoming_rpc, decode_message, decode_messages

KEPT_SIZE_BYTES_MAX = 8 << 20  # of unconfirmed messages: above this a report shows fewer of them, but misses nothing
SHOWN_MESSAGES_MAX = 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """Mark in the log that the outputs of a replay do not match.

    The record ``sequence_id`` (None: a checkpoint's header) holds the mark at ``position`` of the stream to
    ``destination``; up to ``after_position`` all was equal. ``made``: the messages that the replay made between the
    two, by position, at most the first SHOWN_MESSAGES_MAX; ``made_position``: how many it has made in all.
    ``logged``: the log's messages at these positions, as far as it has them. ``other_calls``: the log proves that more
    than the arguments differ.
    """

    destination: str
    sequence_id: int | None
    after_position: int
    position: int
    made_position: int
    made: tuple[tuple[int, bytes], ...]
    logged: tuple[tuple[int, bytes], ...] = ()
    other_calls: bool = False


class OutputDivergenceError(DivergenceError):
    """Raised if a replay makes other outputs than before. ``divergence``: where they differ."""

    def __init__(self, divergence: Divergence) -> None:
        after, sequence_id = divergence.after_position, divergence.sequence_id
        where = "the checkpoint's" if sequence_id is None else f"record {sequence_id}'s"
        super().__init__(
            f"{where} mark of the stream to {divergence.destination or 'oneself'!r} does not fit what the replay made "
            f"between the messages {after} and {divergence.position}"
        )
        self.divergence = divergence


OnDivergence = Callable[[Divergence], None]
"""Callback for a mark that a replay does not match. Raises OutputDivergenceError, or returns to let it continue."""


def raise_divergence(divergence: Divergence) -> None:
    raise OutputDivergenceError(divergence)


@dataclass(slots=True, eq=False, repr=False)
class _Made:
    batch: OutputBatch
    checksum_before: int
    checksum_after: int


class OutputCheck:
    """Check of one stream, beginning at ``mark``, where the replay begins."""

    def __init__(
        self, destination: str, mark: OutputMark | None = None, on_divergence: OnDivergence = raise_divergence
    ) -> None:
        self.destination = destination
        self._on_divergence = on_divergence
        self._has_diverged = False  # a mark did not fit, so no later one fits
        self._logged: deque[OutputBatch] = deque()
        self._logged_size_bytes = 0
        self._confirmed = mark or OutputMark(0, 0)
        self._expected: deque[tuple[int | None, OutputMark]] = deque()
        self._made: deque[_Made] = deque()
        self._made_size_bytes = 0
        self._made_position = self._confirmed.position

    @property
    def has_open_marks(self) -> bool:
        """True if the replay has not reached a mark of the log."""
        return bool(self._expected)

    def expect(self, sequence_id: int | None, mark: OutputMark) -> None:
        """Add a mark of the log, to be compared by :meth:`compare`, in the order of the log."""
        if mark.position > self._confirmed.position:  # the checkpoint already has the output of lower marks
            self._expected.append((sequence_id, mark))

    def add_logged(self, batch: OutputBatch) -> None:
        """Add messages that the log has, before the mark that follows them. Drop the oldest if memory is short."""
        self._logged.append(batch)
        self._logged_size_bytes += len(batch.payload)
        while self._logged_size_bytes > KEPT_SIZE_BYTES_MAX and len(self._logged) > 1:
            self._logged_size_bytes -= len(self._logged.popleft().payload)

    def add_made(self, batch: OutputBatch, checksum_before: int, checksum_after: int) -> None:
        """Add a ``batch`` that the replay has made, with the stream's checksums before and after it.

        Impulses do not change the checksum. Raises OutputDivergenceError.
        """
        self._made.append(_Made(batch, checksum_before, checksum_after))
        self._made_size_bytes += len(batch.payload)
        self._made_position = batch.last_position
        self.compare()
        while self._made_size_bytes > KEPT_SIZE_BYTES_MAX and len(self._made) > 1:
            self._made_size_bytes -= len(self._made.popleft().batch.payload)

    def compare(self) -> None:
        """Compare the reached marks with the replay's messages. Raises OutputDivergenceError."""
        within_reach: list[tuple[int | None, OutputMark]] = []
        while self._expected and self._expected[0][1].position <= self._made_position:
            within_reach.append(self._expected.popleft())
        if not within_reach:
            return
        last = within_reach[-1][1]
        if self._has_diverged:
            divergence = self._divergence(*within_reach[-1])
            if divergence.other_calls:
                self._on_divergence(divergence)
        elif self._checksum_at(last.position) not in (None, last.checksum):
            self._has_diverged = True
            self._on_divergence(self._divergence(*self._first_wrong(within_reach), through=last.position))
        self._confirmed = last
        while self._made and self._made[0].batch.last_position <= last.position:
            self._made_size_bytes -= len(self._made.popleft().batch.payload)
        while self._logged and self._logged[0].last_position <= last.position:
            self._logged_size_bytes -= len(self._logged.popleft().payload)

    def has_confirmed(self, mark: OutputMark) -> bool:
        """Return True if a mark proves that the replay made the same messages up to ``mark``, impulses left out."""
        confirmed = self._confirmed
        return not self._has_diverged and (confirmed.position >= mark.position or confirmed.checksum == mark.checksum)

    def finish(self) -> None:
        """Check that the complete replay has reached all marks. Raises OutputDivergenceError."""
        if self._expected:
            raise OutputDivergenceError(self._divergence(*self._expected[0]))

    def _checksum_at(self, position: int) -> int | None:
        """Return the checksum at ``position``; None if its messages were dropped, since a later mark covers them."""
        for made in self._made:
            batch = made.batch
            if position == batch.last_position:
                return made.checksum_after
            if batch.first_position <= position < batch.last_position:
                if made.checksum_before == made.checksum_after:
                    return made.checksum_after  # impulses
                count = position - batch.first_position + 1
                return crc64(batch.payload[: offset_after(batch.payload, count, batch.count)], made.checksum_before)
        return None

    def _first_wrong(self, expected: Sequence[tuple[int | None, OutputMark]]) -> tuple[int | None, OutputMark]:
        for sequence_id, mark in expected:
            if self._checksum_at(mark.position) not in (None, mark.checksum):
                return sequence_id, mark
            self._confirmed = mark
        return expected[-1]

    def _divergence(self, sequence_id: int | None, mark: OutputMark, through: int | None = None) -> Divergence:
        """Describe a divergence. ``through``: position up to which calls are compared; None: the mark's position."""
        after, last = self._confirmed.position, max(mark.position, through or 0)
        made = _messages([entry.batch for entry in self._made], after, last)
        logged = _messages(self._logged, after, last)
        same = {position for position, message in made.items() if logged.get(position) == message}
        both = made.keys() & logged.keys() - same
        return Divergence(
            self.destination,
            sequence_id,
            after,
            mark.position,
            self._made_position,
            _shown(made, mark.position, same),
            _shown(logged, mark.position, same),
            other_calls=any(_front(made[position]) != _front(logged[position]) for position in both),
        )


def _messages(batches: Iterable[OutputBatch], after: int, last: int) -> dict[int, bytes]:
    """Return the messages from position ``after`` + 1 to ``last``, by position. Acknowledged impulses have none."""
    found: dict[int, bytes] = {}
    for batch in batches:
        if batch.last_position <= after or batch.first_position > last:
            continue
        start = 0
        for index, (_, _, end) in enumerate(decode_messages(batch.payload)):
            position = batch.first_position + index
            if after < position <= last:
                found[position] = batch.payload[start:end]
            start = end
    return found


def _shown(messages: dict[int, bytes], last: int, same: set[int]) -> tuple[tuple[int, bytes], ...]:
    differing = [(position, message) for position, message in messages.items() if position <= last]
    return tuple([entry for entry in differing if entry[0] not in same][:SHOWN_MESSAGES_MAX])


def _front(message: bytes) -> tuple[int, int, int]:
    """Return kind, method and type of a call, without its arguments."""
    _, start, end = decode_message(message)
    rpc = decode_incoming_rpc(message, start, end)
    return rpc.kind, rpc.method_id, rpc.rpc_type
