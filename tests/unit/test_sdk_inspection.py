"""States as trees, what differs between them, and the command line that shows both."""

from __future__ import annotations

import collections
import json
import random
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest

from immortal import Immortal, Transient
from immortal.appsdk.dispatch.lifecycle import upgrades
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.inspection import inspect_state, main
from immortal.appsdk.state.schema import Envelope, encode_envelope
from immortal.appsdk.state.tree import Fields, differences, to_json, tree
from immortal.errors import StateError


class Color(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


class Row(msgspec.Struct, tag="row"):
    name: str


@dataclass
class Item:
    name: str
    tags: set[str] = field(default_factory=set)


class Node:
    def __init__(self) -> None:
        self.next: Node | None = None
        self.values = [1]


class Slotted:
    __slots__ = ("a", "b")


def text(value: Any) -> Any:
    return to_json(tree(value))


UUID_TEXT = "12345678-1234-5678-1234-567812345678"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (2**70, 2**70),
        (1.5, 1.5),
        (float("nan"), {"$float": "nan"}),
        (float("-inf"), {"$float": "-inf"}),
        (b"\x01\xff", {"$bytes": "01ff"}),
        (bytearray(b"\x01"), {"$bytes": "01"}),
        ({"b", "a", "c"}, {"$set": ["a", "b", "c"]}),
        (frozenset({(2, "x"), (1, "y")}), {"$set": [[1, "y"], [2, "x"]]}),
        ({1: "a", None: 2, False: 3}, {"1": "a", "null": 2, "false": 3}),
        ({(1, "a"): 2}, {'[1, "a"]': 2}),
        ({b"\x01": 2}, {'{"$bytes": "01"}': 2}),
        ({UUID(UUID_TEXT): 1}, {UUID_TEXT: 1}),
        ({1: "a", "1": "b"}, {"$map": [["1", "b"], [1, "a"]]}),
        ({"$set": [1]}, {"$map": [["$set", [1]]]}),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00Z"),
        (Color.RED, "red"),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Row("a"), {"type": "row", "name": "a"}),
        (Item("a", {"y", "x"}), {"name": "a", "tags": {"$set": ["x", "y"]}}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.deque([1, 2]), [1, 2]),
        (Fraction(1, 3), "1/3"),
        (len, {"$global": "builtins.len"}),
    ],
)
def test_values_as_json(value: Any, expected: Any) -> None:
    assert text(value) == expected
    assert json.loads(json.dumps(text(value), allow_nan=False)) == expected


def test_objects_that_only_pickle_knows() -> None:
    node = Node()
    node.next = Node()
    node.next.next = node
    name = f"{__name__}.Node"
    assert text(node) == {"$type": name, "next": {"$type": name, "next": {"$cycle": 2}, "values": [1]}, "values": [1]}
    slotted = Slotted()
    slotted.b = {1}
    assert text(slotted) == {"$type": f"{__name__}.Slotted", "b": {"$set": [1]}}
    assert text(random.Random(5)) == text(random.Random(5)) != text(random.Random(6))
    assert text(threading.Lock())["$type"] == "_thread.lock"
    keys = {UUID(UUID_TEXT): 1, UUID_TEXT: 2}
    assert text(keys) == {UUID_TEXT: 1, '["str", "' + UUID_TEXT + '"]': 2}


def diff(old: Any, new: Any) -> list[dict[str, Any]]:
    return [difference.to_json() for difference in differences(Fields(s=tree(old)), Fields(s=tree(new)))]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"the": 1, "a": 2}, {"a": 2, "the": 3}, [{"path": "s['the']", "old": 1, "new": 3}]),
        ({1: "a"}, {"1": "a"}, [{"path": "s[1]", "old": "a"}, {"path": "s['1']", "new": "a"}]),
        ([1, 2, 3], [0, 1, 2, 3], [{"path": "s[0]", "new": 0}]),
        ([1, 2, 3], [1, 3], [{"path": "s[1]", "old": 2}]),
        ([1, 2, 3, 4], [1, 9, 8, 4], [{"path": "s[1]", "old": 2, "new": 9}, {"path": "s[2]", "old": 3, "new": 8}]),
        ([1, 1], [1], [{"path": "s[1]", "old": 1}]),
        ([Item("a")], [Item("b")], [{"path": "s[0].name", "old": "a", "new": "b"}]),
        ({"a", "b"}, {"b", "c"}, [{"path": "s{'a'}", "old": "a"}, {"path": "s{'c'}", "new": "c"}]),
        ({(1, 2)}, set(), [{"path": "s{[1, 2]}", "old": [1, 2]}]),
        (1, 1.0, [{"path": "s", "old": 1, "new": 1.0}]),
        (1, True, [{"path": "s", "old": 1, "new": True}]),
        (None, [], [{"path": "s", "old": None, "new": []}]),
        ([], set(), [{"path": "s", "old": [], "new": {"$set": []}}]),
        (b"a", b"b", [{"path": "s", "old": {"$bytes": "61"}, "new": {"$bytes": "62"}}]),
        (float("nan"), float("nan"), []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
    ],
)
def test_differences(old: Any, new: Any, expected: list[dict[str, Any]]) -> None:
    found = diff(old, new)
    assert found == expected
    assert [[type(part) for part in entry.values()] for entry in found] == [
        [type(part) for part in entry.values()] for entry in expected
    ]


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Shop(Immortal):
    items: list[Item]
    tags: set[str]
    cache: Transient[dict[str, Item]]
    currency: str = "EUR"

    def __init__(self) -> None:
        self.items = [Item("a", {"x"})]
        self.tags = {"b", "a"}

    def prepare(self) -> None:
        raise AssertionError("nothing runs but what reads the state")


class Pickled(Immortal, serializer="pickle"):
    words: collections.Counter[str]

    def __init__(self) -> None:
        self.words = collections.Counter("aab")


class Own(Immortal):
    def __init__(self) -> None:
        self.total = 5

    def checkpoint(self) -> bytes:
        return str(self.total).encode()

    def restore(self, blob: bytes) -> None:
        self.total = int(blob)


class AnnotatedOwn(Own):
    total: int
    cache: Transient[int]
    unset: str

    def restore(self, blob: bytes) -> None:
        super().restore(blob)
        self.cache = 1


class Deep(Own):
    lists: list[Any]

    def restore(self, blob: bytes) -> None:
        self.lists = []
        for _ in range(10_000):
            self.lists = [self.lists]


@upgrades(Shop)
class NewShop(Immortal):
    count: int

    @classmethod
    def upgrade(cls, old: Shop) -> NewShop:
        return cls()


def blob_of(instance: Immortal, sequence_id: int = 7) -> bytes:
    definition = definition_of(type(instance))
    schema = definition.state()
    envelope = Envelope(
        class_name=definition.name,
        serializer=schema.serializer,
        seed=bytes(16),
        sequence_id=sequence_id,
        version=definition.version,
    )
    return encode_envelope(envelope) + schema.encode(instance)


SHOP_STATE = {
    "items": [{"name": "a", "tags": {"$set": ["x"]}}],
    "tags": {"$set": ["a", "b"]},
    "currency": "EUR",
}


@pytest.mark.parametrize(
    ("instance", "state"),
    [
        (Shop(), SHOP_STATE),
        (Pickled(), {"words": {"a": 2, "b": 1}}),
        (Own(), {"$opaque": 1, "check": "ac6d6b0f22a9e25d"}),
        (AnnotatedOwn(), {"total": 5}),
    ],
)
def test_states(instance: Immortal, state: Any) -> None:
    found = inspect_state(definition_of(type(instance)), blob_of(instance)).to_json()
    if "check" in state:
        assert re.fullmatch("[0-9a-f]{16}", found["state"]["check"])
        state = {**state, "check": found["state"]["check"]}
        other = type(instance)()
        other.total = 6  # type: ignore[attr-defined]
        assert inspect_state(definition_of(Own), blob_of(other)).to_json()["state"]["check"] != state["check"]
    assert found == {"class": type(instance).__qualname__, "version": 1, "sequence_id": 7, "state": state}


def test_a_state_of_the_version_before() -> None:
    found = inspect_state(definition_of(NewShop), blob_of(Shop())).to_json()
    assert found == {"class": "Shop", "version": 1, "sequence_id": 7, "state": SHOP_STATE}


def test_checkpoints_that_can_not_be_read() -> None:
    blob = blob_of(Own())
    with pytest.raises(StateError, match=r"Own\.restore raised ValueError: invalid literal"):
        inspect_state(definition_of(Own), blob[:-1] + b"x")
    with pytest.raises(StateError, match="is of an app 'Own'"):
        inspect_state(definition_of(Shop), blob)
    with pytest.raises(StateError, match="another kind of app"):
        inspect_state(definition_of(Shop), b"x" * 20)
    with pytest.raises(StateError, match="Deep: the state is too deep to be shown"):
        inspect_state(definition_of(Deep), blob_of(Deep()))


# --- the command line -------------------------------------------------------------------------------------------------

PROGRAM = """
from immortal import Immortal, rpc
print("imported")

class Counter(Immortal):
    words: dict[str, int]
    tags: set[str]

    def __init__(self) -> None:
        self.words = {"the": 1}
        self.tags = {"a"}

    @rpc
    def count(self, word: str) -> None: ...

class Renamed(Counter, formerly=("Counter",)):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made: dict[str, Any] = {"__name__": "shop_to_inspect"}
    exec(compile(PROGRAM, "shop_to_inspect.py", "exec"), made)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_to_inspect", raising=False)
    (tmp_path / "shop_to_inspect.py").write_text(PROGRAM)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    old, new = made["Counter"](), made["Counter"]()
    new.words = {"the": 3, "a": 1}
    new.tags = set()
    (tmp_path / "old").write_bytes(blob_of(old))
    (tmp_path / "new").write_bytes(blob_of(new, 9))
    (tmp_path / "damaged").write_bytes(b"IMMAPP")
    return tmp_path


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "immortal.appsdk.running.inspection", "show", "shop_to_inspect:Counter", "old"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown
    assert json.loads(shown.stdout) == {
        "class": "Counter",
        "version": 1,
        "sequence_id": 7,
        "state": {"words": {"the": 1}, "tags": {"$set": ["a"]}},
    }
    assert shown.stderr == "imported\n"
    changes = [
        {"path": "words['the']", "old": 1, "new": 3},
        {"path": "words['a']", "new": 1},
        {"path": "tags{'a'}", "old": "a"},
    ]
    sides = ("shop_to_inspect:Counter", "old", "shop_to_inspect:Renamed", "new")
    assert main(["diff", *sides]) == 0
    assert json.loads(capsys.readouterr().out) == changes
    assert main(["diff", *sides, "--limit", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == changes[:2]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("show", "shop_to_inspect:Counter", "missing"), 1, "can't be read: missing: No such file"),
        (("show", "shop_to_inspect:Counter", "damaged"), 1, "damaged: the checkpoint has 6 bytes"),
        (("show", "shop_to_inspect:Gone", "old"), 2, "has no 'Gone' (its apps: Counter, Renamed)"),
        (("show", "broken:Counter", "old"), 2, "ZeroDivisionError"),
        (("show", "shop_to_inspect:Counter"), 2, "required: FILE"),
        (("diff", "a:B", "old", "a:B", "new", "--limit", "0"), 2, "a number from 1 was expected"),
    ],
)
def test_mistakes(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    try:
        result = main(arguments)
    except SystemExit as error:  # called wrongly
        result = error.code
    said = capsys.readouterr()
    assert (result, said.out) == (status, "")
    assert words in said.err
    if status == 1:
        assert said.err.removeprefix("imported\n").count("\n") == 1
