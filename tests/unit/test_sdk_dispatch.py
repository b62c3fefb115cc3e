"""The dispatcher against hand-made records: no socket, no thread, no clock."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

import immortal
from immortal import Immortal, Transient, impulse, initial, peer, rpc
from immortal.appsdk.calls.outbox import BATCH_SIZE_BYTES, READY_SIZE_BYTES_MAX
from immortal.appsdk.dispatch import delivery
from immortal.appsdk.dispatch.events import BecamePrimary, Goodbye, OutputReady, Refusal
from immortal.appsdk.handlers.decorators import method_id_of_name
from immortal.errors import EXIT_HANDLER_FAILED, HandlerError, StateError
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.extensions import decode_hello
from immortal.protocol.messages import MessageType, RpcType, decode_incoming_rpc, decode_message, encode_message
from immortal.protocol.record import encode_record
from tests.helpers.sdk import TAKE_FIRST, Life, first_start, recover
from tests.helpers.wire import (
    COMMITTER_ID,
    START_TIME_NS,
    accepted,
    call,
    checkpoint_record,
    control,
    initial_record,
    logged,
)


class Counter(Immortal):
    words: dict[str, int]
    times: list[datetime]

    def __init__(self) -> None:
        self.words = {}
        self.times = []

    @rpc
    def count(self, line: str, times: int = 1) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + times

    @rpc(id=5)
    def note(self) -> None:
        self.times.append(immortal.now())

    @rpc
    def store(self, data: bytes) -> None:
        self.words["bytes"] = self.words.get("bytes", 0) + len(data)


class Relay(Immortal):
    counter = peer(Counter, "counter")
    other = peer(Counter, "other")
    lines: int
    begun: bool
    cache: Transient[list[str]]

    def __init__(self) -> None:
        self.lines = 0
        self.begun = False

    def prepare(self) -> None:
        self.cache = [f"prepared at {self.lines}"]

    @initial
    def begin(self) -> None:
        self.begun = True
        self.counter.count.fork("begin")

    @impulse
    def line(self, text: str) -> None:
        self.lines += 1
        self.counter.count.fork(text)
        if text == "twice":
            self.other.count.fork(line=text, times=2)
        if text == "again":
            self.line.fork("self")
        if text == "bad":
            raise ValueError(f"no line {text!r}")
        if text == "exit":
            raise SystemExit(3)

    @rpc
    def many(self, count: int, size_bytes: int) -> None:
        for _ in range(count):
            self.counter.store.fork(bytes(size_bytes))


COUNT, LINE, MANY = method_id_of_name("count"), method_id_of_name("line"), method_id_of_name("many")


def test_hello_is_first() -> None:
    life = Life.of(Counter)
    life.give(b"")
    life.give(TAKE_FIRST)
    hello = decode_hello(life.output.messages[0].data)
    assert hello.label.endswith("test_sdk_dispatch:Counter")
    assert MessageType.RECORD_TIME in hello.extensions


def test_first_start() -> None:
    life = Life.of(Relay)
    relay = life.give(TAKE_FIRST)
    assert life.sent_types == [
        MessageType.HELLO,
        MessageType.APP_DESCRIPTION,
        MessageType.INITIAL_MESSAGE,
        MessageType.CHECKPOINT,
    ]
    message_type, start, end = decode_message(life.output.initial_message)
    rpc_message = decode_incoming_rpc(life.output.initial_message, start, end)
    assert (message_type, rpc_message.method_id, rpc_message.rpc_type) == (MessageType.RPC, -1, RpcType.FORK)
    assert rpc_message.arguments == b"\x90"
    assert not relay.begun
    assert life.events == []  # the initial message comes first
    life.give(initial_record(life.output.initial_message))
    assert relay.begun
    assert relay.cache == ["prepared at 0"]
    assert life.output.calls == [("counter", COUNT, ("begin",))]
    assert life.events == [BecamePrimary()]


def test_the_bytes_of_a_first_start_are_those_of_the_wire_document() -> None:
    life = Life.of(Counter)
    life.give(TAKE_FIRST)
    chunks = bytes(encode_message(MessageType.INITIAL_MESSAGE, life.output.initial_message))
    # size 8 and type 9, then an RPC of size 6: call, method -1, fork, an empty array
    assert chunks.hex() == "0e090a000001" + "0190"
    # Record 0 of another client, without the time: the app that wrote it can't know our extension.
    content = bytes.fromhex("12090e00004001050403")
    with pytest.raises(HandlerError, match="Counter has no method 32"):
        life.give(encode_record(COMMITTER_ID, 0, content))


@pytest.mark.parametrize("piece_size_bytes", [1, 7, 24, 1 << 20])
def test_a_whole_life_in_pieces(piece_size_bytes: int) -> None:
    life = first_start(Relay, piece_size_bytes)
    record = logged(1, [call(LINE, "a", rpc_type=RpcType.IMPULSE), call(LINE, "twice"), call(LINE, "again")])
    life.give(record, piece_size_bytes)
    life.give(control(MessageType.TAKE_CHECKPOINT), piece_size_bytes)
    assert life.dispatcher.instance.lines == 3
    assert sorted(life.output.calls) == sorted(
        [
            ("counter", COUNT, ("begin",)),
            ("counter", COUNT, ("a",)),
            ("counter", COUNT, ("twice",)),
            ("other", COUNT, ("twice", 2)),
            ("counter", COUNT, ("again",)),
            ("", LINE, ("self",)),
        ]
    )
    assert life.sent_types.count(MessageType.ATTACH_TO) == 2
    assert len(life.output.blobs) == 2

    recovered = recover(Relay, life.output.blobs[0], initial_record(life.output.initial_message), record)
    assert recovered.dispatcher.instance.lines == 3
    assert recovered.output.calls == life.output.calls
    assert recovered.output.blobs == [life.output.blobs[1]]  # the same state, byte for byte
    assert recovered.events == [BecamePrimary()]


def test_recovery_runs_no_init_and_calls_prepare() -> None:
    life = first_start(Relay)
    life.give(logged(1, [call(LINE, "a")]) + control(MessageType.TAKE_CHECKPOINT))
    recovered = recover(Relay, life.output.blobs[1], logged(2, [call(LINE, "b")]))
    assert recovered.dispatcher.instance.lines == 2
    assert recovered.dispatcher.instance.cache == ["prepared at 1"]
    assert MessageType.INITIAL_MESSAGE not in recovered.sent_types
    assert recovered.sent_types[-1] == MessageType.CHECKPOINT


def test_becoming_primary_without_a_checkpoint() -> None:
    life = first_start(Counter)
    promoted = Life.of(Counter)
    promoted.give(checkpoint_record(life.output.blobs[0]))
    assert promoted.events == []
    promoted.give(control(MessageType.BECOMING_PRIMARY))
    assert promoted.events == [BecamePrimary()]
    assert promoted.output.blobs == []


def test_outputs_come_before_the_checkpoint_that_follows_their_record() -> None:
    life = first_start(Relay)
    both = logged(1, [call(LINE, "a")]) + control(MessageType.TAKE_CHECKPOINT) + logged(2, [call(LINE, "b")])
    before = len(life.output.messages)
    life.give(both)
    after = life.output.messages[before:]
    assert [sent.message_type for sent in after] == [
        MessageType.STREAM_BATCH,
        MessageType.CHECKPOINT,
        MessageType.STREAM_BATCH,
    ]
    assert after[0].calls[0][2] == msgspec.msgpack.encode(("a",))


def test_full_batches_go_before_the_record_is_done() -> None:
    life = first_start(Relay)
    life.dispatcher.receive_data(logged(1, [call(MANY, 10, BATCH_SIZE_BYTES // 10)] * 1_000))
    assert life.dispatcher.next_event() == OutputReady()
    size_bytes = sum(map(len, life.dispatcher.data_to_send()))
    assert READY_SIZE_BYTES_MAX <= size_bytes <= READY_SIZE_BYTES_MAX + 2 * BATCH_SIZE_BYTES


@pytest.mark.parametrize("size_bytes", [0, 1, 50, 60, 120, 127, 128, 129, 8190, 8192, 1 << 17])
def test_sizes_of_calls(size_bytes: int) -> None:
    life = first_start(Relay)
    life.give(logged(1, [call(MANY, 3, size_bytes), call(MANY, 1, 3), call(MANY, 2, size_bytes)]))
    sent = [arguments for name, _, arguments in life.output.calls if arguments != ("begin",)]
    assert sent == [(bytes(size_bytes),)] * 3 + [(bytes(3),)] + [(bytes(size_bytes),)] * 2
    counter = first_start(Counter)
    store = method_id_of_name("store")
    counter.give(logged(1, [call(store, *arguments) for arguments in sent]))
    assert counter.dispatcher.instance.words == {"bytes": 5 * size_bytes + 3}


def test_mixed_messages_and_defaults() -> None:
    life = first_start(Counter)
    calls = [call(COUNT, "a"), call(5), call(COUNT, "b", 4), call(COUNT, "a"), call(5, rpc_type=RpcType.IMPULSE)]
    counter = life.give(logged(1, calls) + logged(2, [call(5)], time_ns=START_TIME_NS + 1_234_567_891))
    assert counter.words == {"a": 2, "b": 4}
    assert counter.times[0] == counter.times[1] == datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC)
    assert counter.times[2] == datetime(2023, 11, 14, 22, 13, 21, 234567, tzinfo=UTC)


@pytest.mark.parametrize("known_max", [1, 3, delivery.CACHED_MAX])
def test_methods_and_sizes_in_turns(known_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts of several lengths, remembered or forgotten again; sizes on both sides of one more byte for the size."""
    monkeypatch.setattr(delivery, "CACHED_MAX", known_max)
    life = first_start(Counter)
    store = method_id_of_name("store")
    sizes = [0, 1, 50, 51, 52, 53, 54, 55, 56, 57, 8170, 8180, 8190, 1 << 15, 1, 50]
    calls = [one for size_bytes in sizes for one in (call(store, bytes(size_bytes)), call(5), call(COUNT, "a"))]
    for sequence_id in (1, 2):
        counter = life.give(logged(sequence_id, calls))
        assert counter.words == {"bytes": sequence_id * sum(sizes), "a": sequence_id * len(sizes)}
        assert len(counter.times) == sequence_id * len(sizes)


def test_a_replayable_batch_is_a_batch() -> None:
    life = first_start(Counter)
    payload = call(COUNT, "a") + call(COUNT, "b", rpc_type=RpcType.IMPULSE)
    content = encode_message(MessageType.COUNT_REPLAYABLE_RPC_BATCH, b"\x04\x02" + payload)
    counter = life.give(encode_record(COMMITTER_ID, 1, content))
    assert counter.words == {"a": 1, "b": 1}


def test_a_handler_that_raises_says_all_that_is_needed() -> None:
    life = first_start(Relay)
    with pytest.raises(HandlerError) as caught:
        life.give(logged(1, [call(LINE, "fine"), call(LINE, "bad"), call(LINE, "never")]))
    error = caught.value
    assert (error.sequence_id, error.message_index, error.exit_status) == (1, 1, EXIT_HANDLER_FAILED)
    assert life.dispatcher.instance.lines == 2
    text = str(error)
    for word in ("Relay.line", "record 1, message 1", "('bad')", "ValueError: no line 'bad'", "start the\n  app again"):
        assert word in text
    assert "delivery.py" not in text


def test_a_handler_that_exits_is_a_failed_handler() -> None:
    life = first_start(Relay)
    with pytest.raises(HandlerError, match="SystemExit"):
        life.give(logged(1, [call(LINE, "exit")]))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (call(COUNT, 1), ["Counter.count", "Expected `str`, got `int`", "record 1, message 1"]),
        (call(COUNT), ["Counter.count", "takes 1 to 2 arguments (line, times), 0 came"]),
        (call(COUNT, "a", 1, 2), ["Counter.count", "3 came"]),
        (call(999_999), ["method 999999", "it has: count, note, store", "record 1, message 1"]),
        (call(COUNT, "a", rpc_type=RpcType.ASYNC), ["Counter.count", "does not say who waits"]),
    ],
)
def test_calls_that_can_not_be_handled(message: bytes, words: list[str]) -> None:
    life = first_start(Counter)
    with pytest.raises(HandlerError) as caught:
        life.give(logged(1, [call(COUNT, "a"), message]))
    for word in words:
        assert word in str(caught.value)
    assert caught.value.message_index == 1


def test_what_is_not_the_protocol() -> None:
    blob = first_start(Counter).output.blobs[0]
    attempts: list[tuple[bytes, str]] = [
        (logged(0, [call(COUNT, "a")]), "before a checkpoint"),
        (control(MessageType.TAKE_CHECKPOINT), "before the first start"),
        (control(MessageType.BECOMING_PRIMARY), "before it had a state"),
        (control(MessageType.UPGRADE_SERVICE), "before the app had a state"),
        (control(MessageType.HELLO), "type 64"),
        (checkpoint_record(blob) * 2, "second checkpoint"),
        (checkpoint_record(blob) + logged(1, [call(COUNT, "a")]), "record 1 came, 0 was expected"),
        (checkpoint_record(blob) + encode_record(COMMITTER_ID, 0, encode_message(1, b"a")), "type 1"),
        (
            checkpoint_record(blob) + encode_record(COMMITTER_ID, 0, encode_message(5, b"\x04" + call(COUNT, "a"))),
            "count as 2",
        ),
        (checkpoint_record(blob) + encode_record(COMMITTER_ID, 0, encode_message(5, b"\x02\x04\x01\x00")), "type 1"),
        (
            checkpoint_record(blob)
            + encode_record(COMMITTER_ID, 0, encode_message(5, b"\x02" + call(COUNT, "a")[:-1])),
            "past",
        ),
        (checkpoint_record(blob) + encode_record(COMMITTER_ID, 0, encode_message(5, b"\x02\x00")), "size"),
    ]
    for data, text in attempts:
        life = Life.of(Counter)
        with pytest.raises(RemoteProtocolError, match=text):
            life.give(data)
    damaged = bytearray(TAKE_FIRST)
    damaged[-1] ^= 1
    with pytest.raises(DamagedRecordError):
        Life.of(Counter).give(bytes(damaged))
    with pytest.raises(RemoteProtocolError, match="3 impulses are accepted"):
        first_start(Counter).give(accepted(3))


def test_goodbye_and_refusal() -> None:
    life = first_start(Counter)
    life.give(control(MessageType.GOODBYE, "stopping ü".encode()))
    assert life.events[-1] == Goodbye("stopping ü")
    refused = Life.of(Counter)
    refused.give(control(MessageType.REFUSAL, b"wrong secret"))
    assert refused.events == [Refusal("wrong secret")]


class FailsInInit(Immortal):
    def __init__(self) -> None:
        raise RuntimeError("no luck")


class CallsInInit(Immortal):
    counter = peer(Counter, "counter")

    def __init__(self) -> None:
        self.counter.count.fork("a")


class ForgetsAttribute(Immortal):
    words: dict[str, int]


def test_errors_of_the_first_start() -> None:
    with pytest.raises(StateError, match=r"(?s)FailsInInit.__init__ raised RuntimeError.*no luck"):
        Life.of(FailsInInit).give(TAKE_FIRST)
    with pytest.raises(Exception, match="only handlers send calls"):
        Life.of(CallsInInit).give(TAKE_FIRST)
    with pytest.raises(StateError, match="'words' is annotated but not set"):
        Life.of(ForgetsAttribute).give(TAKE_FIRST)


class Careless(Immortal):
    counter = peer(Counter, "counter")

    @rpc
    def too_many(self) -> None:
        self.counter.count.fork("a", 1, "c")  # type: ignore[call-arg]

    @rpc
    def wrong_name(self) -> None:
        self.counter.count.fork(text="a")  # type: ignore[call-arg]

    @rpc
    def object_argument(self) -> None:
        self.counter.count.fork(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("too_many", ["TypeError: Counter.count(", "too many positional"]),
        ("wrong_name", ["TypeError: Counter.count(", "'line'"]),
        ("object_argument", ["TypeError: Counter.count: parameter 'line' (a object) can't be encoded"]),
    ],
)
def test_mistakes_of_a_caller_are_its_own(method: str, words: list[str]) -> None:
    life = first_start(Careless)
    with pytest.raises(HandlerError) as caught:
        life.give(logged(1, [call(method_id_of_name(method))]))
    for word in [*words, "self.counter.count.fork(", method]:
        assert word in str(caught.value)
    assert life.output.calls == []
