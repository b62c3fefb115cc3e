"""Nodes and handles between real instances: their apps, their coordinators' machines and logs, in one process."""

from __future__ import annotations

from typing import Any

import pytest

import immortal
from immortal import CalleeFailed, Handle, Immortal, Node, impulse, initial, peer, rpc, upgrades
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.inspection import inspect_state
from immortal.appsdk.types.handles import handle_label
from immortal.errors import DefinitionError, StateError
from immortal.protocol.system_methods import NODE_METHOD_ID
from immortal.testing import Environment, Instance, crash_everywhere
from tests.helpers.effort import effort


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
        handle = immortal.create_node(Order, note)
        self.orders.append(handle)
        for name in to:
            (self.broker if name == "broker" else self.other).take.fork(handle)

    @rpc
    def order_for(self, note: str) -> Handle[Order]:
        self.orders.append(immortal.create_node(Order, note))
        return self.orders[-1]

    @rpc
    def filled(self, index: int) -> int:
        return immortal.node_of(self.orders[index]).filled

    @rpc
    def close(self, index: int) -> None:
        immortal.destroy(self.orders[index])

    @rpc
    def withdraw(self, index: int, name: str) -> None:
        self.orders[index] = immortal.revoke(self.orders[index], name or None)

    @rpc
    def give(self, index: int) -> None:
        self.broker.take.fork(self.orders[index])

    @rpc
    def who(self, index: int) -> list[str]:
        return immortal.holders_of(self.orders[index])

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
        return await (await immortal.step(self.last)).fill(count)

    @rpc
    def last(self) -> Handle[Order]:
        return self.held[-1]

    @rpc
    async def order_and_fill(self, note: str, count: int) -> int:
        handle = await self.exchange.order_for(note)
        await immortal.step(self.keep, handle)
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
        immortal.release_handle(self.held.pop())

    @rpc
    def hear(self, text: str) -> None:
        self.seen.append(text)

    @impulse
    def tell(self, to: str, text: str) -> None:
        listener = self.other if to == "other" else self.broker
        immortal.multicast([self.held[-1], listener]).hear.fork(text)  # type: ignore[list-item]

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
    for order in range(effort(8)):
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
        with pytest.raises(CalleeFailed, match="it was released or has ended"):
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
    for order in range(effort(8)):
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
            nodes.accounts.sender("exchange", NODE_METHOD_ID)(nodes.wrapped([key], handler, (5,)))

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
    for env in crash_everywhere(runs_max=effort(10)):
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


# --- more ways to use them, and to misuse them ------------------------------------------------------------------------


class Listener(Node):
    heard: list[str]

    def __init__(self) -> None:
        self.heard = []

    @rpc
    def hear(self, text: str) -> int:
        self.heard.append(text)
        return len(self.heard)

    @rpc
    def give(self, handle: Handle[Listener]) -> None:
        self.owner.others.append(handle)

    @rpc
    def twice(self, text: str) -> int:
        return self.hear(text) + self.hear(text)

    @rpc
    def later(self, text: str) -> None:
        self.hear.fork(text)


class Hub(Immortal, nodes=(Listener,)):
    a = peer(lambda: Hub, "a")
    b = peer(lambda: Hub, "b")
    c = peer(lambda: Hub, "c")
    mine: list[Handle[Listener]]
    others: list[Handle[Listener]]
    direct: list[str]
    raises: bool

    def __init__(self) -> None:
        self.mine, self.others, self.direct, self.raises = [], [], [], False

    @rpc
    def make(self) -> None:
        self.mine.append(immortal.create_node(Listener))
        self.a.take.fork(self.mine[-1])

    @rpc
    def take(self, handle: Handle[Listener]) -> None:
        self.others.append(handle)

    @rpc
    def take_all(self, handles: dict[str, list[Handle[Listener]]], other: Any) -> None:
        self.others += [*handles["x"], other]

    @rpc
    def pass_all(self) -> None:
        self.b.take_all.fork({"x": self.others}, self.others[0])

    @rpc
    def hear(self, text: str) -> int:
        self.direct.append(text)
        return -1

    @rpc
    def all_others(self) -> list[Handle[Listener]]:
        return self.others

    @rpc
    async def ask_all(self, text: str) -> list[int]:
        handles = await immortal.step(self.all_others)
        return list(await immortal.multicast([handles[0], self.c, handles[1]]).hear.all(text))  # type: ignore[list-item]

    @impulse
    def tell_all(self, text: str) -> None:
        immortal.multicast([*self.others, self.c]).hear.fork(text)  # type: ignore[list-item]

    @rpc
    def give(self) -> None:
        self.others[0].give.fork(self.others[1])

    @rpc
    def call_own(self) -> list[int]:
        node = immortal.node_of(self.mine[0])
        self.mine[0].later.fork("forked")
        return [node.hear("direct"), node.twice("twice")]

    @rpc
    async def call_own_through_the_log(self) -> int:
        return await (await immortal.step(self.first)).hear("awaited")

    @rpc
    def first(self) -> Handle[Listener]:
        return self.mine[0]

    @rpc
    def heard(self) -> list[list[str]]:
        return [immortal.node_of(one).heard for one in self.mine]

    @rpc
    def end(self) -> None:
        immortal.destroy(self.mine[0])
        immortal.destroy(self.mine[0])

    @rpc
    def fail_next(self) -> None:
        self.raises = True

    @rpc
    async def create_in_async(self) -> None:
        immortal.create_node(Listener)

    @rpc
    def release_own(self) -> None:
        immortal.release_handle(self.mine[0])

    @rpc
    def destroy_others(self) -> None:
        immortal.destroy(self.others[0])

    @rpc
    def wrong_class(self) -> None:
        immortal.create_node(Order, "x")

    @rpc
    def no_such(self) -> None:
        self.others[0].no_such.fork()  # type: ignore[attr-defined]

    @rpc
    def not_async(self) -> None:
        self.others[0].hear("x")

    @rpc
    def both(self) -> None:
        immortal.multicast([self.others[0], self.b]).hear.fork("x")  # type: ignore[list-item]

    def on_destroyed(self, handle: Handle[Any]) -> None:
        self.others.remove(handle)
        if self.raises:
            raise ValueError("a hook's")


Hubs = tuple[Instance[Hub], Instance[Hub], Instance[Hub]]


def hubs(env: Environment) -> Hubs:
    found = env.start(Hub, "a"), env.start(Hub, "b"), env.start(Hub, "c")
    for one in found[1:]:
        one.send(Hub.make)
    env.run()
    return found


def test_multicasts_to_nodes_of_several_owners_and_to_instances() -> None:
    with Environment() as env:
        a, b, c = env.start(Hub, "a"), env.start(Hub, "b"), env.start(Hub, "c")
        d = env.start(Hub, "d")
        for one in (b, d, b):
            one.send(Hub.make)
            env.run()
        assert len(a.state.others) == 3
        a.send(Hub.tell_all, "hello")
        env.run()
        assert (b.call(Hub.heard), d.call(Hub.heard)) == ([["hello"], ["hello"]], [["hello"]])
        assert c.state.direct == ["hello"]
        assert a.call(Hub.ask_all, "who") == [2, -1, 2]


def test_handles_within_arguments_and_passed_to_nodes() -> None:
    with Environment() as env:
        a, b, c = hubs(env)
        a.call(Hub.give)  # b's node gets c's
        env.run()
        assert b.state.others == [a.state.others[1]]
        a.call(Hub.pass_all)
        env.run()
        assert len(b.state.others) == 4
        assert b.state.others[1:] == [*a.state.others, a.state.others[0]]
        assert c.state.others == []


def test_one_calls_ones_own_nodes_at_once_and_through_the_log() -> None:
    with Environment() as env:
        _, b, _ = hubs(env)
        assert b.call(Hub.call_own) == [1, 5]
        assert b.call(Hub.call_own_through_the_log) == 5
        assert b.call(Hub.heard) == [["direct", "twice", "twice", "forked", "awaited"]]


def test_a_hook_that_fails_is_a_dead_letter_and_the_end_holds() -> None:
    with Environment(fail_alone=True) as env:
        a, b, _ = hubs(env)
        a.call(Hub.fail_next)
        b.call(Hub.end)
        env.run()
        assert len(a.state.others) == 2  # the hook is undone
        assert [letter.text for letter in a.dead_letters] == ["a hook's"]
        a.crash_app()
        a.recover()
        with pytest.raises(CalleeFailed, match="it was released or has ended"):
            a.call(Hub.give)
        app = env._world.nodes["b"].local_app
        assert app is not None
        assert app.dispatcher.context.nodes.accounts.owner.grants == {}  # given back all the same


def test_what_can_not_be_done_is_said() -> None:
    with Environment(fail_alone=True) as env:
        a, b, _ = hubs(env)
        for one, handler, text in [
            (a, Hub.create_in_async, "an async handler touches no nodes"),
            (b, Hub.release_own, "it is one's own"),
            (a, Hub.destroy_others, "only its owner, 'b', can do that"),
            (a, Hub.wrong_class, r"Hub does not name it: class Hub\(Immortal, nodes=\(Order,\)\)"),
            (a, Hub.no_such, "has no handler 'no_such'"),
            (a, Hub.not_async, "only async handlers wait"),
            (a, Hub.both, "'b' is in it twice"),
        ]:
            with pytest.raises(CalleeFailed, match=text):
                one.call(handler)


def test_classes_of_nodes_are_checked() -> None:
    with pytest.raises(DefinitionError, match="an 'async def': a node's handlers are @rpc and plain 'def'"):

        class Waits(Node):
            @rpc
            async def wait(self) -> None: ...

    with pytest.raises(DefinitionError, match=r"classes below immortal\.Node were expected"):

        class Wrong(Immortal, nodes=(int,)):  # type: ignore[type-var]
            pass

    with pytest.raises(DefinitionError, match=r"Handle\[int\]: a class below immortal.Node was expected"):

        class Odd(Immortal):
            odd: Handle[int]


class Place(Node):
    heat: int

    def __init__(self) -> None:
        self.heat = 20

    @rpc
    def warm(self) -> int:
        self.heat += 1
        return self.heat


class House(Immortal, nodes=(Place,)):
    guest = peer(lambda: Guest, "guest")
    place: Handle[Place] | None

    def __init__(self) -> None:
        self.place = None

    @initial
    def begin(self) -> None:
        self.place = immortal.create_node(Place)
        self.guest.take.fork(self.place)


class Guest(Immortal):
    places: list[Handle[Place]]

    def __init__(self) -> None:
        self.places = []

    @rpc
    def take(self, place: Handle[Place]) -> None:
        self.places.append(place)

    @rpc
    def room(self) -> Handle[Place]:
        return self.places[0]

    @rpc
    async def warm(self) -> int:
        return await (await immortal.step(self.room)).warm()


class Room(Node, formerly=("Place",)):
    heat: int
    lamps: int = 2

    @rpc
    def warm(self) -> int:
        self.heat += self.lamps
        return self.heat


@upgrades(House)
class House2(Immortal, nodes=(Room,)):
    place: Handle[Room] | None

    @classmethod
    def upgrade(cls, old: House) -> House2:
        new = cls()
        new.place = old.place  # type: ignore[assignment]
        return new


@upgrades(House)
class House3(Immortal):
    @classmethod
    def upgrade(cls, old: House) -> House3:
        return cls()


def test_an_upgrade_takes_the_nodes_over() -> None:
    with Environment() as env:
        guest, house = env.start(Guest, "guest"), env.start(House, "house")
        env.run()
        assert guest.call(Guest.warm) == 21
        house.upgrade(House2)
        assert guest.call(Guest.warm) == 23


def test_an_upgrade_that_forgets_a_class_of_nodes_is_refused() -> None:
    with Environment() as env:
        guest, house = env.start(Guest, "guest"), env.start(House, "house")
        env.run()
        with pytest.raises(StateError, match=r"a node of the class 'Place', and House3 has none: name it in nodes="):
            house.upgrade(House3)
        assert guest.state.places


def test_a_test_is_no_holder() -> None:
    with Environment() as env:
        exchange, broker, _ = start(env)
        handle = exchange.call(Exchange.order_for, "gold")
        assert handle == exchange.state.orders[0]
        assert exchange.call(Exchange.who, 0) == []
        exchange.send(Exchange.close, 0)  # which waits for no holder
        env.run()
        with pytest.raises(TypeError, match="a handle is sent by handlers"):
            broker.call(Broker.take, handle)


def test_nodes_and_handles_are_shown_without_keys() -> None:
    with Environment() as env:
        exchange, broker, _ = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        broker.call(Broker.fill, 3)
        env.run()
        keys, shown = set(), []
        for one, cls in [(exchange, Exchange), (broker, Broker)]:
            app = env._world.nodes[one.name].local_app
            assert app is not None
            keys |= {grant.key for grant in app.dispatcher.context.nodes.accounts.owner.grants.values()}
            state = inspect_state(definition_of(cls), b"".join(app.dispatcher._life.encode())).state
            shown.append(state)
        assert shown[0]["$nodes"] == [{"$number": 1, "$class": "Order", "filled": 3, "note": "gold"}]
        assert shown[0]["$handles"]["of_nodes"][0]["holders"] == {"broker": 1}
        assert shown[1]["$handles"]["held"][0]["owner"] == "exchange"
        (key,) = keys
        assert key not in repr(shown).encode()
        assert repr(key)[2:-1] not in repr(shown)
        assert handle_label(key) in repr(shown[1]["held"])


def test_a_handle_that_comes_behind_its_end_leads_nowhere_and_the_hook_is_called() -> None:
    with Environment(fail_alone=True) as env:
        exchange, broker, other = start(env)
        exchange.call(Exchange.open, "gold", ["broker"])
        env.partition(broker, other)
        broker.send(Broker.pass_on, "other", False)
        env.run()
        assert exchange.call(Exchange.who, 0) == ["broker", "other"]
        exchange.send(Exchange.close, 0)
        env.run()
        assert (broker.state.seen, other.state.seen) == (["destroyed"], ["destroyed"])  # before the copy is there
        assert other.state.held == []
        env.heal()
        env.run()
        assert (len(other.state.held), other.state.ended, other.state.seen) == (1, 1, ["destroyed"] * 2)
        with pytest.raises(CalleeFailed, match="can't be used"):
            other.call(Broker.fill, 1)
        other.call(Broker.drop)  # of what is over it does nothing
        app = env._world.nodes["exchange"].local_app
        assert app is not None
        assert app.dispatcher.context.nodes.accounts.owner.grants == {}
