"""Verdicts on failed messages of one connection: the known ones, and the effects of a new one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import (
    FAILED_IN_A_ROW_MAX,
    REPEATED_SIZE_BYTES_MAX,
    dead_letter_message,
    forked,
    method_of,
    rpc_of,
    verdict_on,
    waiting_caller,
)
from immortal.appsdk.dispatch.delivery import Delivery
from immortal.appsdk.errors import HandlerError
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID
from immortal.appsdk.state.journal import SavedTask
from immortal.appsdk.waiting.impulses import EffectResult
from immortal.appsdk.waiting.task import Task
from immortal.protocol import decoding
from immortal.protocol.batch import decode_batch, decode_replayable_batch
from immortal.protocol.client_frames import decode_answered_number
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import MessageType, RpcKind, decode_message, decode_messages, encode_incoming_rpc
from immortal.protocol.nesting import without_values
from immortal.protocol.readers import Record
from immortal.protocol.system_methods import ORDERED_METHOD_ID
from immortal.protocol.varint import encode_zigzag
from immortal.protocol.verdicts import Handling, MessageKey, Verdict, VerdictKind, encode_verdict


class RewindNeededError(Exception):
    """Raised if the state before the message of ``verdict`` must be restored; the message is skipped from here on."""

    def __init__(self, verdict: Verdict, method_id: int | None) -> None:
        super().__init__(f"message {verdict.message_index} of record {verdict.sequence_id}")
        self.verdict = verdict
        self.method_id = method_id


def message_at(content: bytes, offset: int) -> bytes:
    """Return the message at ``offset``, with its size field."""
    _, _, end = decode_message(content, offset)
    return content[offset:end]


_EFFECT_FRONT_COUNT = 4  # items of an effect's result that identify the effect
_decode_result = decoding.Decoder(EffectResult).decode


def without_result(message: bytes) -> bytes | None:
    """Return the message that ends a handler's wait (an answer, a time, an effect's result), without its value.

    The value can be unreadable. None: it is another message, or it does not say which wait it ends."""
    rpc = rpc_of(message)
    if rpc is None or (rpc.kind == RpcKind.CALL and rpc.method_id not in (CLOCK_METHOD_ID, EFFECT_METHOD_ID)):
        return None
    if rpc.kind != RpcKind.CALL:
        _, start, end = decode_message(message)
        number = decode_answered_number(message, start, end)
        arguments = None if number is None else encoder.encode((number, None))
        return arguments and encode_incoming_rpc(rpc.method_id, rpc.rpc_type, arguments, RpcKind.RETURNED_VALUE)
    if rpc.method_id == CLOCK_METHOD_ID:
        return message
    arguments = without_values(rpc.arguments, _EFFECT_FRONT_COUNT)
    try:
        _decode_result(arguments)
    except decoding.DecodeError:
        return None
    return encode_incoming_rpc(rpc.method_id, rpc.rpc_type, arguments or b"", rpc.kind)


def offset_after(content: bytes, offset: int, count: int) -> int:
    """Return the offset after ``count`` messages that begin at ``offset``."""
    for _ in range(count):
        _, _, offset = decode_message(content, offset)
    return offset


UNREPORTED_MAX = 1000


class _FailureStreak:
    """Consecutive failures of one method: none of its calls succeeded in between."""

    def __init__(self) -> None:
        self.last: MessageKey = (-1, 0, 0, 0)
        self.count = 0
        self.repeated_size_bytes = 0


class Failures:
    """Failures of one connection. ``known``: verdicts that the coordinator has, or receives before their effects."""

    def __init__(self, context: Context, *, fails_alone: bool = True) -> None:
        self.fails_alone = fails_alone
        self.known: dict[MessageKey, Verdict] = {}
        self.can_fail = False  # the coordinator keeps verdicts
        self._context = context
        self.skipped: dict[int, list[int]] = {}  # indices of messages to skip, by record, ascending
        self._streaks: dict[int, _FailureStreak] = {}  # by method ID
        self._tripped: set[int] = set()
        self._replays_until: MessageKey | None = None  # the message at which the replay of a rewind ends
        self.taken_back: dict[int, list[Verdict]] = {}  # on later records, by the record after which they apply
        self._unreported: dict[MessageKey, Callable[[], None]] = {}  # reports of failures in an app that is not primary
        self._excluded_answers: list[tuple[Verdict, bytes]] | None = None  # to messages that are left out
        context.tasks.handler_runs.verdicts = self.known
        context.tasks.handler_runs.report_failure = self._report

    def add_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Add verdicts that the coordinator has sent."""
        self.can_fail = self.fails_alone
        for verdict in verdicts:
            self._add(verdict)
            self._unreported.pop(verdict.key, None)

    def _add(self, verdict: Verdict) -> None:
        if verdict.kind is VerdictKind.TAKEN_BACK:
            self.taken_back.setdefault(verdict.behind, []).append(verdict)
            return
        self.known[verdict.key] = verdict
        if verdict.skips and not verdict.task:
            indices = self.skipped.setdefault(verdict.sequence_id, [])
            at = bisect_left(indices, verdict.message_index)
            if indices[at : at + 1] != [verdict.message_index]:
                indices.insert(at, verdict.message_index)

    def next_skipped_index(self, sequence_id: int, message_index: int) -> int | None:
        """Return the index of the next skipped message of a record, from ``message_index`` on."""
        indices = self.skipped.get(sequence_id)
        if indices is None:
            return None
        at = bisect_left(indices, message_index)
        return indices[at] if at < len(indices) else None

    def verdict(self, error: HandlerError, message: bytes) -> Verdict | None:
        """Make the verdict on the ``message`` of ``error``; None if it can't fail alone."""
        failure = error.failure
        if failure is None or not self.can_fail or (failure.policy == "stop" and not failure.refused):
            return None
        caller = None if failure.step else waiting_caller(message)
        return verdict_on(error, failure, None if caller is None else caller.name, message)

    def note(self, verdict: Verdict, error: HandlerError) -> None:
        """Note a new verdict and report it: the coordinator receives it before its effects."""
        context = self._context
        if context.reporter is not None and verdict.key not in self.known:
            self._unreported[verdict.key] = partial(
                context.reporter.failed, verdict, error.arguments, context.instance_name
            )
            if context.tasks.queries.is_live:
                self.report_pending()
            elif len(self._unreported) > UNREPORTED_MAX:
                del self._unreported[next(iter(self._unreported))]
        self._add(verdict.without_dead_letter())
        context.outbox.report(encode_verdict(verdict))

    def report_pending(self) -> None:
        """Report the failures that no other app has reported: this app is primary."""
        for report in self._unreported.values():
            report()
        self._unreported.clear()

    def _report(self, verdict: Verdict, error: HandlerError) -> bool:
        """Report a failure of an async handler or step, with nothing to undo; return False if it can't fail alone."""
        if self.can_fail and verdict.key not in self.known:
            self.note(verdict, error)
        return self.can_fail

    def exclude(self, verdicts: Sequence[Verdict]) -> list[tuple[Verdict, bytes]]:
        """Skip the messages of ``verdicts`` from here on without a report. Their answers go into the returned list."""
        answers: list[tuple[Verdict, bytes]] = []
        self._excluded_answers = answers
        for verdict in verdicts:
            self._add(replace(verdict, kind=VerdictKind.SKIPPED, behind=0))
        return answers

    def end_exclusion(self) -> None:
        """Handle the left-out messages again."""
        for verdict in [one for one in self.known.values() if one.behind == 0]:
            del self.known[verdict.key]
            self.skipped[verdict.sequence_id].remove(verdict.message_index)
        self._excluded_answers = None

    def answer(self, verdict: Verdict, message: bytes) -> None:
        """Send the verdict to the caller that waits for ``message``, if there is one."""
        if method_of(message) == ORDERED_METHOD_ID:
            for call in self._context.multicasts.refuse(message, verdict.text):
                self._answer_refused(verdict, call)
        self._context.nodes.inbox.note_verdict(message, verdict)
        if self._excluded_answers is not None and verdict.behind == 0:
            self._excluded_answers.append((verdict, message))
        elif (caller := waiting_caller(message)) is not None:
            self._context.tasks.answers.answer_verdict(verdict, caller)

    def _answer_refused(self, verdict: Verdict, call: bytes) -> None:
        """Answer a call of a refused multicast, if its sender waits for the answer."""
        try:
            caller = waiting_caller(call)
        except ProtocolError:
            return
        if caller is not None and caller.name == self._context.source:
            self._context.tasks.answers.answer_verdict(verdict, caller)

    def describe_message(self, sequence_id: int, message_index: int, message: bytes) -> Handling:
        """Describe the message that is handled next."""
        caller, method_id = waiting_caller(message), method_of(message)
        handler = self._context.tasks.definition.by_method_id.get(-1 if method_id is None else method_id)
        name = f"method {method_id}" if handler is None else handler.function.__qualname__
        return Handling(
            sequence_id,
            message_index,
            0.0,
            name,
            None if caller is None else caller.name,
            dead_letter_message(message),
            source=self._context.source or "",
        )

    def describe_task(self, sequence_id: int, message_index: int, call: Task | SavedTask) -> Handling:
        """Describe the ``async def`` handler that continues, or begins, next."""
        handler = self._context.tasks.definition.by_method_id[call.method_id]
        message = forked(call.method_id, call.arguments) if call.caller is None else b""
        name = handler.function.__qualname__
        return Handling(sequence_id, message_index, 0.0, name, call.caller, message, call.number)

    def forget_up_to(self, sequence_id: int) -> None:
        """Forget verdicts up to the record ``sequence_id``: no replay in this process handles these records again."""
        if any(key[0] <= sequence_id for key in self.known):
            for key in [key for key in self.known if key[0] <= sequence_id]:
                del self.known[key]
            self.skipped = {key: indices for key, indices in self.skipped.items() if key > sequence_id}

    # --- a rewind -----------------------------------------------------------------------------------------------------

    def note_rewind(
        self, needed: RewindNeededError, records: Sequence[Record], size_bytes: int, delivery: Delivery
    ) -> None:
        """Note a rewind: the app restores its state and replays ``records`` up to the failed message."""
        verdict, method_id = needed.verdict, needed.method_id
        self._replays_until = verdict.key
        delivery.trip(())  # calls that ran before run again
        if method_id is None:
            return
        row = self._streaks.get(method_id)
        if row is None or self._has_succeeded(method_id, records, row.last, verdict.key):
            row = self._streaks[method_id] = _FailureStreak()
        row.last = verdict.key
        row.count += 1
        row.repeated_size_bytes += size_bytes
        if row.count >= FAILED_IN_A_ROW_MAX or row.repeated_size_bytes >= REPEATED_SIZE_BYTES_MAX:
            self._tripped.add(method_id)

    def note_full_rewind(self, sequence_id: int, delivery: Delivery) -> None:
        """Note a rewind over all records before ``sequence_id``, without a new failure."""
        self._replays_until = sequence_id, 0, 0, 0
        delivery.trip(())

    def _has_succeeded(self, method_id: int, records: Sequence[Record], after: MessageKey, until: MessageKey) -> bool:
        """Return True if a call of the method succeeded between the two messages, or if ``records`` begin too late."""
        if not records or records[0].header.sequence_id > after[0] + 1:
            return True
        for record in records:
            sequence_id = record.header.sequence_id
            if sequence_id < after[0]:
                continue
            for index, called in enumerate(map(method_of, messages_of(record.content))):
                is_between = after[:2] < (sequence_id, index) < until[:2]
                if is_between and called == method_id and (sequence_id, index, 0, 0) not in self.known:
                    return True
        return False

    def succeeded_before(self, verdict: Verdict) -> bool:
        """Return True if the message succeeded before the rewind, so that it must succeed again."""
        return self._replays_until is not None and verdict.key[:2] < self._replays_until[:2]

    def end_replay(self, delivery: Delivery) -> None:
        """End the replay of a rewind."""
        self._replays_until = None
        delivery.trip(self._tripped)


def find_rpcs(content: bytes, message_type: int, start: int, end: int) -> tuple[int, int] | None:
    """Return (number of RPCs, offset of the first one) of a record's message; None: it holds none."""
    if message_type == MessageType.RPC:
        return 1, start - 1 - len(encode_zigzag(end - start + 1))
    if message_type == MessageType.RPC_BATCH:
        count, skipped = decode_batch(content[start : start + 16])
        return count, start + skipped
    if message_type == MessageType.COUNT_REPLAYABLE_RPC_BATCH:
        count, _, skipped = decode_replayable_batch(content[start : start + 16])
        return count, start + skipped
    return (1, start) if message_type == MessageType.INITIAL_MESSAGE else None


def messages_of(content: bytes) -> Iterator[bytes]:
    """Yield the RPCs of a record in order, each with its size field."""
    for message_type, start, end in decode_messages(content):
        if (packed := find_rpcs(content, message_type, start, end)) is not None:
            _, first = packed
            offset = first
            for _, _, last in decode_messages(content[first:end]):
                yield content[offset : first + last]
                offset = first + last
