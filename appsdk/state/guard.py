"""Checks after messages that the state can still be saved: so the call that broke it fails, not the next checkpoint.

A small state is checked completely. In a large one only new parts are checked that are found fast: attributes that were
assigned, and items at the end of lists and dicts. A message is never blamed for older parts, since nobody knows which
message changed them. The next checkpoint finds the rest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from immortal.appsdk.errors import StateError
from immortal.appsdk.state.schema import StateSchema

SMALL_SIZE_BYTES_MAX = 4 << 10
"""Size of attributes that are encoded each time, all together: about 10 microseconds."""
MEASURED_SIZE_BYTES_MAX = 4 << 20
"""Size of a state whose attributes are measured at its checkpoint: in a larger one only single values count as
small."""
NEW_ITEMS_MAX = 64
"""Number of items of a large list or dict that are checked after each message."""

_UNSET = object()


class _Snapshot:
    """Attribute at its last check. ``data``: its bytes if it is small; else None."""

    __slots__ = ("data", "length", "value")

    def __init__(self, value: Any, data: bytes | None) -> None:
        self.value = value
        self.length = _length(value)
        self.data = data


_SEQUENCES: dict[type, Callable[[Any, int], Any]] = {
    list: lambda value, count: value[-count:],
    deque: lambda value, count: deque(islice(reversed(value), count), value.maxlen),
}
_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: {},
    defaultdict: lambda value: defaultdict(value.default_factory),
    OrderedDict: lambda value: OrderedDict(),
    Counter: lambda value: Counter(),
}


def _length(value: Any) -> int:
    return len(value) if type(value) in _SEQUENCES or type(value) in _MAPPINGS else 0


def _last_items(value: Any, count: int) -> Any:
    """Return the last ``count`` items, in a container of the same type."""
    if (cut := _SEQUENCES.get(type(value))) is not None:
        return cut(value, count)
    made = _MAPPINGS[type(value)](value)
    for key in islice(reversed(value), count):
        made[key] = value[key]
    return made


class Guard:
    """Guard of one instance's state. The instance stays the same object for its whole life.

    ``is_on``: messages are handled for the first time, so one can be blamed for a new failure.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._schema: StateSchema | None = None
        self._instance: Any = None
        self._snapshots: dict[str, _Snapshot] = {}
        self._excluded: set[str] = set()  # attributes that could not be saved even before the first checked message
        self._names: set[str] = set()  # of attributes

    def begin(self, schema: StateSchema, instance: Any, size_bytes: int) -> None:
        """Begin with the present state, whose problems no later message has caused. ``size_bytes``: its recent size."""
        self._schema = None if schema.serializer == "own" else schema  # that runs code of the user's
        self._instance = instance
        self._snapshots.clear()
        self._excluded.clear()
        if self._schema is None:
            return
        self._names = set(vars(instance))
        small = self._encode_small(schema, instance, size_bytes)
        for name in schema.attributes:
            value = getattr(instance, name, _UNSET)
            is_plain = value is _UNSET or schema.is_plain_value(name, value)
            self._snapshots[name] = _Snapshot(value, None if is_plain else small.get(name))
            if name in small and not is_plain and self._problem(name, value) is not None:
                self._excluded.add(name)

    def _encode_small(self, schema: StateSchema, instance: Any, size_bytes: int) -> dict[str, bytes]:
        """Return the bytes of the attributes that are small enough to be compared each time."""
        found: dict[str, bytes] = {}
        if size_bytes > MEASURED_SIZE_BYTES_MAX:
            return found
        for name in schema.attributes:
            try:
                found[name] = schema.raw(getattr(instance, name))
            except Exception:
                self._excluded.add(name)
        left_bytes, small = SMALL_SIZE_BYTES_MAX, {}
        for name in sorted(found, key=lambda one: len(found[one])):
            left_bytes -= len(found[name])
            if left_bytes < 0:
                break
            small[name] = found[name]
        return small

    def suspend(self) -> None:
        """Stop checking until the next save of the state: later messages must not be blamed for the present problem."""
        self._schema = None

    def check(self) -> StateError | None:
        """Return the error if messages since the last check put something into the state that can't be saved."""
        schema, instance = self._schema, self._instance
        if schema is None:
            return None
        attributes = vars(instance)
        if attributes.keys() != self._names:
            try:
                schema.require_annotated(instance)
            except StateError as error:
                return error
            self._names = set(attributes)
        for name, before in self._snapshots.items():
            value = attributes.get(name, _UNSET)
            if value is _UNSET:
                value = getattr(instance, name, _UNSET)  # a default in the class
            if value is before.value and before.data is None and _length(value) == before.length:
                continue
            if name in self._excluded:
                continue
            if (problem := self._check_attribute(schema, name, before, value)) is not None:
                return problem
        return None

    def _check_attribute(self, schema: StateSchema, name: str, before: _Snapshot, value: Any) -> StateError | None:
        is_new = value is not before.value
        if is_new and schema.is_plain_value(name, value):
            self._snapshots[name] = _Snapshot(value, None)
            return None
        if before.data is None and (not is_new or _length(value) > NEW_ITEMS_MAX):
            problem = self._check_end(schema, name, value, NEW_ITEMS_MAX if is_new else len(value) - before.length)
            if problem is None:
                self._snapshots[name] = _Snapshot(value, None)
            return problem
        try:
            data = schema.raw(value)
        except Exception:  # the other function explains the error
            return self._problem(name, value)
        if not is_new and data == before.data:
            return None
        if (problem := self._problem(name, value, data)) is None:
            self._snapshots[name] = _Snapshot(value, data if len(data) <= SMALL_SIZE_BYTES_MAX else None)
        return problem

    def _check_end(self, schema: StateSchema, name: str, value: Any, count: int) -> StateError | None:
        """Check the last ``count`` items of a large attribute."""
        count = min(count, NEW_ITEMS_MAX)
        if count <= 0 or not _length(value):
            return None
        end = _last_items(value, count)
        # Only in case of a problem the whole value is checked: that gives the path.
        return None if self._problem(name, end) is None else self._problem(name, value)

    def _problem(self, name: str, value: Any, data: bytes | None = None) -> StateError | None:
        schema = self._schema
        if schema is None:
            return None
        if value is _UNSET:
            return schema.not_set(name)
        try:
            schema.check_attribute(name, value, data)
        except StateError as error:
            return error
        except Exception as error:  # of a class of the user's
            return StateError(f"attribute {name!r} can't be saved: {type(error).__name__}: {error}")
        return None
