"""A publisher and its clients against a plain table: whatever happens, a copy is the table at its number.

Real frames, in order, over connections that break anywhere; slow clients with small windows; forwarders; entitlements.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal.appsdk.patterns.clone import publication
from immortal.appsdk.patterns.clone.frames import Received, decode_answer, decode_request, encode
from immortal.appsdk.patterns.clone.model import ENTITLED, Entitlement, Entries, Row, covers
from immortal.appsdk.patterns.clone.model import encode as encode_value
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.clone.subscriber import News, Options, Replica
from tests.helpers.effort import effort

KEYS = ["a", "a/b", "a/b/c", "ab", "b", "b/c"]
SUBTREES = ["", "a", "a/b", "b"]
NAMES = ["ann", "bob"]
STEP_NS = 100_000_000


@dataclass
class Client:
    """A copy, its connection to the publisher and what is on the way."""

    name: str
    replica: Replica
    route: bytes = b""
    down: deque[bytes] = field(default_factory=deque)
    seen: dict[str, bytes] = field(default_factory=dict)  # made of the news alone
    is_sure: bool = True  # of each change: none was dropped, or conflated


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is rare happens often."""
    monkeypatch.setattr("immortal.appsdk.patterns.clone.streams.PART_CHANGES_MAX", 3)
    monkeypatch.setattr("immortal.appsdk.patterns.clone.streams.HISTORY_BYTES", 2000)
    monkeypatch.setattr("immortal.appsdk.patterns.clone.model.GONE_MAX", 3)
    monkeypatch.setattr("immortal.appsdk.patterns.clone.publication.WALKS_MAX", 1)


class World:
    """A table, whose every state is known, and one publisher of it."""

    def __init__(self) -> None:
        self.number = 0
        self.states: dict[int, dict[str, bytes]] = {0: {}}
        self.entries = Entries()
        self.publishing = Publication("p", "table", self.entries.copy(), blocking_s=0.0)
        self.now_ns = 0
        self.routes = 0
        self.clients: list[Client] = []
        self.entitled: dict[str, tuple[str, ...]] = {}

    def change(self, key: str, value: bytes | None) -> None:
        self.number += 1
        row = Row(key, self.number, value)
        self.entries.apply(row)
        state = dict(self.states[self.number - 1])
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
        self.states[self.number] = state
        self.publishing.publish([row])

    def entitle(self, name: str, subtrees: tuple[str, ...]) -> None:
        self.entitled[name] = subtrees
        self.change(f"{ENTITLED}/{name}", encode_value(Entitlement(subtrees)))

    def connect(self, client: Client) -> None:
        self.routes += 1
        client.route = b"r%d" % self.routes
        client.down.clear()
        self.say(client, encode(client.replica.activate()))

    def say(self, client: Client, data: bytes) -> None:
        self.publishing.handle_request(client.route, client.name, decode_request(data), self.now_ns)

    def cut(self, client: Client) -> None:
        """What was on its way is lost, and the publisher hears of it."""
        self.publishing.end_stream_of(client.route)
        self.connect(client)

    def flush(self) -> None:
        self.now_ns += STEP_NS
        self.publishing.flush(self.now_ns)
        outgoing, self.publishing.outgoing = self.publishing.outgoing, []
        by_route = {client.route: client for client in self.clients}
        for route, data in outgoing:
            if route in by_route:
                by_route[route].down.append(data)

    def read(self, client: Client, frames: int) -> None:
        replica = client.replica
        for _ in range(frames):
            if not client.down or replica.ended:
                return
            data = client.down.popleft()
            before, dropped = dict(replica.values), replica.counts.dropped
            came = replica.handle_answer(decode_answer(data), len(data))
            assert replica.counts.holes == 0, "connections lose nothing in the middle"
            if isinstance(came, News):
                self.compare(client, came, before)
            elif came:
                self.connect(client)
                return
            elif replica.counts.dropped != dropped:
                client.is_sure = False
            total_bytes = replica.acknowledgement()
            if total_bytes is not None:
                self.say(client, encode(Received(replica.stream, total_bytes)))

    def compare(self, client: Client, news: News, before: dict[str, bytes]) -> None:
        replica = client.replica
        assert replica.subtrees is not None
        state = self.states[replica.number]
        expected = {
            key: value
            for key, value in state.items()
            if any(covers(one, key) for one in replica.subtrees) and not key.startswith(ENTITLED)
        }
        assert replica.values == expected
        for key, number, value in news.changes:
            assert number <= news.number
            if value is None:
                client.seen.pop(key, None)
            else:
                client.seen[key] = value
        assert client.seen == expected, "the news alone say the same"
        if not news.is_conflated and news.whole is None:
            numbers = [number for _, number, _ in news.changes]
            assert numbers == sorted(set(numbers)), "each change, in order"

    def settle(self) -> None:
        """All have room and time."""
        for _ in range(400):
            self.flush()
            for client in self.clients:
                self.read(client, 1000)
            if all(client.replica.ended or client.replica.number == self.number for client in self.clients):
                return
        raise AssertionError([(client.replica.number, self.number) for client in self.clients])


def client_of(name: str, subtrees: tuple[str, ...], policy: str, window_bytes: int) -> Client:
    options = Options(subtrees, window_bytes, publication.MARK_BYTES_MIN, policy, name)  # type: ignore[arg-type]
    return Client(name, Replica(options))


def drawn_client(random: Random) -> Client:
    subtrees = tuple(sorted(random.sample(SUBTREES, random.randint(1, 2))))
    policy = random.choice(["drop", "drop", "disconnect"])
    return client_of(random.choice(NAMES), subtrees, policy, random.choice([publication.WINDOW_BYTES_MIN, 1 << 20]))


def join(world: World, client: Client) -> None:
    world.clients.append(client)
    world.connect(client)


def act(world: World, random: Random, step: str) -> None:
    live = [client for client in world.clients if not client.replica.ended]
    if step == "change":
        value = None if random.random() < 0.4 else b"v" * random.choice([0, 10, 3000]) + b"%d" % world.number
        world.change(random.choice(KEYS), value)
    elif step == "burst":
        size_bytes = random.choice([10, 500])
        for _ in range(random.randint(1, 40)):
            world.change(random.choice(KEYS), b"b" * size_bytes + b"%d" % world.number)
            if random.random() < 0.1:
                world.flush()
    elif step == "flush":
        world.flush()
    elif step == "join" and len(world.clients) < 5:
        join(world, drawn_client(random))
    elif step == "entitle":
        world.entitle(random.choice(NAMES), random.choice([("",), ("a",), ("a/b", "b"), ()]))
    elif live and step == "read":
        world.read(random.choice(live), random.choice([1, 2, 30]))
    elif live and step == "cut":
        world.cut(random.choice(live))


STEPS = ["change"] * 4 + ["burst"] * 3 + ["flush"] * 6 + ["read"] * 8 + ["cut", "cut", "join"]


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=effort(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_copy_is_the_table_at_its_number_whatever_happens(seed: int, has_rights: bool) -> None:
    random = Random(seed)
    world = World()
    for _ in range(random.randint(1, 3)):
        join(world, drawn_client(random))
    for _ in range(random.randint(5, 60)):
        act(world, random, random.choice([*STEPS, "entitle"] if has_rights else STEPS))
    world.settle()
    for client in world.clients:
        if not client.replica.ended and world.entitled:
            allowed = world.entitled.get(client.name, ())
            for key in client.replica.values:
                assert any(covers(one, key) for one in allowed), "nobody sees more than it may"


def test_a_hole_is_found_and_mended() -> None:
    world = World()
    client = client_of("ann", ("",), "drop", 1 << 20)
    join(world, client)
    world.change("a", b"1")
    world.flush()
    world.read(client, 10)
    world.change("a", b"2")
    world.flush()
    client.down.popleft()
    world.change("b", b"3")
    world.flush()
    replica = client.replica
    assert replica.handle_answer(decode_answer(client.down.popleft()), 100) is True, "it is to ask again"
    assert (replica.counts.holes, replica.number, replica.values) == (1, 1, {"a": b"1"})
    world.say(client, encode(replica.activate()))
    world.flush()
    replica.counts.holes = 0
    world.read(client, 10)
    assert (replica.number, replica.values) == (3, {"a": b"2", "b": b"3"})
    assert (replica.counts.whole, replica.counts.resumed) == (1, 1), "it went on where it was"
