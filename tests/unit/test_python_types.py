"""Python's own types beside those of test_types.py: what each reader shows, what is refused, and the bytes in logs."""

import enum
import json
import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Interface
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

import msgspec
import pytest

import immortal
from immortal import CalleeFailed, Immortal, peer, register_type, rpc
from immortal.appsdk.calls.codec import ValueDecoder, encode_value
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.guard import SMALL_SIZE_BYTES_MAX
from immortal.appsdk.state.tree import Fields, state_rows, to_json, tree
from immortal.appsdk.types.encoding import form_of
from immortal.appsdk.types.handles import EXTENSION_CODE as HANDLE_CODE
from immortal.appsdk.types.handles import KEY_SIZE_BYTES, MARK, Handle, handles_in
from immortal.appsdk.types.registry import may_hold_handles, unsupported_type
from immortal.appsdk.types.steps import NotRoundTrippableError
from immortal.coordinator.core.formatting import format_call
from immortal.pipeline.arguments import ArgumentDecoder
from immortal.pipeline.sql.states import read_tables
from immortal.presenters.records import describe_message
from immortal.protocol import decoding
from immortal.protocol.extension_values import EXTENSION_CODE, KINDS, decode_plain
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.replay.travel.values import shown, steps_of, value_at
from immortal.testing import Environment


class ShopError(Exception):
    pass


class BakeryError(ShopError):
    pass


class Board(Immortal):
    """A handler and a state with values of each type."""

    recent: deque[Fraction]
    counts: defaultdict[str, int]
    votes: Counter[IPv4Address]
    spans: OrderedDict[str, range]
    pattern: re.Pattern[str]
    zone: ZoneInfo
    point: complex
    failure: Exception | None
    facts: dict[str, Any]

    @rpc
    def put(
        self,
        recent: deque[Fraction],
        votes: Counter[IPv4Address],
        pattern: re.Pattern[str],
        failure: ValueError,
        more: Any,
    ) -> None: ...


MORE = {"range": range(2**70), "many": [Fraction(1, 3), IPv6Address("::1"), 1j, ZoneInfo("UTC"), deque([1], 2), (1,)]}
MORE_SHOWN = {"range": f"range(0, {2**70})", "many": ["1/3", "::1", "1j", "UTC", [1], [1]]}
ARGUMENTS = (
    deque([Fraction(1, 3)]),
    Counter([IPv4Address("10.0.0.1")]),
    re.compile("a+", re.I),
    ValueError("no tea", 5),
    MORE,
)
ARGUMENTS_SHOWN = {
    "recent": ["1/3"],
    "votes": {"10.0.0.1": 1},
    "pattern": {"pattern": "a+", "flags": 34},
    "failure": {"$type": "builtins.ValueError", "$arguments": ["no tea", 5]},
}


def board() -> Board:
    made: Board = definition_of(Board).new_instance()
    made.recent, made.counts, made.votes = deque([Fraction(1, 3)]), defaultdict(int, tea=2**70), ARGUMENTS[1]
    made.spans, made.pattern, made.zone = OrderedDict(b=range(3), a=range(2)), ARGUMENTS[2], ZoneInfo("Europe/Paris")
    made.point, made.failure, made.facts = 1 + 2j, KeyError("tea"), MORE
    return made


def encoded() -> bytes:
    definition = definition_of(Board)
    return definition.codec(definition.handlers["put"]).encoded(ARGUMENTS)[1]


def message() -> bytes:
    return encode_incoming_rpc(definition_of(Board).handlers["put"].method_id, RpcType.FORK, encoded())


# --- readers ----------------------------------------------------------------------------------------------------------


def test_log_show_with_the_class_and_without() -> None:
    with_class = describe_message(message(), ArgumentDecoder(definition_of(Board)))["arguments"]
    more = with_class.pop("more")
    assert with_class == ARGUMENTS_SHOWN
    assert more == {**MORE_SHOWN, "many": [*MORE_SHOWN["many"][:4], {"items": [1], "maxlen": 2}, [1]]}
    without = describe_message(message(), None)["arguments"]
    assert without[:2] == [[[1, 3]], {"10.0.0.1": 1}]
    assert without[4] == more


def test_the_text_of_a_message() -> None:
    words = format_call(message(), "", {("", definition_of(Board).handlers["put"].method_id): "Board.put"})
    for part in ("'10.0.0.1': 1", f"range(0, {2**70})", "Fraction(1, 3)", "IPv6Address('::1')"):
        assert part in words


def test_the_pipeline() -> None:
    decoded = ArgumentDecoder(definition_of(Board)).decode(
        RpcKind.CALL, RpcType.FORK, definition_of(Board).handlers["put"].method_id, encoded()
    )
    assert json.loads(decoded.arguments_json or "").items() >= ARGUMENTS_SHOWN.items()
    answer = encode_value((7, form_of(Any).tag(MORE)))
    shown_answer = ArgumentDecoder(definition_of(Board)).decode(RpcKind.RETURNED_VALUE, RpcType.FORK, 9, answer)
    assert json.loads(shown_answer.arguments_json or "")["value"]["range"] == MORE_SHOWN["range"]


def test_sql(tmp_path: Path) -> None:
    rows = state_rows(Fields({name: tree(value) for name, value in vars(board()).items()}))
    file = tmp_path / "rows"
    lines = ([name, row if isinstance(row, str) else to_json(Fields(row))] for name, row in rows)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tables = {name: table.to_pylist() for name, table in read_tables(file).items()}
    assert tables["recent"] == [{"index": 0, "value": "1/3"}]
    assert tables["counts"] == [{"key": "tea", "value": str(2**70)}]
    assert tables["votes"] == [{"key": "10.0.0.1", "value": 1}]
    assert tables["spans"] == [{"key": "b", "value": "range(0, 3)"}, {"key": "a", "value": "range(0, 2)"}]
    (state,) = tables["state"]
    assert (state["zone"], state["point"]) == ("Europe/Paris", "(1+2j)")
    assert json.loads(state["pattern"])["pattern"] == "a+"
    assert json.loads(state["failure"]) == {"$type": "builtins.KeyError", "$arguments": ["tea"]}


def test_the_page_and_its_paths() -> None:
    root = shown(Fields({name: tree(value) for name, value in vars(board()).items()}))
    texts: dict[str, str] = {}

    def collect(node: dict[str, Any]) -> None:
        texts[node["path"]] = node.get("text", "")
        for child in node.get("items", ()):
            collect(child)

    collect(root)
    assert texts["recent[0]"] == '"1/3"'
    assert texts["votes['10.0.0.1']"] == "1"
    assert texts["pattern.pattern"] == '"a+"'
    assert texts["failure.$arguments[0]"] == '"tea"'
    assert texts["facts['many'][1]"] == '"::1"'
    for path in ("recent[0]", "votes['10.0.0.1']", "pattern.pattern", "facts['many'][1]"):
        assert json.dumps(value_at(board(), steps_of(path))) == texts[path]


# --- bytes that are in logs -------------------------------------------------------------------------------------------

GOLDEN: list[tuple[Any, str]] = [
    ((1, "a"), "54 9201a161"),
    ({1}, "53 9101"),
    (frozenset({1}), "46 9101"),
    (deque([1, 2], 3), "71 93030102"),
    (deque("a"), "71 92c0a161"),
    (OrderedDict(b=1), "6f 81a16201"),
    (Counter("a"), "63 81a16101"),
    (Decimal("1.10"), "44 a4312e3130"),
    (1.5j, "78 a4312e356a"),
    (range(1, 9, 2), "72 93010902"),
    (range(2**70), "72 9300c70a49 69400000000000000000 01"),
    (Fraction(-1, 3), "66 92ff03"),
    (ZoneInfo("UTC"), "7a a3555443"),
    (re.compile("a"), "70 a161"),
    (re.compile("a", re.I), "70 82a77061747465726ea161a5666c61677322"),
    (IPv4Address("1.2.3.4"), "61 a7312e322e332e34"),
    (IPv6Interface("::1/64"), "45 a63a3a312f3634"),
]


@pytest.mark.parametrize(("value", "expected"), GOLDEN, ids=repr)
def test_golden_bytes_in_any(value: Any, expected: str) -> None:
    data = form_of(Any).encode(value)
    assert decode_plain(data) == value
    assert decoding.decode(data, ext_hook=lambda code, content: content.hex()) == expected.replace(" ", "")


def test_each_kind_has_a_letter_and_a_class_of_its_own() -> None:
    assert len({kind.letter for kind in KINDS}) == len({kind.path for kind in KINDS}) == len({one.cls for one in KINDS})


@pytest.mark.parametrize(
    "data",
    [
        b"q\x90",
        b"q\x92\xff\x01",
        b"c\x01",
        b"x\xa1a",
        b"r\x93\x00\x01\x00",
        b"f\x92\x01\x00",
        b"f" + encode_value((1, 2**70000)),
        b"f\xa1i",
        b"z\xa9../passwd",
        b"p\xa2a(",
        b"p\x82\xa7pattern\xa1a\xa5flags\xcc\x80",
        b"p" + encode_value("(" * 5000 + ")" * 5000),
        b"a\xa3::1",
        b"a\x05",
    ],
)
def test_an_extension_that_is_none_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(decoding.DecodeError):
        decode_plain(msgspec.msgpack.encode(msgspec.msgpack.Ext(EXTENSION_CODE, data)))


# --- what is refused where it is made ---------------------------------------------------------------------------------

REFUSED: list[tuple[Any, Any, str]] = [
    (deque[int], [1], "a value of type list where deque is annotated"),
    (deque[int], deque(["a"]), r"\[0\]: a value of type str where int"),
    (list[int], deque([1]), "a value of type deque where list is annotated"),
    (dict[str, int], Counter("a"), "a value of type Counter where dict is annotated"),
    (Counter[str], Counter({"a": 1.5}), r"\['a'\]: a value of type float where int"),
    (deque[Any], deque([ShopError()]), r"\[0\]: a value of type ShopError can't be kept where the annotation is Any"),
    (Any, defaultdict(int), "a value of type defaultdict can't be kept where the annotation is Any"),
    (defaultdict[str, int], defaultdict(None), "default_factory is None, and would come back as int"),
    (defaultdict[str, list[int]], defaultdict(lambda: [0]), "default_factory is .*, and would come back as list"),
    (dict[int, defaultdict[str, int]], {1: defaultdict(list)}, r"\[1\]: its default_factory is list,"),
    (Exception, ShopError(), "got the exception `.*ShopError`: name its class in the annotation"),
    (list[ShopError], [ShopError(), BakeryError()], r"\[1\]: a value of type BakeryError where a ShopError"),
    (ShopError, ValueError(), "got the exception `ValueError`"),
    (ValueError, ValueError(ShopError()), r"\[1\]\[0\]: a value of type ShopError can't be kept"),
    (list[Fraction], [Fraction(1, 2**70000)], r"\[0\]: .* more than 65536 bits"),
    (Any, [Fraction(1, 2**70000)], r"more than 65536 bits"),
    (deque[str], deque(["\ud800"]), r"\[0\]: .*lone surrogate"),
    (Any, [("\ud800",)], r"lone surrogate \('\\ud800'\)"),
]


@pytest.mark.parametrize(("annotation", "value", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_come_back_as_something_else_is_refused(annotation: Any, value: Any, words: str) -> None:
    with pytest.raises(NotRoundTrippableError, match=words):
        form_of(annotation).encode(value)


class Beyond(enum.IntEnum):
    ONE = 2**70


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (defaultdict, "the class of its values makes its defaults"),
        (dict[str, defaultdict[str, Any]], "the class of its values makes its defaults"),
        (deque[object], "object is no type that can be encoded"),
        (BaseException, "BaseException is no type that can be encoded"),
        (ExceptionGroup, "ExceptionGroup is no type that can be encoded"),
        (Beyond, "Integer values > (2**63 - 1) are not currently supported"),
        (list[Literal[2**70]], "Integer values > (2**63 - 1) are not currently supported"),
    ],
)
def test_an_annotation_that_cannot_be_carried(annotation: Any, words: str) -> None:
    assert words in (unsupported_type(annotation) or "")


def test_the_factory_of_a_default() -> None:
    annotation = defaultdict[str, defaultdict[str, list[int] | None]]
    value = defaultdict(partial(defaultdict, list), a=defaultdict(list, b=None))
    found: Any = ValueDecoder(annotation).decode(form_of(annotation).encode(value))
    assert found == value
    assert found["c"]["d"] == []


def test_simpler_forms_from_callers_without_the_class() -> None:
    for annotation, plain, expected in (
        (Fraction, "1/3", Fraction(1, 3)),
        (Fraction, "0.25", Fraction(1, 4)),
        (complex, 1.5, 1.5 + 0j),
        (re.Pattern[str], "a", re.compile("a")),
        (IPv4Network, "10.0.0.0/8", IPv4Network("10.0.0.0/8")),
    ):
        assert ValueDecoder(annotation).decode(encode_value(plain)) == expected
    for text in ("1e9999999999", "1_0", "1/0"):
        with pytest.raises(decoding.DecodeError):
            ValueDecoder(Fraction).decode(encode_value(text))


def test_custom_keys_beside_integers_beyond_64_bits() -> None:
    annotation = tuple[int, dict[str, dict[Path, int]], list[dict[IPv4Address | None, int]]]
    value = (2**70, {"a": {Path("b"): 1}}, [{IPv4Address("10.0.0.1"): 2**70, None: 1}])
    assert ValueDecoder(annotation).decode(encode_value(value)) == value


def test_an_exception_may_have_a_codec_of_its_own() -> None:
    class Own(Exception):  # noqa: N818
        pass

    register_type(Own, encode=lambda error: error.args[0], decode=Own, form=str)
    assert encode_value(Own("a")) == encode_value("a")


def test_a_codec_that_an_app_gave_one_of_them_stays() -> None:
    program = (
        "import immortal, fractions\n"
        "from immortal.appsdk.types.encoding import ValueDecoder, encode_value\n"
        "immortal.register_type(fractions.Fraction, encode=str, decode=fractions.Fraction, form=str)\n"
        "half = encode_value(fractions.Fraction(1, 2))\n"
        "print(half, ValueDecoder(fractions.Fraction).decode(half))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "b'\\xa31/2' 1/2"


def test_handles_in_them_are_found() -> None:
    handle = msgspec.msgpack.encode(msgspec.msgpack.Ext(HANDLE_CODE, MARK + bytes(KEY_SIZE_BYTES) + b"owner"))
    held = [
        msgspec.msgpack.Ext(EXTENSION_CODE, b"q\x92\xc0" + handle),
        form_of(Any).tag(range(2**70)),
        msgspec.Raw(handle),
    ]
    assert handles_in(encode_value(held)) == [("owner", bytes(KEY_SIZE_BYTES))] * 2
    assert may_hold_handles(dict[str, deque[Handle[Any]]])
    assert not may_hold_handles(dict[str, deque[int]])


# --- in a service -----------------------------------------------------------------------------------------------------


class Large(Immortal):
    """Its attributes are too large to be looked at as a whole after each message."""

    values: deque[Any]
    lists: defaultdict[int, list[Any]]

    def __init__(self) -> None:
        self.values = deque(range(2 * SMALL_SIZE_BYTES_MAX))
        self.lists = defaultdict(list, {number: [number] for number in range(2 * SMALL_SIZE_BYTES_MAX)})

    @rpc
    def add_value(self, good: bool) -> None:
        self.values.append(1 if good else object())

    @rpc
    def add_list(self, good: bool) -> None:
        self.lists[-1].append(1 if good else object())


@pytest.mark.parametrize("method", [Large.add_value, Large.add_list])
def test_what_is_added_to_large_ones_is_looked_at(method: Any) -> None:
    with Environment(fail_alone=True) as env:
        large = env.start(Large, "large")
        with pytest.raises(CalleeFailed, match=r"StateError: .* a value of type object"):
            large.call(method, False)
        large.call(method, True)
        large.checkpoint()
        large.crash()
        large.recover()
        assert large.state.values[0] == 0
        assert large.state.lists[-5] == []  # by the factory


SURROGATE = "\ud800"


def halved() -> str:
    return SURROGATE


class Halving(Immortal):
    text: str

    def __init__(self) -> None:
        self.text = ""

    @rpc
    def take(self, value: Any) -> None: ...

    @rpc
    def give(self) -> str:
        return SURROGATE

    @rpc
    def keep(self) -> None:
        self.text = SURROGATE

    @rpc
    def tell(self) -> None:
        immortal.signal("told", SURROGATE)


class Asking(Immortal):
    halving = peer(Halving, "halving")

    @rpc
    async def ask(self, how: str) -> Any:
        if how == "an argument":
            return await self.halving.take((SURROGATE,))
        if how == "an effect":
            return await immortal.effect(halved)
        return await getattr(self.halving, how)()


@pytest.mark.parametrize("how", ["an argument", "an effect", "give", "keep", "tell"])
def test_a_lone_surrogate_is_an_error_where_it_is_made(how: str) -> None:
    with Environment(fail_alone=True) as env:
        env.start(Halving, "halving")
        asking = env.start(Asking, "asking", effects={halved: halved})
        with pytest.raises((CalleeFailed, TypeError), match=r"a text with a lone surrogate \('\\\\*ud800'\)"):
            asking.call(Asking.ask, how)
