"""Repair of a state that can't be saved: finds the message that broke it and removes its effect.

The app rewinds to its last copy and handles the records since then again, as after a failure, but without output. It
tries to encode the state at some points, then at points between two of these, and so finds the last message before
which the state could be saved. The message is taken back if nobody has been told anything that differs from what they
would have been told without it: after the record that was handled last the state becomes the one without it, a
checkpoint of that follows at once, and the coordinator makes both valid together. So what was told stays true, and each
replay does the same after that record: see :meth:`StateRepair.apply_taken_back`.

If others have been told something different, an operator decides (``forced``); until then there is no checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil

import msgspec
from msgspec.structs import replace

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import dead_letter_message, is_awaited, rpc_of, waiting_caller
from immortal.appsdk.dispatch.lifecycle import Life
from immortal.appsdk.dispatch.records import Records, Rewinds
from immortal.appsdk.dispatch.verdicts import Failures, messages_of
from immortal.appsdk.errors import HandlerError, RecoveryNeeded, StateError
from immortal.appsdk.state.schema import WAYS_OUT
from immortal.appsdk.state.snapshots import Copy
from immortal.appsdk.waiting.host import Answers
from immortal.protocol import decoding
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.messages import MessageType, RpcKind
from immortal.protocol.readers import Record
from immortal.protocol.verdicts import TEXT_CHARACTERS_MAX, MessageKey, Unsaved, Verdict, VerdictKind, encode_verdict

TAKEN_BACK_MAX = 16  # messages taken back for one checkpoint
POINTS_PER_RUN = 32  # at which a run tries to encode the state
LARGE_SIZE_BYTES = 16 << 20  # of a state: above it, an attempt to encode costs more than to handle messages again
POINTS_PER_LARGE_RUN = 4

_PARTS = decoding.Decoder(list[msgspec.Raw])


class _Output(msgspec.Struct):
    """Output of a run: messages by destination, effects (number, what, detail), and answers to left-out messages."""

    messages: dict[str, list[bytes]]
    effects: list[tuple[int, str, int]]
    answers: list[tuple[Verdict, bytes]]

    @property
    def awaited(self) -> Counter[object]:
        """Calls and effects whose results handlers wait for."""
        calls = [(to, one) for to, messages in self.messages.items() for one in messages if is_awaited(one)]
        return Counter([*calls, *self.effects])

    def has_answered(self, message: bytes) -> bool:
        """Return True if the caller that waits for the answer to ``message`` has got it."""
        caller = waiting_caller(message)
        if caller is None:
            return True
        to, front = Answers.answer_address(caller.name, caller.number)
        for answer in self.messages.get(to, ()):
            rpc = rpc_of(answer)
            if rpc is not None and rpc.kind != RpcKind.CALL:
                parts = _PARTS.decode(rpc.arguments)[: len(front)]
                if tuple([decoding.decode(part) for part in parts]) == front:
                    return True
        return False


class _EnoughError(Exception):
    """Raised when a run has reached the last inspected point."""


class StateRepair:
    """Repair of the state of one app.

    ``forced``: verdicts on messages that an operator wants taken back. ``may_recover``: the app can ask for a recovery
    from its checkpoint if there is no copy.
    """

    def __init__(self, context: Context, life: Life, records: Records, failures: Failures, rewinds: Rewinds) -> None:
        self.forced: list[Verdict] = []
        self.may_recover = False
        self._context = context
        self._life = life
        self._records = records
        self._failures = failures
        self._rewinds = rewinds
        self._found: Unsaved | None = None  # the result for a state that could not be saved since

    # --- a checkpoint ------------------------------------------------------------------------------------------------

    def encode(self, *, heals: bool = True) -> Sequence[bytes] | Unsaved:
        """Encode the state, in pieces; or return why it can't be saved. Without ``heals`` nothing is taken back.

        Raises RecoveryNeeded.
        """
        forced, self.forced = self.forced, []
        try:
            pieces = self._life.encode()
        except StateError as error:  # handlers that run again must not see it as the exception that is handled
            problem = error
        else:
            self._found = None
            return pieces
        if self._found is None or forced:
            return self._heal(problem, forced, heals=heals)
        return replace(self._found, text=one_line(problem))

    def _heal(self, error: StateError, forced: list[Verdict], *, heals: bool) -> Sequence[bytes] | Unsaved:
        copies, why = self._rewinds.copies, ""
        if error.takes_too_long or isinstance(error.__cause__, MemoryError):
            why = "to try takes too long" if error.takes_too_long else "there is not enough memory"
        elif copies.current is None and copies.enabled and self.may_recover and heals:
            raise RecoveryNeeded(f"{one_line(error)}; the app is recovered, to find the message that made it so")
        elif copies.current is None or not self._failures.can_fail:
            why = "there is no copy of the state from before"
        if why or copies.current is None:
            return Unsaved(one_line(error), why=f"which message made it so is not known: {why}")
        self._context.outbox.close_batches()
        self._context.outbox.mark()
        self._found = None
        result = self._encode_without(copies.current, error, forced, heals=heals)
        if isinstance(result, Unsaved):
            self._run(copies.current)
            self._found = result if heals else None
            self._rewinds.end()
        return result

    def _encode_without(
        self, copy: Copy, error: StateError, verdicts: list[Verdict], *, heals: bool
    ) -> Sequence[bytes] | Unsaved:
        """Return the state without ``verdicts``, and without other messages that keep it from being saved."""
        is_forced, found = bool(verdicts), Unsaved(one_line(error))
        while True:
            if verdicts:
                try:
                    self._run(copy, verdicts)
                    self._life.encode()
                    break
                except HandlerError as failure:
                    return replace(found, why=f"without it another message fails: {one_line(failure)}")
                except StateError as problem:
                    error = problem
            key = self._search(copy, verdicts)
            if key is None:
                return replace(found, why="it could not be saved before that record either")
            described, verdict = self._describe(copy, key, error)
            found = described if is_forced or not verdicts else found  # the first is the one to begin with
            if key in self._failures.known:
                return replace(found, why="it has failed, and what it did by then stands")
            if not key[0]:
                return replace(found, why="it is the first one, without which there is no state")
            if is_forced or not heals or len(verdicts) == TAKEN_BACK_MAX:
                return found
            verdicts.append(verdict)
        old = self._run(copy)
        if self._can_encode():  # the cause has passed, and was no message
            self._rewinds.end()
            return self._life.encode()
        new = self._run(copy, verdicts)
        extra = self._extra(old, new, may_differ=is_forced)
        if isinstance(extra, str):
            return replace(found, why=extra)
        self._rewinds.end()
        for verdict in verdicts:
            taken_back = replace(verdict, behind=self._life.next_sequence_id - 1)
            self._context.outbox.send(encode_verdict(taken_back, MessageType.TAKEN_BACK))
        self._send_extra(extra, new, old)
        return self._life.encode()

    def apply_taken_back(self, sequence_id: int) -> None:
        """Take back the messages that the log says were taken back after this record, which was just handled.

        Raises RecoveryNeeded.
        """
        verdicts = self._failures.taken_back.pop(sequence_id)
        copies = self._rewinds.copies
        copy = copies.current
        if copy is None or any(one.sequence_id <= copy.sequence_id for one in verdicts):
            raise RecoveryNeeded(f"messages were taken back behind record {sequence_id}: the app is recovered")
        self._context.outbox.close_batches()
        self._context.outbox.mark()
        old = self._run(copy)
        new = self._run(copy, verdicts)
        extra = self._extra(old, new, may_differ=True)
        self._rewinds.end()
        self._send_extra({} if isinstance(extra, str) else extra, new, old)
        copies.pinned = bool(self._failures.taken_back)
        self._rewinds.retake_copy()

    def _extra(self, old: _Output, new: _Output, *, may_differ: bool) -> dict[str, list[bytes]] | str:
        """Return the messages in ``new`` that are not in ``old`` yet; or, as text, why there can be none."""
        extra: dict[str, list[bytes]] = {}
        differs = "an effect has begun that would not have" if new.effects[: len(old.effects)] != old.effects else ""
        for to in {**old.messages, **new.messages}:
            before, now = old.messages.get(to, []), new.messages.get(to, [])
            if now[: len(before)] != before:
                whom = {"": "the instance itself", CLIENTS: "a client"}.get(to, to)
                differs = f"{whom} was told what it would not have been"
            extra[to] = now[len(before) :]
        if not differs:
            return extra
        if not may_differ:
            return differs
        if not new.awaited <= old.awaited:
            return "without it handlers would wait for other calls or effects than there were"
        return {}

    def _send_extra(self, extra: dict[str, list[bytes]], new: _Output, old: _Output) -> None:
        for to, messages in extra.items():
            if messages:
                self._context.outbox.push(to, [part for message in messages for part in (message, b"")])
        for verdict, message in new.answers:
            if not old.has_answered(message):
                self._failures.answer(replace(verdict, kind=VerdictKind.TAKEN_BACK, behind=-1), message)
        self._context.outbox.close_batches()

    # --- runs over the records since the copy ------------------------------------------------------------------------

    def _run(self, copy: Copy, without: Sequence[Verdict] = (), records: Iterator[Record] | None = None) -> _Output:
        """Handle ``records`` (None: all of the copy's tail) again; return the output. Raises HandlerError."""
        outbox, effects, failures = self._context.outbox, self._context.tasks.effects, self._failures
        collected: list[tuple[str, list[bytes]]] = []
        begun: list[tuple[int, str, int]] = []
        outbox.collected, effects.collected = collected, begun
        answers = failures.exclude(without)
        messages: dict[str, list[bytes]] = {}
        try:
            self._rewinds.replay_records(copy, copy.tail if records is None else records)
            outbox.close_batches()
        except _EnoughError:
            pass
        finally:
            outbox.close_open()
            outbox.collected = effects.collected = self._records.probe = None
            failures.end_exclusion()
        for to, parts in collected:
            messages.setdefault(to, []).extend(map(bytes.__add__, parts[::2], parts[1::2]))
        return _Output(messages, begun, answers)

    def _search(self, copy: Copy, without: Sequence[Verdict]) -> MessageKey | None:
        """Return the last message before which the state could be saved; None: not even the copy's state can be."""
        self._run(copy, without, iter(()))
        if not copy.tail or not self._can_encode():
            return None
        points_max = POINTS_PER_RUN if len(copy.blob) < LARGE_SIZE_BYTES else POINTS_PER_LARGE_RUN

        def after_records(points: range) -> list[int]:
            good: list[int] = []

            def records() -> Iterator[Record]:
                for number, record in enumerate(islice(copy.tail, points[-1] + 1)):
                    if number in points and self._can_encode():
                        good.append(number)
                    if number < points[-1]:
                        yield record

            self._run(copy, without, records())
            return good

        count = _first_bad_point(len(copy.tail), points_max, after_records)
        record = copy.tail[count - 1]

        def after_messages(points: range) -> list[int]:
            good: list[int] = []

            def probe(index: int) -> None:
                if index + 1 in points and self._can_encode():
                    good.append(index + 1)
                if index + 1 == points[-1]:
                    raise _EnoughError

            def records() -> Iterator[Record]:
                yield from islice(copy.tail, count - 1)
                self._records.probe = probe
                yield record

            self._run(copy, without, records())
            return good

        index = _first_bad_point(sum(1 for _ in messages_of(record.content)), points_max, after_messages) - 1
        return record.header.sequence_id, index, 0, 0

    def _can_encode(self) -> bool:
        try:
            self._life.encode()
        except StateError:
            return False
        return True

    def _describe(self, copy: Copy, key: MessageKey, error: StateError) -> tuple[Unsaved, Verdict]:
        sequence_id, index, _, _ = key
        record = copy.tail[sequence_id - copy.sequence_id - 1]
        message = next(islice(messages_of(record.content), index, None))
        text, handling = one_line(error), self._failures.describe_message(sequence_id, index, message)
        method, caller = handling.method, handling.caller
        verdict = Verdict(
            sequence_id,
            index,
            VerdictKind.TAKEN_BACK,
            StateError.__name__,
            text,
            method=method,
            caller=caller,
            message=dead_letter_message(message),
        )
        return Unsaved(text, sequence_id, index, method, caller), verdict


def _first_bad_point(end: int, points_max: int, try_at: Callable[[range], list[int]]) -> int:
    """Return the first point after the last good one; 0 is good, ``end`` is bad. ``try_at`` returns the good points."""
    begin = 0
    while end - begin > 1:
        step = ceil((end - begin) / points_max)
        begin = max(try_at(range(begin + step, end, step)), default=begin)
        end = min(begin + step, end)
    return end


def one_line(error: Exception) -> str:
    """Format an error in one line; an error of the user's code without the traceback."""
    first, stops, rest = str(error).partition("; the app stops\n")
    last = rest.strip().rpartition("\n")[2].strip() if stops else ""
    last = last.removeprefix(f"{first.rpartition(' ')[2]}: ")
    first = first.partition("\n")[0].partition(f"; {WAYS_OUT}")[0]
    return f"{first}{f': {last}' if last else ''}"[:TEXT_CHARACTERS_MAX]
