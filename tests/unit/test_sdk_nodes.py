"""Nodes and handles between real instances: their apps, their coordinators' machines and logs, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from appsdk import CalleeFailed, Handle, Immortal, Node, impulse, peer, rpc
from appsdk.testing import Environment, Instance, crash_everywhere
from protocol.nodes import NODE_METHOD_ID


class NotFilledError(Exception):
    pass


class Order(Node):
    filled: int
    note: str

    def __init__(self, note: str) -> None:
        self.filled = 0
        self.note = note

    @rpc(raises=[NotFilledError])
    def fill(self, count: int) -> int:
        if count < 0:
            raise NotFilledError(self.note)
        if count == 13:
            raise ValueError("bad luck")
        self.filled += count
        self.owner.seen.append(f"{self.note} {count}")
        return self.filled

    @rpc
    def hear(self, text: str) -> None:
        self.owner.seen.append(f"{self.note} hears {text}")


class Exchange(Immortal, nodes=(Order,)):
    broker = peer(lambda: Broker, "broker")
    other = peer(lambda: Broker, "other")
    orders: list[Handle[Order]]
    seen: list[str]
    released: int

    def __init__(self) -> None:
        self.orders = []
        self.seen = []
        self.released = 0

    @rpc
    def open(self, note: str, to: list[str]) -> None:
        handle = self.create_node(Order, note)
        self.orders.append(handle)
        for name in to:
            (self.broker if name == "broker" else self.other).take.fork(handle)

    @rpc
    def order_for(self, note: str) -> Handle[Order]:
        self.orders.append(self.create_node(Order, note))
        return self.orders[-1]

    @rpc
    def filled(self, index: int) -> int:
        return self.node_of(self.orders[index]).filled

    @rpc
    def close(self, index: int) -> None:
        self.destroy(self.orders[index])

    @rpc
    def withdraw(self, index: int, name: str) -> None:
        self.orders[index] = self.revoke(self.orders[index], name or None)

    @rpc
    def give(self, index: int) -> None:
        self.broker.take.fork(self.orders[index])

    @rpc
    def who(self, index: int) -> list[str]:
        return self.holders_of(self.orders[index])

    def on_last_release(self, handle: Handle[Any]) -> None:
        self.seen.append(f"released {self.orders.index(handle)}")
        self.released += 1


class Broker(Immortal):
    exchange = peer(Exchange, "exchange")
    broker = peer(lambda: Broker, "broker")
    other = peer(lambda: Broker, "other")
    held: list[Handle[Order]]
    ended: int
    seen: list[str]

    def __init__(self) -> None:
        self.held = []
        self.ended = 0
        self.seen = []

    @rpc
    def take(self, handle: Handle[Order]) -> None:
        self.held.append(handle)

    @rpc
    def take_badly(self, handle: Handle[Order]) -> None:
        self.held.append(handle)
        raise ValueError("no")

    @rpc
    def fill(self, count: int) -> None:
        self.held[-1].fill.fork(count)

    @rpc
    async def ask(self, handle: Handle[Order], count: int) -> int:
        return await handle.fill(count)

    @rpc
    async def ask_held(self, count: int) -> int:
        return await (await self.last()).fill(count)

    @rpc
    def last(self) -> Handle[Order]:
        return self.held[-1]

    @rpc
    async def order_and_fill(self, note: str, count: int) -> int:
        handle = await self.exchange.order_for(note)
        await self.keep(handle)
        return await handle.fill(count)

    @rpc
    def keep(self, handle: Handle[Order]) -> None:
        self.held.append(handle)

    @rpc
    def pass_on(self, to: str, then_release: bool) -> None:
        (self.other if to == "other" else self.broker).take.fork(self.held[-1])
        if then_release:
            self.drop()

    @rpc
    def pass_badly(self) -> None:
        self.other.take_badly.fork(self.held[-1])
        self.drop()

    @rpc
    def drop(self) -> None:
        self.release_handle(self.held.pop())

    @rpc
    def hear(self, text: str) -> None:
        self.seen.append(text)

    @impulse
    def tell(self, to: str, text: str) -> None:
        listener = self.other if to == "other" else self.broker
        self.multicast([self.held[-1], listener]).hear.fork(text)  # type: ignore[list-item]

    def on_destroyed(self, handle: Handle[Any]) -> None:
        self.ended += self.held.count(handle)
        self.seen.append("destroyed")

    def on_revoked(self, handle: Handle[Any]) -> None:
        self.seen.append("revoked")


Started = tuple[Instance[Exchange], Instance[Broker], Instance[Broker]]


def start(env: Environment) -> Started:
    return env.start(Exchange, "exchange"), env.start(Broker, "broker"), env.start(Broker, "other")


def test_who_is_passed_a_handle_calls_the_node() -> None:
    with Environment() as env:
        exchange, broker, other = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        broker.call(Broker.fill, 3)
        assert exchange.call(Exchange.filled, 0) == 3
        assert broker.call(Broker.ask_held, 4) == 7
        assert exchange.call(Exchange.who, 0) == ["broker"]
        assert other.state.held == []


def test_a_handle_comes_back_as_an_answer() -> None:
    with Environment() as env:
        exchange, broker, _ = start(env)
        assert broker.call(Broker.order_and_fill, "silver", 5) == 5
        assert exchange.call(Exchange.who, 0) == ["broker"]
        broker.call(Broker.drop)
        env.run()
        assert exchange.state.released == 1


def test_the_last_release_is_told_to_the_owner() -> None:
    for order in range(20):
        with Environment(order=order) as env:
            exchange, broker, other = start(env)
            exchange.send(Exchange.open, "gold", ["broker"])
            env.run()
            broker.send(Broker.pass_on, "other", True)
            env.run()
            assert exchange.call(Exchange.who, 0) == ["other"]
            assert exchange.state.released == 0
            other.send(Broker.pass_on, "broker", True)
            broker.send(Broker.drop) if broker.state.held else None
            env.run()
            if broker.state.held:
                broker.send(Broker.drop)
            env.run()
            assert exchange.state.released == 1
            assert exchange.call(Exchange.who, 0) == []


def test_a_copy_that_a_failed_call_brought_is_given_back() -> None:
    with Environment(fail_alone=True) as env:
        exchange, broker, other = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        broker.send(Broker.pass_badly)
        env.run()
        assert other.state.held == []
        assert len(other.dead_letters) == 1
        assert exchange.state.released == 1


def test_destruction_is_told_to_holders_and_the_handle_leads_nowhere() -> None:
    with Environment(fail_alone=True) as env:
        exchange, broker, other = start(env)
        exchange.call(Exchange.open, "gold", ["broker", "other"])
        exchange.send(Exchange.close, 0)
        env.run()
        assert (broker.state.ended, other.state.ended) == (1, 1)
        with pytest.raises(CalleeFailed, match=r"'exchange' has destroyed it|does not hold it"):
            broker.call(Broker.fill, 1)
        with pytest.raises(CalleeFailed, match="destroyed or revoked"):
            exchange.call(Exchange.filled, 0)
        with pytest.raises(CalleeFailed, match="can't be passed on"):
            broker.call(Broker.pass_on, "other", False)
        assert exchange.state.released == 0


def test_an_answer_of_a_node_may_be_an_exception() -> None:
    with Environment(fail_alone=True) as env:
        exchange, broker, _ = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        with pytest.raises(CalleeFailed, match="NotFilledError"):
            broker.call(Broker.ask_held, -1)
        with pytest.raises(CalleeFailed, match="bad luck"):
            broker.call(Broker.ask_held, 13)
        broker.call(Broker.fill, 13)
        env.run()
        assert exchange.state.seen == []
        assert len(exchange.dead_letters) == 1
        broker.call(Broker.fill, 2)
        assert exchange.call(Exchange.filled, 0) == 2


def test_all_agree_what_came_before_the_destruction() -> None:
    """A multicast to the node and to the other holder: who hears it before it hears of the end, if the node got it."""
    outcomes = set()
    for order in range(20):
        with Environment(order=order) as env:
            exchange, broker, other = start(env)
            exchange.send(Exchange.open, "gold", ["broker", "other"])
            env.run()
            teller, listener = (broker, other) if order % 2 else (other, broker)
            env.partition(exchange, teller)
            exchange.send(Exchange.close, 0)
            teller.send(Broker.tell, listener.name, "news")
            env.heal()
            env.run()
            delivered = exchange.state.seen == ["gold hears news"]
            assert delivered or exchange.state.seen == []
            assert listener.state.seen == (["news", "destroyed"] if delivered else ["destroyed", "news"])
            outcomes.add(delivered)
    assert outcomes == {True, False}


def test_revoking_for_one_and_for_all() -> None:
    with Environment(fail_alone=True) as env:
        exchange, broker, other = start(env)
        exchange.call(Exchange.open, "gold", ["broker", "other"])
        exchange.call(Exchange.withdraw, 0, "broker")
        env.run()
        assert broker.state.seen == ["revoked"]
        with pytest.raises(CalleeFailed, match="'exchange' has revoked it"):
            broker.call(Broker.fill, 1)
        other.call(Broker.fill, 1)
        assert exchange.call(Exchange.filled, 0) == 1
        with pytest.raises(CalleeFailed, match="it was revoked for 'broker'"):
            exchange.call(Exchange.give, 0)
        exchange.call(Exchange.withdraw, 0, "")
        env.run()
        assert other.state.seen == ["revoked"]
        assert exchange.call(Exchange.filled, 0) == 1
        exchange.call(Exchange.give, 0)
        broker.call(Broker.fill, 2)
        assert exchange.call(Exchange.filled, 0) == 3


def test_who_guesses_is_refused() -> None:
    class Guesser(Immortal):
        exchange = peer(Exchange, "exchange")

        @rpc
        def guess(self, key: bytes) -> None:
            nodes: Any = self._immortal_context.nodes
            handler: Any = Order._immortal_node.handlers["fill"]
            nodes._sender("exchange", NODE_METHOD_ID)(nodes.wrapped([key], handler, (5,)))

    with Environment(fail_alone=True) as env:
        exchange, broker, _ = start(env)
        guesser = env.start(Guesser, "guesser")
        exchange.call(Exchange.open, "gold", ["broker"])
        key = broker.state.held[0]._immortal_of[1]  # type: ignore[attr-defined]
        assert len(key) == 16
        for number in range(16):  # all but one bit of each byte are right
            guessed = bytearray(key)
            guessed[number] ^= 1
            guesser.send(Guesser.guess, bytes(guessed))
        env.run()
        assert exchange.call(Exchange.filled, 0) == 0
        assert len(exchange.dead_letters) == 16
        assert "has no such handle" in exchange.dead_letters[0].text
        assert key.hex() not in repr(broker.state.held)


@pytest.mark.parametrize("how", ["crash", "crash_app"])
def test_nodes_and_handles_outlive_crashes(how: str) -> None:
    with Environment() as env:
        exchange, broker, _ = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        broker.call(Broker.fill, 3)
        for instance in (exchange, broker):
            if how == "crash":
                instance.checkpoint()
                instance.crash()
            else:
                instance.crash_app()
            instance.recover()
        broker.call(Broker.fill, 4)
        assert exchange.call(Exchange.filled, 0) == 7


def test_a_crash_anywhere_changes_nothing() -> None:
    for env in crash_everywhere(runs_max=25):
        with env:
            exchange, broker, other = start(env)
            exchange.send(Exchange.open, "gold", ["broker"])
            env.run()
            broker.send(Broker.pass_on, "other", False)
            broker.send(Broker.tell, "other", "news")
            env.run()
            exchange.send(Exchange.close, 0)
            env.run()
            assert exchange.state.seen == ["gold hears news"]
            assert other.state.seen == ["news", "destroyed"]
            assert (broker.state.ended, other.state.ended) == (1, 1)
