"""Verdicts on logged messages that fail alone, so that the app continues; reports of an app about its work.

A replay would repeat a message that stopped the app, and stop again. So the message fails alone: the app, the
coordinator or an operator gives a verdict, the coordinator keeps it in the log, and each replay receives it before it
reaches the message. `docs/WIRE.md`, part 7, has the messages; `docs/reference/errors.md` has the kinds of failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_message, message_of

TEXT_CHARACTERS_MAX = 4096  # limit of an exception's message, which goes to callers and into their logs
TRACE_CHARACTERS_MAX = 16_384  # of a traceback for the operator; its end is kept, where the cause is
LETTER_SIZE_BYTES_MAX = 1 << 20  # limit of a message kept in a dead letter; a larger one is left out of its dead letter
VERDICTS_SIZE_BYTES_MAX = 1 << 20  # limit of one Verdicts message; there can be several
RECORD = -1  # message index for the record as a whole

FAILED_CALL = "~failed"
"""Name of the error that a caller receives if the handler failed; no exception has this name.
Arguments of the error: [type of the exception, its message, the failed message and its log]."""


class VerdictKind(IntEnum):
    """Treatment of a failed message in a replay: handled again, or skipped and answered by the verdict.

    KEPT and, up to a record, TAKEN_BACK messages are handled again."""

    REFUSED = 1  # it could not be delivered: nothing was called
    UNDONE = 2  # its handler raised, and its changes of the state were undone
    KEPT = 3  # its handler raised, and its changes up to then stay: it runs again, and fails again
    KILLED = 4  # it has ended the app's process repeatedly
    SKIPPED = 5  # an operator decided so
    TAKEN_BACK = 6  # it was handled, and later the state was rebuilt without it: see ``behind``


class Cause(IntEnum):
    """Reason why a message was refused."""

    NONE = 0
    METHOD = 1  # unknown here: a later version can have it
    ARGUMENTS = 2  # they do not fit the parameters of this version
    UNREADABLE = 3  # it is no call
    TRIPPED = 4  # the method has failed so often in a row that it is no longer called
    SENDER = 5  # the answer is not from the called instance
    FORBIDDEN = 6  # by the coordinator's settings its caller may not call the method, or has too many open calls
    UNUSABLE = 7  # nested too deeply, or an unreadable answer: the waiting handler gets a failure


NOT_FIXABLE_BY_CODE = (Cause.FORBIDDEN, Cause.UNUSABLE)
"""Causes that other code of the app cannot remove."""

MessageKey: TypeAlias = tuple[int, int, int, int]
"""Key of a message: (sequence ID, index in the record, task, step).

Task and step are 0, except for a step of an ``async def`` handler.
"""


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Verdict on the message ``message_index`` (from 0) of the record ``sequence_id``.

    With ``task`` (its number in the life of the instance) and ``step`` it covers only that step of that handler; with
    ``task`` alone only that handler, which the message made begin or continue, perhaps with others.
    ``type_name``: of the exception, "" in a refusal; ``text``: its message, or the reason of the refusal.
    ``method``: for people, such as "Counter.add". ``caller``: waits for the answer ("" is the instance itself, "~x"
    a client); None: nobody waits, so that it becomes a dead letter. ``message``: for a dead letter the logged message,
    from its size on; ``trace``: the traceback, for the operator. ``behind``: for TAKEN_BACK, the record after which the
    state has nothing of that message any more.
    """

    sequence_id: int
    message_index: int
    kind: VerdictKind
    type_name: str = ""
    text: str = ""
    cause: Cause = Cause.NONE
    task: int = 0
    step: int = 0
    method: str = ""
    caller: str | None = None
    message: bytes = b""
    trace: str = ""
    behind: int = -1

    @property
    def key(self) -> MessageKey:
        return self.sequence_id, self.message_index, self.task, self.step

    @property
    def ends_waiting(self) -> bool:
        """True if a handler that waits for the message continues with a failure instead."""
        return self.kind in (VerdictKind.KILLED, VerdictKind.SKIPPED) or self.cause is Cause.UNUSABLE

    @property
    def is_dead_letter(self) -> bool:
        """True if the message becomes a dead letter: no caller waits for its answer, or the message was taken back.
        In the latter case the caller has already got another answer."""
        return self.kind is VerdictKind.TAKEN_BACK or (self.caller is None and not self.step)

    @property
    def skips(self) -> bool:
        """True if a replay skips the message (or step)."""
        return self.kind not in (VerdictKind.KEPT, VerdictKind.TAKEN_BACK)

    def without_dead_letter(self) -> Verdict:
        """Return a copy without the parts that only a dead letter needs, for a replay."""
        return msgspec.structs.replace(self, message=b"", trace="")


class Unsaved(msgspec.Struct, array_like=True, frozen=True):
    """Report that the app made no checkpoint, since its state can't be saved: ``text`` has the reason.

    The cause is the message ``message_index`` of the record ``sequence_id`` (-1: unknown), a call of ``method`` by
    ``caller`` (None: nobody waits or waited). ``why``: the reason for which the app has not taken it back itself.
    """

    text: str
    sequence_id: int = -1
    message_index: int = -1
    method: str = ""
    caller: str | None = None
    why: str = ""


class Handling(msgspec.Struct, array_like=True, frozen=True):
    """Report of the message that the app is about to handle, or has been handling for ``for_s`` seconds.

    ``message_index`` RECORD: all messages of the record, in order; ``sequence_id`` -1: the app is idle. ``message``: as
    in a :class:`Verdict`, if a :class:`Careful` asked for single messages. ``task``: number of the handler that is
    about to continue. ``source``: the instance that sent the message; "" if it is the app's own instance or unknown.
    """

    sequence_id: int
    message_index: int = RECORD
    for_s: float = 0.0
    method: str = ""
    caller: str | None = None
    message: bytes = b""
    task: int = 0
    source: str = ""


class Careful(msgspec.Struct, array_like=True, frozen=True):
    """Request to the app to announce each step of work, since an earlier process of the app died during a step.

    The app sends Handling before each record up to ``last_sequence_id``, and before each message of the record
    ``suspect_sequence_id`` (-1: no record), and waits until it is sent. After the last record it sends that it is idle,
    and waits for that too. ``handlers``: it does the same before each ``async def`` handler that a message of that
    record makes continue.
    """

    last_sequence_id: int
    suspect_sequence_id: int = -1
    handlers: bool = False


_encode = msgspec.msgpack.Encoder().encode
_VERDICT = decoding.Decoder(Verdict)
_VERDICTS = decoding.Decoder(list[Verdict])

encode_unsaved, decode_unsaved = message_of(MessageType.CHECKPOINT_FAILED, Unsaved, "a CheckpointFailed message")
encode_careful, decode_careful = message_of(MessageType.CAREFUL, Careful, "a Careful message")
encode_handling, _decode_handling = message_of(MessageType.HANDLING, Handling, "a Handling message")


def encode_verdict(verdict: Verdict, message_type: MessageType = MessageType.VERDICT) -> bytes:
    """Encode a Verdict or TakenBack message from an app, or a TakeBack message to an app."""
    return encode_message(message_type, _encode(verdict))


def decode_verdict(data: bytes) -> Verdict:
    """Decode a Verdict, TakenBack or TakeBack. Raises RemoteProtocolError."""
    return _checked(_VERDICT.decode_message(data, "a Verdict message"))


def encode_verdicts(verdicts: Iterable[Verdict]) -> list[bytes]:
    """Encode Verdicts messages for an app, each with at most VERDICTS_SIZE_BYTES_MAX bytes, or one larger verdict.

    There is at least one message: without verdicts an empty one.
    """
    messages: list[bytes] = []
    gathered: list[msgspec.Raw] = []
    size_bytes = 0
    for verdict in verdicts:
        packed = _encode(verdict.without_dead_letter())
        if gathered and size_bytes + len(packed) > VERDICTS_SIZE_BYTES_MAX:
            messages.append(encode_message(MessageType.VERDICTS, _encode(gathered)))
            gathered, size_bytes = [], 0
        gathered.append(msgspec.Raw(packed))
        size_bytes += len(packed)
    if gathered or not messages:
        messages.append(encode_message(MessageType.VERDICTS, _encode(gathered)))
    return messages


def decode_verdicts(data: bytes) -> Sequence[Verdict]:
    """Decode a Verdicts message. Raises RemoteProtocolError."""
    return [_checked(verdict) for verdict in _VERDICTS.decode_message(data, "a Verdicts message")]


def decode_handling(data: bytes) -> Handling:
    """Decode a Handling. Raises RemoteProtocolError."""
    handling = _decode_handling(data)
    if handling.message_index < RECORD or handling.task < 0:
        raise RemoteProtocolError(
            f"a Handling of message {handling.message_index}, handler {handling.task}: at least {RECORD} and 0 were "
            f"expected"
        )
    return handling


def _checked(verdict: Verdict) -> Verdict:
    if verdict.sequence_id < 0 or verdict.message_index < 0 or verdict.task < 0 or verdict.step < 0:
        raise RemoteProtocolError(
            f"a verdict on message {verdict.message_index} of record {verdict.sequence_id}, task {verdict.task}, step "
            f"{verdict.step}: none of them can be negative"
        )
    return verdict
