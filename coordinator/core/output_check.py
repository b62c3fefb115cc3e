"""Proof that a replay makes the same outputs: the messages of one stream against the marks in the log.

A record's trailer says how far the stream had got when the record was sealed: its position, and the running checksum of
what had been made up to there. A replay may make messages before their mark is read or after it, so each waits for the
other. Only the last mark within reach is compared: if it fits, so do all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.core.errors import DivergenceError
from coordinator.core.interfaces import OutputBatch, OutputMark
from protocol.batch import offset_after
from protocol.checksum import crc64
from protocol.messages import decode_messages

KEPT_SIZE_BYTES_MAX = 8 << 20  # of messages that no mark has confirmed: beyond it a report shows fewer, none is missed
SHOWN_MESSAGES_MAX = 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """A mark that the replay does not fit.

    The record ``sequence_id`` (None: a checkpoint's header) holds the mark at ``position`` of the stream to
    ``destination``; at ``after_position`` all was as before. ``made``: the messages that the replay made between the
    two, by position, the first SHOWN_MESSAGES_MAX at most; ``made_position``: how many it has made in all.
    """

    destination: str
    sequence_id: int | None
    after_position: int
    position: int
    made_position: int
    made: tuple[tuple[int, bytes], ...]


class OutputDivergenceError(DivergenceError):
    """A replay makes other outputs than were made before; ``divergence`` says where."""

    def __init__(self, message: str, divergence: Divergence) -> None:
        super().__init__(message)
        self.divergence = divergence


@dataclass(slots=True)
class _Made:
    batch: OutputBatch
    checksum_before: int
    checksum_after: int


class OutputCheck:
    """The check of one stream, from ``mark`` (where the replay begins) on."""

    def __init__(self, destination: str, mark: OutputMark | None = None) -> None:
        self.destination = destination
        self._confirmed = mark or OutputMark(0, 0)
        self._expected: deque[tuple[int | None, OutputMark]] = deque()
        self._made: deque[_Made] = deque()
        self._made_size_bytes = 0
        self._made_position = self._confirmed.position

    @property
    def waits(self) -> bool:
        """There is a mark that the replay has not reached."""
        return bool(self._expected)

    def expect(self, sequence_id: int | None, mark: OutputMark) -> None:
        """The log says that the stream had ``mark``. To be compared by :meth:`compare`, in the order of the log."""
        if mark.position > self._confirmed.position:  # those below are of what the checkpoint holds already
            self._expected.append((sequence_id, mark))

    def made(self, batch: OutputBatch, checksum_before: int, checksum_after: int) -> None:
        """The replay has made ``batch``; the checksums of the stream before and behind it. An impulse changes none.

        Raises OutputDivergenceError.
        """
        self._made.append(_Made(batch, checksum_before, checksum_after))
        self._made_size_bytes += len(batch.payload)
        self._made_position = batch.last_position
        self.compare()
        while self._made_size_bytes > KEPT_SIZE_BYTES_MAX and len(self._made) > 1:
            self._made_size_bytes -= len(self._made.popleft().batch.payload)

    def compare(self) -> None:
        """Compare what is known on both sides. Raises OutputDivergenceError."""
        within_reach: list[tuple[int | None, OutputMark]] = []
        while self._expected and self._expected[0][1].position <= self._made_position:
            within_reach.append(self._expected.popleft())
        if not within_reach:
            return
        last = within_reach[-1][1]
        if self._checksum_at(last.position) not in (None, last.checksum):
            raise self._divergence(*self._first_wrong(within_reach))
        self._confirmed = last
        while self._made and self._made[0].batch.last_position <= last.position:
            self._made_size_bytes -= len(self._made.popleft().batch.payload)

    def finish(self) -> None:
        """The replay is complete and holds nothing back. Raises OutputDivergenceError if it has made too little."""
        if self._expected:
            raise self._divergence(*self._expected[0])

    def _checksum_at(self, position: int) -> int | None:
        """None where the messages are not kept any more; a later mark covers them."""
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

    def _divergence(self, sequence_id: int | None, mark: OutputMark) -> OutputDivergenceError:
        after = self._confirmed.position
        made: list[tuple[int, bytes]] = []
        for entry in self._made:
            batch = entry.batch
            if batch.last_position <= after or batch.first_position > mark.position:
                continue
            start = 0
            for index, (_, _, end) in enumerate(decode_messages(batch.payload)):
                position = batch.first_position + index
                if after < position <= mark.position and len(made) < SHOWN_MESSAGES_MAX:
                    made.append((position, batch.payload[start:end]))
                start = end
        divergence = Divergence(self.destination, sequence_id, after, mark.position, self._made_position, tuple(made))
        where = "the checkpoint's" if sequence_id is None else f"record {sequence_id}'s"
        return OutputDivergenceError(
            f"{where} mark of the stream to {self.destination or 'oneself'!r} does not fit what the replay made "
            f"between the messages {after} and {mark.position}",
            divergence,
        )
