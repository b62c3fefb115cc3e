"""Calls that wait for an answer, and answers, byte by byte: a dispatcher driven by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import immortal
from immortal import Immortal, impulse, initial, peer, rpc
from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.outbox import AWAITED_BATCH_SIZE_BYTES
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import method_names
from immortal.appsdk.running import tracing
from immortal.appsdk.state.schema import Envelope, decode_envelope, encode_envelope
from immortal.errors import HandlerError, StateError
from immortal.protocol.extensions import decode_app_batch, decode_origins
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_incoming_rpc, decode_messages
from tests.helpers.sdk import SEED, TAKE, TAKE_FIRST, Life, recover
from tests.helpers.wire import START_TIME_NS, AppOutput, answer, call, initial_record, logged


class Refused(Exception):  # noqa: N818
    pass


class Bank(Immortal):
    balance: int

    def __init__(self) -> None:
        self.balance = 0

    @rpc(id=1, raises=[Refused])
    def debit(self, account: str, amount: int = 1) -> int | None:
        if account == "nobody":
            raise Refused(account, {"x": [1]})
        if account == "unsendable":
            raise Refused(object())
        if account == "bug":
            raise ValueError(account)
        return amount or None

    @rpc(id=2)
    def large(self, size_bytes: int) -> bytes:
        return bytes(size_bytes)

    @rpc(id=3)
    def unsendable(self) -> Any:
        return object()

    @rpc(id=4)
    def fourteen(
        self, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int, j: int, k: int, x: int = 12,
        y: int = 13, z: int = 14,
    ) -> int:  # fmt: skip
        return x + y + z


class Teller(Immortal):
    bank = peer(Bank, "bank")
    notes: list[Any]

    def __init__(self) -> None:
        self.notes = []

    @rpc(id=10)
    def note(self, value: Any) -> None:
        self.notes.append(value)

    @impulse(id=11)
    async def ask(self, account: str) -> None:
        try:
            await immortal.step(self.note, await self.bank.debit(account))  # type: ignore[func-returns-value]
        except Refused as error:
            await immortal.step(self.note, list(error.args))  # type: ignore[func-returns-value]

    @rpc(id=12)
    async def double(self, number: int) -> int:
        if number:
            await immortal.sleep(timedelta(seconds=number))
        return number * 2

    @impulse(id=13)
    async def many(self, count: int) -> None:
        await asyncio.gather(*(self.bank.large(number) for number in range(count)))


def started(cls: type, name: str = "teller") -> Life:
    life = Life.of(cls)
    life.give(TAKE_FIRST)
    life.give(initial_record(life.output.initial_message, name))
    return life


def sent(life: Life) -> list[tuple[str, int, int, int, list[Any]]]:
    """(destination, kind, method ID, RPC type, arguments) of all that was sent."""
    found = []
    for message in life.output.messages:
        for method_id, rpc_type, arguments in message.calls:
            found.append((message.destination, 0, method_id, rpc_type, msgspec.msgpack.decode(arguments)))
    return found


class Wire:
    """A dispatcher whose batches are taken apart, kinds too."""

    def __init__(self, cls: type, *, traced: bool = False, name: str = "teller") -> None:
        keywords: dict[str, Any] = (
            {"extensions": tracing.EXTENSIONS, "make_outbox": tracing.TracingOutbox} if traced else {}
        )
        self.dispatcher = Dispatcher(definition_of(cls), lambda: SEED, **keywords)
        self.output = AppOutput()
        self.batches: list[tuple[str, list[tuple[int, int, int, list[Any]]]]] = []
        self.give(TAKE_FIRST)
        self.give(initial_record(self.output.initial_message, name))
        self.batches.clear()

    def give(self, data: bytes) -> None:
        self.dispatcher.receive_data(data)
        while True:
            event = self.dispatcher.next_event()
            chunks = b"".join(bytes(chunk) for chunk in self.dispatcher.data_to_send())
            self.output.receive_data(chunks)
            if MessageType.CHECKPOINT not in {each.message_type for each in self.output.messages[-1:]}:
                for message_type, start, end in decode_messages(chunks):
                    if message_type in (MessageType.STREAM_BATCH, MessageType.IMPULSE_BATCH):
                        self._batch(chunks[start:end])
            if event is None:
                return

    def _batch(self, data: bytes) -> None:
        batch = decode_app_batch(data)
        found = []
        for _, start, end in decode_messages(batch.payload):
            rpc_message = decode_incoming_rpc(batch.payload, start, end)
            arguments = msgspec.msgpack.decode(rpc_message.arguments)
            found.append((rpc_message.kind, rpc_message.method_id, rpc_message.rpc_type, arguments))
        self.batches.append((batch.destination, found))

    @property
    def notes(self) -> list[Any]:
        found: list[Any] = self.dispatcher.instance.notes
        return found


def test_a_call_and_its_answers() -> None:
    wire = Wire(Teller)
    wire.give(logged(1, [call(11, "a"), call(11, "b"), call(11, "c")]))
    assert wire.batches == [
        ("bank", [(0, 1, 0, ["teller", 2, "a", 1]), (0, 1, 0, ["teller", 4, "b", 1]), (0, 1, 0, ["teller", 6, "c", 1])])
    ]
    wire.give(logged(2, [answer(1, RpcKind.RETURNED_VALUE, 4, 7)]))
    wire.give(
        logged(3, [answer(1, RpcKind.RAISED, 2, "Refused", ["x", 1], {}), answer(1, RpcKind.RETURNED_NOTHING, 6)])
    )
    assert wire.notes == [7, ["x", 1], None]
    assert wire.dispatcher.tasks.count == 0


def test_answers_that_nobody_waits_for_are_left_alone() -> None:
    wire = Wire(Teller)
    wire.give(logged(1, [call(11, "a")]))
    for number, record in ((2, 2), (2, 3), (1, 4), (99, 5)):
        wire.give(logged(record, [answer(1, RpcKind.RETURNED_VALUE, number, 7)]))
    assert wire.notes == [7]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (answer(1, RpcKind.RETURNED_VALUE, 2), ["can't be read", "record 2, message 0"]),
        (
            answer(1, RpcKind.RETURNED_VALUE, 2, "text"),
            ["Teller.ask raised CalleeFailed", "what came does not fit: Expected `int | null`"],
        ),
        (
            answer(1, RpcKind.RAISED, 2, "ValueError", [], {}),
            ["Teller.ask raised CalleeFailed", "it raised ValueError", "Bank.debit declares Refused"],
        ),
        (
            answer(1, RpcKind.RAISED, 2, "Refused"),
            ["Teller.ask raised CalleeFailed", "what came does not fit", "length"],
        ),
        (call(1, "x", rpc_type=RpcType.ASYNC), ["Teller has no method 1"]),
    ],
)
def test_answers_that_can_not_be_taken(message: bytes, words: list[str]) -> None:
    wire = Wire(Teller)
    wire.give(logged(1, [call(11, "a")]))
    with pytest.raises(HandlerError) as caught:
        wire.give(logged(2, [message]))
    for word in words:
        assert word in str(caught.value)
    assert (caught.value.sequence_id, caught.value.message_index) == (2, 0)


def test_a_callee_answers_its_callers() -> None:
    wire = Wire(Bank)
    calls = [
        call(1, "ann", 5, "a", 7, rpc_type=RpcType.ASYNC),
        call(1, "bob", 6, "a", rpc_type=RpcType.ASYNC),
        call(1, "ann", 8, "a", 0, rpc_type=RpcType.ASYNC),
        call(1, "ann", 9, "nobody", rpc_type=RpcType.ASYNC),
        call(1, "", 10, "a", rpc_type=RpcType.ASYNC),
        call(1, "a"),
        call(1, "nobody"),
    ]
    wire.give(logged(1, calls))
    assert wire.batches == [
        ("ann", [(1, 1, 0, [5, 7]), (2, 1, 0, [8]), (3, 1, 0, [9, "Refused", ["nobody", {"x": [1]}], {}])]),
        ("bob", [(1, 1, 0, [6, 1])]),
        ("", [(1, 1, 0, [10, 1])]),
    ]
    assert wire.output.attached == {"ann", "bob"}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call(1, "ann", 1, "bug", rpc_type=RpcType.ASYNC), ["Bank.debit raised ValueError", "arguments: ('bug')"]),
        (call(1, "ann", 1, "unsendable", rpc_type=RpcType.ASYNC), ["Bank.debit", "raised can't be sent"]),
        (call(3, "ann", 1, rpc_type=RpcType.ASYNC), ["Bank.unsendable", "can't be sent to whoever waits"]),
    ],
)
def test_a_callee_with_a_bug_stops(message: bytes, words: list[str]) -> None:
    wire = Wire(Bank)
    with pytest.raises(HandlerError) as caught:
        wire.give(logged(1, [message]))
    for word in words:
        assert word in str(caught.value)


def test_an_async_callee_answers_when_it_ends() -> None:
    wire = Wire(Teller)
    wire.give(logged(1, [call(12, "ann", 5, 3, rpc_type=RpcType.ASYNC), call(12, "ann", 6, 0, rpc_type=RpcType.ASYNC)]))
    assert wire.batches == [("ann", [(1, 12, 0, [6, 0])])]
    due_ns = wire.dispatcher.next_due_ns
    assert due_ns == START_TIME_NS + 4_000_000_000
    wire.give(logged(2, [call(CLOCK_METHOD_ID, due_ns - 1, rpc_type=RpcType.IMPULSE)]))
    assert len(wire.batches) == 1
    wire.give(logged(3, [call(CLOCK_METHOD_ID, due_ns, rpc_type=RpcType.IMPULSE)]))
    assert wire.batches[1:] == [("ann", [(1, 12, 0, [5, 6])])]


def test_the_time_is_told_by_one_impulse_at_a_time() -> None:
    wire = Wire(Teller)
    wire.give(logged(1, [call(12, 3)]))
    due_ns = wire.dispatcher.next_due_ns
    assert due_ns is not None
    wire.dispatcher.log_time(due_ns)
    assert wire.dispatcher.next_due_ns is None
    wire.give(b"")
    assert wire.batches == [("", [(0, CLOCK_METHOD_ID, 2, [due_ns])])]
    wire.give(logged(2, [call(12, 3), call(CLOCK_METHOD_ID, due_ns, rpc_type=RpcType.IMPULSE)]))
    assert wire.dispatcher.next_due_ns == START_TIME_NS + 5_000_000_000


def test_no_time_is_told_before_the_app_is_primary() -> None:
    life = started(Teller)
    life.give(logged(1, [call(12, 3)]) + TAKE)
    again = Life.of(Teller)
    again.give(b"")
    assert again.dispatcher.next_due_ns is None
    primary = recover(Teller, life.output.blobs[-1])
    assert primary.dispatcher.next_due_ns is not None


def test_without_the_instances_name_no_answer_could_come() -> None:
    wire = Wire(Teller, name="")
    with pytest.raises(HandlerError, match=r"(?s)Teller\.ask raised UsageError.*does not say what this instance is"):
        wire.give(logged(1, [call(11, "a")]))


def test_the_name_is_kept_in_checkpoints() -> None:
    life = started(Teller)
    life.give(TAKE)
    envelope, _ = decode_envelope(life.output.blobs[-1])
    assert (envelope.instance_name, envelope.tasks) == ("teller", None)
    again = recover(Teller, life.output.blobs[-1], logged(1, [call(11, "a")]))
    assert sent(again)[-1] == ("bank", 0, 1, 0, ["teller", 2, "a", 1])


def test_checkpoints_of_older_versions_are_read() -> None:
    class Before(msgspec.Struct, kw_only=True):
        class_name: str = "Bank"
        serializer: str = "msgspec"
        seed: bytes = SEED
        sequence_id: int = 3

    header = encoder.encode(Before())
    now = encode_envelope(Envelope(class_name="Bank", serializer="msgspec", seed=SEED, sequence_id=3))
    blob = now[:8] + len(header).to_bytes(4, "little") + header + encoder.encode({"balance": 5})
    assert recover(Bank, blob).dispatcher.instance.balance == 5


def test_many_calls_go_out_in_batches() -> None:
    wire = Wire(Bank)
    wire.give(logged(1, [call(2, "ann", number, 5_000, rpc_type=RpcType.ASYNC) for number in range(5)]))
    assert [len(calls) for _, calls in wire.batches] == [2, 2, 1]
    assert AWAITED_BATCH_SIZE_BYTES < 10_000  # so that whoever waits does not wait for a large batch to fill
    assert [arguments[0] for _, calls in wire.batches for _, _, _, arguments in calls] == list(range(5))


@pytest.mark.parametrize("count", [11, 12, 13, 14])
def test_calls_with_many_parameters_some_of_them_left_out(count: int) -> None:
    wire = Wire(Bank)
    wire.give(logged(1, [call(4, "ann", 1, *range(1, count + 1), rpc_type=RpcType.ASYNC)]))
    assert wire.batches == [("ann", [(1, 4, 0, [1, 39])])]
    with pytest.raises(HandlerError, match="takes 11 to 14 arguments"):
        wire.give(logged(2, [call(4, "ann", 1, *range(10), rpc_type=RpcType.ASYNC)]))


def test_what_is_sent_has_its_origins() -> None:
    wire = Wire(Teller, traced=True)
    wire.give(logged(1, [call(13, 3), call(12, "ann", 5, 0, rpc_type=RpcType.ASYNC)]))
    wire.give(logged(2, [call(11, "x")]))
    origins = [decode_origins(each.data) for each in wire.output.messages if each.message_type == MessageType.ORIGINS]
    found = [[(run.sequence_id, run.message_index, run.count) for run in runs] for runs in origins]
    assert found == [[(1, 0, 3)], [(1, 1, 1)], [(2, 0, 1)]]


def test_the_clock_has_a_name_where_there_is_one() -> None:
    assert method_names(definition_of(Teller))["", CLOCK_METHOD_ID] == "the clock"
    assert ("", CLOCK_METHOD_ID) not in method_names(definition_of(Bank))


def test_a_checkpoint_of_a_class_that_kept_nothing_of_it_is_refused() -> None:
    life = started(Teller)
    life.give(logged(1, [call(12, 3)]) + TAKE)

    class Teller2(Immortal, formerly=("Teller",)):
        notes: list[Any]

    with pytest.raises(StateError, match=r"an async handler with the method ID 12 waits, .* no such handler"):
        recover(Teller2, life.output.blobs[-1])

    class Teller3(Immortal, formerly=("Teller",)):
        notes: list[Any]

        @rpc(id=12)
        def double(self, number: int) -> int:
            return number

    with pytest.raises(StateError, match="double there, which is no 'async def'"):
        recover(Teller3, life.output.blobs[-1])


def test_nothing_is_sent_while_it_is_run_again() -> None:
    life = started(Teller)
    life.give(logged(1, [call(13, 3), call(11, "a"), call(12, "ann", 5, 3, rpc_type=RpcType.ASYNC)]) + TAKE)
    assert len(sent(life)) == 4
    again = recover(Teller, life.output.blobs[-1])
    assert sent(again) == []
    assert again.dispatcher.tasks.count == 3
    assert decode_envelope(again.output.blobs[-1])[0].tasks == decode_envelope(life.output.blobs[-1])[0].tasks


@pytest.mark.slow
def test_ten_thousand_that_wait() -> None:
    count = 10_000
    life = started(Teller)
    calls = [call(12, "ann", number, 1, rpc_type=RpcType.ASYNC) for number in range(count)]
    life.give(logged(1, calls) + TAKE)
    blob = life.output.blobs[-1]
    assert len(blob) < 100 * count
    again = recover(Teller, blob)
    assert again.dispatcher.tasks.count == count
    due_ns = again.dispatcher.next_due_ns
    assert due_ns is not None
    again.give(logged(2, [call(CLOCK_METHOD_ID, due_ns, rpc_type=RpcType.IMPULSE)]))
    assert again.dispatcher.tasks.count == 0
    assert [arguments for _, _, _, _, arguments in sent(again)] == [[number, 2] for number in range(count)]


def test_an_initial_method_starts_one() -> None:
    class Starting(Teller):
        @initial
        def begin(self) -> None:
            self.ask.fork("begun")
            immortal.signal("begun", 5)

    wire = Wire(Starting)
    saved = wire.dispatcher.tasks.save()
    assert saved is not None
    assert saved.signals == {"begun": [b"\x05"]}
    wire.give(logged(1, [call(11, "begun")]))
    assert wire.batches[-1] == ("bank", [(0, 1, 0, ["teller", 2, "begun", 1])])


def test_a_signal_in_a_class_where_nobody_waits_is_kept() -> None:
    class Signals(Immortal):
        @rpc(id=1)
        def send(self) -> None:
            immortal.signal("x", 5)

    wire = Wire(Signals)
    wire.give(logged(1, [call(1), call(1)]))
    saved = wire.dispatcher.tasks.save()
    assert saved is not None
    assert saved.signals == {"x": [b"\x05", b"\x05"]}


def test_impulses_of_the_sdk_count_as_the_apps_own() -> None:
    wire = Wire(Teller)
    impulses = wire.dispatcher.outbox.impulses
    wire.dispatcher.log_time(5)
    wire.give(b"")
    done: list[Callable[[], None]] = []
    impulses.accept(1)
    hook = threading.Thread(target=lambda: done.append(impulses.flush(1.0)))  # type: ignore[func-returns-value, arg-type]
    hook.start()
    hook.join()
    assert done == [None]
