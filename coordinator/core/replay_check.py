"""What a recovery does where its replay makes other calls than the log says: it stops, or goes on with a warning.

How many calls are made, and in which order, is strict either way: what a receiver has is known by its position.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, MutableSequence, Sequence

from immortal.coordinator.core.effects import Effect, Report
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import ONESELF, OutputBatch
from immortal.coordinator.core.limits import Limits, ReplayCheck
from immortal.coordinator.core.notices import Diverged
from immortal.coordinator.core.output_check import Divergence, OutputDivergenceError
from immortal.coordinator.core.session import AppSession
from immortal.coordinator.core.words import divergence_in_words
from immortal.protocol.batch import decode_batch
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, decode_message
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.trailer import BatchKind, BatchSource

_INPUT = (MessageType.RPC, MessageType.RPC_BATCH, MessageType.COUNT_REPLAYABLE_RPC_BATCH, MessageType.INITIAL_MESSAGE)


class ReplayPolicy:
    """That of one instance. ``effects``: where effects go; the machine's."""

    def __init__(self, name: str, limits: Limits, session: AppSession, effects: MutableSequence[Effect]) -> None:
        self._name = name
        self._limits = limits
        self._session = session
        self._effects = effects

    @property
    def compares(self) -> bool:
        return self._limits.replay_check is not ReplayCheck.OFF

    @property
    def counts(self) -> bool:
        """Calls are counted, and other arguments are let pass."""
        if self._limits.replay_check is None:
            return self._session.hello is None
        return self._limits.replay_check is ReplayCheck.COUNTS

    def differs(self, divergence: Divergence) -> None:
        """A mark of the log does not fit. Raises OutputDivergenceError, or warns, once for each stream and recovery."""
        if not self.counts or divergence.other_calls:
            raise OutputDivergenceError(divergence)
        to = divergence.destination
        holds = f"what {to!r} has already stays as it was sent, the rest is sent as it is now"
        if to == ONESELF:
            holds = "what the log has stays as it was, the rest is as it is now"
        self._effects.append(Report(Diverged(to, self._in_words(divergence), holds)))

    def explained(self, error: ImmortalError) -> ImmortalError:
        """In the words of an operator, where it is about a replay."""
        if not isinstance(error, OutputDivergenceError):
            return error
        return DivergenceError(
            f"{self._in_words(error.divergence)}: a handler does what a replay can't repeat, or its code was changed "
            f"without an upgrade. 'immortal verify {self._name}' finds where (with --peer-log PEER also what was sent "
            f"then); nothing is lost: mend it so that it does what it did, and start again"
        )

    def _in_words(self, divergence: Divergence) -> str:
        return divergence_in_words(divergence, self._name, self._session.description.methods)


def own_calls(record: memoryview, batches: Sequence[BatchSource]) -> Iterator[OutputBatch]:
    """The calls to oneself in a logged ``record``, whose trailer has ``batches``."""
    for batch, calls in stream_batches(record, batches, (ONESELF,)):
        yield OutputBatch(batch.first_position, batch.count, calls)


def stream_batches(
    record: memoryview, batches: Sequence[BatchSource], senders: Container[str]
) -> Iterator[tuple[BatchSource, bytes]]:
    """What these instances have sent of a logged ``record``, whose trailer has ``batches``: packed RPC messages."""
    if not any(batch.kind == BatchKind.STREAM and batch.name in senders for batch in batches):
        return
    sources = iter(batches)
    offset = HEADER_SIZE_BYTES
    while offset < len(record):
        message_type, start, end = decode_message(record, offset)
        if message_type in _INPUT:
            batch = next(sources)
            if batch.kind == BatchKind.STREAM and batch.name in senders:
                single = message_type == MessageType.RPC
                begin = offset if single else start + decode_batch(record[start:end])[1]
                yield batch, bytes(record[begin:end])
        offset = end
