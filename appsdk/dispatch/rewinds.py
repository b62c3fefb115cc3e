# cython: annotation_typing=False
"""Rewinds the state to before a failed message: to a copy of it, and over the records since, without that message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from immortal.appsdk.calls.context import Context
from immortal.appsdk.dispatch.events import Event
from immortal.appsdk.dispatch.lifecycle import Life
from immortal.appsdk.dispatch.records import Records, SingleStepNeededError
from immortal.appsdk.dispatch.verdicts import Failures, RewindNeededError
from immortal.appsdk.errors import RecoveryNeeded, StateError
from immortal.appsdk.state.snapshots import Copies, Copy
from immortal.protocol.readers import Record

MESSAGE_INDEX_MAX = (1 << 31) - 1  # of a record: above any that there is


class Rewinds:
    """Rewinds of one app. ``copies``: of its state."""

    def __init__(self, context: Context, life: Life, records: Records, failures: Failures, copies: Copies) -> None:
        self.copies = copies
        self._context = context
        self._life = life
        self._records = records
        self._failures = failures
        records.can_rewind = lambda: copies.current is not None

    def handle(self, record: Record) -> Iterator[Event]:
        """Handle ``record``, once more for each of its messages that must leave no trace. Raises RecoveryNeeded."""
        rewound = False
        while True:
            try:
                yield from self._records.handle(record)
                break
            except RewindNeededError as needed:
                self._undo(needed, record)
                rewound = True
            except SingleStepNeededError as closer:
                sequence_id = record.header.sequence_id
                self._records.closely = sequence_id, closer.message_index
                copy = self._current_copy()
                self._failures.repeat_all(sequence_id, self._life.delivery)
                self._context.outbox.rewind_to_copy()
                self._go_over(copy, copy.tail, (sequence_id, MESSAGE_INDEX_MAX))
                rewound = True
        self._records.closely = None
        if rewound:
            self.settle()
        if self.copies.add(record, rewound=rewound):
            self.retake_copy()

    def _undo(self, needed: RewindNeededError, record: Record) -> None:
        """Go back to the copy of the state, and again over the records behind it, up to ``record``."""
        copy, verdict = self.copies.current, needed.verdict
        if copy is None:
            self._context.outbox.rewind_to_copy()
            raise RecoveryNeeded(
                f"{verdict.method} failed at record {verdict.sequence_id}, message {verdict.message_index}; the app "
                f"is recovered without it"
            )
        size_bytes = len(copy.blob) + copy.tail_size_bytes
        self._failures.repeat(needed, [*copy.tail, record], size_bytes, self._life.delivery)
        self._context.outbox.rewind_to_copy()
        self._go_over(copy, copy.tail, verdict.key[:2])

    def reload_from_log(self) -> None:
        """Make the state anew from the records so far, which do not make the present one. Raises RecoveryNeeded."""
        copy = self.copies.current
        self._context.outbox.mark()
        if copy is None:
            raise RecoveryNeeded("a query has changed the state: the app is recovered from its log, without that")
        self._context.outbox.rewind_to_copy()
        self.replay_records(copy, copy.tail)
        self.settle()

    def replay_records(self, copy: Copy, records: Iterable[Record]) -> None:
        """Handle ``records`` of its tail once more, from the first one on; none of them is to fail anew. Then comes
        :meth:`settle`, at once or behind other such runs."""
        last_sequence_id = copy.sequence_id + len(copy.tail)
        self._failures.repeat_all(last_sequence_id + 1, self._life.delivery)
        self._go_over(copy, records, (last_sequence_id, MESSAGE_INDEX_MAX))

    def _current_copy(self) -> Copy:
        """Return the current copy; there must be one."""
        copy = self.copies.current
        if copy is None:
            raise RecoveryNeeded("there is no copy of the state any more: the app is recovered from its log")
        return copy

    def guards(self) -> None:
        """Guard the state from here on: messages are handled for the first time, and it is looked at behind them."""
        self._records.guard.is_on = self._failures.may_refuse
        self._restart_guard()

    def _restart_guard(self) -> None:
        """Let the guard begin anew with the present state: nobody is to be blamed for what is wrong with it already."""
        guard, context = self._records.guard, self._context
        if guard.is_on:
            size_bytes = context.tasks.queries.state_size_bytes
            schema = self._life.definition.state()
            guard.begin(schema, self._life.instance, size_bytes)

    def _go_over(self, copy: Copy, records: Iterable[Record], passed: tuple[int, int]) -> None:
        """Handle ``records`` over the copy. ``passed``: up to which message of which record this was done before."""
        tasks = self._context.tasks
        self.copies.failed()
        tasks.rewinds()
        tasks.effects.pause()
        tasks.queries.passed = passed
        guard = self._records.guard
        was_on, guard.is_on = guard.is_on, False
        self._life.go_back(copy.blob)
        for handled in records:
            for _ in self._records.handle(handled):
                pass
        guard.is_on = was_on
        self._restart_guard()

    def settle(self) -> None:
        """End a rewind: the state is that behind the last record again."""
        self._failures.settle(self._life.delivery)
        self._context.tasks.effects.resume()

    def retake_copy(self) -> None:
        """Take a new copy: much log lies behind the last one, or not only records have changed the state."""
        self._context.outbox.close_batches()
        try:
            blob = b"".join(self._life.encode())
        except StateError:
            self.copies.copy_failed()  # the next checkpoint says so
            return
        self.take_copy((blob,))

    def take_copy(self, pieces: Sequence[bytes]) -> None:
        """Take a copy of the state as it is now, behind all calls made so far."""
        tasks, sequence_id = self._context.tasks, self._life.next_sequence_id - 1
        self._context.outbox.begin_copy()
        tasks.queries.state_size_bytes = sum(map(len, pieces))
        self.copies.take(pieces, sequence_id)
        self._failures.forget_up_to(self.copies.sequence_id(sequence_id))
        tasks.copied()
        self._restart_guard()
