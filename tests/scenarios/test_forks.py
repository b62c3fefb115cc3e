"""Clients of each kind that were made before ``os.fork()``: in the child they work, or say at once that they can't.

The parent is not disturbed, whatever its threads do at that moment, and the child is a client of its own.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from immortal.client import CallTimeout, ClientClosed, connect, handle, start, with_key, with_timeout
from immortal.embedded import Embedded
from immortal.embedded import start as embed
from immortal.errors import Disconnected
from immortal.messenger import Messenger, MessengerClosedError
from immortal.patterns import clone, harmony, pirate, queue
from tests.helpers.clients import client_of

CHILD_S = 15.0
AT_ONCE_S = 1.0
APP = """
import immortal
from immortal import Immortal, Impulses, on_primary, query, rpc

ways = []


class Counter(Immortal):
    n: int

    def __init__(self) -> None:
        self.n = 0

    @rpc
    def add(self, by: int = 1) -> int:
        self.n += by
        return self.n

    @query
    def total(self) -> int:
        return self.n

    @rpc
    async def wait(self, event: str) -> str:
        await immortal.event(event)
        return event

    @rpc
    def go(self, event: str) -> None:
        immortal.signal(event)

    @on_primary
    def hook(self, impulses: Impulses) -> None:
        ways.append(impulses)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("forks")
    (folder / "forked_app.py").write_text(APP)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def counters(home: Path) -> Iterator[Embedded]:
    from forked_app import Counter  # type: ignore[import-not-found]

    with embed(Counter, "counter", home=home) as embedded:
        yield embedded


def in_child(function: Callable[[], Any]) -> Any:
    """What it returns in a child of this process, or "Type: text" of what it raises; and how long it took."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        began_s = time.monotonic()
        try:
            said = function()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, msgspec.msgpack.encode((said, time.monotonic() - began_s)))
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], CHILD_S)[0]:
            raise AssertionError("the child hangs")
        return msgspec.msgpack.decode(os.read(reading, 65536))
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def refused_at_once(function: Callable[[], Any], error: type[BaseException]) -> str:
    said, took_s = in_child(function)
    assert said.startswith(f"{error.__name__}: "), said
    assert f"was made in process {os.getpid()}, of which this one is a fork: " in said
    assert took_s < AT_ONCE_S
    return str(said)


@contextmanager
def busy(call: Callable[[], Any], threads: int = 2) -> Iterator[list[Any]]:
    """The parent goes on calling meanwhile, in other threads, which hold the client's locks now and then."""
    results: list[Any] = []
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            results.append(call())

    running = [threading.Thread(target=go_on) for _ in range(threads)]
    for one in running:
        one.start()
    try:
        yield results
    finally:
        ended.set()
        for one in running:
            one.join(CHILD_S)
        assert not any(one.is_alive() for one in running), "the parent was disturbed"


def test_a_client_works_in_a_child_under_an_id_of_its_own_and_each_call_counts_once(
    home: Path, counters: Embedded
) -> None:
    with connect("counter", home=home, timeout=5) as counter:
        before = counter.total()
        own = client_of(counter).client_id
        in_children = []
        with busy(counter.add) as results:
            for _ in range(6):
                said, _ = in_child(lambda: [client_of(counter).client_id, counter.add(), counter.query.total()])
                in_children.append(said)
        assert {client_id for client_id, *_ in in_children}.isdisjoint({own})
        assert len({client_id for client_id, *_ in in_children}) == 6
        numbers = [number for _, number, _ in in_children] + results
        assert sorted(numbers) == list(range(before + 1, before + 1 + len(numbers)))


def test_a_child_of_a_child_is_another_client_again(home: Path, counters: Embedded) -> None:
    with connect("counter", home=home, timeout=5) as counter:
        before = counter.add()

        def child() -> Any:
            own = counter.add()
            return [own, in_child(lambda: [counter.add(), client_of(counter).client_id])[0], counter.add()]

        first, (second, _), third = in_child(child)[0]
        assert [first, second, third] == [before + 1, before + 2, before + 3]
        assert in_child(lambda: in_child(counter.add)[0])[0] == before + 4  # that has not used it itself
        assert counter.add() == before + 5


def test_a_call_that_is_outstanding_stays_the_parents(home: Path, counters: Embedded) -> None:
    with connect("counter", home=home, timeout=5) as counter:
        with pytest.raises(CallTimeout) as caught:
            with_timeout(counter, 0.2).wait("outstanding")
        again = caught.value.again
        refused_at_once(lambda: again(None), ClientClosed)
        assert isinstance(in_child(counter.add)[0], int)
        counter.go("outstanding")
        assert again(5) == "outstanding"


def test_forks_keys_and_handles_of_a_child_are_its_own(home: Path, counters: Embedded) -> None:
    with connect("counter", home=home, timeout=5) as counter:
        before = counter.total()
        counter.add.fork()

        def child() -> Any:
            counter.add.fork()
            client_of(counter).settle(5)
            made = start(with_key(counter, "of the child").wait, "key")
            counter.go("key")
            return [made.result(5), with_key(counter, "shared").add(100)]

        assert in_child(child)[0] == ["key", with_key(counter, "shared").add(100)]
        assert handle(counter, "wait:of the child").result(5) == "key"
        client_of(counter).settle(5)
        assert counter.total() == before + 102


def test_a_child_that_leaves_the_with_disturbs_nobody(home: Path, counters: Embedded) -> None:
    block = connect("counter", home=home, timeout=5)
    with block as counter:
        before = counter.add()
        assert in_child(lambda: _left(block))[0] == "left"
        assert in_child(lambda: _left(block, counter.add))[0] == "left"
        assert counter.add() == before + 2


def _left(block: Any, use: Callable[[], object] = lambda: None) -> str:
    use()
    block.__exit__(None, None, None)
    return "left"


def test_a_client_with_an_id_given_by_hand_says_that_it_cant(home: Path, counters: Embedded) -> None:
    with connect("counter", home=home, client_id="script", timeout=5) as counter:
        assert isinstance(counter.add(), int)
        said = refused_at_once(counter.add, ClientClosed)
        assert "client_id of its own" in said
        assert isinstance(counter.add(), int)
        assert isinstance(in_child(lambda: _call(home, "another script"))[0], int)


def _call(home: Path, client_id: str) -> Any:
    with connect("counter", home=home, client_id=client_id, timeout=5) as counter:
        return counter.add()


def test_a_client_of_asyncio_says_that_it_cant(home: Path, counters: Embedded) -> None:
    async def main() -> None:
        async with connect("counter", home=home, timeout=5) as counter:
            before = await counter.add()

            def child() -> Any:
                async def use() -> Any:
                    return await counter.add()

                return asyncio.run(use())

            said = await asyncio.to_thread(refused_at_once, child, ClientClosed)
            assert "in a loop of this one" in said
            assert await counter.add() == before + 1

    asyncio.run(main())


@contextmanager
def serving(function: Callable[[bytes], bytes]) -> Iterator[pirate.Server]:
    server = pirate.Server(lambda request: function(request.body), "tcp://127.0.0.1:*")
    works = threading.Thread(target=server.run)
    works.start()
    try:
        yield server
    finally:
        server.close()
        works.join(CHILD_S)


def test_a_pool_of_servers_works_in_a_child(home: Path) -> None:
    with serving(lambda body: body + b"!") as server:
        with pirate.connect([server.endpoint], timeout=5) as pool, busy(lambda: pool.request(b"parent")) as replies:
            for _ in range(3):
                said, _ = in_child(lambda: [pool.request(b"child"), pool.client_id])
                assert said[0] == b"child!"
                assert said[1] != pool.client_id
        assert set(replies) == {b"parent!"}
        with pirate.connect([server.endpoint], timeout=5, client_id="script") as pool:
            pool.request(b"parent")
            refused_at_once(lambda: pool.request(b"child"), ClientClosed)

        async def main() -> None:
            async with pirate.connect([server.endpoint], timeout=5) as pool:
                await pool.request(b"parent")
                await asyncio.to_thread(refused_at_once, lambda: asyncio.run(_requested(pool)), ClientClosed)
                assert await pool.request(b"parent") == b"parent!"

        asyncio.run(main())


async def _requested(pool: Any) -> bytes:
    found: bytes = await pool.request(b"child")
    return found


def test_a_pool_of_instances_works_in_a_child(home: Path, counters: Embedded) -> None:
    with pirate.connect_instances(["counter"], home=home, timeout=5) as counter:
        before = counter.add()
        assert in_child(counter.add)[0] == before + 1
        assert counter.add() == before + 2


def test_a_queue_and_a_cluster_work_in_a_child(home: Path) -> None:
    with (
        embed(queue.Queue, "jobs", home=home),
        embed(harmony.Cluster, "cluster", home=home),
        queue.connect("jobs", home=home, timeout=5) as jobs,
        harmony.connect("cluster", home=home, timeout=5) as cluster,
    ):
        first = jobs.submit("resize", ["a"]).id
        assert in_child(lambda: jobs.submit("resize", ["b"]).id)[0] == first + 1
        assert jobs.submit("resize", ["c"]).id == first + 2
        assert in_child(lambda: cluster.batch("b", "f", collector="results").sent)[0] == 0
        assert cluster.batches() == ["b"]


def test_a_clone_is_followed_anew_in_a_child(home: Path) -> None:
    with embed(clone.Table, "prices", home=home), clone.connect("prices", int, home=home, timeout=5) as prices:
        prices.put("tea", 3)
        changes = prices.changes(timeout=5)
        with busy(lambda: prices.put("busy", 1), threads=1):
            for _ in range(2):
                said, _ = in_child(lambda: [prices["tea"], prices.put("coffee", 4) > 0, prices["coffee"]])
                assert said == [3, True, 4]
        refused_at_once(lambda: next(changes), ClientClosed)
        assert next(changes).key in ("busy", "coffee")
        prices.put("tea", 5)
        assert prices["tea"] == 5


def test_a_messenger_says_that_it_cant() -> None:
    with Messenger() as messenger:
        endpoint = messenger.listen("tcp://127.0.0.1:*", lambda received: received.reply())
        for use in (
            lambda: messenger.send_message(endpoint, b"from the child"),
            lambda: messenger.pending_count(endpoint),
            messenger.process,
            messenger.flush,
        ):
            refused_at_once(use, MessengerClosedError)
        assert in_child(messenger.close)[0] is None
        messenger.send_message(endpoint, b"from the parent")
        until_s = time.monotonic() + CHILD_S
        while messenger.pending_count(endpoint):
            assert time.monotonic() < until_s


def test_impulses_and_an_embedded_service_are_the_parents(home: Path, counters: Embedded) -> None:
    from forked_app import ways

    refused_at_once(lambda: ways[-1].add(1), Disconnected)
    refused_at_once(ways[-1].checkpoint, Disconnected)
    assert in_child(lambda: [counters.running, counters.stop()])[0] == [False, 0]
    assert counters.running
    with connect("counter", home=home, timeout=5) as counter:
        before = counter.total()
        ways[-1].add(1)
        ways[-1].flush(5)
        assert counter.total() == before + 1
