"""The state: what is refused before it is lost, and what an old checkpoint needs."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import immortal
from immortal import Handle, Immortal, Node, Retry, Table, Transient, Winner, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.state.schema import FRONT, Envelope, copied_envelope, decode_envelope, encode_envelope
from immortal.errors import StateError
from immortal.testing import Environment


@dataclass
class Account:
    owner: str
    amount: int


class Bank(Immortal):
    accounts: dict[int, Account]
    _secret: bytes
    cache: Transient[list[str]]
    limit: int = 10

    def __init__(self) -> None:
        self.accounts = {1: Account("a", 5)}
        self._secret = b"s"


class Vault(Bank):
    keys: set[str]


class Anything(Immortal):
    value: Any


class Plain(Immortal):
    words: dict[str, int]
    ratio: float

    def __init__(self) -> None:
        self.words = {}
        self.ratio = 0.0


class Pickled(Immortal, serializer="pickle"):
    words: defaultdict[str, int]

    def __init__(self) -> None:
        self.words = defaultdict(int)


class Own(Immortal):
    def __init__(self) -> None:
        self.anything = threading.Lock()
        self.count = 3

    def checkpoint(self) -> bytes:
        return self.count.to_bytes(4, "little")

    def restore(self, blob: bytes) -> None:
        self.anything = threading.Lock()
        self.count = int.from_bytes(blob, "little")


def encode(instance: Immortal) -> bytes:
    return definition_of(type(instance)).state().encode(instance)


def envelope_of(cls: type, **changes: Any) -> Envelope:
    schema = definition_of(cls).state()
    values: dict[str, Any] = {
        "class_name": cls.__qualname__,
        "serializer": schema.serializer,
        "seed": b"s" * 16,
        "sequence_id": 4,
    }
    return Envelope(**{**values, **changes})


def restore(cls: type, state: bytes, **changes: Any) -> Any:
    restored: Any = object.__new__(cls)
    definition_of(cls).state().restore(restored, envelope_of(cls, **changes), memoryview(state))
    return restored


def test_round_trip() -> None:
    bank = Bank()
    bank.accounts[2] = Account("b", -1)
    bank.cache = ["not saved"]
    again = restore(Bank, encode(bank))
    assert again.accounts == bank.accounts
    assert again._secret == b"s"
    assert again.limit == 10
    assert not hasattr(again, "cache")


def test_inherited_attributes_are_state_too() -> None:
    vault = Vault()
    with pytest.raises(StateError, match="Vault: attribute 'keys' is annotated but not set"):
        encode(vault)
    vault.keys = {"a"}
    assert restore(Vault, encode(vault)).keys == {"a"}


class Leaf(Node):
    marks: list[int] = []  # noqa: RUF012

    @rpc
    def mark(self) -> list[int]:
        self.marks.append(1)
        return self.marks


class Branch(Immortal, nodes=(Leaf,)):
    leaves: list[Handle[Leaf]] = []  # noqa: RUF012
    known: dict[str, list[int]] = {}  # noqa: RUF012

    @rpc
    def grow(self) -> tuple[int, list[int]]:
        self.leaves.append(immortal.create_node(Leaf))
        self.known.setdefault("numbers", []).append(1)
        return len(self.leaves), self.known["numbers"]

    @rpc
    async def mark(self) -> list[list[int]]:
        return [await leaf.mark() for leaf in self.leaves]


def test_each_instance_and_node_has_its_own_copy_of_a_default() -> None:
    for _ in range(2):
        with Environment() as env:
            for branch in (env.start(Branch, "one"), env.start(Branch, "two")):
                assert branch.call(Branch.grow) == (1, [1])
                assert branch.call(Branch.grow) == (2, [1, 1])
                assert branch.call(Branch.mark) == [[1], [1]]
    assert (Branch.leaves, Branch.known, Leaf.marks) == ([], {}, [])


def test_an_attribute_that_is_not_annotated_would_be_lost() -> None:
    bank = Bank()
    bank.surprise = 1.5  # type: ignore[attr-defined]
    with pytest.raises(StateError, match=r"Bank: attribute 'surprise' is set but not annotated.*surprise: float"):
        encode(bank)


def test_what_can_not_be_encoded_is_named() -> None:
    anything = Anything()
    anything.value = {"lock": threading.Lock()}
    with pytest.raises(StateError, match=r"Anything: attribute 'value' \['lock'\].*checkpoint.*pickle"):
        encode(anything)
    anything.value = ["\ud800"]
    with pytest.raises(StateError, match=r"'value' \[0\] can't be saved: .* lone surrogate"):
        encode(anything)


def test_what_could_not_be_read_back_is_refused_when_it_is_written() -> None:
    plain = Plain()
    plain.words = {"a": 1.5}  # type: ignore[dict-item]
    with pytest.raises(StateError, match=r"'words' \['a'\] can't be saved: a value of type float where int"):
        encode(plain)
    plain.words = defaultdict(int)
    with pytest.raises(StateError, match="'words' can't be saved: a value of type defaultdict where dict"):
        encode(plain)
    plain.words = {}
    plain.ratio = 1  # an int is a float to type checkers
    assert encode(plain)


def test_old_checkpoints() -> None:
    old = msgspec.msgpack.encode({"accounts": {}, "_secret": b""})
    assert restore(Bank, old).limit == 10  # a new attribute with a default
    with pytest.raises(StateError, match="is from before '_secret'"):
        restore(Bank, msgspec.msgpack.encode({"accounts": {}}))
    with pytest.raises(StateError, match="has 'gone', which the class does not annotate any more"):
        restore(Bank, msgspec.msgpack.encode({"accounts": {}, "_secret": b"", "gone": 1}))
    with pytest.raises(StateError, match="'accounts' is not what its annotation says"):
        restore(Bank, msgspec.msgpack.encode({"accounts": 3, "_secret": b""}))
    with pytest.raises(StateError, match="can't be read"):
        restore(Bank, b"\xc1")


def test_the_class_has_to_be_the_one_that_wrote_it() -> None:
    with pytest.raises(StateError, match=r"an app 'Shop', this is 'Bank'.*formerly=\('Shop',\)"):
        restore(Bank, encode(Bank()), class_name="Shop")

    class Renamed(Bank, formerly=("Bank",)):
        pass

    assert restore(Renamed, encode(Bank()), class_name="Bank").limit == 10
    with pytest.raises(StateError, match="written by 'pickle', now the class has 'msgspec'"):
        restore(Bank, encode(Bank()), serializer="pickle")


def test_pickle_on_request() -> None:
    pickled = Pickled()
    pickled.words["a"] += 1
    again = restore(Pickled, encode(pickled))
    assert type(again.words) is defaultdict
    assert again.words == {"a": 1}
    pickled.words["lock"] = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(StateError, match=r"'words' \(a defaultdict\) can't be pickled"):
        encode(pickled)
    with pytest.raises(StateError, match="can't be read"):
        restore(Pickled, b"nonsense")


def test_a_form_of_ones_own() -> None:
    own = Own()
    own.count = 77
    assert encode(own) == b"\x4d\0\0\0"
    assert restore(Own, encode(own)).count == 77
    own.checkpoint = lambda: "text"  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(StateError, match="returned a str, bytes were expected"):
        encode(own)


def test_envelope() -> None:
    envelope = envelope_of(Bank)
    blob = encode_envelope(envelope) + b"state"
    decoded, state = decode_envelope(blob)
    assert decoded == envelope
    assert bytes(state) == b"state"
    for damaged, text in [
        (b"", "0 bytes"),
        (b"ANOTHER APPS STATE", "another kind of app"),
        (blob[:6] + b"\x06" + blob[7:], "version 6, this SDK reads versions 3 to 5"),
        (blob[:30], "header can't be read"),
        (blob[: FRONT.size - 1], f"{FRONT.size - 1} bytes, at least {FRONT.size} were expected"),
        (blob[: FRONT.size], "header can't be read"),
    ]:
        with pytest.raises(StateError, match=text):
            decode_envelope(damaged)


class Keeper(Immortal, serializer="pickle"):
    won: Winner[str]
    retry: Retry


def test_a_state_pickled_before_the_sdk_had_rooms_is_read() -> None:
    state = (
        b"\x80\x05\x95\xb3\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x03won\x94\x8c\x0cappsdk.waits\x94\x8c\x06Winner\x94"
        b"\x93\x94)\x81\x94]\x94(K\x01\x8c\x01b\x94eb\x8c\x05retry\x94\x8c\x0eappsdk.effects\x94\x8c\x05Retry\x94\x93"
        b"\x94)\x81\x94]\x94(K\x03\x8c\x08datetime\x94\x8c\ttimedelta\x94\x93\x94K\x00K\x01K\x00\x87\x94R\x94G@\x00\x00"
        b"\x00\x00\x00\x00\x00h\x10K\x00K<K\x00\x87\x94R\x94\x8c\x08builtins\x94\x8c\tException\x94\x93\x94\x85\x94ebu."
    )
    keeper = restore(Keeper, state)
    assert keeper.won == Winner(1, "b")
    assert keeper.retry == Retry(attempts=3)


@dataclass
class Price:
    net: int
    tax: int = 0


@dataclass
class NetPrice:  # as Price is in newer code
    net: int


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        (Price, NetPrice, Price(5, 1)),
        (list[Price], list[NetPrice], [Price(5, 1), Price(6)]),
        (dict[str, list[Price] | None], dict[str, list[NetPrice] | None], {"a": None, "b": [Price(5)]}),
        (tuple[Price, ...], tuple[NetPrice, ...], (Price(5, 1),)),
        (Table[int, Price], Table[int, NetPrice], {1: Price(5)}),
    ],
)
def test_a_field_that_a_class_no_longer_has_is_not_dropped(before: Any, after: Any, value: Any) -> None:
    old, new = (
        definition_of(type("Shop", (Immortal,), {"__annotations__": {"value": kind}, "__module__": __name__}))
        for kind in (before, after)
    )
    one = old.new_instance()
    one.value = value
    saved = memoryview(old.state().encode(one))
    old.state().restore(old.new_instance(), copied_envelope("Shop", "msgspec"), saved)
    with pytest.raises(
        StateError, match=r"'value': the checkpoint has values of NetPrice\.tax, a field that the class"
    ):
        new.state().restore(new.new_instance(), copied_envelope("Shop", "msgspec"), saved)
