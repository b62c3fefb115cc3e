"""Tables: mappings in the state that keep their rows encoded, in the order of their keys, and mostly on disk.

In a checkpoint a table is what a ``dict`` would be, so every reader of states knows it, and an attribute can become a
table, or a dict again. Values are encoded when they are set and decoded when they are read: a changed value must be
set again.
"""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence, ValuesView
from itertools import chain
from operator import add, attrgetter, lt
from threading import get_ident
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeGuard, TypeVar, cast, get_args

import lmdb
import msgspec

from immortal.appsdk.calls.codec import ValueDecoder, encode_value, resolve_hints
from immortal.appsdk.calls.context import QUERY_RUNS, Context
from immortal.appsdk.errors import AS_RPC, DefinitionError, QueryError, StateError, UsageError
from immortal.appsdk.state.incoming import map_front
from immortal.appsdk.state.table_rows import KEY_SIZE_BYTES_MAX, KeyForm, Span, Store, after_prefix, key_form, span_of
from immortal.appsdk.types import registry
from immortal.appsdk.types.encoding import allow_integers
from immortal.appsdk.types.handles import MARK
from immortal.appsdk.types.registry import may_change, may_hold_handles
from immortal.protocol import decoding

K = TypeVar("K")
V = TypeVar("V")

PIECE_SIZE_BYTES = 256 << 10
WATCHED_MAX = 1000  # values that were read, before those are forgotten that nobody holds any more
_NOBODY_HOLDS = 2  # references: that of the list, and that of the count itself
_REQUIRED: Any = object()


class RowCodec(Protocol):
    """Encoder and decoder of rows: a :class:`~immortal.appsdk.state.schema.StateSchema`. Both raise StateError."""

    def encode_row(self, name: str, value: Any) -> bytes: ...
    def decode_attribute(self, name: str, raw: Any) -> Any: ...


class Index(NamedTuple):
    value_of: Any
    form: KeyForm


class TableKind:
    """Definition of one table: types of its keys and values, and its indexes. ``schema``: of the class that has it.

    Raises DefinitionError.
    """

    def __init__(self, schema: RowCodec, class_name: str, name: str, annotation: Any, indexed: Iterable[str]) -> None:
        self.schema = schema
        self.name = name
        self.where = f"{class_name}: table {name!r}"
        key, self.value_type = get_args(annotation)
        try:
            self.key = key_form(key)
            self.indexes = {attribute: self._index(attribute) for attribute in indexed}
        except TypeError as error:
            raise DefinitionError(f"{self.where}: {error}") from None
        self.has_plain_keys = getattr(key, "__supertype__", key) in (int, str, bytes)  # which packing never changes
        exact_key: Any = allow_integers(key)
        exact_value: Any = allow_integers(self.value_type)
        self.decode_key = ValueDecoder(exact_key).decode
        self.decode = ValueDecoder(exact_value).plainly
        self.decode_rows = ValueDecoder(dict[exact_key, exact_value]).plainly
        self.decode_raws = ValueDecoder(dict[exact_key, msgspec.Raw]).plainly
        self.is_mutable = may_change(self.value_type)
        self.may_hold_handles = may_hold_handles(self.value_type)

    def _index(self, attribute: str) -> Index:
        cls = self.value_type
        hints = (
            resolve_hints(cls) if isinstance(cls, type) and not issubclass(cls, dict) else {}
        )  # a TypedDict has keys
        if attribute not in hints:
            known = ", ".join(hints) or "none"
            raise TypeError(f"index={attribute!r}: its values have no such attribute (they have: {known})")
        return Index(attrgetter(attribute), key_form(hints[attribute]))


class TableField:
    """Descriptor of a table in a class: it makes the table at the first use."""

    def __init__(self, index: Sequence[str] = ()) -> None:
        if isinstance(index, str):
            raise DefinitionError(f"table(index={index!r}): a list of names was expected: [{index!r}]")
        self.index = tuple(index)
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        attributes = vars(instance)
        found = attributes.get(self.name)
        if type(found) is Table:
            return found
        definition = type(instance)._immortal_definition
        made = attributes[self.name] = Table[Any, Any](definition.state().tables[self.name], instance)
        if found is not None:  # of a copy of the instance
            made.update(found)
        return made

    def __set__(self, instance: Any, rows: Mapping[Any, Any]) -> None:
        """Replace all rows by those of another mapping."""
        mine = self.__get__(instance)
        if rows is not mine:
            if not isinstance(rows, Mapping):
                raise TypeError(f"self.{self.name} = ...: a {type(rows).__qualname__} came, a mapping was expected")
            rows = rows if type(rows) is Table else dict(rows)  # another mapping can read from this table
            mine.clear()
            mine.update(rows)


def table(*, index: Sequence[str] = ()) -> Any:
    """Declare a :class:`Table` with indexes over attributes of its values: ``table(index=["customer"])``.

    A table without an index needs only its annotation.
    """
    return TableField(index)


class Table(MutableMapping[K, V], Generic[K, V]):
    """Mapping in the state of a service, with keys in order: ``orders: Table[int, Order]``.

    It can be larger than memory: old rows are in a temporary file, recent ones in memory. Keys are int, str, bytes,
    bool, float, date, datetime, timedelta, UUID, enums, or tuples of these. Values are what an attribute can be. Each
    read returns a new value: if you change one, set it again, ``self.orders[1] = order``. A handler that forgets it
    fails. Rows that are written during an iteration are seen if they lie ahead.
    """

    __slots__ = ("_count", "_indexes", "_instance", "_kind", "_mark", "_rows", "_size_bytes", "_store", "_watch")

    def __init__(self, kind: TableKind | None = None, instance: Any = None) -> None:
        if kind is None:
            raise UsageError("Table(): a table is an attribute of a service: annotate it, 'orders: Table[int, Order]'")
        self._kind = kind
        self._instance = instance
        self._store = Store()
        self._rows = self._store.add()
        self._indexes = {name: (index, self._store.add()) for name, index in kind.indexes.items()}
        self._count = self._size_bytes = 0  # of the rows in a checkpoint
        self._mark = 0, 0  # the same at the last copy of the state
        self._watch = _Watch(kind)

    # --- rows -------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: K) -> V:
        packed = self._kind.key.pack(key)
        context = self._enter()
        if (data := self._rows.get(packed)) is None:
            raise KeyError(key)
        return self._read(packed, data, context)

    def __contains__(self, key: object) -> bool:
        self._enter()
        return self._rows.get(self._kind.key.pack(key)) is not None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __reversed__(self) -> Iterator[K]:
        return iter(self.keys(reverse=True))

    def __setitem__(self, key: K, value: V) -> None:
        kind = self._kind
        packed = kind.key.pack(key)
        context = self._enter(writes=True)
        data = kind.schema.encode_row(kind.name, value)
        if kind.may_hold_handles and MARK in data:
            raise StateError(f"{kind.where}: row {key!r} has a handle, a table can't keep it: put it in an attribute")
        self._put(key, packed, data, value, self._watched(context) if _handles_new(context) else None)
        if kind.is_mutable and _handles(context):
            self._watched(context).stored(packed, value, data)

    def settle(self, key: K, value: V) -> None:
        """Set a row to a value that nobody changes any more, so that no check has to look at it again."""
        self[key] = value
        self._watch.forget(self._kind.key.pack(key))

    def __delitem__(self, key: K) -> None:
        packed = self._kind.key.pack(key)
        self._enter(writes=True)
        if self._rows.get(packed) is None:
            raise KeyError(key)
        self._delete(packed)

    def __or__(self, rows: Mapping[K, V]) -> dict[K, V]:
        return {**self, **rows}

    def __ror__(self, rows: Mapping[K, V]) -> dict[K, V]:
        return {**rows, **self}

    def __ior__(self, rows: Mapping[K, V] | Iterable[tuple[K, V]]) -> Self:
        self.update(rows)
        return self

    def clear(self) -> None:
        """Remove all rows."""
        for key in self.keys():
            del self[key]

    def first(self) -> tuple[K, V] | None:
        """Return the row with the smallest key; None: there are no rows."""
        return next(iter(self.items()), None)

    def last(self) -> tuple[K, V] | None:
        """Return the row with the largest key; None: there are no rows."""
        return next(iter(self.items(reverse=True)), None)

    # --- rows in order ----------------------------------------------------------------------------------------------

    def keys(self, start: Any = None, stop: Any = None, *, prefix: Any = None, reverse: bool = False) -> KeysView[K]:
        """Return the keys from ``start`` up to, but without, ``stop``; or those that begin with ``prefix``.

        ``prefix``: begin of a str or of bytes, or first items of a tuple; ``start`` and ``stop`` can be prefixes, too.
        """
        return KeysView(self._part(start, stop, prefix, reverse))

    def values(
        self, start: Any = None, stop: Any = None, *, prefix: Any = None, reverse: bool = False
    ) -> ValuesView[V]:
        """Return the values in the order of their keys, see :meth:`keys`."""
        return _Values(self._part(start, stop, prefix, reverse))

    def items(
        self, start: Any = None, stop: Any = None, *, prefix: Any = None, reverse: bool = False
    ) -> ItemsView[K, V]:
        """Return the rows in the order of their keys, see :meth:`keys`."""
        return _Items(self._part(start, stop, prefix, reverse))

    def by(
        self,
        index: str,
        value: Any = _REQUIRED,
        *,
        start: Any = None,
        stop: Any = None,
        prefix: Any = None,
        reverse: bool = False,
    ) -> Iterator[tuple[K, V]]:
        """Yield the rows whose attribute ``index`` is ``value``, or in a range as of :meth:`keys`, sorted by it.

        Rows with the same value follow in the order of their keys.
        """
        if index not in self._indexes:
            known = ", ".join(self._indexes) or "none"
            raise UsageError(f"{self._kind.where} has no index {index!r} (its indexes: {known}): table(index=[...])")
        (_, form), entries = self._indexes[index]
        if value is _REQUIRED:
            span = span_of(form, start, stop, prefix)
        elif (start, stop, prefix) != (None, None, None):
            raise TypeError(f"by({index!r}, <a value>): it can't be together with start=, stop= or prefix=")
        else:
            front = form.pack(value)
            span = front, after_prefix(front)
        self._enter()
        for entry, _ in entries.scan(span, reverse=reverse):
            context = self._enter()
            packed = entry[form.unpack(entry, 0)[1] :]
            data = self._rows.get(packed)
            if data is not None:
                yield self._kind.key.unpack(packed, 0)[0], self._read(packed, data, context)

    def _part(self, start: Any, stop: Any, prefix: Any, reverse: bool) -> _Part[K, V]:
        return _Part(self, span_of(self._kind.key, start, stop, prefix), reverse)

    def _scan(self, span: Span, reverse: bool) -> Iterator[tuple[bytes, bytes, Context | None]]:
        for packed, data in self._rows.scan(span, reverse=reverse):
            yield packed, data, self._enter()

    # --- access -----------------------------------------------------------------------------------------------------

    def _enter(self, *, writes: bool = False) -> Context | None:
        """Check that the code that runs can use the table; return its context, None: the state is only shown.

        Raises UsageError.
        """
        context: Context | None = getattr(self._instance, "_immortal_context", None)
        if context is None:
            return None
        if get_ident() != context.thread_id and context.outbox is not None:
            raise UsageError(
                f"self.{self._kind.name} is used in another thread than the handlers': only they use a table; keep "
                f"what a hook or thread needs in an attribute"
            )
        if writes and context.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"self.{self._kind.name} is changed: a query only reads: {AS_RPC}")
        return context

    def _watched(self, context: Context) -> _Watch:
        """Return the values of the message that is handled."""
        moment = context.sequence_id, context.message_index
        if self._watch.moment != moment:
            self._watch = _Watch(self._kind, moment)
        return self._watch

    def _read(self, packed: bytes, data: bytes, context: Context | None) -> V:
        kind = self._kind
        try:
            value: V = kind.decode(data)
        except Exception:  # the other function reads more, and explains errors
            value = kind.schema.decode_attribute(kind.name, data)
        if kind.is_mutable and _handles(context):
            self._watched(context).read(packed, value, data)
        return value

    def _put(self, key: K, packed: bytes, data: bytes, value: V, refuses: _Watch | None = None) -> None:
        entries = [index.form.pack(index.value_of(value)) + packed for index, _ in self._indexes.values()]
        for one in (packed, *entries):
            if len(one) > KEY_SIZE_BYTES_MAX:
                what = "its key has" if one is packed else "its key and an indexed attribute have"
                raise StateError(
                    f"{self._kind.where}: row {str(key)[:40]!r}...: {what} {len(one)} bytes, at most "
                    f"{KEY_SIZE_BYTES_MAX} are possible: use a shorter key"
                )
        self._make_room(refuses)
        old = self._rows.put(packed, data)
        self._size_bytes += len(data)
        if old is None:
            self._count += 1
            self._size_bytes += self._key_size_bytes(packed)
        else:
            self._size_bytes -= len(old)
        if entries and old != data:
            self._forget_entries(packed, old)
            for entry, (_, rows) in zip(entries, self._indexes.values(), strict=True):
                rows.put(entry, b"")

    def _delete(self, packed: bytes) -> None:
        self._make_room(None)
        old = self._rows.put(packed, None)
        self._count -= 1
        self._size_bytes -= self._key_size_bytes(packed) + len(old or b"")
        self._forget_entries(packed, old)
        self._watch.forget(packed)

    def _key_size_bytes(self, packed: bytes) -> int:
        """Return the size of a key in a checkpoint, where 1 in a table of float is 1.0."""
        return len(encode_value(self._kind.key.unpack(packed, 0)[0]))

    def _forget_entries(self, packed: bytes, old: bytes | None) -> None:
        if old is not None and self._indexes:
            value = self._kind.schema.decode_attribute(self._kind.name, old)
            for index, rows in self._indexes.values():
                rows.put(index.form.pack(index.value_of(value)) + packed, None)

    def _make_room(self, refuses: _Watch | None) -> None:
        """Move recent writes into the file if they are many.

        ``refuses``: notes a failure, which is then raised as StateError; None: go on, since a replay must not fail
        where no call failed before.
        """
        store = self._store
        if store.recent_size_bytes <= store.limit_bytes:
            return
        try:
            store.flush()
        except (OSError, lmdb.Error) as error:
            if refuses is not None:
                refuses.problem = StateError(  # the call fails, even if its handler catches the error
                    f"{self._kind.where}: the row can't be kept, since the table's temporary file can't be written: "
                    f"{error}; make room there, or choose another folder with TMPDIR"
                )
                raise refuses.problem from None
            store.limit_bytes = 2 * store.recent_size_bytes

    # --- for the SDK ------------------------------------------------------------------------------------------------

    def pop_raw(self, key: K) -> bytes | None:
        """Remove a row and return its encoded value; None: there is none."""
        packed = self._kind.key.pack(key)
        self._enter(writes=True)
        if (data := self._rows.get(packed)) is not None:
            self._delete(packed)
        return data

    def put_raw(self, key: K, data: bytes) -> None:
        """Set a row to an encoded value, of a table of the same class without indexes."""
        self._enter(writes=True)
        self._put(key, self._kind.key.pack(key), data, cast(V, None))

    def pieces(self) -> tuple[int, Iterator[bytes]]:
        """Encode the table as a MessagePack map, like a dict; return its size in bytes, and its pieces."""
        front = map_front(self._count)
        return len(front) + self._size_bytes, self._pieces(front)

    def _pieces(self, front: bytes) -> Iterator[bytes]:
        unpack = self._kind.key.unpack
        parts, size_bytes = [front], 0
        for packed, data in self._rows.scan((b"", None)):
            parts += encode_value(unpack(packed, 0)[0]), data
            size_bytes += len(data)
            if size_bytes >= PIECE_SIZE_BYTES:
                yield b"".join(parts)
                parts, size_bytes = [], 0
        yield b"".join(parts)

    def load(self, count: int, data: bytes) -> None:
        """Add the rows of a MessagePack map of ``count`` entries. Raises StateError."""
        kind = self._kind
        last = next((key for key, _ in self._rows.scan((b"", None), reverse=True)), b"")
        try:  # all at once, as a checkpoint of a table has them
            raws, values = kind.decode_raws(data), kind.decode_rows(data)
            keys = list(map(kind.key.pack, raws))
            entries = [
                list(map(add, map(index.form.pack, map(index.value_of, values.values())), keys))
                for index, _ in self._indexes.values()
            ]
            is_plain = len(keys) == count and last < keys[0] and all(map(lt, keys, keys[1:]))
        except Exception:  # the other function reads more, and explains errors
            is_plain = False
        if not is_plain or max(map(len, chain(keys, *entries))) > KEY_SIZE_BYTES_MAX:
            self._load_each(2 * count, data[len(map_front(count)) :])
            return
        self._make_room(None)
        rows = list(map(bytes, raws.values()))
        self._rows.fill(dict(zip(keys, rows, strict=True)), at_end=True)
        for some, (_, index_rows) in zip(entries, self._indexes.values(), strict=True):
            index_rows.fill(dict.fromkeys(some, b""))
        saved = list(raws) if kind.has_plain_keys else [kind.key.unpack(key, 0)[0] for key in keys]
        self._count += count
        self._size_bytes += sum(map(len, rows)) + len(encode_value(saved)) - len(map_front(count))

    def _load_each(self, count: int, data: bytes) -> None:
        """Add rows one after the other, such as those of a dict, which has another order. ``count``: of keys and
        values. Raises StateError."""
        kind = self._kind
        try:  # as an array its items are found without the creation of any key or value
            front = b"\xdd" + count.to_bytes(4, "big")
            items = map(bytes, decoding.decode(front + data, type=list[msgspec.Raw]))
            for key_data, row in zip(items, items, strict=True):
                key = kind.decode_key(key_data)
                self._put(key, kind.key.pack(key), row, kind.schema.decode_attribute(kind.name, row))
        except (decoding.DecodeError, TypeError, ValueError) as error:
            raise StateError(f"{kind.where} can't be read from the checkpoint: {error}") from None

    def track_undo(self, *, enabled: bool) -> None:
        """Keep old values of rows from now on, so that :meth:`undo_changes` restores the present ones; False: stop."""
        self._mark = self._count, self._size_bytes
        self._store.track_undo(enabled=enabled)

    def undo_changes(self) -> None:
        """Restore the rows of the last copy of the state."""
        self._store.undo_changes()
        self._count, self._size_bytes = self._mark
        self._watch = _Watch(self._kind)
        self.track_undo(enabled=True)

    @property
    def undo_size_bytes(self) -> int:
        return self._store.undo_size_bytes

    @property
    def snapshot(self) -> object:
        """Read transaction of the file. While somebody holds it, a forked child can read the rows."""
        return self._store.snapshot

    def storage_problem(self) -> StateError | None:
        """Return the error if the handler that has run changed a value that it read, and did not set it again, or if a
        row was refused to it."""
        watch = self._watch
        if not watch.held and watch.changed is None and watch.problem is None:
            return None
        watch.compare()
        self._watch = _Watch(self._kind)
        if watch.changed is None or watch.problem is not None:
            return watch.problem
        key = self._kind.key.unpack(watch.changed, 0)[0]
        return StateError(
            f"{self._kind.where}: row {key!r} was changed but not stored: a read returns a copy, so write "
            f"self.{self._kind.name}[{key!r}] = <the value> after the change"
        )

    def __repr__(self) -> str:
        return f"<Table {self._kind.name!r} of {self._count} rows>"

    def __reduce__(self) -> Any:  # a copy outside of a service is a dict
        return dict, (dict(self),)


registry._registered[Table] = registry.Codec(  # as the result of a handler it is a dict
    dict,
    lambda annotation, rows: rows,
    problem=lambda annotation: "a Table is possible only as the whole annotation of an attribute",
)


def _handles(context: Context | None) -> TypeGuard[Context]:
    """Return True if a handler runs that is no query."""
    return context is not None and context.handling_thread_id > QUERY_RUNS


def _handles_new(context: Context | None) -> TypeGuard[Context]:
    """Return True if a message is handled that no earlier life has handled, as far as is known."""
    return _handles(context) and context.tasks is not None and context.tasks.queries.handles_new


class _Watch:
    """Values that a handler has read from a table or put into it. ``changed``: key of one that has changed since.

    ``moment``: (record, message) that is handled. ``problem``: why the temporary file took no row."""

    def __init__(self, kind: TableKind, moment: tuple[int, int] = (-1, 0)) -> None:
        self.moment = moment
        self.held: dict[bytes, list[tuple[Any, bytes]]] = {}
        self.changed: bytes | None = None
        self.problem: StateError | None = None
        self._kind = kind
        self._left = WATCHED_MAX

    def read(self, packed: bytes, value: Any, data: bytes) -> None:
        self.held.setdefault(packed, []).append((value, data))
        self._left -= 1
        if not self._left:
            self.compare()
            self._left = max(WATCHED_MAX, len(self.held))

    def stored(self, packed: bytes, value: Any, data: bytes) -> None:
        self.held[packed] = []
        self.read(packed, value, data)

    def forget(self, packed: bytes) -> None:
        self.held.pop(packed, None)

    def compare(self) -> None:
        """Find the values that have changed, and forget those that nobody else holds."""
        held, self.held = self.held, {}
        for packed, entries in held.items():
            if self.changed is None and any(self._has_changed(value, data) for value, data in entries):
                self.changed = packed
            if kept := [entry for entry in entries if sys.getrefcount(entry[0]) > _NOBODY_HOLDS]:
                self.held[packed] = kept

    def _has_changed(self, value: Any, data: bytes) -> bool:
        schema, name = self._kind.schema, self._kind.name
        try:
            now = schema.encode_row(name, value)
        except StateError:
            return True
        # A set has another order than the one that was put.
        return now != data and now != schema.encode_row(name, schema.decode_attribute(name, data))


class _Part(Mapping[K, V]):
    """Rows of a table whose keys lie in a span."""

    def __init__(self, table: Table[K, V], span: Span, reverse: bool) -> None:
        self._table = table
        self._span = span
        self._reverse = reverse

    def __getitem__(self, key: K) -> V:
        packed, (low, high) = self._table._kind.key.pack(key), self._span
        if packed < low or (high is not None and packed >= high):
            raise KeyError(key)
        return self._table[key]

    def __iter__(self) -> Iterator[K]:
        unpack = self._table._kind.key.unpack
        for packed, _, _ in self._table._scan(self._span, self._reverse):
            yield unpack(packed, 0)[0]

    def __len__(self) -> int:
        return len(self._table) if self._span == (b"", None) else sum(1 for _ in self)

    def rows(self) -> Iterator[tuple[K, V]]:
        table = self._table
        unpack = table._kind.key.unpack
        for packed, data, context in table._scan(self._span, self._reverse):
            yield unpack(packed, 0)[0], table._read(packed, data, context)


class _Values(ValuesView[V]):
    _mapping: Any

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.rows())


class _Items(ItemsView[K, V]):
    _mapping: Any

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._mapping.rows()  # type: ignore[no-any-return]
