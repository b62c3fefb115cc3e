"""What is nested too deeply, or can't be read, fails alone: an argument, an answer, a result of an effect, a query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

import immortal
from immortal import CalleeFailed, CallRefused, Handle, Immortal, Node, peer, query, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.types.handles import EXTENSION_CODE, KEY_SIZE_BYTES, MARK
from immortal.protocol.limits import NESTING_MAX_DEFAULT
from immortal.protocol.messages import RpcKind, RpcType, encode_incoming_rpc
from immortal.testing import Environment
from tests.helpers.hostile import DEEP, client_says, hostile


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Shelf(Node):
    """What handles are of."""


class Supplier(Immortal):
    """What the buyer believes that its peer is."""

    @rpc
    def price(self, what: str) -> Any:
        return 1


class Buyer(Immortal):
    supplier = peer(Supplier, name="supplier")
    heard: list[str]
    count: int

    def __init__(self) -> None:
        self.heard = []
        self.count = 0

    @rpc
    async def ask(self) -> str:
        try:
            said = f"got {await self.supplier.price('tea')}"
        except (CalleeFailed, CallRefused) as error:
            said = f"failed: {error}"
        await immortal.step(self.note, said)
        return said

    @rpc
    def note(self, said: str) -> None:
        self.heard.append(said)

    @rpc
    def take(self, value: Any) -> int:
        self.count += 1
        return self.count

    @rpc
    def hold(self, handle: Handle[Shelf]) -> None:
        """It keeps none."""

    @rpc
    def give(self, depth: int) -> Any:
        return nested(depth)

    @rpc
    def send(self, depth: int) -> None:
        self.supplier.price.fork(nested(depth))

    @query
    def total(self, value: Any = 0) -> Any:
        return self.count if isinstance(value, list) else nested(value)


def method_id(name: str) -> int:
    return definition_of(Buyer).handlers[name].method_id


def array(count: int, *items: bytes) -> bytes:
    return bytes((0x90 | count,)) + b"".join(items)


ANSWERS = {
    "value": (RpcKind.RETURNED_VALUE, lambda number: array(2, number, DEEP)),
    "exception": (RpcKind.RAISED, lambda number: array(4, number, b"\xa1E", array(1, DEEP), b"\x80")),
    "attribute": (RpcKind.RAISED, lambda number: array(4, number, b"\xa1E", b"\x90", b"\x81\xa1a" + DEEP)),
    "cut off": (RpcKind.RETURNED_VALUE, lambda number: array(2, number, b"\xdd\xff\xff\xff\xff")),
    "no MessagePack": (RpcKind.RETURNED_VALUE, lambda number: array(2, number, b"\xc1")),
    "not UTF-8": (RpcKind.RETURNED_VALUE, lambda number: array(2, number, b"\xa1\xff")),
    "a key that is a deep array": (RpcKind.RETURNED_VALUE, lambda number: array(2, number, b"\x81" + DEEP + b"\x01")),
}


def lets_all_in(env: Environment, name: str) -> None:
    """Its coordinator knows no limit, as one of an older version: what the SDK does then by itself."""
    state = env._world.nodes[name]._driver.machine.state  # type: ignore[union-attr]
    state.limits = replace(state.limits, nesting_max=1 << 30)


@pytest.mark.parametrize("is_limited", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_cant_be_read_fails_who_waits_for_it_alone(name: str, is_limited: bool) -> None:
    kind, arguments = ANSWERS[name]
    with Environment(fail_alone=True) as env:
        supplier = hostile(env, "supplier")
        buyer = env.start(Buyer, "buyer")
        if not is_limited:
            lets_all_in(env, "buyer")
        supplier.answer_with = lambda number: (kind, arguments(msgspec.msgpack.encode(number)))
        said = buyer.call(Buyer.ask)
        assert said.startswith("failed: "), said
        assert buyer.call(Buyer.take, 1) == 1
        buyer.crash()
        buyer.recover()
        assert (buyer.state.heard, buyer.call(Buyer.take, 1)) == ([said], 2)


@pytest.mark.parametrize("number", [1, 17, 1 << 40])
@pytest.mark.parametrize("is_limited", [True, False])
def test_an_answer_to_nobody_is_passed_over(number: int, is_limited: bool) -> None:
    """Whoever may connect can send one, with any number."""
    with Environment(fail_alone=True) as env:
        evil = hostile(env, "evil")
        buyer = env.start(Buyer, "buyer")
        if not is_limited:
            lets_all_in(env, "buyer")
        for kind in (RpcKind.RETURNED_VALUE, RpcKind.RETURNED_NOTHING, RpcKind.RAISED):
            for arguments in (array(2, msgspec.msgpack.encode(number), DEEP), DEEP, array(2, DEEP, b"\x01")):
                evil.say("buyer", encode_incoming_rpc(method_id("take"), RpcType.ASYNC, arguments, kind))
        env.run()
        assert buyer.call(Buyer.take, 1) == 1
        buyer.crash()
        buyer.recover()
        assert buyer.call(Buyer.take, 1) == 2


@pytest.mark.parametrize("is_limited", [True, False])
@pytest.mark.parametrize("rpc_type", [RpcType.ASYNC, RpcType.FORK, RpcType.IMPULSE])
def test_a_call_that_is_nested_too_deeply_fails_alone(rpc_type: RpcType, is_limited: bool) -> None:
    """... and it is known whose it was."""
    front = b"\xa4evil\x01" if rpc_type == RpcType.ASYNC else b""
    arguments = array(3 if front else 1, front, DEEP)
    with Environment(fail_alone=True) as env:
        evil = hostile(env, "evil")
        buyer = env.start(Buyer, "buyer")
        if not is_limited:
            lets_all_in(env, "buyer")
        evil.say("buyer", encode_incoming_rpc(method_id("take"), rpc_type, arguments))
        env.run()
        assert buyer.call(Buyer.take, 1) == 1, "nothing was called"
        status = env._world.nodes["buyer"]._driver.machine.view.status(0)  # type: ignore[union-attr]
        assert status["nested"] == ({"evil": 1} if is_limited else {})
        buyer.crash()
        buyer.recover()
        assert buyer.call(Buyer.take, 1) == 2


@pytest.mark.parametrize(("depth", "taken"), [(NESTING_MAX_DEFAULT, True), (NESTING_MAX_DEFAULT + 1, False)])
def test_the_limit_of_a_value_is_one_for_all_doors(depth: int, taken: bool) -> None:
    value = msgspec.msgpack.encode(nested(depth))
    with Environment(fail_alone=True) as env:
        evil = hostile(env, "evil")
        buyer = env.start(Buyer, "buyer")
        evil.say("buyer", encode_incoming_rpc(method_id("take"), RpcType.FORK, array(1, value)))
        env.run()
        assert buyer.state.count == taken
        client_says(env, "buyer", method_id("take"), array(1, value))
        assert buyer.state.count == 2 * taken
        if taken:
            assert buyer.call(Buyer.give, depth) == nested(depth)
            buyer.call(Buyer.send, depth)
        else:
            with pytest.raises(CalleeFailed, match="nested 65 levels deep, at most 64"):
                buyer.call(Buyer.give, depth)
            with pytest.raises(CalleeFailed, match=r"Supplier.price: parameter 'what' is nested 65 levels deep"):
                buyer.call(Buyer.send, depth)


@pytest.mark.parametrize("owner", [b"\0", b"buyer\0", b"a" * 256, b"\xff", b"~", b"nobody"])
def test_a_handle_whose_owner_can_be_nobody_fails_alone(owner: bytes) -> None:
    """Word of each handle goes to its owner: a name that no instance can have would stop the app."""
    data = MARK + bytes(KEY_SIZE_BYTES) + owner
    extension = b"\xc8" + len(data).to_bytes(2, "big") + bytes((EXTENSION_CODE & 0xFF,)) + data
    with Environment(fail_alone=True) as env:
        evil = hostile(env, "evil")
        buyer = env.start(Buyer, "buyer")
        evil.say("buyer", encode_incoming_rpc(method_id("take"), RpcType.FORK, array(1, extension)))
        evil.say("buyer", encode_incoming_rpc(method_id("take"), RpcType.FORK, array(2, extension, extension)))
        evil.say("buyer", encode_incoming_rpc(method_id("hold"), RpcType.FORK, array(1, extension)))
        evil.say("buyer", encode_incoming_rpc(method_id("take"), RpcType.ASYNC, array(2, b"\x01", extension), 1))
        env.run()
        assert buyer.call(Buyer.take, 1) in (1, 2)


def test_a_value_that_holds_itself_is_refused_where_it_is_sent() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with Environment(fail_alone=True) as env:
        buyer = env.start(Buyer, "buyer")
        with pytest.raises(TypeError, match="deep, or holds itself"):
            buyer.call(Buyer.take, itself)
        assert buyer.call(Buyer.take, 1) == 1
