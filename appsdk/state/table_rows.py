"""Ordered rows of bytes for tables, and keys as bytes that have the order of their values.

Recent writes stay in memory until they are many; then they move into an LMDB file. It is a temporary file of this
process: it has no name once it is open, and no later process reads it, since a checkpoint has all rows. A small table
never has one. The results of reads do not depend on when rows move into the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from functools import partial
from itertools import chain, islice, takewhile
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin
from uuid import UUID

import lmdb

KEY_SIZE_BYTES_MAX = 510  # LMDB has 511, and a scan looks for the key behind one, which is a byte longer
RECENT_SIZE_BYTES_MAX = 8 << 20  # of one table's writes in memory, before they move into the file
_ROW_SIZE_BYTES = 150  # of a row's objects in memory, about
_DELETED_SIZE_BYTES = 128 << 10
_MAP_SIZES_BYTES = (1 << 40, 1 << 36, 1 << 32)  # of address space: the first that the process may have
_READERS_SIZE_BYTES = 8192  # of LMDB's table of 126 readers
_AROUND_SIZE_BYTES = 64 << 10  # of pages that the system maps with the one that is read
_READ_SIZE_BYTES_MAX = 32 << 20  # of pages that can have been mapped, before that is looked at
_MAPPED_SIZE_BYTES_MAX = 160 << 20  # of all files in this process, before a table's pages are unmapped
_ROWS_AT_ONCE_MIN, _ROWS_AT_ONCE_MAX = 8, 128
_ABSENT: Any = object()

Row = tuple[bytes, bytes]
Span = tuple[bytes, bytes | None]  # keys from the first one up to the second, which is outside; None: to the end


class Store:
    """Rows of one table and of its indexes, in one file."""

    def __init__(self) -> None:
        self.all: list[Rows] = []
        self.recent_size_bytes = 0
        self.undo_size_bytes = 0
        self.limit_bytes = RECENT_SIZE_BYTES_MAX
        self.snapshot: Any = None  # LMDB's transaction on the rows in the file; None: there is no file
        self.read_size_bytes = 0  # of pages of the file, since :meth:`bound_pages`
        self._file: Any = None
        self._unmap_pages: Callable[[], object] = int

    def add(self) -> Rows:
        """Add an ordered map. All must be added before the first row is written."""
        self.all.append(made := Rows(self))
        return made

    def flush(self) -> None:
        """Move the recent writes into the file, all or none. Raises OSError, lmdb.Error."""
        if self._file is None:
            self._file = self._opened()
        with self._file.begin(write=True) as transaction:
            for rows in self.all:
                rows.write(transaction)
        self.snapshot = self._file.begin()  # a forked child can still read the one before, whose pages stay
        for rows in self.all:
            rows.written()
        self.recent_size_bytes, self.limit_bytes = 0, RECENT_SIZE_BYTES_MAX

    def _opened(self) -> Any:
        with tempfile.TemporaryDirectory(prefix="immortal-table-") as folder:
            path = os.path.join(folder, "rows")
            with open(f"{path}-lock", "wb") as readers:  # mapped: on a full disk a hole in it would kill the process
                os.posix_fallocate(readers.fileno(), 0, _READERS_SIZE_BYTES)
            for size_bytes in _MAP_SIZES_BYTES:
                try:
                    file = lmdb.open(
                        path, subdir=False, map_size=size_bytes, max_dbs=len(self.all), sync=False, metasync=False
                    )
                    break
                except lmdb.MemoryError:  # the process may not have so much address space
                    if size_bytes == _MAP_SIZES_BYTES[-1]:
                        raise
            self._unmap_pages = _unmapper(os.path.realpath(path))
        for number, rows in enumerate(self.all):
            rows.database = file.open_db(str(number).encode())
        return file

    def bound_pages(self) -> None:
        """Unmap the pages of the file if there are many: each page that is read counts as memory of this process."""
        self.read_size_bytes = 0
        with suppress(OSError), open("/proc/self/statm", "rb", 0) as numbers:
            if int(numbers.read().split()[2]) * mmap.PAGESIZE > _MAPPED_SIZE_BYTES_MAX:
                self._unmap_pages()

    def track_undo(self, *, enabled: bool) -> None:
        """Keep old values of rows from now on, so that :meth:`undo_changes` restores the present ones; False: stop."""
        self.undo_size_bytes = 0
        for rows in self.all:
            rows.undo = {} if enabled else None

    def undo_changes(self) -> None:
        """Restore the rows as they were at :meth:`track_undo`."""
        for rows in self.all:
            undo, rows.undo = rows.undo or {}, None
            for key, value in undo.items():
                rows.put(key, value)


class Rows:
    """Ordered map from bytes to bytes. ``version``: changes with each write."""

    def __init__(self, store: Store) -> None:
        self.version = 0
        self.database: Any = None
        self.undo: dict[bytes, bytes | None] | None = None  # old values since the last copy of the state
        self._store = store
        self._recent: dict[bytes, bytes | None] = {}  # None: deleted
        self._keys: list[bytes] | None = None  # of the recent writes, sorted; None: nobody has needed them yet

    def get(self, key: bytes) -> bytes | None:
        found = self._recent.get(key, _ABSENT)
        if found is not _ABSENT:
            return found  # type: ignore[no-any-return]
        store = self._store
        if store.snapshot is None:
            return None
        data: bytes | None = store.snapshot.get(key, None, self.database)
        store.read_size_bytes += _AROUND_SIZE_BYTES + len(data or b"")
        if store.read_size_bytes > _READ_SIZE_BYTES_MAX:
            store.bound_pages()
        return data

    def put(self, key: bytes, value: bytes | None) -> bytes | None:
        """Set a row, or delete it with None; return the old value."""
        store, recent = self._store, self._recent
        old = self.get(key)
        if self.undo is not None and key not in self.undo:
            self.undo[key] = old
            store.undo_size_bytes += _ROW_SIZE_BYTES + len(key) + (0 if old is None else len(old))
        is_recent, keys = key in recent, self._keys
        if is_recent:
            store.recent_size_bytes -= _size_of(key, recent[key])
        if value is not None or store.snapshot is not None:
            if keys is not None and not is_recent:
                insort(keys, key)
            recent[key] = value
            store.recent_size_bytes += _size_of(key, value)
        elif is_recent:  # there is no row in a file to hide
            del recent[key]
            if keys is not None:
                del keys[bisect_left(keys, key)]
        self.version += 1
        return old

    def fill(self, rows: dict[bytes, bytes], *, at_end: bool = False) -> None:
        """Add rows that are not there yet, before anybody keeps old values. ``at_end``: in order, behind all others."""
        self._recent.update(rows)
        if not at_end:
            self._keys = None
        elif self._keys is not None:
            self._keys += rows
        size_bytes = sum(map(len, rows)) + sum(map(len, rows.values()))
        self._store.recent_size_bytes += _ROW_SIZE_BYTES * len(rows) + size_bytes
        self.version += 1

    def write(self, transaction: Any) -> None:
        """Write the recent rows into the file."""
        puts = []
        for key in sorted(self._recent):
            if (value := self._recent[key]) is None:
                transaction.delete(key, db=self.database)
            else:
                puts.append((key, value))
        if puts:
            with transaction.cursor(self.database) as cursor:
                cursor.putmulti(puts, append=not cursor.last() or cursor.key() < puts[0][0])

    def written(self) -> None:
        """Forget the recent rows, which the file has."""
        self._recent, self._keys = {}, None

    def scan(self, span: Span, *, reverse: bool = False) -> Iterator[Row]:
        """Yield rows in order. Rows that are written meanwhile are seen if they lie ahead."""
        left: Span | None = span
        count = _ROWS_AT_ONCE_MIN
        while left is not None:
            span, version = left, self.version
            found, left = self._scan_batch(span, reverse, count)
            count = min(2 * count, _ROWS_AT_ONCE_MAX)
            for row in found:
                yield row
                if self.version != version:
                    left, count = _rest_after(span, row[0], reverse), _ROWS_AT_ONCE_MIN
                    break

    def _scan_batch(self, span: Span, reverse: bool, count: int) -> tuple[list[Row], Span | None]:
        """Return the first rows of the span, and the rest of the span; None: nothing is left."""
        low, high = span
        written = self._scan_file(span, reverse, count)
        keys = self._keys = sorted(self._recent) if self._keys is None else self._keys
        begin, end = bisect_left(keys, low), len(keys) if high is None else bisect_left(keys, high)
        recent = keys[max(begin, end - count) : end][::-1] if reverse else keys[begin : min(begin + count, end)]
        ends = [part[-1] for part in ([key for key, _ in written], recent) if len(part) == count]
        left = None
        if ends:  # rows behind the nearer end can be incomplete
            last = max(ends) if reverse else min(ends)
            left = _rest_after(span, last, reverse)
            low, high = (last, high) if reverse else (low, last + b"\0")
        if not recent:
            return written, left
        rows: dict[bytes, bytes | None] = dict(written)
        rows.update((key, self._recent[key]) for key in recent)
        inside = ((key, value) for key, value in rows.items() if key >= low and (high is None or key < high))
        return sorted(((key, value) for key, value in inside if value is not None), reverse=reverse), left

    def _scan_file(self, span: Span, reverse: bool, count: int) -> list[Row]:
        """Return the first rows of the span that are in the file."""
        store = self._store
        if store.snapshot is None:
            return []
        low, high = span
        with store.snapshot.cursor(self.database) as cursor:
            if reverse:
                if high is not None and cursor.set_range(high):
                    is_there = cursor.prev()
                else:
                    is_there = cursor.last()
                rows = takewhile(lambda row: row[0] >= low, cursor.iterprev()) if is_there else iter(())
            else:
                is_there = cursor.set_range(low) if low else cursor.first()
                rows = takewhile(lambda row: high is None or row[0] < high, cursor.iternext()) if is_there else iter(())
            found: list[Row] = list(islice(rows, count))
        store.read_size_bytes += sum(map(len, chain.from_iterable(found)))
        if store.read_size_bytes > _READ_SIZE_BYTES_MAX:
            store.bound_pages()
        return found


def _unmapper(path: str) -> Callable[[], object]:
    """Return a function that unmaps the pages of a mapped file. The system keeps them, and maps those that are read."""
    try:
        import ctypes  # here: it takes milliseconds, and few apps have such large tables

        with open("/proc/self/maps") as maps:
            found = next(line for line in maps if line.endswith(f" {path}\n"))
        start, end = (int(number, 16) for number in found.split()[0].split("-"))
        advise = ctypes.CDLL(None).madvise
        return partial(advise, ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
    except (ImportError, OSError, AttributeError, StopIteration):  # not on Linux
        return int


def _size_of(key: bytes, value: bytes | None) -> int:
    """Return the size of a recent row in memory; more for a deleted one, which each scan has to pass over."""
    return _ROW_SIZE_BYTES + len(key) + (_DELETED_SIZE_BYTES if value is None else len(value))


def _rest_after(span: Span, key: bytes, reverse: bool) -> Span:
    return (span[0], key) if reverse else (key + b"\0", span[1])


def after_prefix(prefix: bytes) -> bytes | None:
    """Return the smallest bytes that sort after all that begin with ``prefix``; None: there are none."""
    front = prefix.rstrip(b"\xff")
    return front[:-1] + bytes((front[-1] + 1,)) if front else None


# Keys as bytes, which sort like the values. Each form marks its own end, so forms can follow each other in a tuple.


class KeyForm(NamedTuple):
    """Encoding of one type's keys as bytes. ``unpack`` takes (bytes, offset) and returns (value, offset behind it).

    ``pack_front``: packs a prefix of a key, such as the first items of a tuple; None: only whole keys can be packed.
    """

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes, int], tuple[Any, int]]
    pack_front: Callable[[Any], bytes] | None = None


def span_of(form: KeyForm, start: Any, stop: Any, prefix: Any) -> Span:
    """Return the span of keys from ``start`` up to ``stop``, or with ``prefix``; None: no bound. Raises TypeError."""
    if prefix is not None:
        if form.pack_front is None:
            raise TypeError(
                "prefix=... came, but only keys that are str, bytes or tuples have prefixes: use start= and stop="
            )
        if start is not None or stop is not None:
            raise TypeError("prefix=... came together with start= or stop=: give only one of the two")
        front = form.pack_front(prefix)
        return front, after_prefix(front)
    pack = form.pack_front or form.pack
    low, high = (None if one is None else pack(one)[: KEY_SIZE_BYTES_MAX + 1] for one in (start, stop))
    return low or b"", high


_HEADS = [bytes((number,)) for number in range(256)]
_INTEGER_ZERO, _INTEGER_BYTES_MAX = 0x80, 126
_END, _ZERO = b"\0\1", b"\0\xff"  # of a text; a zero byte in it
_DATE, _BITS = struct.Struct(">I"), struct.Struct(">Q")
_FLOAT = struct.Struct(">d")
_SIGN, _ALL = 1 << 63, (1 << 64) - 1
_MICROSECOND, _FIRST, _FIRST_AWARE = timedelta(microseconds=1), datetime.min, datetime.min.replace(tzinfo=UTC)


def _pack_integer(value: int) -> bytes:
    size_bytes = (value.bit_length() + 7) >> 3
    if size_bytes > _INTEGER_BYTES_MAX:
        raise ValueError(f"a key of {value.bit_length()} bits came, at most {8 * _INTEGER_BYTES_MAX} were expected")
    if value >= 0:
        return _HEADS[_INTEGER_ZERO + size_bytes] + value.to_bytes(size_bytes, "big")
    return _HEADS[_INTEGER_ZERO - size_bytes] + (value + (1 << 8 * size_bytes) - 1).to_bytes(size_bytes, "big")


def _unpack_integer(data: bytes, at: int) -> tuple[int, int]:
    size_bytes = data[at] - _INTEGER_ZERO
    end = at + 1 + abs(size_bytes)
    value = int.from_bytes(data[at + 1 : end], "big")
    return (value if size_bytes >= 0 else value + 1 - (1 << -8 * size_bytes)), end


def _pack_bytes(value: bytes) -> bytes:
    return (value.replace(b"\0", _ZERO) if b"\0" in value else value) + _END


def _front(value: bytes) -> bytes:
    return _pack_bytes(value)[: -len(_END)]


def _unpack_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.index(_END, at)
    return data[at:end].replace(_ZERO, b"\0"), end + len(_END)


def _unpack_text(data: bytes, at: int) -> tuple[str, int]:
    value, end = _unpack_bytes(data, at)
    return value.decode(), end


def _pack_float(value: float) -> bytes:
    if value != value:
        raise ValueError("the key NaN came, a number that has an order was expected")
    (bits,) = _BITS.unpack(_FLOAT.pack(value + 0.0))  # -0.0 is 0.0, as for a dict
    return _BITS.pack(bits ^ _ALL if bits & _SIGN else bits | _SIGN)


def _unpack_float(data: bytes, at: int) -> tuple[float, int]:
    (bits,) = _BITS.unpack_from(data, at)
    (value,) = _FLOAT.unpack(_BITS.pack(bits & ~_SIGN if bits & _SIGN else bits ^ _ALL))
    return value, at + 8


def _pack_moment(value: datetime) -> bytes:
    is_aware = value.utcoffset() is not None
    since = value.astimezone(UTC) - _FIRST_AWARE if is_aware else value.replace(tzinfo=None) - _FIRST
    return _HEADS[is_aware] + _pack_integer(since // _MICROSECOND)


def _unpack_moment(data: bytes, at: int) -> tuple[datetime, int]:
    value, end = _unpack_integer(data, at + 1)
    return (_FIRST_AWARE if data[at] else _FIRST) + value * _MICROSECOND, end


def _unpack_duration(data: bytes, at: int) -> tuple[timedelta, int]:
    value, end = _unpack_integer(data, at)
    return value * _MICROSECOND, end


_FORMS: dict[type, KeyForm] = {
    bool: KeyForm(lambda value: _HEADS[value], lambda data, at: (bool(data[at]), at + 1)),
    int: KeyForm(_pack_integer, _unpack_integer),
    str: KeyForm(lambda value: _pack_bytes(value.encode()), _unpack_text, lambda value: _front(value.encode())),
    bytes: KeyForm(_pack_bytes, _unpack_bytes, _front),
    float: KeyForm(_pack_float, _unpack_float),
    date: KeyForm(
        lambda value: _DATE.pack(value.toordinal()),
        lambda data, at: (date.fromordinal(_DATE.unpack_from(data, at)[0]), at + 4),
    ),
    datetime: KeyForm(_pack_moment, _unpack_moment),
    timedelta: KeyForm(lambda value: _pack_integer(value // _MICROSECOND), _unpack_duration),
    UUID: KeyForm(lambda value: value.bytes, lambda data, at: (UUID(bytes=data[at : at + 16]), at + 16)),
}
KEY_TYPES = "int, str, bytes, bool, float, date, datetime, timedelta, UUID, an enum, or a tuple of these"


def key_form(annotation: Any) -> KeyForm:
    """Return the encoding of keys of a type. Raises TypeError if keys can't have this type."""
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    parts = get_args(annotation)
    if (form := _FORMS.get(annotation)) is not None:
        return _checked(annotation, form)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        classes = {type(member.value) for member in annotation}
        if len(classes) == 1 and (form := _FORMS.get(classes.pop())) is not None:
            return _checked(annotation, _enum_form(annotation, form))
    if get_origin(annotation) is tuple and parts and Ellipsis not in parts:
        return _tuple_form([key_form(part) for part in parts])
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 2 and NoneType in parts:
        return _optional_form(key_form(parts[parts[0] is NoneType]))
    raise TypeError(f"keys of type {getattr(annotation, '__qualname__', annotation)} came, {KEY_TYPES} were expected")


def _checked(cls: type, form: KeyForm) -> KeyForm:
    def checks(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def checked(value: Any) -> bytes:
            if type(value) is cls:
                return pack(value)
            if cls is float and type(value) is int and float(value) == value:
                return pack(float(value))
            raise TypeError(f"a key of type {type(value).__qualname__} came, {cls.__qualname__} was expected")

        return checked

    return KeyForm(checks(form.pack), form.unpack, form.pack_front and checks(form.pack_front))


def _enum_form(cls: type[Enum], form: KeyForm) -> KeyForm:
    def unpack(data: bytes, at: int) -> tuple[Enum, int]:
        value, end = form.unpack(data, at)
        return cls(value), end

    return KeyForm(lambda value: form.pack(value.value), unpack)


def _optional_form(form: KeyForm) -> KeyForm:
    """Return the encoding of a type or None, which sorts first."""
    return KeyForm(
        lambda value: b"\0" if value is None else b"\1" + form.pack(value),
        lambda data, at: form.unpack(data, at + 1) if data[at] else (None, at + 1),
    )


def _tuple_form(forms: list[KeyForm]) -> KeyForm:
    packs = [form.pack for form in forms]

    def pack(value: Any, length_min: int = len(forms)) -> bytes:
        if type(value) is not tuple or not length_min <= len(value) <= len(packs):
            raise TypeError(f"the key {value!r} came, a tuple of {len(packs)} items was expected")
        return b"".join([pack(item) for pack, item in zip(packs, value, strict=False)])

    def unpack(data: bytes, at: int) -> tuple[Any, int]:
        items = []
        for form in forms:
            item, at = form.unpack(data, at)
            items.append(item)
        return tuple(items), at

    return KeyForm(pack, unpack, partial(pack, length_min=0))
