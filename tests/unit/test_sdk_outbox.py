"""Calls and impulses on their way out: who may send, in which order, and who waits when too much is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from inspect import signature

import pytest

import immortal.appsdk.calls.outbox
from immortal import Immortal, Impulses, impulse, peer, rpc
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import BATCH_SIZE_BYTES, Outbox
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import attach
from immortal.errors import Disconnected, UsageError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType
from tests.helpers.wire import AppOutput

WAIT_S = 10.0  # no test waits this long unless it fails


class Counter(Immortal):
    @rpc(id=1)
    def count(self, line: str) -> None: ...

    @rpc(id=2)
    def store(self, data: bytes) -> None: ...


class Reader(Immortal):
    counter = peer(Counter, "counter")
    other = peer(Counter, "other")

    @impulse(id=1)
    def line(self, text: str, times: int = 1) -> None: ...


class Setup:
    """An instance whose handlers' thread is this one, and a hook's thread."""

    def __init__(self) -> None:
        self.wakes = 0
        self.context = Context(b"s" * 16)
        self.outbox = self.context.outbox = Outbox(self.context, self._wake)
        self.reader = Reader()
        attach(self.reader, self.context)
        self.impulses = Impulses(self.reader, definition_of(Reader), self.outbox.impulses)
        self.output = AppOutput()
        self.context.handling_thread_id = self.context.thread_id

    def _wake(self) -> None:
        self.wakes += 1

    def take(self) -> None:
        self.output.receive_data(b"".join(self.outbox.pop_chunks()))

    def in_hook(self, work: Callable[[], object]) -> Hook:
        hook = Hook(work)
        hook.start()
        return hook


class Hook(threading.Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def finish(self) -> BaseException | None:
        self.join(WAIT_S)
        assert not self.is_alive(), "the hook still waits"
        return self.error


def wait_for_waiter(setup: Setup) -> None:
    """Until a hook waits in the impulse queue: a condition, no sleep."""
    queue = setup.outbox.impulses
    done = threading.Event()
    while not queue._changed._waiters:  # type: ignore[attr-defined]
        done.wait(0.001)


def test_batches_and_attaching() -> None:
    setup = Setup()
    reader = setup.reader
    reader.other.count.fork("1")
    reader.counter.count.fork("2")
    reader.line.fork("3")
    reader.counter.count.fork(line="4")
    setup.take()
    reader.counter.count.fork("5")
    setup.take()
    assert [(sent.message_type, sent.destination) for sent in setup.output.messages] == [
        (MessageType.ATTACH_TO, ""),
        (MessageType.STREAM_BATCH, "other"),
        (MessageType.ATTACH_TO, ""),
        (MessageType.STREAM_BATCH, "counter"),
        (MessageType.STREAM_BATCH, ""),
        (MessageType.STREAM_BATCH, "counter"),
    ]
    assert [arguments for name, _, arguments in setup.output.calls if name == "counter"] == [("2",), ("4",), ("5",)]


def test_a_full_batch_is_closed_at_once() -> None:
    setup = Setup()
    setup.reader.other.count.fork("before")
    for _ in range(3):
        setup.reader.counter.store.fork(bytes(BATCH_SIZE_BYTES))
    assert setup.outbox.ready_size_bytes > 3 * BATCH_SIZE_BYTES
    setup.take()
    assert [sent.destination for sent in setup.output.messages if sent.calls] == ["counter"] * 3 + ["other"]


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    monkeypatch.setattr(immortal.appsdk.calls.outbox, "CALL_SIZE_BYTES_MAX", 1000)
    with pytest.raises(
        UsageError,
        match=r"Counter.store: the call's arguments take 1005 bytes, at most 996 are possible.*'data', a bytes of 1004",
    ):
        setup.reader.counter.store.fork(bytes(1001))
    with pytest.raises(TypeError, match=r"Counter.count: parameter 'line' \(a object\) can't be encoded"):
        setup.reader.counter.count.fork(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Reader.line\(text: 'str', times: 'int' = 1\) -> 'None': missing"):
        setup.reader.line.fork()  # type: ignore[call-arg]
    setup.take()
    assert setup.output.messages == []
    setup.reader.counter.store.fork(bytes(10))
    setup.take()
    assert setup.output.calls == [("counter", 2, (bytes(10),))]


def test_who_may_send_what() -> None:
    setup = Setup()
    with pytest.raises(UsageError, match=r"a handler's calls are no impulses: use \.fork"):
        setup.impulses.line("a")
    with pytest.raises(UsageError, match="can't wait for impulses"):
        setup.impulses.flush()
    hook = setup.in_hook(lambda: setup.reader.counter.count.fork("a"))
    assert "calls are impulses" in str(hook.finish())
    setup.context.handling_thread_id = 0
    with pytest.raises(UsageError, match="only handlers send calls"):
        setup.reader.counter.count.fork("a")


def test_impulses_keep_one_order_and_wake_once() -> None:
    setup = Setup()

    def work() -> None:
        setup.impulses.line("1")
        setup.impulses.line(text="2", times=3)
        setup.impulses.counter.count("3")
        setup.impulses.to(setup.reader.counter).count("4")
        setup.impulses.to(setup.reader).line("5")

    assert setup.in_hook(work).finish() is None
    assert setup.wakes == 1
    setup.take()
    assert [(sent.message_type, sent.destination) for sent in setup.output.messages] == [
        (MessageType.IMPULSE_BATCH, ""),
        (MessageType.ATTACH_TO, ""),
        (MessageType.IMPULSE_BATCH, "counter"),
        (MessageType.IMPULSE_BATCH, ""),
    ]
    assert [arguments for _, _, arguments in setup.output.calls] == [("1",), ("2", 3), ("3",), ("4",), ("5",)]
    assert {call[1] for sent in setup.output.messages for call in sent.calls} == {2}
    assert setup.in_hook(lambda: setup.impulses.line("6")).finish() is None
    assert setup.wakes == 2


def test_mistakes_with_the_handle() -> None:
    setup = Setup()
    for work, text in [
        (lambda: setup.impulses.lines("a"), "Reader has no handler 'lines'"),
        (lambda: setup.impulses.counter.counted("a"), "Counter has no handler 'counted'"),
        (lambda: setup.impulses.line(), "missing a required argument"),
        (lambda: setup.impulses.line(object()), "can't be encoded"),
        (lambda: setup.impulses.to("counter"), "self or one of its peers"),
    ]:
        assert text in str(setup.in_hook(work).finish())
    setup.take()
    assert setup.output.messages == []


def test_a_hook_waits_while_too_many_are_not_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.calls.outbox, "IMPULSES_OUTSTANDING_MAX", 3)
    setup = Setup()
    sent: list[int] = []

    def work() -> None:
        for number in range(5):
            setup.impulses.line(str(number))
            sent.append(number)

    hook = setup.in_hook(work)
    wait_for_waiter(setup)
    assert sent == [0, 1, 2]
    setup.take()
    setup.outbox.impulses.accept(1)
    while len(sent) < 4:
        threading.Event().wait(0.001)
    wait_for_waiter(setup)
    assert sent == [0, 1, 2, 3]
    setup.outbox.impulses.accept(3)
    assert hook.finish() is None
    setup.take()
    assert [arguments[0] for _, _, arguments in setup.output.calls] == ["0", "1", "2", "3", "4"]


def test_the_window_is_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.calls.outbox, "IMPULSES_OUTSTANDING_BYTES_MAX", 1000)
    setup = Setup()
    sent: list[int] = []

    def work() -> None:
        for number in range(3):
            setup.impulses.line("x" * 5000)  # larger than the whole window: alone it goes
            sent.append(number)

    hook = setup.in_hook(work)
    for accepted in (1, 2):
        wait_for_waiter(setup)
        assert len(sent) == accepted
        setup.take()
        setup.outbox.impulses.accept(accepted)
        while len(sent) == accepted:
            threading.Event().wait(0.001)
    assert hook.finish() is None


def test_flush_waits_for_what_was_sent() -> None:
    setup = Setup()

    def send_and_flush(text: str, timeout: float | None = None) -> None:
        setup.impulses.line(text)
        setup.impulses.flush(timeout)

    hook = setup.in_hook(lambda: send_and_flush("a"))
    wait_for_waiter(setup)
    setup.take()
    setup.outbox.impulses.accept(1)
    assert hook.finish() is None
    late = setup.in_hook(lambda: send_and_flush("b", timeout=0.001))
    assert isinstance(late.finish(), TimeoutError)


def test_the_end_of_the_connection_frees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.calls.outbox, "IMPULSES_OUTSTANDING_MAX", 1)
    setup = Setup()
    sending = setup.in_hook(lambda: (setup.impulses.line("a"), setup.impulses.line("b")))
    wait_for_waiter(setup)
    flushing = setup.in_hook(setup.impulses.flush)
    while len(setup.outbox.impulses._changed._waiters) < 2:  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    setup.outbox.impulses.close("it is gone")
    for hook in (sending, flushing):
        error = hook.finish()
        assert isinstance(error, Disconnected)
        assert str(error) == "it is gone"
    assert isinstance(setup.in_hook(lambda: setup.impulses.line("c")).finish(), Disconnected)


def test_acceptance_that_can_not_be() -> None:
    setup = Setup()
    assert setup.in_hook(lambda: [setup.impulses.line("a") for _ in range(3)]).finish() is None
    with pytest.raises(RemoteProtocolError, match="was sent 0"):
        setup.outbox.impulses.accept(1)
    setup.take()
    setup.outbox.impulses.accept(2)
    with pytest.raises(RemoteProtocolError, match="it had said 2"):
        setup.outbox.impulses.accept(1)


def test_names_may_be_of_a_subclass_of_str() -> None:
    class Name(StrEnum):
        COUNTER = "counter"

    setup = Setup()
    setup.outbox.make_fork(Name.COUNTER, Name.COUNTER, 1, signature(lambda line: None))("a")
    setup.take()
    assert setup.output.messages[-1].destination == "counter"
