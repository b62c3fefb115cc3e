"""Encodes values that MessagePack has no form for as an extension: large integers, and values that would lose their
type.

An integer beyond 64 bits is encoded like this anywhere. Others only where no annotation gives the type to read, as
inside a value annotated ``Any``. `docs/WIRE.md`, "Extension values", has the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID

from msgspec import ValidationError
from msgspec.msgpack import Ext

from immortal.protocol import decoding

EXTENSION_CODE = 73
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
"""Range of integers that MessagePack itself can hold."""

Encode = Callable[[Any], bytes]
_Zone = tuple[str, int, str] | None  # kind, offset in microseconds, name

SCALARS: dict[type, bytes] = {Decimal: b"D", date: b"d", datetime: b"m", time: b"t", timedelta: b"l", UUID: b"u"}
CONTAINERS: dict[type, bytes] = {tuple: b"T", set: b"S", frozenset: b"F"}


def encode_extension(value: Any, encode: Encode) -> Ext:
    """Encode a value whose type is int or one of the above, and has no :func:`zone_problem`.

    ``encode``: for its parts.
    """
    cls = type(value)
    if cls is int:
        size_bytes = value.bit_length() // 8 + 1
        return Ext(EXTENSION_CODE, b"i" + value.to_bytes(size_bytes, "big", signed=True))
    if (kind := CONTAINERS.get(cls)) is not None:
        return Ext(EXTENSION_CODE, kind + encode(list(value)))
    return Ext(EXTENSION_CODE, SCALARS[cls] + encode(_parts(value)))


def _parts(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.days, value.seconds, value.microseconds
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, datetime | time):
        return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone_parts(value.tzinfo)
    return value.isoformat() if isinstance(value, date) else str(value)


def zone_problem(zone: tzinfo) -> str | None:
    """Why a value with this time zone can't be kept."""
    if type(zone) is timezone or _zone_key(zone):
        return None
    return f"a time zone of the class {type(zone).__qualname__} can't be kept: use zoneinfo.ZoneInfo with a key"


def _zone_key(zone: tzinfo) -> str | None:
    cls = type(zone)
    is_known = cls.__module__.partition(".")[0] == "zoneinfo" and cls.__name__ == "ZoneInfo"
    return getattr(zone, "key", None) if is_known else None


def _zone_parts(zone: tzinfo | None) -> _Zone:
    if zone is None:
        return None
    if type(zone) is timezone:
        return ("fixed", zone.utcoffset(None) // timedelta(microseconds=1), zone.tzname(None))
    return ("zone", 0, _zone_key(zone) or "")


def read_extension(code: int, data: Any, hook: Callable[[int, Any], Any] | None = None) -> Any:
    """Decode an extension; an unknown one is returned as Ext. ``hook``: decodes extensions inside it, in place of this.

    Raises ValidationError.
    """
    found = bytes(data)
    if code != EXTENSION_CODE or not found:
        return Ext(code, found)
    try:
        return _read(found[:1], found[1:], hook or read_extension)
    except ValidationError:
        raise
    except Exception as error:  # raised by a class, or for a zone that this machine lacks
        raise ValidationError(f"an extension value {found[:1]!r} that can't be read: {error}") from None


def _read(kind: bytes, content: bytes, hook: Callable[[int, Any], Any]) -> Any:
    if kind == b"i":
        return int.from_bytes(content, "big", signed=True)
    if (reader := _READERS.get(kind)) is None:
        raise ValidationError(f"an extension value of the kind {kind!r}: this version knows none such")
    form, make = reader
    return make(decoding.decode(content, type=form, ext_hook=hook))


def _read_datetime(parts: tuple[str, int, _Zone]) -> datetime:
    return datetime.fromisoformat(parts[0]).replace(fold=parts[1], tzinfo=_read_zone(parts[2]))


def _read_time(parts: tuple[str, int, _Zone]) -> time:
    return time.fromisoformat(parts[0]).replace(fold=parts[1], tzinfo=_read_zone(parts[2]))


def _read_zone(parts: _Zone) -> tzinfo | None:
    if parts is None:
        return None
    kind, offset_us, name = parts
    if kind == "zone":
        from zoneinfo import ZoneInfo  # imported here: few processes need it, and it slows each start

        return ZoneInfo(name)
    offset = timedelta(microseconds=offset_us)
    plain = timezone(offset)
    return (plain if offset else UTC) if plain.tzname(None) == name else timezone(offset, name)


_Moment = tuple[str, int, _Zone]
_READERS: dict[bytes, tuple[Any, Callable[[Any], Any]]] = {
    b"T": (list[Any], tuple),
    b"S": (list[Any], set),
    b"F": (list[Any], frozenset),
    b"D": (str, Decimal),
    b"d": (str, date.fromisoformat),
    b"m": (_Moment, _read_datetime),
    b"t": (_Moment, _read_time),
    b"l": (tuple[int, int, int], lambda parts: timedelta(*parts)),
    b"u": (bytes, lambda data: UUID(bytes=data)),
}


def is_beyond(value: int) -> bool:
    """True if the integer needs an extension."""
    return not INTEGER_MIN <= value <= INTEGER_MAX


def decode_plain(data: Any) -> Any:
    """Decode one MessagePack value with these extensions. Raises DecodeError."""
    return decoding.decode(data, ext_hook=read_extension)
