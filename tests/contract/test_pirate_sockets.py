"""The pirate over real sockets, in one process: clients of both kinds, hostile frames, servers that lie, keys."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from immortal.appsdk.client.discovery import Finder
from immortal.appsdk.patterns.pirate import server as server_module
from immortal.appsdk.patterns.pirate.driver import PlainLink
from immortal.appsdk.patterns.pirate.frames import Frame, Kind, decode_frame, encode_frame
from immortal.client import CalleeFailed, CallRefused, ClientClosed, NotConnectable, OutcomeUnknown
from immortal.coordinator.peers import keys
from immortal.patterns.pirate import GaveUp, Policy, Request, Server, ServerError, StoreError, connect

QUICK = Policy(tries=3, try_timeout_s=0.2, heartbeat_s=0.05, silence_s=0.3, removal_s=60.0)
DEADLINE_S = 20.0


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)


def echo(request: Request) -> bytes:
    return request.body


def count(request: Request) -> bytes:
    """How often anything was done."""
    request.rows[b"n"] = b"%d" % (int(request.rows.get(b"n", b"0")) + 1)
    return request.rows[b"n"]


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@contextmanager
def pool_of(function: Callable[[Request], bytes], **options: Any) -> Iterator[Server]:
    with serving(Server(function, "tcp://127.0.0.1:*", **options)) as server:
        yield server


# --- clients ----------------------------------------------------------------------------------------------------------


def test_replies_and_what_a_function_raises() -> None:
    def picky(request: Request) -> bytes:
        if request.body == b"wrong":
            raise ValueError("no such account")
        return None if request.body == b"none" else request.body[::-1]  # type: ignore[return-value]

    with pool_of(picky) as server, connect([server.endpoint]) as pool:
        assert pool.request(b"abc") == b"cba"
        with pytest.raises(CalleeFailed, match="ValueError: no such account"):
            pool.request(b"wrong")
        with pytest.raises(CalleeFailed, match="returned NoneType, bytes were expected"):
            pool.request(b"none")
        assert pool.request(b"x" * (1 << 20)) == b"x" * (1 << 20)
        assert pool.servers == {server.endpoint: "live"}


def test_many_at_a_time_with_asyncio_and_in_threads() -> None:
    with pool_of(echo) as one, pool_of(echo) as two:
        servers = [one.endpoint, two.endpoint]

        async def main() -> None:
            async with connect(servers) as pool:
                bodies = [b"%d" % number for number in range(200)]
                assert await asyncio.gather(*map(pool.request, bodies)) == bodies
                assert set(pool.servers.values()) == {"live"}

        asyncio.run(main())
        with connect(servers) as pool:
            replies: list[bytes] = []
            threads = [threading.Thread(target=lambda: replies.append(pool.request(b"t"))) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
            assert replies == [b"t"] * 8


def test_a_request_that_is_cancelled_leaves_the_pool_as_it_was() -> None:
    go = threading.Event()

    def slow(request: Request) -> bytes:
        if request.body == b"slow":
            assert go.wait(DEADLINE_S)
        return request.body

    async def main(endpoint: str) -> None:
        async with connect([endpoint]) as pool:
            task = asyncio.ensure_future(pool.request(b"slow"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            assert await pool.request(b"quick") == b"quick"

    with pool_of(slow) as server:
        asyncio.run(main(server.endpoint))


def test_nobody_there_then_somebody(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    with connect([endpoint], policy=QUICK, timeout=0.3) as pool:
        with pytest.raises(GaveUp, match="never sent, and will not be") as raised:
            pool.request(b"hello")
        assert (raised.value.sent, raised.value.tries) == (False, {})
        assert isinstance(raised.value, TimeoutError)
        with serving(Server(echo, endpoint)):
            assert raised.value.again(timeout=DEADLINE_S) == b"hello"


def test_a_closed_client_says_so() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(request: Request) -> bytes:
        begun.set()
        assert go.wait(DEADLINE_S)
        return b""

    errors: list[BaseException] = []

    def ask() -> None:
        try:
            pool.request(b"")
        except ClientClosed as error:
            errors.append(error)

    with pool_of(slow) as server:
        with connect([server.endpoint]) as pool:
            thread = threading.Thread(target=ask)
            thread.start()
            assert begun.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert len(errors) == 1
        go.set()
        with pytest.raises(ClientClosed):
            pool.request(b"")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(request: Request) -> bytes:
        begun.set()
        assert go.wait(DEADLINE_S)
        return b""

    def breaks() -> None:
        raise RuntimeError("a fault of ours")

    ended: list[Exception] = []

    def ask() -> None:
        try:
            pool.request(b"")
        except ClientClosed as error:
            ended.append(error)

    with pool_of(slow) as server, connect([server.endpoint]) as pool:
        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(DEADLINE_S)
        monkeypatch.setattr(pool._shell.machine, "process", breaks)
        pool._shell.wake()
        thread.join(DEADLINE_S)
        assert len(ended) == 1
        go.set()


def test_nothing_waits_in_a_socket_for_who_may_come(tmp_path: Path) -> None:
    """It would be done by who listens there later, long after it was given up."""
    with zmq.Context() as context:
        link = PlainLink(context, Finder("", endpoints=(f"ipc://{tmp_path}/nobody",)), "me")
        assert not link.send(1, 1, b"x")
        link.close()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("tcp://127.0.0.1:1",), TypeError, "a list of endpoints was expected"),
        (([],), TypeError, "with one at least"),
        ((["tcp://10.0.0.5:7400"],), NotConnectable, "is not on this machine: say whose keys"),
        ((["http://x"],), NotConnectable, "no endpoint"),
    ],
)
def test_a_pool_that_can_not_be(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), connect(*arguments):
        pass


@pytest.mark.parametrize("body", ["text", None, bytes((16 << 20) + 1)])
def test_a_body_that_can_not_be_sent(body: Any) -> None:
    with connect(["tcp://127.0.0.1:1"]) as pool, pytest.raises(TypeError, match="at most 16777216 bytes were expected"):
        pool.request(body)


def test_a_client_id_that_is_none() -> None:
    with pytest.raises(TypeError, match="1 to 64 bytes were expected"):
        connect(["tcp://127.0.0.1:1"], client_id="x" * 65)


# --- once -------------------------------------------------------------------------------------------------------------


class LosesReplies(Server):
    """The network dies as the first reply to each request is on its way."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.lost: set[Any] = set()
        super().__init__(*arguments, **options)

    def send(self, answers: Any) -> None:
        kept = list(answers)
        lost = [answer for answer in kept if answer.key not in self.lost]
        self.lost |= {answer.key for answer in lost}
        with self._lock:
            for answer in lost:
                del self._pending[answer.key]
        super().send([answer for answer in kept if answer not in lost])


def test_a_lost_reply_is_sent_again_and_nothing_done_again(tmp_path: Path) -> None:
    server = LosesReplies(count, "tcp://127.0.0.1:*", store=tmp_path / "s")
    with serving(server), connect([server.endpoint], policy=QUICK) as pool:
        assert [pool.request(b"") for _ in range(3)] == [b"1", b"2", b"3"]
    assert len(server.lost) == 3


def test_without_a_store_it_is_done_again() -> None:
    calls: list[int] = []

    def called(request: Request) -> bytes:
        calls.append(request.number)
        with pytest.raises(ServerError, match="store=FOLDER"):
            _ = request.rows
        return b""

    server = LosesReplies(called, "tcp://127.0.0.1:*")
    with serving(server), connect([server.endpoint], policy=QUICK) as pool:
        pool.request(b"")
    assert calls == [1, 1]


def test_one_that_was_given_up_is_asked_for_again_and_done_once(tmp_path: Path) -> None:
    go = threading.Event()

    def slow(request: Request) -> bytes:
        assert go.wait(DEADLINE_S)
        return count(request)

    with pool_of(slow, store=tmp_path / "s") as server, connect([server.endpoint], policy=QUICK) as pool:
        with pytest.raises(GaveUp, match="may have been done or may still be") as raised:
            pool.request(b"", timeout=0.1)
        assert raised.value.sent
        go.set()
        assert raised.value.again(timeout=DEADLINE_S) == b"1"
        assert pool.request(b"") == b"2"


def test_a_script_that_is_run_again(tmp_path: Path) -> None:
    with pool_of(count, store=tmp_path / "s") as server:
        for _ in range(2):
            with connect([server.endpoint], client_id="monthly") as pool:
                assert [pool.request(b"a"), pool.request(b"b")] == [b"1", b"2"]
        with connect([server.endpoint], client_id="monthly") as pool:
            with pytest.raises(CallRefused, match="was used for another request"):
                pool.request(b"another")
            assert pool.request(b"b") == b"2"
            assert pool.request(b"c") == b"3"


def test_what_a_client_has_its_server_does_not_keep(tmp_path: Path) -> None:
    with pool_of(count, store=tmp_path / "s") as server, connect([server.endpoint]) as pool:
        for _ in range(10):
            pool.request(b"")
        assert server._store is not None
        with server._store._environment.begin() as transaction:
            assert transaction.stat(server._store.tables["replies"])["entries"] == 1


def test_a_store_that_can_not_be_written_ends_the_server_and_nobody_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.pirate.store.MAP_SIZE_BYTES", 1 << 20)

    def fills(request: Request) -> bytes:
        return bytes(2 << 20)

    server = Server(fills, "tcp://127.0.0.1:*", store=tmp_path / "s")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with connect([server.endpoint], policy=QUICK, timeout=0.5) as pool, pytest.raises(GaveUp):
        pool.request(b"")
    thread.join(DEADLINE_S)
    server.close()
    assert "nothing of this is kept" in str(errors[0])


def test_a_request_that_writes_too_much_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.pirate.store.MAP_SIZE_BYTES", 1 << 20)

    def fills(request: Request) -> bytes:
        if request.body:
            request.rows[b"much"] = bytes(2 << 20)
        return count(request)

    with pool_of(fills, store=tmp_path / "s") as server, connect([server.endpoint]) as pool:
        with pytest.raises(CalleeFailed, match="MapFullError"):
            pool.request(b"much")
        assert pool.request(b"") == b"1"


# --- servers that are busy, stuck or gone -----------------------------------------------------------------------------


def test_a_server_without_room_sends_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAITING_MAX", 1)
    begun, go = threading.Event(), threading.Event()

    def stuck(request: Request) -> bytes:
        begun.set()
        assert go.wait(DEADLINE_S)
        return b"stuck"

    with pool_of(stuck) as full, pool_of(echo) as other, connect([full.endpoint]) as first:
        thread = threading.Thread(target=first.request, args=(b"",))
        thread.start()
        assert begun.wait(DEADLINE_S)
        with connect([full.endpoint, other.endpoint]) as pool:
            until(lambda: set(pool.servers.values()) == {"live"})
            assert [pool.request(b"x") for _ in range(4)] == [b"x"] * 4
        with connect([full.endpoint]) as pool, pytest.raises(GaveUp) as raised:
            pool.request(b"x", timeout=0.3)
        assert not raised.value.sent, "it was never taken"
        go.set()
        thread.join(DEADLINE_S)


def test_a_stuck_server_is_left_until_it_goes_on() -> None:
    go = threading.Event()

    def stuck(request: Request) -> bytes:
        assert go.wait(DEADLINE_S)
        return b"stuck"

    with (
        pool_of(stuck) as bad,
        pool_of(lambda request: b"well") as good,
        connect([bad.endpoint, good.endpoint], policy=QUICK) as pool,
    ):
        until(lambda: set(pool.servers.values()) == {"live"})
        assert [pool.request(b"") for _ in range(4)] == [b"well"] * 4
        assert pool.servers[bad.endpoint] == "dead"
        go.set()
        until(lambda: pool.servers[bad.endpoint] == "live")
        assert {pool.request(b""), pool.request(b"")} == {b"well", b"stuck"}


def test_a_server_that_ends_is_found_at_once_and_found_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    patient = Policy(try_timeout_s=DEADLINE_S, heartbeat_s=0.05)
    with connect([endpoint], policy=patient) as pool:
        with serving(Server(echo, endpoint)):
            assert pool.request(b"1") == b"1"
        until(lambda: pool.servers[endpoint] == "dead")
        with serving(Server(echo, endpoint)):
            assert pool.request(b"2") == b"2"


# --- hostile ----------------------------------------------------------------------------------------------------------


def garbage() -> list[list[bytes]]:
    good = encode_frame(Frame(Kind.REQUEST, 1, 1, "eve", b"x"))
    return [
        [b""],
        [os.urandom(100)],
        [good[:3] + b"\x02" + good[4:]],
        [good[:-1]],
        [good, good],
        [b"", good],
        [b"x"] * 2000,
        [encode_frame(Frame(Kind.REPLY, 1, body=b"x"))],
        [encode_frame(Frame(Kind.PONG, body=b"sixteen bytes id"))],
    ]


def test_a_server_drops_what_is_no_frame_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    messages = garbage()
    with pool_of(echo) as server, zmq.Context() as context, context.socket(zmq.DEALER) as eve:
        eve.setsockopt(zmq.LINGER, 0)
        eve.connect(server.endpoint)
        for message in messages:
            eve.send_multipart(message)
        until(lambda: server.malformed == len(messages))
        with connect([server.endpoint]) as pool:
            assert pool.request(b"still here") == b"still here"
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1


def test_who_sends_too_much_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server_module._OPTIONS, zmq.MAXMSGSIZE, 1 << 20)
    with pool_of(echo) as server, zmq.Context() as context, context.socket(zmq.DEALER) as eve:
        eve.setsockopt(zmq.LINGER, 0)
        monitor = eve.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        eve.connect(server.endpoint)
        eve.send(bytes(2 << 20))
        assert monitor.poll(DEADLINE_S * 1000)
        eve.disable_monitor()
        assert server.malformed == 0
        with connect([server.endpoint]) as pool:
            assert pool.request(b"still here") == b"still here"


@contextmanager
def lying(answers: Callable[[Frame], list[list[bytes]]]) -> Iterator[str]:
    """A server whose answers are these; its endpoint."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                if socket.poll(10):
                    route, data = socket.recv_multipart()
                    for answer in answers(decode_frame(data)):
                        socket.send_multipart([route, *answer])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield endpoint
        finally:
            ended.set()
            thread.join(DEADLINE_S)


def test_a_client_takes_no_reply_that_it_did_not_ask_for_there(tmp_path: Path) -> None:
    """The liar answers each ping with replies to every request, and never gets one: it has another store."""
    pong = encode_frame(Frame(Kind.PONG, body=b"a store of a lie"))
    replies = [[encode_frame(Frame(Kind.REPLY, number, body=b"a lie"))] for number in range(1, 20)]
    go, begun = threading.Event(), threading.Event()

    def slow(request: Request) -> bytes:
        begun.set()
        assert go.wait(DEADLINE_S)
        return count(request)

    with (
        lying(lambda frame: [*replies, [pong]]) as liar,
        pool_of(slow, store=tmp_path / "s") as server,
        connect([server.endpoint], policy=QUICK) as pool,
    ):
        driver = pool._shell.machine
        answered: list[bytes] = []
        thread = threading.Thread(target=lambda: answered.append(pool.request(b"")))
        thread.start()
        assert begun.wait(DEADLINE_S)
        with pool._shell.lock:  # the liar joins the pool, behind the request that the server has
            driver._find_servers = lambda: [server.endpoint, liar]
            driver._refresh_due_s = 0.0
        pool._shell.wake()
        until(lambda: driver.strays >= 100)
        assert answered == []
        go.set()
        thread.join(DEADLINE_S)
        assert answered == [b"1"]


def test_a_client_drops_what_is_no_answer_and_says_what_it_was() -> None:
    def wrong(frame: Frame) -> list[list[bytes]]:
        if frame.kind is Kind.PING:
            return [*([part] for parts in garbage()[:4] for part in parts), [encode_frame(Frame(Kind.PONG))]]
        data = encode_frame(Frame(Kind.REPLY, frame.number))
        return [[encode_frame(frame)], [data, data], [data[:3] + b"\x02" + data[4:]]]

    with lying(wrong) as endpoint, connect([endpoint], policy=QUICK) as pool:
        with pytest.raises(GaveUp, match=r"it sends .*version 2, 1 is known here") as raised:
            pool.request(b"")
        assert raised.value.tries == {endpoint: 3}


def test_what_is_behind_the_kept_is_not_known_any_more() -> None:
    def gone(frame: Frame) -> list[list[bytes]]:
        kind = Kind.PONG if frame.kind is Kind.PING else Kind.GONE
        return [[encode_frame(Frame(kind, frame.number))]]

    with lying(gone) as endpoint, connect([endpoint]) as pool, pytest.raises(OutcomeUnknown, match="behind what"):
        pool.request(b"")


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    for name in ("vault", "ada", "eve"):
        keys.create(folder / name, role=keys.Role.CLIENT)
    return folder


def test_only_named_keys_call_and_a_forged_id_gets_nobody_elses_reply(tmp_path: Path, home: Path) -> None:
    secured = {"store": tmp_path / "s", "identity": "vault", "callers": ["ada", "eve"], "home": home}
    with pool_of(count, **secured) as server, ExitStack() as stack:

        def calling(who: str | None) -> Any:
            options: dict[str, Any] = {"client_id": "shared", "server": "vault", "home": home, "policy": QUICK}
            return stack.enter_context(connect([server.endpoint], identity=who, **options))

        assert calling("ada").request(b"") == b"1"
        assert calling("eve").request(b"") == b"2"
        assert calling("ada").request(b"") == b"1"
        assert calling(None).request(b"") == b"3", "who can read the server's own keys"


def test_others_are_not_let_in(tmp_path: Path, home: Path) -> None:
    with pool_of(echo, identity="vault", callers=["ada"], home=home) as server:
        options: dict[str, Any] = {"home": home, "timeout": 0.5}
        with (
            connect([server.endpoint], server="vault", identity="eve", **options) as pool,
            pytest.raises(GaveUp, match="it does not let the caller's key in"),
        ):
            pool.request(b"")
        with (
            connect([server.endpoint], **options) as pool,
            pytest.raises(GaveUp, match="takes only callers with keys"),
        ):
            pool.request(b"")
        with connect([server.endpoint], server="vault", identity="ada", home=home) as pool:
            assert pool.request(b"hello") == b"hello"


def test_a_key_that_is_taken_away_calls_no_more_on_an_open_connection(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pool_of(echo, identity="vault", callers=["ada"], home=home) as server,
        connect([server.endpoint], server="vault", identity="ada", home=home, policy=QUICK) as pool,
    ):
        assert pool.request(b"hello") == b"hello"
        (home / "ada" / "public_keys").unlink()
        until(lambda: server.malformed > 0)
        with pytest.raises(GaveUp):
            pool.request(b"", timeout=0.3)


def test_a_key_that_has_expired_and_one_of_two_names(home: Path) -> None:
    file = home / "ada" / "public_keys"
    text = file.read_text()
    file.write_text("; made: 2020-01-01, expires: 2020-02-01\n" + "\n".join(text.splitlines()[-1:]) + "\n")
    with pool_of(echo, identity="vault", callers=["ada"], home=home) as server:
        assert server._listener.callers is not None
        (key,) = text.splitlines()[-1:]
        assert server._listener.callers.name_of(key) is None
    file.write_text(text)
    (home / "eve" / "public_keys").write_text(text)
    with pool_of(echo, identity="vault", callers=["ada", "eve"], home=home) as server:
        assert server._listener.callers is not None
        assert server._listener.callers.name_of(key) is None


@pytest.mark.parametrize(
    ("endpoint", "options", "text"),
    [
        ("tcp://*:*", {}, "is not on this machine only: it needs keys, with identity=NAME"),
        ("tcp://127.0.0.1:*", {"callers": ["ada"]}, "need keys of this server"),
        ("tcp://127.0.0.1:*", {"identity": "nobody"}, "'nobody' has no keys in"),
        ("tcp://127.0.0.1:*", {"identity": "vault", "callers": ["nobody"]}, "there are no keys of it in"),
        ("http://127.0.0.1", {}, "is no endpoint"),
        ("tcp://127.0.0.1:99999", {}, "can't listen at"),
    ],
)
def test_a_server_that_can_not_be(home: Path, endpoint: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ServerError, match=text):
        Server(echo, endpoint, home=home, **options)


def test_a_secret_that_others_can_read(home: Path) -> None:
    (home / "vault" / "keys" / "pairs").chmod(0o644)
    with pytest.raises(ServerError, match="can be read by others"):
        Server(echo, "tcp://127.0.0.1:*", home=home, identity="vault")


@pytest.mark.parametrize("kind", ["tcp://127.0.0.1:*", "ipc://{}/socket"])
def test_an_endpoint_in_use(kind: str, tmp_path: Path) -> None:
    with serving(Server(echo, kind.format(tmp_path))) as server, pytest.raises(ServerError, match="in use"):
        Server(echo, server.endpoint)
