"""A pool and its links together: links are made up, the pool is the real one."""

from __future__ import annotations

import pytest
import zmq

from immortal.appsdk.client.errors import ClientClosed, ClientError, NotConnectable
from immortal.appsdk.patterns.pirate import driver as driver_module
from immortal.appsdk.patterns.pirate.driver import Driver, Event, Pending
from immortal.appsdk.patterns.pirate.frames import GaveUp, TooManyRequests
from immortal.appsdk.patterns.pirate.pool import Policy, Pool

POLICY = Policy(tries=1, try_timeout_s=5.0)


class FakeLink:
    """Says a word as it is made. ``reaches``: whether what is sent leaves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problem = "a problem"
        self.sent: list[tuple[int, int, object]] = []
        self.events: list[Event] = [Event(Pool.ponged, (b"store", 0.0))]
        self.reaches = True
        self.closed = False

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return []

    def process(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def send(self, number: int, settled: int, payload: object) -> bool:
        if self.reaches:
            self.sent.append((number, settled, payload))
        return self.reaches

    def ping(self) -> None:
        pass

    def next_deadline_s(self) -> float:
        return float("inf")

    def close(self) -> None:
        self.closed = True


class Made:
    """A driver of made-up links."""

    def __init__(self, *names: str, keeps_replies: bool = False, policy: Policy = POLICY) -> None:
        self.names = list(names)
        self.refused: set[str] = set()
        self.links: dict[str, FakeLink] = {}
        self.driver = Driver(
            lambda: self.names, self.link, policy, "me", keeps_replies=keeps_replies, polls_servers=True
        )
        self.driver.process()

    def link(self, name: str) -> FakeLink:
        if name in self.refused:
            raise NotConnectable(name)
        return self.links.setdefault(name, FakeLink(name))

    def ask(self, payload: object, timeout_s: float | None = 30.0) -> Pending:
        pending = Pending(payload, timeout_s)
        self.driver.submit(pending)
        self.driver.process()
        return pending

    def reply(self, name: str, number: int, outcome: object) -> None:
        self.links[name].events.append(Event(Pool.replied, (number,), outcome))
        self.driver.process()

    def look_again(self) -> None:
        self.driver._refresh_due_s = 0.0
        self.driver.process()


def test_what_can_not_leave_goes_to_the_next_at_once() -> None:
    made = Made("a", "b")
    made.links["a"].reaches = False
    pending = made.ask(b"x")
    assert (made.links["a"].sent, made.links["b"].sent) == ([], [(1, 1, b"x")])
    made.reply("b", 1, b"done")
    assert pending.outcome == b"done"
    assert made.driver.servers["a"].value == "dead"


def test_all_below_the_oldest_that_is_open_is_settled() -> None:
    made = Made("a", "b", "c")
    for payload in (b"1", b"2", b"3"):
        made.ask(payload)
    made.reply("b", 2, b"")
    made.ask(b"4")
    made.reply("a", 1, b"")
    made.ask(b"5")
    assert [settled for name in "abc" for _, settled, _ in made.links[name].sent] == [1, 3, 1, 1, 1]
    assert made.links["a"].sent[1] == (5, 3, b"5")


def test_one_that_was_given_up_is_not_settled_until_it_is_done() -> None:
    made = Made("a")
    pending = made.ask(b"1", timeout_s=0.0)
    assert isinstance(pending.outcome, GaveUp)
    made.driver.process()
    made.ask(b"2")
    assert made.links["a"].sent == [(2, 1, b"2")], "1 never left: it may be sent yet"
    made.reply("a", 2, b"")
    pending.timeout_s = 30.0
    made.driver.submit(pending)
    made.driver.process()
    made.reply("a", 1, b"")
    made.ask(b"3")
    assert made.links["a"].sent[1:] == [(1, 1, b"1"), (3, 3, b"3")]


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "GIVEN_UP_MAX", 2)
    made = Made("a")
    for payload in (b"1", b"2", b"3"):
        made.ask(payload, timeout_s=0.0)
    made.ask(b"4")
    assert made.links["a"].sent == [(4, 2, b"4")]


def test_a_client_with_an_id_of_its_own_settles_nothing() -> None:
    made = Made("a", keeps_replies=True)
    made.ask(b"1")
    made.reply("a", 1, b"")
    made.ask(b"2")
    assert made.links["a"].sent == [(1, 0, b"1"), (2, 0, b"2")]


def test_what_is_said_of_one_that_is_given_up() -> None:
    made = Made("a", "b")
    made.links["b"].events.append(Event(Pool.ponged, (b"store", 0.0)))
    pending = made.ask(b"1", timeout_s=0.0)
    assert isinstance(pending.outcome, GaveUp)
    assert pending.outcome.reason == (
        "no reply to request 1 of client 'me' within 0 s: its time is over (a: live, tried 0 times, a problem; "
        "b: live, tried 0 times, a problem); it was never sent, and will not be"
    )


def test_a_request_is_asked_again_by_one_at_a_time() -> None:
    made = Made("a")
    pending = made.ask(b"1")
    with pytest.raises(ClientError, match="already"):
        made.driver.submit(pending)


def test_one_that_nobody_waits_for_any_more_is_a_stray() -> None:
    made = Made("a")
    pending = made.ask(b"1")
    made.driver.withdraw(pending)
    made.reply("a", 1, b"late")
    assert (pending.outcome, made.driver.strays) == (None, 1)


def test_servers_are_looked_for_again() -> None:
    made = Made("a")
    made.names, made.refused = ["b", "c"], {"c"}
    made.look_again()
    assert made.links["a"].closed
    assert list(made.driver.servers) == ["b"]
    made.refused = set()
    made.look_again()
    assert sorted(made.driver.servers) == ["b", "c"]


def test_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "OPEN_REQUESTS_MAX", 1)
    made = Made("a")
    made.ask(b"1")
    with pytest.raises(TooManyRequests, match="1 requests of this client are open"):
        made.ask(b"2")


def test_what_can_not_be_connected_leaves_nothing_open() -> None:
    links = [FakeLink("a")]
    ended: list[bool] = []

    def link(name: str) -> FakeLink:
        if name == "b":
            raise NotConnectable("b")
        return links[0]

    with pytest.raises(NotConnectable):
        Driver(lambda: ["a", "b"], link, POLICY, "me", keeps_replies=False, end=lambda: ended.append(True))
    assert links[0].closed
    assert ended == [True]


def test_a_closed_one() -> None:
    made = Made("a")
    pending = made.ask(b"1")
    made.driver.close()
    made.driver.close()
    assert isinstance(pending.outcome, ClientClosed)
    assert made.links["a"].closed
    with pytest.raises(ClientClosed):
        made.ask(b"2")
