"""Codecs of a client's calls and replies, typed by the class or by names only; also of status and cancel requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import Any, Literal, Protocol

import msgspec

from immortal.appsdk.calls.codec import ValueDecoder, describe_depth, encode_value, is_too_deep, largest, unencodable
from immortal.appsdk.calls.failures import CANCELLED, argument_mismatch
from immortal.appsdk.client.errors import (
    CallCancelled,
    CallConflict,
    CalleeFailed,
    CallRaised,
    CallRefused,
    ClientClosed,
    ClientError,
)
from immortal.appsdk.client.session import REQUEST_ACCEPTED, REQUEST_UNKNOWN, Call
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import KEY_MARK, Definition
from immortal.appsdk.handlers.proxy import find_handler
from immortal.appsdk.state.journal import decode_raised
from immortal.protocol import decoding
from immortal.protocol.client_frames import REFUSED_CALL, Reply, ReplyKind
from immortal.protocol.extension_values import decode_plain
from immortal.protocol.extensions import QUERIES
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from immortal.protocol.verdicts import FAILED_CALL

ARGUMENTS_SIZE_BYTES_MAX = (16 << 20) - 1024  # of one call: the coordinator accepts no larger frame
CONFLICT_FIELDS = ("what", "known", "given", "advice")
_decode_raised = ValueDecoder(tuple[str, list[Any], dict[str, Any]]).decode
_ARRAY_OF_3 = b"\x93"  # the first byte of the array, which a raised reply lacks


class Method(Protocol):
    """Codec of one method's calls. ``method``: its ID, or its name while the ID is unknown; ``name``: for messages."""

    method: int | str
    name: str

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        """Encode the arguments of a call. Raises TypeError."""

    def value(self, reply: Reply) -> Any:
        """Return the handler's result. Raises what it raised, and ClientError."""


class NamedMethod:
    """Method of an instance whose class is not known here. ``key``: a tuple with the key in a keyed class, else ().

    ``is_query``: it is called only if the instance has it as a query.
    """

    def __init__(self, name: str, key: tuple[Any, ...] = (), *, is_query: bool = False) -> None:
        marked = name + KEY_MARK * len(key)
        self.method: int | str = query_name(marked) if is_query else marked
        self.name = name

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        if keywords:
            raise TypeError(
                f"{self.name}: arguments by name ({', '.join(keywords)}) need the class: connect(Class, name); "
                f"without it they go by position"
            )
        return _encoded(self.name, arguments, (f"argument {place}" for place in count(1)))

    def value(self, reply: Reply) -> Any:
        if reply.kind == ReplyKind.NOTHING:
            return None
        if reply.kind == ReplyKind.VALUE:
            return _decoded(self.name, reply.value)
        raised = _raised(self.name, reply)
        raise CallRaised(self.name, *raised)


def query_name(name: str) -> str:
    """Return the name under which a query is looked up; no handler can have it."""
    return f"{QUERIES}.{name}"


def query_of(name: str) -> str:
    """Return the query for which :func:`query_name` returned ``name``; "" for another name."""
    front, dot, query = name.rpartition(".")
    return query if dot and front == QUERIES else ""


class TypedMethod:
    """Method of an instance whose class is known here."""

    def __init__(self, definition: Definition, handler: Handler[Any, Any]) -> None:
        self.method: int | str = handler.method_id
        self.name = handler.function.__qualname__
        self.is_query = handler.is_query
        self._handler = handler
        self._codec = definition.codec(handler)

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        """Encode the arguments. They are checked here, where the message can say what is wrong."""
        if keywords or len(arguments) != self._codec.positional_count:
            arguments = self._codec.bind(arguments, keywords)
        if self._codec.needs_forms:
            arguments = self._codec.tag_values(arguments)
        data = _encoded(self.name, arguments, self._codec.signature.parameters)
        try:
            self._codec.decode(data)
        except Exception as error:  # msgspec's own, and what a type's __post_init__ raises
            raise TypeError(argument_mismatch(self._codec, error, data, 0)) from None
        return data

    def value(self, reply: Reply) -> Any:
        if reply.kind == ReplyKind.NOTHING:
            return None
        try:
            if reply.kind == ReplyKind.VALUE:
                return self._codec.decode_result(reply.value)
            _raised(self.name, reply)  # may say that the call was refused
            error = decode_raised(self._handler.raises, self.name, _ARRAY_OF_3 + reply.value)
        except (decoding.DecodeError, LookupError) as problem:
            raise ClientError(f"{self.name}: the reply does not fit what it is declared to be: {problem}") from None
        raise error


def typed_method(definition: Definition, name: str) -> TypedMethod:
    """Return the handler ``name``. Raises AttributeError if there is none."""
    return TypedMethod(definition, find_handler(definition, name))


def typed_query(definition: Definition, name: str) -> TypedMethod:
    """Return the query ``name``. Raises AttributeError if there is none."""
    found = definition.handlers.get(name)
    if found is None or not found.is_query:
        queries = ", ".join(sorted(one.name for one in definition.handlers.values() if one.is_query)) or "none"
        if found is not None:
            what = f"{found.function.__qualname__} is no query (the queries: {queries}): it is called without .query"
            raise AttributeError(what)
        raise AttributeError(f"{definition.name} has no query {name!r} (its queries: {queries})")
    return TypedMethod(definition, found)


def _encoded(name: str, arguments: tuple[Any, ...], parameters: Iterable[str]) -> bytes:
    try:
        data = encode_value(arguments)
    except Exception as error:  # an error of a user's type
        raise unencodable(name, parameters, arguments, error) from error
    if is_too_deep(data):
        raise TypeError(describe_depth(name, parameters, arguments))
    if len(data) > ARGUMENTS_SIZE_BYTES_MAX:
        raise TypeError(
            f"{name}: the arguments take {len(data)} bytes, at most {ARGUMENTS_SIZE_BYTES_MAX} are possible: send them "
            f"in parts{largest(parameters, arguments)}"
        )
    return data


def _decoded(name: str, data: bytes) -> Any:
    try:
        return decode_plain(data)
    except decoding.DecodeError as error:
        raise ClientError(f"{name}: the reply can't be read: {error}") from None


def check_conflict(name: str, reply: Reply) -> None:
    """Raise CallConflict if ``reply`` reports one; ignore errors of the handler."""
    if reply.kind == ReplyKind.RAISED:
        with suppress(CallCancelled, CalleeFailed):
            _raised(name, reply)


def _raised(name: str, reply: Reply) -> tuple[str, list[Any], dict[str, Any]]:
    """Return (name of the exception, arguments, attributes) of a reply.

    Raises CallRefused, CalleeFailed, ClientError."""
    try:
        found: tuple[str, list[Any], dict[str, Any]] = _decode_raised(_ARRAY_OF_3 + reply.value)
    except decoding.DecodeError as error:
        raise ClientError(f"{name}: what it raised can't be read: {error}") from None
    if found[0] == REFUSED_CALL:
        if found[2].keys() >= set(CONFLICT_FIELDS):
            raise CallConflict(*(str(found[2][field]) for field in CONFLICT_FIELDS))
        raise CallRefused(f"the call was refused: {', '.join(map(str, found[1]))}")
    if found[0] == FAILED_CALL:
        type_name, text, reference = (*map(str, found[1]), "", "", "")[:3]
        if type_name == CANCELLED:
            raise CallCancelled(name, text, reference)
        raise CalleeFailed(name, type_name, text, reference)
    return found


# Requests about a request: its status, and its cancellation.


Status = Literal["waiting", "done", "unknown"]


class _StatusMethod:
    """Codec of the reply to a :class:`immortal.appsdk.client.session.Question`."""

    method: int | str = 0
    name = "status"

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return b""

    def value(self, reply: Reply) -> Status:
        """Return the status as a word. Raises CallConflict."""
        if reply is REQUEST_ACCEPTED:
            return "waiting"
        check_conflict(self.name, reply)
        return "unknown" if reply is REQUEST_UNKNOWN else "done"


class _CancelMethod:
    """Codec of request 2 of a key, which cancels request 1."""

    method: int | str = CANCEL_CALL_METHOD_ID
    name = "cancel"

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode((1, *arguments))

    def value(self, reply: Reply) -> bool:
        """Return True if the call still waited. Raises ClientError."""
        if reply.kind != ReplyKind.VALUE:
            raise ClientError(
                "the app does not know how to cancel a call: its SDK is of an earlier version than this client's"
            )
        found: bool = decoding.decode(reply.value, type=bool)
        return found


STATUS = _StatusMethod()
CANCEL = _CancelMethod()


class ForkTracker:
    """Forked calls that have no reply yet, which a client awaits before it closes, and the first error of any."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._missing_count = 0
        self._error: ClientError | None = None  # the first
        self._waiting: list[Callable[[], None]] = []

    def call(self, method: Method, arguments: bytes, trace_context: str = "") -> Call:
        """Return a forked call for the caller to submit; its reply is counted here."""
        self._missing_count += 1
        return Call(method.method, arguments, lambda call: self._done(method, call), trace_context)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once no reply is missing, possibly at once."""
        self._waiting.append(callback)
        self._notify()

    def _notify(self) -> None:
        if not self._missing_count:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def _done(self, method: Method, call: Call) -> None:
        self._missing_count -= 1
        try:
            if isinstance(call.outcome, ClientError):
                raise call.outcome
            if call.outcome is not None:
                method.value(call.outcome)
        except CallRaised:
            pass  # it was done, and nobody needs its outcome
        except ClientError as error:
            self._error = self._error or error
        except Exception:  # noqa: S110 (an exception that the handler declares)
            pass
        self._notify()

    def check(self, timeout_s: float | None) -> None:
        """Check, after a wait of ``timeout_s``, that all forked calls were done. Raises ClientError if not."""
        if self._error is not None:
            raise self._error
        if self._missing_count:
            raise ClientClosed(
                f"{self._missing_count} calls that were forked to {self._instance!r} have no reply within "
                f"{timeout_s:g} s: they may have been done or not"
            )
