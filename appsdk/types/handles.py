"""Handles: each names a node by its owner and a key. To a type checker ``Handle[Order]`` is ``type[Order]``.

A handle is encoded as a MessagePack extension, so that it is found in any message, whatever type the reader expects.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import typing
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from immortal.appsdk.errors import UsageError
from immortal.appsdk.types.registry import Codec, describe_received
from immortal.protocol import decoding, extension_values
from immortal.protocol.limits import NAME_SIZE_BYTES_MAX

T = TypeVar("T")

EXTENSION_CODE = 72
MARK = b"\xf3handle\x01"  # first bytes of its data: a message without them has no handles, which is fast to check
KEY_SIZE_BYTES = 16


class _Current(threading.local):
    life: Any = None  # owner of values that are decoded now: an immortal.appsdk.nodes.nodes.Nodes, or None


current = _Current()


class _Handle(Generic[T]):
    """Right to call one node. ``_immortal_of``: (owner, key, the node's class or None, the instance that uses it)."""

    __slots__ = ("_immortal_of",)

    def __init__(self, owner: str, key: bytes, cls: Any, life: Any) -> None:
        object.__setattr__(self, "_immortal_of", (owner, key, cls, life))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        life = self._immortal_of[3]
        if life is None:
            raise UsageError(f"{self!r}.{name}: a handle is used in handlers, by the instance that it was passed to")
        return life.method(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r}.{name}: a handle has no attributes: send its node a call")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handle) and self._immortal_of[:2] == other._immortal_of[:2]

    def __hash__(self) -> int:
        return hash(self._immortal_of[:2])

    def __repr__(self) -> str:
        owner, key, cls, _ = self._immortal_of
        return f"<handle {handle_label(key)} of {owner!r}{f', {cls.__qualname__}' if cls is not None else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, self._immortal_of[:3]


def handle_label(key: bytes) -> str:
    """Return a label of a handle for people: it identifies the handle and reveals nothing of its key."""
    return hashlib.blake2b(key, digest_size=4).hexdigest()


def _unpickled(owner: str, key: bytes, cls: Any) -> _Handle[Any]:
    return _Handle(owner, key, cls, current.life)


if TYPE_CHECKING:
    Handle: TypeAlias = type[T]
else:
    Handle = _Handle
    Handle.__name__ = Handle.__qualname__ = "Handle"


def codec_of(cls: type) -> Codec | None:
    return _HANDLE if cls is _Handle else None


def _encode(handle: _Handle[Any]) -> msgspec.msgpack.Ext:
    owner, key, _, life = handle._immortal_of
    if life is None:
        raise TypeError("a handle is sent by handlers: not by tests, clients and other code around them")
    life.encoding()
    return msgspec.msgpack.Ext(EXTENSION_CODE, MARK + key + owner.encode())


def read_extension(code: int, data: Any) -> Any:
    """Decode a handle without a class, or what :mod:`protocol.extension_values` reads; return the rest unchanged.

    Raises ValueError.
    """
    found = bytes(data)
    if code != EXTENSION_CODE or not found.startswith(MARK) or len(found) <= len(MARK) + KEY_SIZE_BYTES:
        return extension_values.read_extension(code, found, read_extension)
    key, owner = found[len(MARK) : len(MARK) + KEY_SIZE_BYTES], found[len(MARK) + KEY_SIZE_BYTES :]
    if 0 in owner or len(owner) > NAME_SIZE_BYTES_MAX:  # messages about the handle are sent to its owner
        raise ValueError(f"a handle whose owner is {owner[:20]!r}, which no instance can be called")
    return _Handle(owner.decode(), key, None, current.life)


def _decode(annotation: Any, plain: Any) -> _Handle[Any]:
    if not isinstance(plain, _Handle):
        raise ValueError(f"Expected a handle, got {describe_received(plain)}")
    owner, key, _, life = plain._immortal_of
    (cls,) = typing.get_args(annotation) or (None,)
    return _Handle(owner, key, cls if hasattr(cls, "_immortal_node") else None, life)


def _problem(annotation: Any) -> str | None:
    (cls,) = typing.get_args(annotation) or (Any,)
    if cls is not Any and isinstance(cls, type) and not hasattr(cls, "_immortal_node"):
        return f"Handle[{cls.__qualname__}]: a class below immortal.Node was expected"
    return None


_HANDLE = Codec(_encode, _decode, show=repr, problem=_problem)


def handles_in(data: bytes) -> list[tuple[str, bytes]]:
    """Return (owner, key) of each handle in MessagePack data, in order; of damaged data, those before the damage."""
    found: list[tuple[str, bytes]] = []
    if MARK not in data:
        return found

    def collect(code: int, content: Any) -> Any:
        if code == extension_values.EXTENSION_CODE:
            return extension_values.read_extension(code, content, collect)
        if isinstance(handle := read_extension(code, content), _Handle):
            found.append(handle._immortal_of[:2])
        return None

    with contextlib.suppress(decoding.DecodeError):
        decoding.decode(data, ext_hook=collect)
    return found
