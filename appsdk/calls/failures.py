"""Failed messages: the handler's policy, the verdict, and the exception, encoded for the caller and restored there.

A verdict is in the log, so the text of an exception is taken only once: the same code could give another text the next
time. `docs/reference/errors.md` says what fails in which way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from immortal.appsdk.calls.codec import ArgumentCodec, encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.user_code import is_user_failure, user_traceback
from immortal.appsdk.errors import (
    CallCancelled,
    CalleeFailed,
    CallRefused,
    DefinitionError,
    Failure,
    HandlerError,
    OnError,
)
from immortal.protocol import decoding
from immortal.protocol.client_frames import REFUSED_CALL, Caller, decode_caller
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import (
    IncomingRpc,
    RpcKind,
    RpcType,
    decode_incoming_rpc,
    decode_message,
    encode_incoming_rpc,
)
from immortal.protocol.verdicts import (
    FAILED_CALL,
    LETTER_SIZE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    TRACE_CHARACTERS_MAX,
    Cause,
    Verdict,
    VerdictKind,
)

FAILED_IN_A_ROW_MAX = 100
"""Calls of a method that can fail in a row before further calls are refused: each failure costs a rewind."""
REPEATED_SIZE_BYTES_MAX = 4 << 30
"""Bytes of state and log that can be replayed for such failures before further calls are refused."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_AT_INDEX = re.compile(r" - at `\$\[(\d+)\]")
_CALLER_AND_NUMBER = decoding.Decoder(list[msgspec.Raw])


def checked_on_error(subject: str, given: object) -> OnError:
    """Return ``given`` as an OnError. Raises DefinitionError."""
    for one in get_args(OnError):
        if given == one:
            found: OnError = one
            return found
    raise DefinitionError(f"{subject}: on_error={given!r}: 'undo', 'keep' or 'stop' were expected")


def checked_raises(subject: str, raises: Iterable[type[Exception]]) -> dict[str, type[Exception]]:
    """Return the declared exceptions by name. Raises DefinitionError."""
    found: dict[str, type[Exception]] = {}
    given: Any = (raises,) if isinstance(raises, type) else raises
    for one in given:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise DefinitionError(f"{subject}(raises=[{one!r}]): a class below Exception was expected")
        if issubclass(one, BaseExceptionGroup):
            raise DefinitionError(f"{subject}(raises=[{one!r}]): a group of exceptions can't be sent, only one of them")
        if found.setdefault(one.__name__, one) is not one:
            raise DefinitionError(f"{subject}(raises=...): two exceptions are called {one.__name__!r}")
    return found


def failure_of(
    policy: OnError,
    method: str,
    method_id: int | None,
    error: BaseException,
    task: int = 0,
    *,
    shares_trace: bool = False,
) -> Failure:
    """Make the Failure of an error. ``shares_trace``: callers see where it was raised."""
    trace = _encodable(user_traceback(error))[-TRACE_CHARACTERS_MAX:]
    text = text_of(error)
    if shares_trace:
        front = f"{text}\n"
        text = front + _ADDRESS.sub(" at 0x...", trace)[-max(0, TEXT_CHARACTERS_MAX - len(front)) :]
    return Failure(policy, method, method_id, type(error).__name__, text[:TEXT_CHARACTERS_MAX], trace, task=task)


def refusal(method: str, method_id: int | None, cause: Cause, text: str) -> Failure:
    return Failure("keep", method, method_id, "", _encodable(text)[:TEXT_CHARACTERS_MAX], refused=cause)


def refused(context: Context, subject: str, cause: Cause, text: str) -> HandlerError:
    """Make the error for a message that this instance must not receive: the message fails alone."""
    sequence_id, index = context.sequence_id, context.message_index
    failure = refusal(subject, None, cause, text)
    return HandlerError(f"record {sequence_id}, message {index}: {text}; the app stops", sequence_id, index, failure)


def text_of(error: BaseException) -> str:
    """Return an exception's message, without memory addresses, which differ from run to run."""
    try:
        text = str(error)
    except BaseException as problem:  # a __str__ of the user's
        if not is_user_failure(problem):
            raise
        text = f"its str() raises {type(problem).__name__}"
    return _encodable(_ADDRESS.sub(" at 0x...", text))[:TEXT_CHARACTERS_MAX]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def argument_mismatch(codec: ArgumentCodec, error: BaseException, data: bytes, front: int) -> str:
    """Return an error text that names the parameter that does not fit, what was expected and what was received.

    ``front``: number of items before the arguments.
    """
    names = list(codec.signature.parameters)
    problem = text_of(error)
    try:
        count = len(_CALLER_AND_NUMBER.decode(data)) - front
    except decoding.DecodeError:
        return f"{codec.name}: the arguments can't be read: {problem}"
    if count < 0:
        return f"{codec.name}: a call that waits for an answer, and does not say who waits"
    if not codec.required_count <= count <= codec.count:
        takes = str(codec.count) if codec.required_count == codec.count else f"{codec.required_count} to {codec.count}"
        return f"{codec.name} takes {takes} arguments ({', '.join(names) or 'none'}), {count} came"
    if (found := _AT_INDEX.search(problem)) and front <= int(found[1]) < front + len(names):
        index = int(found[1])
        rest = problem[found.end() :].removesuffix("`")
        where = f" (in it: {rest})" if rest else ""
        return f"{codec.name}: parameter {names[index - front]!r}: {problem[: found.start()]}{where}"
    return f"{codec.name}: {problem}"


# --- the message itself -----------------------------------------------------------------------------------------------


def describe_failure(verdict: Verdict) -> str:
    """Return a verdict as text: "KeyError: 'pepper'", or the kind of failure."""
    return ": ".join(filter(None, (verdict.type_name, verdict.text))) or verdict.kind.name.lower()


def waiting_caller(message: bytes) -> Caller | None:
    """Return the caller that waits for the answer to ``message`` (with its size field); None: nobody, or unknown."""
    _, start, end = decode_message(message, 0)
    return decode_caller(message, start, end)


def rpc_of(message: bytes) -> IncomingRpc | None:
    """Decode the RPC of a logged message; return None if it can't be read."""
    try:
        _, start, end = decode_message(message, 0)
        return decode_incoming_rpc(message, start, end)
    except ProtocolError:
        return None


def method_of(message: bytes) -> int | None:
    """Return the method ID of a call; None if the message is no call, or can't be read."""
    rpc = rpc_of(message)
    return None if rpc is None or rpc.kind != RpcKind.CALL else rpc.method_id


def is_awaited(message: bytes) -> bool:
    """Return True if a message is a call whose caller waits for the answer."""
    rpc = rpc_of(message)
    return rpc is not None and rpc.kind == RpcKind.CALL and rpc.rpc_type == RpcType.ASYNC


def dead_letter_message(data: bytes) -> bytes:
    return data if len(data) <= LETTER_SIZE_BYTES_MAX else b""


def forked(method_id: int, arguments: bytes) -> bytes:
    """Return the message that repeats this call as a fork."""
    return dead_letter_message(encode_incoming_rpc(method_id, RpcType.FORK, arguments))


def verdict_on(error: HandlerError, failure: Failure, caller: str | None, message: bytes) -> Verdict:
    """Make the verdict on a failed message. ``message``: as it was logged, kept if nobody waits for an answer."""
    kind = VerdictKind.KEPT
    if failure.refused:
        kind = VerdictKind.REFUSED
    elif failure.policy == "undo":
        kind = VerdictKind.UNDONE
    return Verdict(
        error.sequence_id,
        error.message_index,
        kind,
        failure.type_name,
        failure.text,
        failure.refused,
        failure.task,
        failure.step,
        failure.method,
        caller,
        dead_letter_message(message) if caller is None else b"",
        failure.trace,
    )


# --- what the caller receives -----------------------------------------------------------------------------------------


def reference(instance_name: str, sequence_id: int, message_index: int) -> str:
    return f"{instance_name} record {sequence_id}:{message_index}".strip()


def answer_of(verdict: Verdict, instance_name: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return name, arguments and attributes of the exception that tells the waiting caller of a verdict."""
    if verdict.kind is VerdictKind.REFUSED:
        return REFUSED_CALL, (verdict.text,), {}
    where = reference(instance_name, verdict.sequence_id, verdict.message_index)
    return FAILED_CALL, (verdict.type_name or verdict.kind.name.capitalize(), verdict.text, where), {}


CANCELLED = "~cancelled"
"""Type name that says that the handler was cancelled. A caller that does not know it raises a CalleeFailed."""


def encode_failed(type_name: str, text: str, place: str) -> bytes:
    """Encode a CalleeFailed, in the form of :func:`immortal.appsdk.state.journal.encode_raised`."""
    return encoder.encode((FAILED_CALL, (type_name, text, place), {}))


def encode_refused(text: str) -> bytes:
    """Encode a CallRefused: the call was not carried out."""
    return encoder.encode((REFUSED_CALL, (text,), {}))


def decode_failed(called: str, name: str, arguments: Sequence[Any]) -> Exception | None:
    """Make the exception for the caller of ``called``; None if ``name`` is an exception that the callee declares."""
    texts = [str(one) for one in arguments]
    if name == REFUSED_CALL:
        return CallRefused(f"{called} was refused: {', '.join(texts)}")
    if name == FAILED_CALL:
        type_name, text, where = (*texts, "", "", "")[:3]
        if type_name == CANCELLED:
            return CallCancelled(called, text, where)
        return CalleeFailed(called, type_name, text, where)
    return None
