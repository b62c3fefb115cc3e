"""Journals of waiting ``async def`` handlers in a checkpoint, to rebuild the handlers.

A journal holds the arguments of the handler and the results that it has had since, in their order. A recovery runs the
handler over it: each operation is compared with the journal and not done again. Each operation of a handler has a step
number, from 1 in the order in which they begin, and a description: ``what`` in words and a ``detail`` (the checksum of
a call's arguments, the time of a timer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.calls.failures import decode_failed
from immortal.appsdk.errors import StateError
from immortal.appsdk.types.exceptions import attributes_of, made
from immortal.protocol import decoding

TIMER = "timer"
CANCEL = "cancel"  # an entry that is no result: Cancelled was raised where the handler waited
CANCEL_STEP = 0

WAYS_OUT = (
    "  A handler that waits is run again over what it has had so far, and must do the same again. Start the app with\n"
    "  the code that it waits in; code that does something else is for a new version of the class (@upgrades), and\n"
    "  has to do the same up to there, or to be a handler of another name."
)


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result in a journal. ``value``: encoded; with ``raised`` the error (:func:`encode_raised`), else the result.

    With CANCEL_STEP it is a cancellation instead, and ``value`` is (the reason, who).
    """

    step: int
    what: str
    detail: int
    raised: bool
    value: bytes
    time_ns: int  # of the record that contained it


decode_journal = decoding.Decoder(list[Entry]).decode


class Pending(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Operation without a result yet. ``number``: unique in the life of the instance."""

    step: int
    what: str
    detail: int
    number: int


class SavedTask(msgspec.Struct, array_like=True, frozen=True):
    """Saved ``async def`` handler that waits. ``sequence_id`` and ``message_index``: of the message that began it."""

    number: int
    generation: int  # how often it has begun again with continue_as
    method_id: int
    arguments: bytes
    caller: str | None  # the caller that waits for its answer; None: nobody
    call_number: int  # of the caller
    started_ns: int
    entries: list[Entry]
    pending: list[Pending]
    sequence_id: int = -1  # unknown: it began in an earlier version
    message_index: int = 0


class SavedTasks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Saved handlers of an instance, and all that they need."""

    next_number: int = 1  # of tasks, calls, timers and waits for events
    tasks: list[SavedTask] = []
    signals: dict[str, list[bytes]] = {}  # without a waiter yet, by name
    schedules: dict[int, int] = {}  # the next time of each, ns since the Unix epoch, by method ID
    jumps: list[tuple[int, int]] = []  # of the clock, while older timers are pending: since when, and by how much
    jumped_to_ns: int = 0  # the last of all jumps
    queued: list[SavedTask] = []  # calls that wait for their turn; ``started_ns``: when they arrived


_decode_raised = ValueDecoder(tuple[str, list[Any], dict[str, Any]]).decode


class JournalError(StateError):
    """Raised if a waiting handler does not repeat its operations: its code has changed."""


class Described(Protocol):
    """Description of a journal entry, a pending operation, or an operation of a handler."""

    @property
    def what(self) -> str: ...
    @property
    def detail(self) -> int: ...


def describe_operation(one: Described) -> str:
    """Return an entry or operation as text, for people."""
    if one.what == TIMER:
        return f"timer for {datetime_of(one.detail).isoformat()}"
    return f"{one.what} (arguments {one.detail & 0xFFFFFFFF:08x})" if one.detail else one.what


def describe_wait(one: Described) -> str:
    """Return what is waited for as text, without the checksum of its arguments."""
    return describe_operation(one) if one.what == TIMER else one.what


# --- exceptions -------------------------------------------------------------------------------------------------------


def declared_name(raises: Mapping[str, type[Exception]], error: BaseException) -> str | None:
    """Return the name under which a waiting caller gets ``error``; None: it is not declared."""
    for cls in type(error).__mro__:
        if raises.get(cls.__name__) is cls:
            return cls.__name__
    return None


def encode_raised(name: str, error: BaseException) -> bytes:
    """Encode an exception as [name, arguments, attributes]. Raises TypeError that says what can't be encoded."""
    attributes = attributes_of(error)
    try:
        return encode_value((name, error.args, attributes))
    except Exception as problem:  # msgspec's own, and what a codec of the user's raises
        raise TypeError(_unencodable(error, {"args": error.args, **attributes}, problem)) from problem


def _unencodable(error: BaseException, parts: Mapping[str, Any], problem: Exception) -> str:
    for name, value in parts.items():
        try:
            encode_value(value)
        except Exception as reason:
            return (
                f"{type(error).__name__} can't be sent to who waits: its {name!r}, a {type(value).__name__}: {reason}"
            )
    return f"{type(error).__name__} can't be sent to who waits: {problem}"


def decode_raised(raises: Mapping[str, type[Exception]], subject: str, data: bytes) -> Exception:
    """Decode the exception that ``subject`` raised, or that says why it could not be called.

    Raises msgspec.DecodeError, LookupError for an exception that ``subject`` does not declare.
    """
    name, arguments, attributes = _decode_raised(data)
    if (failed := decode_failed(subject, name, arguments)) is not None:
        return failed
    if (cls := raises.get(name)) is None:
        raise LookupError(f"it raised {name}; here {subject} declares {', '.join(raises) or 'nothing'}")
    return made(cls, arguments, attributes)
