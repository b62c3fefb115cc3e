"""Verdicts on logged messages that fail alone, and reports of an app about its work.

A log is replayed, so a message that once stopped an app would stop it for good. So it fails alone: the app, the
coordinator or an operator gives a verdict, the coordinator keeps it in the log, and each replay receives it before it
reaches the message. `docs/WIRE.md`, part 7, has the messages; `docs/reference/errors.md` says what fails how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType, encode_message

TEXT_CHARACTERS_MAX = 4096  # limit of an exception's message, which goes to callers and into their logs
TRACE_CHARACTERS_MAX = 16_384  # for the operator; its end is kept, which tells most
LETTER_SIZE_BYTES_MAX = 1 << 20  # limit of a message kept in a dead letter; a larger one is only named
VERDICTS_SIZE_BYTES_MAX = 1 << 20  # limit of one Verdicts message; there may be several
RECORD = -1  # message index for the record as a whole

FAILED_CALL = "~failed"
"""The name under which a caller hears that the handler failed; no exception has it. Its arguments: [type of the
exception, its message, which message of which log failed]."""


class VerdictKind(IntEnum):
    """Treatment of a message in a replay: KEPT and, up to a point, TAKEN_BACK are handled again; all others are
    skipped, and answered as the verdict says.
    """

    REFUSED = 1  # it could not be delivered: nothing was called
    UNDONE = 2  # its handler raised, and the state is as it was before
    KEPT = 3  # its handler raised, and what it had done by then stands: it runs again, and fails again
    KILLED = 4  # it has ended the app's process again and again
    SKIPPED = 5  # an operator said so
    TAKEN_BACK = 6  # it was handled, and later the state was rebuilt without it: see ``behind``


class Cause(IntEnum):
    """Reason for which a message was refused."""

    NONE = 0
    METHOD = 1  # unknown here: a later version may have it
    ARGUMENTS = 2  # they do not fit the parameters of this version
    UNREADABLE = 3  # no call at all
    TRIPPED = 4  # the method has failed so often in a row that it is not called any more
    SENDER = 5  # the answer is not from the instance that was called
    FORBIDDEN = 6  # its caller may not call the method, or has too many calls open, as its coordinator's settings say
    UNUSABLE = 7  # nested too deeply, or an unreadable answer: the waiting handler gets a failure


NOT_OF_CODE = (Cause.FORBIDDEN, Cause.UNUSABLE)
"""Causes for which other code of the app would not help."""

MessageKey: TypeAlias = tuple[int, int, int, int]
"""Key of a message: (sequence ID, index in the record, task, step).

The last two are 0 but for a step of an ``async def`` handler.
"""


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """Verdict on the message ``message_index`` (from 0) of the record ``sequence_id``.

    With ``task`` (its number in the life of the instance) and ``step`` it is about that step of that handler alone,
    with ``task`` alone about that handler, which the message let begin or go on beside others.
    ``type_name``: of the exception, "" in a refusal; ``text``: its message, or why it was refused.
    ``method``: for people, such as "Counter.add". ``caller``: who waits for the answer ("" is the instance itself, "~x"
    a client); None: nobody, so that it becomes a dead letter. ``message``: for a dead letter the message as it was
    logged, from its size on; ``trace``: the traceback, for the operator. ``behind``: of TAKEN_BACK, the record behind
    which the state is one without that message.
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
        """True if a handler that waits for the message goes on with a failure in its place."""
        return self.kind in (VerdictKind.KILLED, VerdictKind.SKIPPED) or self.cause is Cause.UNUSABLE

    @property
    def is_dead_letter(self) -> bool:
        """True if the message becomes a dead letter for an operator: no caller learns of the failure, or it was told
        otherwise.
        """
        return self.kind is VerdictKind.TAKEN_BACK or (self.caller is None and not self.step)

    @property
    def skips(self) -> bool:
        """True if a replay skips the message (or step)."""
        return self.kind not in (VerdictKind.KEPT, VerdictKind.TAKEN_BACK)

    def without_dead_letter(self) -> Verdict:
        """Return a copy without the parts that only a dead letter needs, for a replay."""
        return msgspec.structs.replace(self, message=b"", trace="")


class Unsaved(msgspec.Struct, array_like=True, frozen=True):
    """Report that there is no checkpoint: the state can't be saved, as ``text`` says.

    Since the message ``message_index`` of the record ``sequence_id`` (-1: that is not known), as ``method``, from
    ``caller`` (None: nobody waits or waited). ``why``: why the app has not taken it back by itself, in words.
    """

    text: str
    sequence_id: int = -1
    message_index: int = -1
    method: str = ""
    caller: str | None = None
    why: str = ""


class Handling(msgspec.Struct, array_like=True, frozen=True):
    """Report of what the app is about to handle, or has been handling for ``for_s`` seconds.

    ``message_index`` RECORD: all of the record, message by message; a ``sequence_id`` of -1: nothing any more.
    ``message``: as in a :class:`Verdict`, where the app was asked to be careful with single messages. ``task``: as
    there, of the handler that is about to go on. ``source``: the instance that sent the message, "" where that is the
    app's own or nobody says.
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
    """Request to announce each step of work, since an earlier process of the app died at one.

    It sends Handling before each record up to ``last_sequence_id``, and before each message of the record
    ``suspect_sequence_id`` (-1: of none), and waits until that is on its way. Behind the last of them it sends that it
    handles nothing any more, and waits for that as well. ``handlers``: so it does before each ``async def`` handler
    that a message of that record lets go on.
    """

    last_sequence_id: int
    suspect_sequence_id: int = -1
    handlers: bool = False


_encode = msgspec.msgpack.Encoder().encode
_VERDICT = decoding.Decoder(Verdict)
_VERDICTS = decoding.Decoder(list[Verdict])
_HANDLING = decoding.Decoder(Handling)
_UNSAVED = decoding.Decoder(Unsaved)
_CAREFUL = decoding.Decoder(Careful)


def encode_verdict(verdict: Verdict, message_type: MessageType = MessageType.VERDICT) -> bytes:
    """Encode a Verdict message, from an app; or a TakenBack, or the TakeBack that an app is sent."""
    return encode_message(message_type, _encode(verdict))


def decode_verdict(data: bytes) -> Verdict:
    """Decode a Verdict, TakenBack or TakeBack. Raises RemoteProtocolError."""
    return _checked(_VERDICT.decode_message(data, "a Verdict message"))


def encode_verdicts(verdicts: Iterable[Verdict]) -> list[bytes]:
    """Encode Verdicts messages, for an app: each of VERDICTS_SIZE_BYTES_MAX, or of one verdict, at most.

    At least one: that there are none is said too.
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
    """Decode Verdicts. Raises RemoteProtocolError."""
    return [_checked(verdict) for verdict in _VERDICTS.decode_message(data, "a Verdicts message")]


def encode_unsaved(unsaved: Unsaved) -> bytes:
    """Encode a CheckpointFailed message."""
    return encode_message(MessageType.CHECKPOINT_FAILED, _encode(unsaved))


def decode_unsaved(data: bytes) -> Unsaved:
    """Decode a CheckpointFailed. Raises RemoteProtocolError."""
    return _UNSAVED.decode_message(data, "a CheckpointFailed message")


def encode_handling(handling: Handling) -> bytes:
    """Encode a Handling message."""
    return encode_message(MessageType.HANDLING, _encode(handling))


def decode_handling(data: bytes) -> Handling:
    """Decode a Handling. Raises RemoteProtocolError."""
    handling: Handling = _HANDLING.decode_message(data, "a Handling message")
    if handling.message_index < RECORD or handling.task < 0:
        raise RemoteProtocolError(
            f"a Handling of message {handling.message_index}, handler {handling.task}: at least {RECORD} and 0 were "
            f"expected"
        )
    return handling


def encode_careful(careful: Careful) -> bytes:
    """Encode a Careful message."""
    return encode_message(MessageType.CAREFUL, _encode(careful))


def decode_careful(data: bytes) -> Careful:
    """Decode a Careful. Raises RemoteProtocolError."""
    return _CAREFUL.decode_message(data, "a Careful message")


def _checked(verdict: Verdict) -> Verdict:
    if verdict.sequence_id < 0 or verdict.message_index < 0 or verdict.task < 0 or verdict.step < 0:
        raise RemoteProtocolError(
            f"a verdict on message {verdict.message_index} of record {verdict.sequence_id}, task {verdict.task}, step "
            f"{verdict.step}: none of them can be negative"
        )
    return verdict
