"""Calls of one method with a typed column for each argument, by the annotations of its handlers.

Instances can have different classes, and a class can upgrade an older one: there is a column for each parameter of any
of them, of the wider type where types differ. A call has null where its class has no such parameter, and for a default
that its sender did not send.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect

from immortal.appsdk.calls.codec import ArgumentCodec
from immortal.appsdk.types.registry import find_codec, info_of_form, readable_type, show_custom, type_info
from immortal.pipeline.arguments import decoder_of, read_arguments, unreadable
from immortal.pipeline.errors import SourceError
from immortal.protocol import redaction
from immortal.protocol.messages import RpcKind

JSON = pa.large_string()  # JSON; Spark has one type for it and for other text, which is pa.string() here

_SCALARS = {
    inspect.BoolType: pa.bool_(),
    inspect.IntType: pa.int64(),
    inspect.FloatType: pa.float64(),
    inspect.StrType: pa.string(),
    inspect.UUIDType: pa.string(),
    inspect.BytesType: pa.binary(),
    inspect.ByteArrayType: pa.binary(),
    inspect.DateTimeType: pa.timestamp("us", "UTC"),
    inspect.DateType: pa.date32(),
    inspect.TimeType: pa.time64("ns"),
    inspect.TimeDeltaType: pa.duration("us"),
    inspect.DecimalType: pa.decimal128(38, 18),
}
Fit = Callable[[Any], Any]
_PLAIN = (bytes, bytearray, datetime, date, time, timedelta, Decimal)  # what Arrow takes as it is


def arrow_type(info: inspect.Type, above: tuple[inspect.Type, ...] = ()) -> pa.DataType:
    """Return the type of a column for values of an annotation; JSON if no other fits. ``above``: types around it."""
    if any(info is one for one in above):  # a type that refers to itself
        return JSON
    inner = functools.partial(arrow_type, above=(*above, info))
    match info:
        case inspect.Metadata():
            return inner(info.type)
        case inspect.UnionType():
            found = [inner(arm) for arm in info.types if not isinstance(arm, inspect.NoneType)]
            return found[0] if len(found) == 1 else pa.float64() if {*found} == {pa.int64(), pa.float64()} else JSON
        case inspect.EnumType() | inspect.LiteralType():
            values = info.values if isinstance(info, inspect.LiteralType) else [one.value for one in info.cls]
            kinds = {type(value) for value in values} - {type(None)}
            return pa.string() if kinds == {str} else pa.int64() if kinds == {int} else JSON
        case inspect.CollectionType():
            return pa.list_(inner(info.item_type))
        case inspect.DictType():
            key = JSON if isinstance(info.key_type, inspect.UnionType) else inner(info.key_type)  # no key is null
            return JSON if key == JSON else pa.map_(key, inner(info.value_type))
        case inspect.TupleType():
            fields = [(f"_{number}", inner(item)) for number, item in enumerate(info.item_types, 1)]
            return pa.struct(fields) if fields else JSON
        case inspect.StructType(array_like=True, tag=str() | int()):  # its array begins with the tag
            return JSON
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType() | inspect.NamedTupleType():
            fields = [(field.encode_name, inner(field.type)) for field in info.fields]
            return pa.struct(fields) if fields else JSON
        case inspect.CustomType():  # such as Counter, which is a dict
            codec, form = find_codec(getattr(info.cls, "__origin__", info.cls)), info_of_form(info.cls)
            return JSON if codec is None or codec.show is not None or form is None else inner(form)
    return _SCALARS.get(type(info), JSON)


def wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type for the values of both: a number, else text, else JSON; of two structs one with all fields."""
    if one == other:
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return pa.struct(list(_merged([*one, *other]).items()))
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(wider(one.value_type, other.value_type))
    if pa.types.is_map(one) and pa.types.is_map(other):
        return pa.map_(wider(one.key_type, other.key_type), wider(one.item_type, other.item_type))
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return JSON if JSON in (one, other) or pa.types.is_nested(one) or pa.types.is_nested(other) else pa.string()


def _merged(fields: Sequence[pa.Field]) -> dict[str, pa.DataType]:
    types: dict[str, pa.DataType] = {}
    for field in fields:
        types[field.name] = wider(types.get(field.name, field.type), field.type)
    return types


def fitter(narrow: pa.DataType, wide: pa.DataType) -> Fit:
    """Return a converter of plain values of the type ``narrow`` to what Arrow takes for ``wide``.

    It raises what Arrow raises.
    """
    fit = _fitter(narrow, wide)
    return lambda value: None if value is None else fit(value)


def _fitter(narrow: pa.DataType, wide: pa.DataType) -> Fit:
    if wide == JSON:
        return lambda value: msgspec.json.encode(value).decode()
    if pa.types.is_struct(wide):
        fits = {field.name: fitter(field.type, wide.field(field.name).type) for field in narrow}

        def struct(value: Any) -> dict[str, Any]:
            named = value if isinstance(value, dict) else dict(zip(fits, value, strict=False))
            return {name: fit(named.get(name)) for name, fit in fits.items()}

        return struct
    if pa.types.is_list(wide):
        item = fitter(narrow.value_type, wide.value_type)
        return lambda value: list(map(item, value))
    if pa.types.is_map(wide):
        key, item = fitter(narrow.key_type, wide.key_type), fitter(narrow.item_type, wide.item_type)
        return lambda value: [(key(one), item(other)) for one, other in value.items()]
    if pa.types.is_string(wide):
        return lambda value: value if isinstance(value, str) else msgspec.json.encode(value).decode().strip('"')
    if pa.types.is_floating(wide):
        return float

    def checked(value: Any) -> Any:
        pa.scalar(value, wide)  # so that one that is too large is an error of its row
        return value

    return checked


@dataclass(frozen=True, slots=True)
class _Version:
    """Handler of the method in one class."""

    name: str
    method_id: int
    codec: ArgumentCodec
    types: Mapping[str, pa.DataType]  # by parameter


class CallReader:
    """Reader of the calls to one class, newest version first; without method IDs there are no calls of the method."""

    def __init__(
        self,
        versions: Sequence[_Version],
        columns: Mapping[str, tuple[str, pa.DataType]],
        method_ids: Collection[int],
        problem: str | None,
    ) -> None:
        """``problem``: why no argument can be read."""
        self._versions = [
            (
                version,
                [(name, columns[name][0], fitter(narrow, columns[name][1])) for name, narrow in version.types.items()],
            )
            for version in versions
        ]
        self.names = {"reason", *(name for name, _ in columns.values())}
        self.method_ids = sorted(method_ids)
        self._problem = problem

    def row(self, kind: int, rpc_type: int, method_id: int, arguments: bytes | memoryview) -> dict[str, Any] | None:
        """Return the columns of a call, or its ``reason`` if its arguments fit no version; None: no such call."""
        if kind != RpcKind.CALL or method_id not in self.method_ids:
            return None
        reasons = [] if self._problem is None else [self._problem]
        for version, fits in self._versions:
            if version.method_id == method_id:
                try:
                    named = read_arguments(version.codec, rpc_type, arguments)
                    plain = msgspec.to_builtins(named, builtin_types=_PLAIN, enc_hook=show_custom)
                    plain = redaction.redact(plain, (redaction.name_in_rules(version.name),), hidden=lambda _: None)
                    return {column: fit(plain.get(parameter)) for parameter, column, fit in fits}
                except Exception as error:  # a user's types can raise anything for strange bytes
                    reasons.append(unreadable(version.codec, error))
        return {"reason": reasons[0]}


class TypedCalls:
    """Columns of the calls of one method, and their readers by class ("module:Class")."""

    def __init__(self, method: str, targets: Collection[str], table: pa.Schema) -> None:
        """``method``: "Class.method", or "method" of any class. ``table``: the columns that are no arguments.

        Raises SourceError if no class has the method.
        """
        cls, _, name = method.rpartition(".")
        chains = {target: decoder_of(target).definition.chain for target in targets}
        self._versions = {
            target: [
                _version(name, each.codec(each.handlers[name]), each.handlers[name].method_id)
                for each in chain
                if name in each.handlers and (not cls or cls in [one.name for one in chain])
            ]
            for target, chain in chains.items()
        }
        if not any(self._versions.values()):
            there = sorted(
                {f"{one.name}.{each}" for chain in chains.values() for one in chain for each in one.handlers}
            )
            raise SourceError(f"option method: {method!r}: there are {', '.join(there) or 'none'}")
        versions = itertools.chain.from_iterable(self._versions.values())
        merged = _merged([pa.field(*pair) for version in versions for pair in version.types.items()])
        self._columns: dict[str, tuple[str, pa.DataType]] = {}
        taken = {column.lower() for column in table.names}
        for parameter, kind in merged.items():
            column = parameter
            while column.lower() in taken:  # Spark does not distinguish case
                column += "_"
            taken.add(column.lower())
            self._columns[parameter] = column, kind
        self.schema = pa.schema([*table, *(pa.field(*pair) for pair in self._columns.values())])

    def reader(self, target: str | None, problem: str | None = None) -> CallReader:
        """Return the reader of calls to a class; None: of an instance whose class is not known, if a ``problem``."""
        versions = self._versions[target] if target else []
        of = itertools.chain(*self._versions.values()) if problem else versions
        return CallReader(versions, self._columns, {one.method_id for one in of}, problem)


def _version(name: str, codec: ArgumentCodec, method_id: int) -> _Version:
    return _Version(
        name,
        method_id,
        codec,
        {
            name: arrow_type(type_info(readable_type(one)))
            for name, one in zip(codec.signature.parameters, codec.types, strict=True)
        },
    )
