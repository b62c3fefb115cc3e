"""Extension encoding for values that MessagePack cannot hold: large integers, and values that would lose their type.

An integer beyond 64 bits is always encoded like this. Other values are only where no annotation gives the type to read,
as inside a value annotated ``Any``. :data:`KINDS` lists them. `docs/WIRE.md`, "Extension values", has the bytes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import msgspec
from msgspec import ValidationError
from msgspec.msgpack import Ext

from immortal.protocol import decoding

EXTENSION_CODE = 73
INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 64) - 1
"""Range of integers that MessagePack can hold."""
FRACTION_BITS_MAX = 1 << 16
"""Limit of the bits of a fraction's parts: the time to reduce a fraction grows with their square."""

Encode = Callable[[Any], bytes]
Hook = Callable[[int, Any], Any]
_Zone = tuple[str, int, str] | None  # kind, offset in microseconds, name
_Moment = tuple[str, int, _Zone]


class Kind(NamedTuple):
    """Kind of extension values: the values of one class.

    ``path``: of the class, which is imported when its first value is read. ``form``: the type of the contents.
    ``parts``: returns the contents of a value; raises ValueError if the value can't be kept. ``build``: builds the
    value from the class and the contents. ``is_container``: the contents are values of any type, as in a list.
    """

    letter: bytes
    path: str
    form: Any
    parts: Callable[[Any], Any]
    build: Callable[[Any, Any], Any]
    is_container: bool = False

    @property
    def cls(self) -> Any:
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def kind_of(cls: type) -> Kind | None:
    """Return the kind of extension values of a class; None if it has none."""
    kind = _BY_PATH.get(f"{cls.__module__}.{cls.__qualname__}")
    return kind if kind is not None and kind.cls is cls else None


def encode_extension(value: Any, encode: Encode) -> Ext:
    """Encode an int, or a value of a class that has a kind. ``encode``: encodes the contents.

    Raises ValueError for a value that can't be kept, and the errors of ``encode``.
    """
    cls = type(value)
    if cls is int:
        size_bytes = value.bit_length() // 8 + 1
        return Ext(EXTENSION_CODE, b"i" + value.to_bytes(size_bytes, "big", signed=True))
    if (kind := kind_of(cls)) is None:
        raise ValueError(f"a value of type {cls.__qualname__} has no form as an extension")
    return Ext(EXTENSION_CODE, kind.letter + encode(kind.parts(value)))


# --- the kinds --------------------------------------------------------------------------------------------------------


def _call(cls: Any, contents: Any) -> Any:
    return cls(contents)


def _call_with_items(cls: Any, contents: Any) -> Any:
    return cls(*contents)


def _deque(cls: Any, contents: list[Any]) -> Any:
    return cls(contents[1:], contents[0])


def _fraction_parts(value: Any) -> Any:
    if problem := _fraction_problem(value.numerator, value.denominator):
        raise ValueError(problem)
    return value.numerator, value.denominator


def _fraction(cls: Any, contents: Any) -> Any:
    if isinstance(contents, str):
        if not re.fullmatch(r"[-+]?\d{1,4000}(/\d{1,4000}|\.\d{1,4000})?", contents, re.ASCII):
            raise ValueError(f"Expected a fraction, such as '1/3' or '0.25', got {contents[:40]!r}")
        return cls(contents)
    numbers = contents if isinstance(contents, tuple) else (contents, 1)
    if problem := _fraction_problem(*numbers):
        raise ValueError(problem)
    return cls(*numbers)


def _fraction_problem(*numbers: int) -> str | None:
    if max(number.bit_length() for number in numbers) <= FRACTION_BITS_MAX:
        return None
    return f"a fraction whose numerator or denominator has more than {FRACTION_BITS_MAX} bits can't be kept"


_FLAGS = re.ASCII | re.DOTALL | re.IGNORECASE | re.LOCALE | re.MULTILINE | re.UNICODE | re.VERBOSE


def _pattern_parts(value: re.Pattern[Any]) -> str | dict[str, Any]:
    if value.flags & ~int(_FLAGS):
        raise ValueError("a pattern with the flag re.DEBUG can't be kept")
    is_plain = isinstance(value.pattern, str) and value.flags == re.UNICODE
    return value.pattern if is_plain else {"pattern": value.pattern, "flags": value.flags}


def _pattern(cls: Any, contents: Any) -> Any:
    if isinstance(contents, str):
        contents = {"pattern": contents}
    pattern, flags = contents.get("pattern"), contents.get("flags", 0)
    if not isinstance(pattern, str | bytes) or type(flags) is not int or flags & ~int(_FLAGS):
        raise ValueError('Expected a pattern, as text or as {"pattern": text, "flags": number}')
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{pattern[:40]!r} is no regular expression: {error}") from None


def _zone_name(value: Any) -> str:
    if (key := _zone_key(value)) is None:
        raise ValueError("a ZoneInfo without a key can't be kept")
    return key


def _moment_parts(value: Any) -> _Moment:
    if value.tzinfo is not None and (problem := zone_problem(value.tzinfo)):
        raise ValueError(problem)
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone_parts(value.tzinfo)


def _moment(cls: Any, contents: _Moment) -> datetime | time:
    found: datetime | time = cls.fromisoformat(contents[0])
    return found.replace(fold=contents[1], tzinfo=_read_zone(contents[2]))


def zone_problem(zone: tzinfo) -> str | None:
    """Return why a value with this time zone can't be kept; None if it can."""
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


_ADDRESSES = {
    b"a": "IPv4Address",
    b"A": "IPv6Address",
    b"n": "IPv4Network",
    b"N": "IPv6Network",
    b"e": "IPv4Interface",
    b"E": "IPv6Interface",
}

KINDS = (
    Kind(b"T", "builtins.tuple", list[Any], list, _call, is_container=True),
    Kind(b"S", "builtins.set", list[Any], list, _call, is_container=True),
    Kind(b"F", "builtins.frozenset", list[Any], list, _call, is_container=True),
    Kind(b"q", "collections.deque", list[Any], lambda value: [value.maxlen, *value], _deque, is_container=True),
    Kind(b"o", "collections.OrderedDict", dict[Any, Any], dict, _call, is_container=True),
    Kind(b"c", "collections.Counter", dict[Any, Any], dict, _call, is_container=True),
    Kind(b"D", "decimal.Decimal", str, str, _call),
    Kind(b"d", "datetime.date", str, methodcaller("isoformat"), lambda cls, text: cls.fromisoformat(text)),
    Kind(b"m", "datetime.datetime", _Moment, _moment_parts, _moment),
    Kind(b"t", "datetime.time", _Moment, _moment_parts, _moment),
    Kind(
        b"l",
        "datetime.timedelta",
        tuple[int, int, int],
        attrgetter("days", "seconds", "microseconds"),
        _call_with_items,
    ),
    Kind(b"u", "uuid.UUID", bytes, attrgetter("bytes"), lambda cls, data: cls(bytes=data)),
    Kind(b"x", "builtins.complex", float | str, str, _call),
    Kind(b"r", "builtins.range", tuple[int, int, int], attrgetter("start", "stop", "step"), _call_with_items),
    Kind(b"f", "fractions.Fraction", int | str | tuple[int, int], _fraction_parts, _fraction),
    Kind(b"z", "zoneinfo.ZoneInfo", str, _zone_name, _call),
    Kind(b"p", "re.Pattern", str | dict[str, Any], _pattern_parts, _pattern),
    Kind(
        b"P",
        "immortal.appsdk.types.personal.Personal",
        tuple[str, bytes],
        attrgetter("_encoded"),
        lambda cls, contents: cls._decoded(*contents),
    ),
    *(Kind(letter, f"ipaddress.{name}", str, str, _call) for letter, name in _ADDRESSES.items()),
)
_BY_PATH = {kind.path: kind for kind in KINDS}
_BY_LETTER = {kind.letter: kind for kind in KINDS}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_extension(code: int, data: Any, hook: Hook | None = None) -> Any:
    """Decode an extension; an unknown one is returned as Ext. ``hook``: decodes inner extensions, instead of this.

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


def _read(letter: bytes, content: bytes, hook: Hook) -> Any:
    if letter == b"i":
        return int.from_bytes(content, "big", signed=True)
    if (kind := _BY_LETTER.get(letter)) is None:
        raise ValidationError(f"an extension value of the kind {letter!r}: this version knows none such")
    return kind.build(kind.cls, converted(decoding.decode(content, ext_hook=hook), kind.form))


def converted(plain: Any, form: Any, dec_hook: Callable[[Any, Any], Any] | None = None) -> Any:
    """Convert a decoded value to ``form``; integers in it can have any size. Raises ValidationError."""
    return msgspec.convert(plain, form, dec_hook=dec_hook, builtin_types=(bytes, bytearray, memoryview))


def is_beyond(value: int) -> bool:
    """Return True if the integer needs an extension."""
    return not INTEGER_MIN <= value <= INTEGER_MAX


def decode_plain(data: Any) -> Any:
    """Decode one MessagePack value with these extensions. Raises DecodeError."""
    return decoding.decode(data, ext_hook=read_extension)
