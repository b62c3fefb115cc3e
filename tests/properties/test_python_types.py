"""Values of Python's own types come back as what they are: as arguments, as results, and in a checkpoint."""

import contextlib
import re
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction
from functools import cache, partial
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal import Immortal, rpc
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.state.schema import copied_envelope
from immortal.appsdk.types.encoding import form_of
from immortal.protocol import decoding
from immortal.protocol.extension_values import EXTENSION_CODE, KINDS, decode_plain

INTEGERS = st.integers() | st.integers(-(1 << 200), 1 << 200)
TEXTS = st.text(max_size=5)
FRACTIONS = st.builds(Fraction, INTEGERS, INTEGERS.filter(bool))
COMPLEX = st.complex_numbers()
RANGES = st.builds(range, INTEGERS, INTEGERS, INTEGERS.filter(bool))
ZONES = st.sampled_from(["UTC", "Europe/Paris", "Asia/Kolkata"]).map(ZoneInfo)
PATTERNS = st.builds(re.compile, TEXTS.map(re.escape), st.sampled_from([0, re.I, re.M | re.S, re.ASCII]))
ADDRESSES = st.ip_addresses(v=4)
KEYS = st.one_of(INTEGERS, TEXTS, FRACTIONS, COMPLEX.filter(lambda value: value == value), RANGES, ZONES, ADDRESSES)
SCALARS = st.one_of(KEYS, PATTERNS, COMPLEX, st.none(), st.binary(max_size=3), st.decimals(), st.timedeltas())


def deques(items: st.SearchStrategy[Any]) -> st.SearchStrategy[deque[Any]]:
    return st.builds(deque, st.lists(items, max_size=4), st.none() | st.integers(0, 5))


def dicts(
    keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any], make: Any = dict
) -> st.SearchStrategy[dict[Any, Any]]:
    return st.lists(st.tuples(keys, values), max_size=4).map(lambda pairs: make(dict(pairs)))


def moved(contents: dict[Any, Any]) -> OrderedDict[Any, Any]:
    """Its order is not that in which a plain dict would have its keys."""
    made = OrderedDict(contents)
    if made:
        made.move_to_end(next(iter(made)))
    return made


ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(KEYS, max_size=3),
        deques(inner),
        dicts(KEYS, inner),
        dicts(KEYS, inner, moved),
        dicts(KEYS, inner, Counter),
    ),
    max_leaves=8,
)


class ShopError(Exception):
    def __init__(self, item: Any, count: int) -> None:
        super().__init__(f"{count}")
        self.item, self.count = item, count


PYTHONS = st.one_of(*(st.builds(cls, ANYTHING, INTEGERS) for cls in (ValueError, KeyError, UserWarning)))
CASES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "anything": (Any, ANYTHING),
    "int": (dict[int, list[int]], dicts(INTEGERS, st.lists(INTEGERS))),
    "deque": (deque[int], deques(INTEGERS)),
    "deque of anything": (deque[Any], deques(ANYTHING)),
    "defaultdict": (defaultdict[Fraction, int], dicts(FRACTIONS, INTEGERS, partial(defaultdict, int))),
    "defaultdict of deques": (
        defaultdict[str, deque[int]],
        dicts(TEXTS, deques(INTEGERS), partial(defaultdict, deque)),
    ),
    "OrderedDict": (OrderedDict[int, Any], dicts(INTEGERS, ANYTHING, moved)),
    "nested OrderedDict": (
        dict[str, OrderedDict[int, OrderedDict[str, int]]],
        dicts(TEXTS, dicts(INTEGERS, dicts(TEXTS, INTEGERS, moved), moved)),
    ),
    "Counter": (Counter[Any], dicts(KEYS, INTEGERS, Counter)),
    "complex": (list[complex], st.lists(COMPLEX, max_size=3)),
    "range": (range, RANGES),
    "fraction": (Fraction | None, FRACTIONS | st.none()),
    "zone": (dict[ZoneInfo, int], dicts(ZONES, INTEGERS)),
    "pattern": (re.Pattern[str], PATTERNS),
    "own exception": (ShopError, st.builds(ShopError, ANYTHING, INTEGERS)),
    "Python's exceptions": (list[Exception], st.lists(PYTHONS, max_size=2)),
}


@cache
def keeper(name: str) -> Definition:
    annotation = CASES[name][0]

    class Keeper(Immortal):
        kept: annotation  # type: ignore[valid-type]

        @rpc
        def keep(self, value: annotation) -> annotation:  # type: ignore[valid-type]
            return value

    return definition_of(Keeper)


def tag_values(value: Any) -> Any:
    """What two values share that are the same in types, order and contents."""
    cls = type(value)
    if isinstance(value, BaseException):
        return cls, tag_values(value.args), tag_values(vars(value))
    if isinstance(value, dict):
        pairs = [(tag_values(key), tag_values(item)) for key, item in value.items()]
        return cls, str(getattr(value, "default_factory", None)), pairs
    if isinstance(value, deque):
        return cls, value.maxlen, list(map(tag_values, value))
    if isinstance(value, list | tuple):
        return cls, list(map(tag_values, value))
    if isinstance(value, frozenset):
        return cls, sorted(map(repr, map(tag_values, value)))
    if isinstance(value, range):
        return cls, value.start, value.stop, value.step
    return cls, repr(value)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_each_comes_back_as_an_argument_a_result_and_from_a_checkpoint(name: str, data: st.DataObject) -> None:
    value, definition = data.draw(CASES[name][1]), keeper(name)
    codec, schema = definition.codec(definition.handlers["keep"]), definition.state()
    (argument,) = codec.decode(codec.encoded((value,))[1])
    assert tag_values(argument) == tag_values(value)
    assert tag_values(codec.decode_result(codec.encode_result(value))) == tag_values(value)
    before, after = definition.new_instance(), definition.new_instance()
    before.kept = value
    schema.restore(after, copied_envelope(definition.name, "msgspec"), memoryview(schema.encode(before)))
    assert tag_values(after.kept) == tag_values(value)


@given(st.sampled_from([kind.letter for kind in KINDS]), st.binary(max_size=20) | ANYTHING.map(form_of(Any).encode))
def test_strange_contents_are_a_value_or_a_decode_error(letter: bytes, contents: bytes) -> None:
    with contextlib.suppress(decoding.DecodeError):
        decode_plain(msgspec.msgpack.encode(msgspec.msgpack.Ext(EXTENSION_CODE, letter + contents)))
