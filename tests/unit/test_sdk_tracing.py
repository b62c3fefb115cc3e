"""What made each call: in a traced run each batch is preceded by it. An ordinary run has nothing of that."""

from __future__ import annotations

from typing import Any

import pytest

import immortal
from immortal import Immortal, initial, peer, rpc
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers.decorators import INITIAL_METHOD_ID, method_id_of_name
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import method_names
from immortal.appsdk.running import tracing
from immortal.appsdk.state import snapshots
from immortal.errors import HandlerError
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    TRACE_EXTENSIONS,
    RandomDraw,
    decode_hello,
    decode_numbers,
    decode_origins,
)
from immortal.protocol.messages import MessageType, RpcKind
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from immortal.protocol.verdicts import encode_verdicts
from tests.helpers.wire import COMMITTER_ID, AppOutput, answer, call, control, initial_record, logged

TAKE_FIRST = control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)


class Counter(Immortal):
    @rpc(id=1)
    def count(self, line: str) -> None: ...


class Relay(Immortal):
    counter = peer(Counter, "counter")
    other = peer(Counter, "other")
    seen: int

    def __init__(self) -> None:
        self.seen = 0

    @initial
    def begin(self) -> None:
        self.counter.count.fork("begin")

    @rpc(id=1)
    def line(self, text: str) -> None:
        for word in text.split():
            self.counter.count.fork(word)

    @rpc(id=2)
    def three(self, size_bytes: int) -> None:
        self.other.count.fork("x")
        self.line.fork("y" * size_bytes)
        self.counter.count.fork("z")

    @rpc(id=3)
    def failing(self) -> None:
        self.counter.count.fork("before")
        for wrong in (object(), "x" * (65 << 20)):
            try:
                self.counter.count.fork(wrong)  # type: ignore[arg-type]
            except Exception:
                self.seen += 1
        try:
            self.counter.count.fork()  # type: ignore[call-arg]
        except TypeError:
            self.seen += 1
        self.counter.count.fork("after")


class Run:
    """A dispatcher and the messages it sends."""

    def __init__(self, cls: type = Relay, *, traced: bool = True) -> None:
        make_dispatcher = tracing.TracingDispatcher if traced else Dispatcher
        self.dispatcher = make_dispatcher(definition_of(cls), lambda: bytes(16))
        self.output = AppOutput()
        self.feed(TAKE_FIRST)
        self.feed(initial_record(self.output.initial_message, "relay"))

    def feed(self, data: bytes) -> None:
        self.dispatcher.receive_data(data)
        while True:
            event = self.dispatcher.next_event()
            self.output.receive_data(b"".join(self.dispatcher.data_to_send()))
            if event is None:
                return

    def batches(self) -> list[tuple[list[tuple[int, int, int]], str, int]]:
        """For each batch what precedes it, its destination and how many calls it has."""
        found = []
        for before, sent in zip(self.output.messages, self.output.messages[1:], strict=False):
            if sent.message_type == MessageType.STREAM_BATCH:
                assert before.message_type == MessageType.ORIGINS
                runs = [(o.sequence_id, o.message_index, o.count) for o in decode_origins(before.data)]
                found.append((runs, sent.destination, len(sent.calls)))
        return found


def test_each_batch_has_its_origins() -> None:
    run = Run()
    run.feed(logged(1, [call(1, "a b c"), call(1, ""), call(1, "d")]) + logged(2, [call(2, 1), call(1, "e f")]))
    assert run.batches() == [
        ([(0, 0, 1)], "counter", 1),
        ([(1, 0, 3), (1, 2, 1), (2, 0, 1), (2, 1, 2)], "counter", 7),
        ([(2, 0, 1)], "other", 1),
        ([(2, 0, 1)], "", 1),
    ]
    assert decode_hello(run.output.messages[0].data).extensions == ALL_EXTENSIONS | TRACE_EXTENSIONS


def test_a_batch_that_a_call_closes() -> None:
    run = Run()
    run.feed(logged(1, [call(2, 40_000)] * 5))
    own = [(runs, count) for runs, destination, count in run.batches() if destination == ""]
    assert own == [([(1, 0, 1), (1, 1, 1)], 2), ([(1, 2, 1), (1, 3, 1)], 2), ([(1, 4, 1)], 1)]
    for runs, _, count in run.batches():
        assert sum(made for _, _, made in runs) == count


def test_calls_that_fail_have_no_origin() -> None:
    run = Run()
    run.feed(logged(1, [call(3), call(3)]))
    assert run.dispatcher.instance.seen == 6
    assert run.batches()[1:] == [([(1, 0, 2), (1, 1, 2)], "counter", 4)]


def test_an_ordinary_run_has_none() -> None:
    run = Run(traced=False)
    run.feed(logged(1, [call(1, "a b c")]))
    assert MessageType.ORIGINS not in {sent.message_type for sent in run.output.messages}
    fork = run.dispatcher.instance.counter.count.fork
    assert fork.__qualname__ == "Outbox.make_fork.<locals>.fork"
    assert decode_hello(run.output.messages[0].data).extensions == ALL_EXTENSIONS


def test_the_calls_before_a_failure_come_first() -> None:
    class Failing(Relay):
        @rpc(id=1)
        def line(self, text: str) -> None:
            super().line(text)
            if text == "bad":
                raise ValueError(text)

    class NoTransport:
        """Takes what the last words are."""

        def send_last_output(self, timeout_s: float) -> None:
            run.output.receive_data(b"".join(run.dispatcher.data_to_send()))

    run = Run(Failing)
    with pytest.raises(HandlerError) as caught:
        run.feed(logged(1, [call(1, "good"), call(1, "bad"), call(1, "never")]))
    transport: Any = NoTransport()
    tracing.report_failure(caught.value, run.dispatcher, transport)
    assert run.batches()[1:] == [([(1, 0, 1), (1, 1, 1)], "counter", 2)]
    assert run.output.messages[-1].message_type == MessageType.HANDLER_FAILED


def test_names_of_methods() -> None:
    assert method_names(definition_of(Relay)) == {
        ("", INITIAL_METHOD_ID): "Relay.begin",
        ("", 1): "Relay.line",
        ("", 2): "Relay.three",
        ("", 3): "Relay.failing",
        ("counter", 1): "Counter.count",
        ("other", 1): "Counter.count",
    }

    class Wide(Relay):
        lost = peer("surely_not_there:Counter", "lost")

        def wide(self) -> None: ...

        wide.__qualname__ = "é" * 200
        wide = rpc(wide)  # type: ignore[assignment]

    names = method_names(definition_of(Wide))
    assert names["", method_id_of_name("wide")] == "é" * 127
    assert ("counter", 1) in names
    assert not any(destination == "lost" for destination, _ in names)
    assert names["", INITIAL_METHOD_ID].endswith("Wide.begin")


# --- numbers ----------------------------------------------------------------------------------------------------------


class Waiter(Immortal):
    counter = peer(Counter, "counter")
    drawn: dict[str, float]

    def __init__(self) -> None:
        self.drawn = {}

    @rpc(id=1)
    async def wait(self, words: str) -> None:
        for word in words:
            await self.counter.count(word)
        await immortal.step(self.note, words, immortal.random.random())

    @rpc
    def note(self, words: str, value: float) -> None:
        self.drawn[words] = value

    @rpc(id=2)
    def fail(self) -> None:
        self.drawn.clear()
        raise ValueError


class Hasty(Waiter, formerly=("Waiter",)):
    @rpc(id=1)
    async def wait(self, words: str) -> None:
        if words == "ab":
            await self.counter.count("b")
        else:
            await Waiter.wait.function(self, words)


@pytest.mark.parametrize("restores", [False, True])
def test_code_that_is_told_the_numbers_of_another_run_draws_the_same_for_the_same(restores: bool) -> None:
    records = [
        logged(1, [call(1, "ab"), call(1, "c")]),
        logged(2, [answer(1, RpcKind.RETURNED_NOTHING, 2)]),
        logged(3, [answer(1, RpcKind.RETURNED_NOTHING, 5), answer(1, RpcKind.RETURNED_NOTHING, 4)]),
    ]
    old, new = Run(Waiter), Run(Hasty)
    pending = [{2, 4}, {4, 5}, set()]
    pending_now = [{-1, 2, 4}, {2, 4, 5}, set()]  # 2 is kept for a call that does not come; 5 was not known at first
    said_now = len(new.output.messages)
    for record, numbers, numbers_now in zip(records, pending, pending_now, strict=True):
        said = len(old.output.messages)
        old.feed(record)
        assert set(old.dispatcher.tasks.calls) == numbers
        told = [each.data for each in old.output.messages[said:] if each.message_type == MessageType.NUMBERS]
        assert decode_numbers(told[-1]).draws == []  # there are no more
        for data in told:
            new.feed(control(MessageType.NUMBERS, data))
        new.feed(record)
        assert set(new.dispatcher.tasks.calls) == numbers_now
        if restores and (saved := new.dispatcher.tasks.save()) is not None:  # as an upgrade on the way does
            new.dispatcher.tasks.restore(saved)
            assert set(new.dispatcher.tasks.calls) == numbers_now
    assert new.dispatcher.instance.drawn["c"] == old.dispatcher.instance.drawn["c"]
    assert new.dispatcher.tasks.count == old.dispatcher.tasks.count == 0
    assert not any(each.message_type == MessageType.NUMBERS for each in new.output.messages[said_now:])


def test_a_rewind_draws_and_tells_no_number_twice() -> None:
    run, other = Run(Waiter), Run(Waiter)
    for each in (run, other):
        each.feed(control(MessageType.VERDICTS, b"\x90"))  # so that messages fail alone
    said = len(run.output.messages)
    records = [
        logged(1, [call(1, "ab"), call(1, "c")]),
        logged(2, [answer(1, RpcKind.RETURNED_NOTHING, 2), call(2), call(1, "d")]),
        logged(3, [answer(1, RpcKind.RETURNED_NOTHING, number) for number in (5, 4, 7)]),
    ]
    draws: list[RandomDraw] = []
    for record, numbers in zip(records, [{2, 4}, {4, 5, 7}, set()], strict=True):
        run.feed(record)
        assert set(run.dispatcher.tasks.calls) == numbers
        for told in run.output.messages[said:]:
            if told.message_type == MessageType.NUMBERS:
                draws += decode_numbers(told.data).draws
                other.feed(control(MessageType.NUMBERS, told.data))
        said = len(run.output.messages)
        other.feed(record)
        assert set(other.dispatcher.tasks.calls) == numbers
    assert [(draw.number, draw.task) for draw in draws] == [(1, 0), (2, 1), (3, 0), (4, 3), (5, 1), (6, 0), (7, 6)]
    assert run.dispatcher.instance.drawn == other.dispatcher.instance.drawn
    assert sorted(run.dispatcher.instance.drawn) == ["ab", "c", "d"]


class Heavy(Immortal):
    ballast: bytes
    numbers: list[int]

    def __init__(self) -> None:
        self.ballast, self.numbers = bytes(2 << 20), []

    @rpc(id=1)
    def add(self, number: int, padding: bytes = b"") -> None:
        self.numbers.append(number)
        assert number >= 0


def test_a_large_state_is_put_back_however_long_no_call_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would start that run again."""
    monkeypatch.setattr(snapshots, "RECENT_FAILURE_SIZE_BYTES", 1000)
    monkeypatch.setattr(snapshots, "TAIL_SIZE_BYTES_MAX", 1000)
    run = Run(Heavy)
    run.feed(encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, b"".join(encode_verdicts(()))))
    for sequence_id in range(1, 12):
        run.feed(logged(sequence_id, [call(1, sequence_id, bytes(100 << 10))]))
    run.feed(logged(12, [call(1, 12), call(1, -1), call(1, 13)]))
    assert run.dispatcher.instance.numbers == list(range(1, 14))
