"""Schema of the state: its attributes, their encoding into a checkpoint's blob, and their decoding.

The state is the annotated attributes of the class and its bases, except ClassVar, peers and :data:`Transient` ones. It
is encoded as a MessagePack map from name to value, and decoded by the annotations. A value that could not be decoded
again is refused when it is encoded: after a crash it would be too late.

A blob is this module's envelope (magic, version, size of the header, header), then the state:

    0-5 "IMMAPP" · 6 version · 7 zero · 8-11 size of the header, little endian · header (MessagePack) · state

The version is 1, 2 if async handlers wait, 3 with other rules than the first, 4 with ordered multicasts, 5 with nodes
or handles.
"""

from __future__ import annotations

import inspect
import io
import pickle
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain
from types import FunctionType, GenericAlias
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec

from immortal.appsdk.calls.codec import ValueDecoder, encode_value, encoder, resolve_hints
from immortal.appsdk.calls.replay_rules import NEWEST, NEWEST_ORDER, OrderRules, Rules
from immortal.appsdk.errors import DefinitionError, StateError
from immortal.appsdk.state.incoming import Incoming, Waiting, finish, map_front
from immortal.appsdk.state.journal import SavedTasks
from immortal.appsdk.state.table import Table, TableField, TableKind
from immortal.appsdk.state.tree import differences, tree
from immortal.appsdk.types.encoding import PLAIN_CLASSES, AnnotatedForm, allow_integers, form_of
from immortal.appsdk.types.handles import MARK
from immortal.appsdk.types.registry import current_module, has_named_fields, lost_field, unsupported_type
from immortal.appsdk.types.steps import NotRoundTrippableError
from immortal.protocol import decoding
from immortal.protocol.state_envelope import FRONT, MAGIC

T = TypeVar("T")


class _TransientMark:
    __slots__ = ()


Transient = Annotated[T, _TransientMark()]
"""Type of an attribute that is no part of the state: ``cache: Transient[dict[str, int]]``. ``prepare`` sets it from the
state, after ``__init__`` and after each recovery."""

VERIFIED_STATE_SIZE_BYTES_MAX = 64 << 20  # decoding takes 2-3 times as long as encoding: above this, too long

_VERSION = 3
_VERSION_WITH_ORDERING = 4  # an SDK without ordered multicasts must not lose them
_VERSION_WITH_NODES = 5  # nor an SDK without handles

WAYS_OUT = (
    "give the type a codec (immortal.register_type), write 'def checkpoint(self) -> bytes' and "
    "'def restore(self, blob: bytes) -> None' of your own, "
    'or opt in to pickle: class ...(Immortal, serializer="pickle")'
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a blob: what the SDK itself needs to restore."""

    class_name: str
    serializer: str  # msgspec, pickle or own
    seed: bytes  # of the random streams, drawn at the first start
    sequence_id: int  # of the last record handled; -1: none
    version: int = 1  # of the class that wrote the state
    record_time_ns: int | None = None  # of the last record handled; None: unknown
    instance_name: str = ""  # the instance's name in the log
    tasks: SavedTasks | None = None  # async handlers that wait
    rules: int = NEWEST  # for the log's whole life
    ordering: bytes | None = None  # of ordered multicasts; None: there never was one
    nodes: bytes | None = None  # and handles; None: there never was one
    order_rules: int = NEWEST_ORDER  # for the log's whole life


def copied_envelope(class_name: str, serializer: str) -> Envelope:
    """Return the envelope of a state that is copied within a process."""
    return Envelope(class_name=class_name, serializer=serializer, seed=b"", sequence_id=-1)


def encode_envelope(envelope: Envelope) -> bytes:
    header = encoder.encode(envelope)
    if envelope.nodes is not None:
        version = _VERSION_WITH_NODES
    elif envelope.ordering is not None:
        version = _VERSION_WITH_ORDERING
    else:
        version = _VERSION
    return FRONT.pack(MAGIC, version, 0, len(header)) + header


def envelope_size_bytes(front: bytes) -> int:
    """Return the size of an envelope, from a blob's first bytes; any size if they are no envelope's."""
    return FRONT.size + FRONT.unpack(front[: FRONT.size])[3] if len(front) >= FRONT.size else FRONT.size


def decode_envelope(blob: bytes) -> tuple[Envelope, memoryview]:
    """Decode the header of a blob; return it and the state. Raises StateError."""
    if len(blob) < FRONT.size:
        raise StateError(
            f"the checkpoint has {len(blob)} bytes, at least {FRONT.size} were expected: it is not this SDK's"
        )
    magic, version, _, header_size_bytes = FRONT.unpack_from(blob)
    if magic != MAGIC:
        raise StateError(
            f"the checkpoint starts with {bytes(blob[:6])!r}, not {MAGIC!r}: it was made by another kind of app"
        )
    if not _VERSION <= version <= _VERSION_WITH_NODES:
        raise StateError(
            f"the checkpoint has version {version}, this SDK reads versions {_VERSION} to {_VERSION_WITH_NODES}: "
            f"start the app with the version of the SDK that wrote it"
        )
    end = FRONT.size + header_size_bytes
    try:
        envelope = decoding.decode(memoryview(blob)[FRONT.size : end], type=Envelope)
    except decoding.DecodeError as error:
        raise StateError(f"the checkpoint's header can't be read: {error}") from None
    for what, rules, known in (("", envelope.rules, Rules), (" of order", envelope.order_rules, OrderRules)):
        if rules not in tuple(known):
            raise StateError(
                f"the checkpoint follows rules{what} {rules}, this SDK knows {min(known)} to {max(known)}: "
                f"start the app with the version of the SDK that wrote it"
            )
    return envelope, memoryview(blob)[end:]


def is_transient(hint: Any) -> bool:
    return any(isinstance(mark, _TransientMark) for mark in getattr(hint, "__metadata__", ()))


class _Unpickler(pickle.Unpickler):
    """Unpickler of the state, which comes from the service's own log: its owner trusts that."""

    def find_class(self, module_name: str, name: str) -> Any:
        return super().find_class(current_module(module_name), name)


def hook_of(cls: type, name: str) -> FunctionType | None:
    """Return the plain method that the SDK calls as a hook, such as ``prepare``; None if the name is another thing."""
    found = inspect.getattr_static(cls, name, None)
    return found if isinstance(found, FunctionType) else None


def _call(function: Callable[[], None]) -> None:
    function()


class StateSchema:
    """Encoder and decoder of the state of one class. Raises DefinitionError, NameError (an unresolved annotation).

    ``objects``: of a keyed class, the schema of its keys' objects."""

    def __init__(
        self,
        cls: type,
        serializer: str,
        not_state: Iterable[str],
        formerly: Iterable[str],
        objects: StateSchema | None = None,
    ) -> None:
        self._objects = objects
        if objects is not None and objects.transient:
            raise DefinitionError(f"{cls.__qualname__}: {min(objects.transient)!r}: a keyed class has no Transient yet")
        self._class_name = cls.__qualname__
        self._cls: Any = cls
        self._formerly = frozenset(formerly)
        self._not_state = frozenset(not_state)
        self.serializer = serializer if hook_of(cls, "checkpoint") is None else "own"
        self.fields: dict[str, Any] = {}
        self.transient: set[str] = set()
        self._decoders: dict[str, ValueDecoder] = {}
        self._forms: dict[str, AnnotatedForm] = {}
        self.tables: dict[str, TableKind] = {}
        self._with_names: dict[str, Any] = {}  # annotations with dataclasses or the like
        self.attributes: list[str] = []  # the fields that are no tables
        if self.serializer == "own":
            with suppress(NameError):
                self._refuse_tables(resolve_hints(cls))
            return
        for name, hint in resolve_hints(cls).items():
            if hint is ClassVar or typing.get_origin(hint) is ClassVar or name in self._not_state:
                continue
            if name.startswith("_immortal_"):  # the SDK's own
                continue
            if is_transient(hint):
                self.transient.add(name)
                continue
            self.fields[name] = typing.get_args(hint)[0] if typing.get_origin(hint) is Final else hint
        self._known = {*self.fields, *self.transient}
        if self.serializer == "pickle":
            self._refuse_tables(self.fields)
        else:
            for name, annotation in self.fields.items():
                if typing.get_origin(annotation) is Table:
                    self.tables[name] = kind = self._table(name, annotation)
                    annotation = kind.value_type  # of one row
                if problem := unsupported_type(annotation):
                    is_table = f"{Table.__module__}.Table" in repr(annotation)
                    ways_out = f"a table is a whole attribute: {name}: Table[int, str]" if is_table else WAYS_OUT
                    raise DefinitionError(f"{self._class_name}: attribute {name!r}: {problem}; {ways_out}")
                exact = allow_integers(annotation)
                self._decoders[name] = ValueDecoder(exact)
                self._forms[name] = form_of(exact)
                if has_named_fields(annotation):
                    self._with_names[name] = (
                        GenericAlias(dict, (Any, annotation)) if name in self.tables else annotation
                    )
        self.attributes = [name for name in self.fields if name not in self.tables]
        named = {name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, TableField)}
        for name in named - self.tables.keys():
            if isinstance(inspect.getattr_static(cls, name), TableField):
                raise DefinitionError(
                    f"{self._class_name}: {name!r} is a table(...) here or in a base class, and not annotated as one: "
                    f"write {name}: Table[int, str], or give it another default"
                )

    def _table(self, name: str, annotation: Any) -> TableKind:
        field = inspect.getattr_static(self._cls, name, None)
        if field is None:
            field = TableField()
            field.__set_name__(self._cls, name)
            setattr(self._cls, name, field)
        if not isinstance(field, TableField) or field.name != name:
            raise DefinitionError(
                f"{self._class_name}: attribute {name!r}: a Table has no default but a table(...) of its own: put rows "
                f"into it in __init__"
            )
        return TableKind(self, self._class_name, name, annotation, field.index)

    def _refuse_tables(self, hints: dict[str, Any]) -> None:
        for name, annotation in hints.items():
            if typing.get_origin(annotation) is Table:
                raise DefinitionError(
                    f"{self._class_name}: attribute {name!r}: a Table is only possible where the SDK itself writes the "
                    f'state: without serializer="pickle", and without a checkpoint method; use a dict here'
                )

    def with_own_defaults(self, instance: T) -> T:
        """Give a new object its own copy of each default in the class that can change, such as a list; return it."""
        for name in self.attributes:
            if type(default := getattr(self._cls, name, None)).__hash__ is None:
                setattr(instance, name, deepcopy(default))
        return instance

    # --- writing --------------------------------------------------------------------------------------------------

    def encode(self, instance: Any) -> bytes:
        """Return the state as bytes, after a check that it can be decoded unchanged. Raises StateError."""
        return b"".join(self.with_tables(instance, self.encode_attributes(instance))[1])

    def with_tables(self, instance: Any, state: bytes) -> tuple[int, Iterator[bytes]]:
        """Return the whole state, from its encoded attributes: its size in bytes, and its pieces."""
        if not self.tables:
            return len(state), iter((state,))
        count = len(self.attributes)
        pieces = [map_front(count + len(self.tables)), state[len(map_front(count)) :]]
        sizes, rows = zip(*(table.pieces() for table in self.tables_of(instance)), strict=True)
        names = [encoder.encode(name) for name in self.tables]
        size_bytes = sum(map(len, (*pieces, *names))) + sum(sizes)
        return size_bytes, chain(pieces, *(chain((name,), one) for name, one in zip(names, rows, strict=True)))

    def tables_of(self, instance: Any) -> list[Table[Any, Any]]:
        """Return the tables of an instance, in the order of :attr:`tables`."""
        return [getattr(instance, name) for name in self.tables]

    def encode_attributes(self, instance: Any) -> bytes:
        """Return the state without its tables, like :meth:`encode`.

        Raises StateError, which names the attribute and the path in it.
        """
        if self.serializer == "own":
            blob = instance.checkpoint()
            if not isinstance(blob, bytes):
                raise StateError(f"{self._class_name}.checkpoint returned a {type(blob).__name__}, bytes were expected")
            return blob
        values = self.collect(instance)
        if self.serializer == "pickle":
            return self._pickled(values)
        blob = self._encoded(values)
        if len(blob) <= VERIFIED_STATE_SIZE_BYTES_MAX:
            self._verify(values, blob)
        return blob

    def _encoded(self, values: dict[str, Any]) -> bytes:
        tagged = {name: self.tagged(name, value) for name, value in values.items()}
        try:
            return encode_value(tagged)
        except Exception as error:  # also of a codec of the user's
            for name, value in values.items():
                self.encode_attribute(name, value)
            raise StateError(f"{self._class_name}: the state can't be saved: {error}; {WAYS_OUT}") from None

    def tagged(self, name: str, value: Any) -> Any:
        """Return the form in which an attribute's value keeps its types. Raises StateError."""
        form = self._forms[name]
        try:
            return form.tag(value) if form.is_odd(value) else value
        except NotRoundTrippableError as error:
            raise self._unfit(name, error if error.path else form.unencodable(value, error)) from None

    def encode_attribute(self, name: str, value: Any) -> bytes:
        """Encode one attribute's value by itself, such that it keeps its types. Raises StateError."""
        tagged = self.tagged(name, value)
        try:
            return encode_value(tagged)
        except Exception as error:
            raise self._unfit(name, self._forms[name].unencodable(value, error)) from None

    def encode_row(self, name: str, value: Any) -> bytes:
        """Encode a value of a table, after the check of :meth:`check_attribute`. Raises StateError."""
        if self._forms[name].is_plain_value(value):
            return encode_value(value)
        data = self.encode_attribute(name, value)
        if not self._forms[name].is_sure:
            self._require_restored(name, value, data)
        return data

    def is_plain_value(self, name: str, value: Any) -> bool:
        """Return True if :meth:`check_attribute` surely accepts the value: a number, text or the like."""
        if self.serializer == "pickle":
            return type(value) in PLAIN_CLASSES
        return self._forms[name].is_plain_value(value)

    def check_attribute(self, name: str, value: Any, data: bytes | None = None) -> None:
        """Check one attribute like :meth:`encode`. ``data``: its encoded form, if known. Raises StateError."""
        if self.serializer == "pickle":
            if data is None:
                self._pickled({name: value})
            return
        if data is None or self.tagged(name, value) is not value:
            data = self.encode_attribute(name, value)
        if not self._forms[name].is_sure:
            self._require_restored(name, value, data)

    def raw(self, value: Any) -> bytes:
        """Return a value encoded without any check. Raises what a class of the user's raises."""
        if self.serializer == "pickle":
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return encode_value(value)

    def _unfit(self, name: str, error: NotRoundTrippableError) -> StateError:
        path = f" {error.path}" if error.path else ""
        return StateError(
            f"{self._class_name}: attribute {name!r}{path} can't be saved: {error.problem}; use a type that is kept, "
            f"{WAYS_OUT}"
        )

    def forms(self, instance: Any) -> dict[str, bytes]:
        """Return the encoded attributes, only for comparison; for a class with its own form, one under "".

        Raises any error of a value that can't be saved.
        """
        if self.serializer == "own":
            return {"": instance.checkpoint()}
        values = {name: getattr(instance, name) for name in self.attributes}
        is_pickled = self.serializer == "pickle"
        return {name: self.raw(value if is_pickled else self.tagged(name, value)) for name, value in values.items()}

    def collect(self, instance: Any) -> dict[str, Any]:
        """Return the attributes, which must be annotated and set. Raises StateError."""
        self.require_annotated(instance)
        values = {}
        for name in self.attributes:
            try:
                values[name] = getattr(instance, name)
            except AttributeError:
                raise self.not_set(name) from None
        return values

    def not_set(self, name: str) -> StateError:
        return StateError(
            f"{self._class_name}: attribute {name!r} is annotated but not set: set it in __init__, give it a "
            f"default in the class, or remove the annotation"
        )

    def require_annotated(self, instance: Any) -> None:
        """Check that all attributes are annotated. Raises StateError."""
        for name in vars(instance).keys() - self._known:
            raise StateError(
                f"{self._class_name}: attribute {name!r} is set but not annotated: a recovery would lose it. Annotate "
                f"it in the class ({name}: {type(vars(instance)[name]).__name__}), as Transient[...] if 'prepare' "
                f"makes it again, or {WAYS_OUT}"
            )

    def _verify(self, values: dict[str, Any], blob: bytes) -> None:
        raws = decoding.decode(blob, type=dict[str, msgspec.Raw])
        for name, raw in raws.items():
            self._require_restored(name, values[name], bytes(raw))

    def _require_restored(self, name: str, value: Any, data: bytes) -> None:
        """Check that ``data`` is decoded as ``value``: a codec or constructor can change it. Raises StateError."""
        restored = self.decode_attribute(name, data)
        form = self._forms[name]
        if form.is_sure or MARK in data:  # the bytes of a handle identify it
            return
        if encode_value(form.tag(restored) if form.is_odd(restored) else restored) == data:
            return
        for found in differences(tree(value), tree(restored)):  # none if only the order of a set differs
            path = f" {found.path}" if found.path else ""
            raise StateError(
                f"{self._class_name}: attribute {name!r}{path} would come back from a checkpoint as something else: a "
                f"codec, a validator or __post_init__ makes another value of it each time. Mend that, or {WAYS_OUT}"
            )

    def _pickled(self, values: dict[str, Any]) -> bytes:
        try:
            return self.raw(values)
        except MemoryError:
            raise
        except Exception as error:  # anything that a __reduce__ raises
            for name, value in values.items():
                try:
                    pickle.dumps(value)
                except Exception as problem:
                    raise StateError(
                        f"{self._class_name}: attribute {name!r} (a {type(value).__name__}) can't be pickled: {problem}"
                    ) from None
            raise StateError(f"{self._class_name}: the state can't be pickled: {error}") from None

    # --- reading --------------------------------------------------------------------------------------------------

    def restore(self, instance: Any, envelope: Envelope, state: memoryview) -> None:
        """Set the attributes of ``instance`` from a checkpoint. Raises StateError, which names what does not fit."""
        finish(self.restoring(instance, envelope, Incoming.of(state)))

    def restoring(
        self, instance: Any, envelope: Envelope, state: Incoming, run: Callable[[Callable[[], None]], None] = _call
    ) -> Waiting[bytes]:
        """Restore like :meth:`restore`, while the state comes in: rows of tables are put into them as they come.

        ``run`` calls functions that may run the user's code. Returns the state if there are no tables. Raises
        StateError.
        """
        if envelope.class_name != self._class_name and envelope.class_name not in self._formerly:
            raise StateError(
                f"the checkpoint is of an app {envelope.class_name!r}, this is {self._class_name!r}: run the "
                f"right one; "
                f"if it was renamed: class {self._class_name}(Immortal, formerly=({envelope.class_name!r},))"
            )
        if self.serializer not in ("own", envelope.serializer):
            raise StateError(
                f"{self._class_name}: the checkpoint was written by {envelope.serializer!r}, now the class has "
                f"{self.serializer!r}: go back, or write a 'restore' of your own that reads the old form"
            )
        if not self.tables:
            whole = yield from state.rest()
            run(partial(self._restore_whole, instance, whole))
            return whole
        values: dict[str, Any] = {}
        try:
            for _ in range((yield from state.map_count())):
                name = decoding.decode((yield from state.value()), type=str)
                if name in self.tables:
                    left = rows_count = yield from state.map_count()
                    while left:
                        count, rows = yield from state.entries(left)
                        if self._objects is not None:
                            saved = decoding.decode(rows, type=dict[str | int, dict[str, msgspec.Raw]])
                            self._objects._require_names(set().union(*saved.values()))
                        if left == rows_count:
                            self._require_fields(name, rows)
                        run(partial(getattr(instance, name).load, count, rows))
                        left -= count
                else:
                    self._require_names((name, *self.fields))
                    values[name] = yield from state.value()
            yield from state.end()
        except decoding.DecodeError as error:
            raise self._unreadable(error) from None
        run(partial(self._set, instance, values))
        return b""

    def _restore_whole(self, instance: Any, state: bytes) -> None:
        if self.serializer == "own":
            instance.restore(state)
        else:
            self._set(instance, self._read(state))

    def _set(self, instance: Any, values: dict[str, Any]) -> None:
        self._require_names(values)
        for name, value in values.items():
            self._require_fields(name, value)
            setattr(instance, name, value if self.serializer == "pickle" else self.decode_attribute(name, value))

    def _unreadable(self, error: decoding.DecodeError) -> StateError:
        return StateError(f"{self._class_name}: the state in the checkpoint can't be read: {error}")

    def _read(self, state: bytes) -> dict[str, Any]:
        try:
            if self.serializer == "pickle":
                return _Unpickler(io.BytesIO(state)).load()  # type: ignore[no-any-return]
            return decoding.decode(state, type=dict[str, msgspec.Raw])
        except decoding.DecodeError as error:
            raise self._unreadable(error) from None
        except Exception as error:  # whatever unpickling raises
            raise StateError(f"{self._class_name}: the pickled state can't be read: {error!r}") from None

    def _require_names(self, saved: Iterable[str]) -> None:
        saved = set(saved)
        if removed := sorted(saved - set(self.fields)):
            raise StateError(
                f"{self._class_name}: the checkpoint has {', '.join(map(repr, removed))}, which the class does "
                f"not annotate "
                f"any more: keep the annotation, or write a 'checkpoint' and a 'restore' of your own that know "
                f"both forms"
            )
        missing = sorted(name for name in set(self.fields) - saved if not hasattr(self._cls, name))
        if missing:
            raise StateError(
                f"{self._class_name}: the checkpoint is from before {', '.join(map(repr, missing))}: give new "
                f"attributes "
                f"a default in the class ({missing[0]}: <type> = <value>)"
            )

    def _require_fields(self, name: str, data: bytes | msgspec.Raw) -> None:
        """Check that classes in an attribute still have the fields that its saved value has. Raises StateError."""
        if name in self._with_names and (lost := lost_field(self._with_names[name], data)):
            raise StateError(
                f"{self._class_name}: attribute {name!r}: the checkpoint has values of {lost}, a field that the class "
                f"does not have any more, so they would be lost: keep the field, or convert it in a new version "
                f"(@upgrades), whose old class has the old one"
            )

    def decode_attribute(self, name: str, raw: msgspec.Raw | bytes) -> Any:
        """Decode an attribute that :meth:`encode_attribute` encoded. Raises StateError."""
        try:
            return self._decoders[name].decode(raw)
        except Exception as error:  # msgspec's own, and what a type's __post_init__ raises
            raise StateError(
                f"{self._class_name}: attribute {name!r} is not what its annotation says ({self.fields[name]}): {error}"
            ) from None
