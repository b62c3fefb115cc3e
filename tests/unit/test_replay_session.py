"""The protocol of a replay, without a process or a socket: what the app is sent, and what is made of its answers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.interfaces import CheckpointHeader, ImpulseBatch, LogSummary, OutputMark, VersionStart
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    TRACE_EXTENSIONS,
    AppDescription,
    HandlerFailure,
    Hello,
    Origin,
    RandomDraw,
    encode_app_batch,
    encode_app_description,
    encode_handler_failed,
    encode_hello,
    encode_origins,
    encode_record_time,
    pack_numbers,
)
from immortal.protocol.messages import (
    MessageType,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.readers import BlobData, BlobStart, Record, RecordReader
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchSource, Trailer
from immortal.protocol.verdicts import Handling, Verdict, VerdictKind, decode_verdicts, encode_handling, encode_verdict
from immortal.replay import OWN_VERSION, Route, UpgradeFailedError
from immortal.replay.session import (
    BlobPiece,
    Ended,
    Event,
    KeptImpulses,
    NumbersDrawn,
    Outputs,
    Phase,
    ReplaySession,
    VerdictFilter,
    VerdictGiven,
)

COMMITTER_ID = 7
HEADER = CheckpointHeader(2, 10, 4, 0, 0, {"b": OutputMark(5, 0)})
SUMMARY = LogSummary(COMMITTER_ID, 1, 0, 13, [HEADER], {}, {}, {}, [], ALL_EXTENSIONS)
ROUTE = Route(HEADER, 13)
HELLO = encode_hello(Hello(ALL_EXTENSIONS | TRACE_EXTENSIONS, "counter:Counter"))
TOLD = (MessageType.VERDICTS,)
SOURCES = (MessageType.SOURCES,)
BLOB = encode_checkpoint(5) + b"state"
TRAILER = Trailer(0, [BatchSource(0, "a", 1, 1, 0)])


def rpc(number: int) -> bytes:
    return encode_incoming_rpc(3, 1, bytes((number,)))


def value(sequence_id: int, *, timed: bool = True) -> bytes:
    content = (encode_record_time(sequence_id) if timed else b"") + rpc(sequence_id)
    return encode_record(COMMITTER_ID, sequence_id, content) + b"trailer"


def sent(session: ReplaySession) -> list[object]:
    """What the app gets, in short: message types of a control record, IDs of logged ones, blobs."""
    reader = RecordReader()
    for data in session.data_to_send():
        reader.receive_data(bytes(data))
    found: list[object] = []
    while (event := reader.next_event()) is not None:
        if isinstance(event, Record) and event.header.sequence_id < 0:
            found.append(tuple(message_type for message_type, _, _ in decode_messages(event.content)))
        elif isinstance(event, Record):
            found.append(event.header.sequence_id)
        elif isinstance(event, BlobData):
            found.append(event.data)
        else:
            assert isinstance(event, BlobStart)
    assert not reader.buffered_bytes
    return found


def heard(session: ReplaySession, *data: bytes) -> list[Event]:
    return list(session.receive(b"".join(data)))


def restored(
    summary: LogSummary = SUMMARY, route: Route = ROUTE, tells: VerdictFilter = lambda verdict: True
) -> ReplaySession:
    """A session whose app has said Hello and has its blob."""
    session = ReplaySession("counter", summary, route, tells)
    assert sent(session) == []
    assert heard(session, HELLO) == []
    assert session.wants_blob
    session.give_blob(b"blob")
    session.blob_is_complete()
    return session


def test_blob_records_then_the_state_is_asked_for_and_goodbye_said() -> None:
    session = restored()
    assert sent(session) == [b"blob", TOLD]
    for sequence_id in (11, 12, 13):
        assert session.wants_records
        session.give_record(value(sequence_id), TRAILER)
    assert not session.wants_records
    assert sent(session) == [SOURCES, 11, 12, 13, (MessageType.TAKE_CHECKPOINT,)]
    assert heard(session, BLOB) == [BlobPiece(b"state"), Ended()]
    assert sent(session) == [(MessageType.GOODBYE,)]
    assert session.phase is Phase.DONE
    assert (session.records, session.messages, session.fed_sequence_id) == (3, 3, 13)
    assert session.label == "counter:Counter"


def test_numbers_go_from_one_app_to_another() -> None:
    session = restored()
    drawn = [pack_numbers(11, [RandomDraw(4, 0, "", 0)]), pack_numbers(11)]
    told = [encode_message(MessageType.NUMBERS, data) for data in drawn]
    assert heard(session, *told) == [NumbersDrawn(11, drawn[0], complete=False), NumbersDrawn(11, drawn[1])]
    session.give_numbers(drawn[:1])
    session.give_record(value(11), TRAILER)
    assert sent(session) == [b"blob", TOLD, (MessageType.NUMBERS,), SOURCES, 11]
    with pytest.raises(RemoteProtocolError, match="a Numbers message can't be read"):
        heard(session, encode_message(MessageType.NUMBERS, b"\x92\xa1x\x90"))


def test_an_app_that_knows_no_numbers_says_so_with_its_hello_and_gets_none() -> None:
    session = ReplaySession("counter", SUMMARY, ROUTE)
    hello = encode_hello(Hello(ALL_EXTENSIONS | TRACE_EXTENSIONS - {MessageType.NUMBERS}))
    assert heard(session, hello) == [NumbersDrawn(None)]
    session.give_numbers([pack_numbers(11)])
    assert sent(session) == []


def failed(sequence_id: int, message_index: int = 0) -> Verdict:
    return Verdict(sequence_id, message_index, VerdictKind.UNDONE, "ValueError", "no", method="Counter.count")


def told(session: ReplaySession) -> list[Verdict]:
    """The verdicts that the app gets, in order; before the first record."""
    reader = RecordReader()
    for data in session.data_to_send():
        reader.receive_data(bytes(data))
    found: list[Verdict] = []
    while (event := reader.next_event()) is not None:
        if isinstance(event, Record) and event.header.sequence_id < 0:
            for message_type, start, end in decode_messages(event.content):
                assert message_type in (MessageType.VERDICTS, MessageType.CHECKPOINT)
                if message_type == MessageType.VERDICTS:
                    found += decode_verdicts(event.content[start:end])
    return found


def test_the_verdicts_behind_the_checkpoint_are_told_before_the_first_record() -> None:
    verdicts = [failed(10), failed(11), failed(12, 3), failed(13)]
    session = restored(replace(SUMMARY, verdicts=verdicts))
    session.give_record(value(11), TRAILER)
    assert sent(session) == [b"blob", TOLD, SOURCES, 11]
    assert told(restored(replace(SUMMARY, verdicts=verdicts))) == verdicts[1:]


def test_who_looks_may_keep_some_to_itself() -> None:
    summary = replace(SUMMARY, verdicts=[failed(11), failed(12)])
    assert told(restored(summary, tells=lambda verdict: verdict.sequence_id > 11)) == [failed(12)]
    assert told(restored(summary, tells=lambda verdict: False)) == []


def test_what_a_running_instance_adds_is_told_before_its_record() -> None:
    session = restored(replace(SUMMARY, verdicts=[failed(11)]), Route(HEADER, None))
    session.give_record(value(11), TRAILER)
    sent(session)
    session.give_verdicts([failed(10), failed(11), failed(12)])
    session.give_verdicts([failed(10), failed(11), failed(12)])
    assert told(session) == [failed(12)]


def test_a_message_that_fails_alone_is_told_and_the_replay_goes_on() -> None:
    session = restored()
    session.give_record(value(11), TRAILER)
    verdict = failed(11)
    assert heard(session, encode_verdict(verdict)) == [VerdictGiven(verdict)]
    others = (
        encode_handling(Handling(11)),
        *(encode_message(message_type) for message_type in (MessageType.LEAVING, MessageType.RETRY_REFUSED)),
    )
    assert heard(session, *others) == []
    assert session.wants_records


def test_an_app_that_knows_no_verdicts_is_told_none_and_gives_none() -> None:
    hello = encode_hello(Hello((ALL_EXTENSIONS | TRACE_EXTENSIONS) - {MessageType.VERDICTS}))
    session = ReplaySession("counter", replace(SUMMARY, verdicts=[failed(11)]), ROUTE)
    assert heard(session, hello) == []
    session.give_blob(b"blob")
    session.blob_is_complete()
    session.give_verdicts([failed(12)])
    assert sent(session) == [b"blob"]
    with pytest.raises(AppProtocolError, match="a message of type 80, which has no place in a replay"):
        heard(session, encode_verdict(failed(11)))


def test_nothing_is_sent_before_the_hello_of_an_app_that_says_one() -> None:
    session = ReplaySession("counter", SUMMARY, ROUTE)
    assert session.phase is Phase.GREETING
    assert heard(session, HELLO[:5]) == []
    assert session.phase is Phase.GREETING


def base(summary: LogSummary = SUMMARY, route: Route = ROUTE) -> ReplaySession:
    """A session of an app that says no Hello, and has its blob."""
    session = ReplaySession("counter", replace(summary, extensions=frozenset()), route)
    session.give_blob(b"blob")
    session.blob_is_complete()
    return session


IMPULSE = encode_outgoing_rpc("", 3, 2, b"x")


def test_a_base_client_s_replay_ends_as_its_recovery_does() -> None:
    session = base(route=replace(ROUTE, last_sequence_id=11))
    session.give_record(value(11, timed=False), TRAILER)
    assert sent(session) == [b"blob", 11, (MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT,)]
    assert heard(session, BLOB, IMPULSE) == [BlobPiece(b"state"), Ended()], "what it does as a primary has no effect"


def test_a_base_client_s_replay_that_ends_with_an_upgrade_ends_with_its_checkpoint() -> None:
    session = base(route=replace(ROUTE, last_sequence_id=11, versions=(VersionStart(2, 11),)))
    session.give_record(value(11, timed=False), TRAILER)
    assert sent(session) == [b"blob", 11, (MessageType.UPGRADE_TAKE_CHECKPOINT,)]
    assert heard(session, BLOB, IMPULSE) == [BlobPiece(b"state"), Ended()]
    with pytest.raises(AppProtocolError, match="an impulse in the phase"):
        heard(base(), IMPULSE)


def test_impulses_behind_an_upgrade_in_the_middle_count_for_nothing() -> None:
    session = base(route=replace(ROUTE, last_sequence_id=12, versions=(VersionStart(2, 11),)))
    session.give_record(value(11, timed=False), TRAILER)
    call = encode_outgoing_rpc("", 3, 1, b"y")
    (made,) = heard(session, BLOB, IMPULSE, call)
    assert isinstance(made, Outputs)
    assert (made.count, made.payload) == (1, encode_incoming_rpc(3, 1, b"y"))
    session.give_record(value(12, timed=False), TRAILER)
    assert sent(session)[-1] == (MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT,)


def test_an_app_of_the_base_protocol() -> None:
    session = ReplaySession("counter", replace(SUMMARY, extensions=frozenset()), replace(ROUTE, last_sequence_id=11))
    session.give_blob(b"blob")
    session.blob_is_complete()
    session.give_record(value(11, timed=False), TRAILER)
    assert sent(session) == [b"blob", 11, (MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT,)]
    events = heard(session, encode_attach_to("b"), encode_outgoing_rpc("b", 3, 1, b"x"), BLOB)
    assert events == [
        Outputs("b", 6, 1, encode_incoming_rpc(3, 1, b"x"), None),
        BlobPiece(b"state"),
        Ended(),
    ]
    assert sent(session) == []  # it knows no Goodbye
    assert not session.app_flushes
    assert not session.app_leaves


def test_an_app_of_the_other_kind_is_refused() -> None:
    session = ReplaySession("counter", replace(SUMMARY, extensions=frozenset()), ROUTE)
    with pytest.raises(AppProtocolError, match="begun by an app of the base protocol's kind"):
        heard(session, HELLO)
    session = ReplaySession("counter", SUMMARY, ROUTE)
    with pytest.raises(AppProtocolError, match="begun by an app of the SDK's kind"):
        heard(session, encode_attach_to("b"))


def test_outputs_go_on_from_the_checkpoint_with_their_origins_and_kept_impulses_between() -> None:
    session = restored(replace(SUMMARY, impulses=[ImpulseBatch(7, 2, b"kept", "b")]))
    payload = rpc(1) + rpc(2)
    events = heard(
        session,
        encode_attach_to("b"),
        encode_origins([Origin(11, 0, 1), Origin(11, 1, 1)]),
        encode_app_batch(MessageType.STREAM_BATCH, "b", 2, payload),
        encode_origins([Origin(12, 0, 1)]),
        encode_app_batch(MessageType.STREAM_BATCH, "", 1, rpc(3)),
        encode_app_batch(MessageType.STREAM_BATCH, "counter", 1, rpc(4)),
    )
    assert events == [
        Outputs("b", 6, 1, rpc(1), [Origin(11, 0, 1)]),
        KeptImpulses("b", 7, 2, b"kept"),
        Outputs("b", 9, 1, rpc(2), [Origin(11, 1, 1)]),
        Outputs("", 1, 1, rpc(3), [Origin(12, 0, 1)]),
        Outputs("", 2, 1, rpc(4), None),  # its own name is itself
    ]


def test_impulses_right_behind_the_checkpoint_come_first() -> None:
    session = restored(replace(SUMMARY, impulses=[ImpulseBatch(6, 1, b"kept", "b"), ImpulseBatch(1, 1, b"", "c")]))
    assert list(session.start()) == [KeptImpulses("b", 6, 1, b"kept"), KeptImpulses("c", 1, 1, b"")]


def test_the_last_record_may_end_in_its_middle() -> None:
    session = restored(route=replace(ROUTE, last_sequence_id=11, last_message=0))
    content = encode_record_time(11) + rpc(1) + rpc(2)
    session.give_record(encode_record(COMMITTER_ID, 11, content) + b"trailer", TRAILER)
    (_, _, _, _, record, _) = session.data_to_send()
    assert bytes(record) == encode_record(COMMITTER_ID, 11, encode_record_time(11) + rpc(1))
    assert session.messages == 1


def test_an_upgrade_of_the_past_is_repeated_between_the_records() -> None:
    session = restored(route=replace(ROUTE, versions=[VersionStart(2, 11)]))
    session.give_record(value(11), TRAILER)
    assert sent(session) == [b"blob", TOLD, SOURCES, 11, (MessageType.VERSION, MessageType.UPGRADE_TAKE_CHECKPOINT)]
    assert not session.wants_records
    assert heard(session, BLOB) == []  # that state is not the one at the end
    assert session.wants_records
    session.give_record(value(12), TRAILER)
    session.give_record(value(13), TRAILER)
    assert sent(session) == [12, 13, (MessageType.TAKE_CHECKPOINT,)]
    assert heard(session, BLOB) == [BlobPiece(b"state"), Ended()]


def test_an_upgrade_at_the_end_gives_the_state() -> None:
    """A TakeCheckpoint right behind it would make the app primary."""
    route = replace(ROUTE, last_sequence_id=10, versions=[VersionStart(2, 10), VersionStart(3, 10)])
    session = restored(route=route)
    upgrade = (MessageType.VERSION, MessageType.UPGRADE_TAKE_CHECKPOINT)
    assert sent(session) == [b"blob", TOLD, upgrade]
    assert heard(session, BLOB) == []
    assert sent(session) == [upgrade]
    assert heard(session, BLOB) == [BlobPiece(b"state"), Ended()]


def test_whoever_follows_may_end_right_behind_an_upgrade() -> None:
    session = restored(route=Route(HEADER, None, versions=[VersionStart(2, 11)]))
    session.give_record(value(11), TRAILER)
    session.end_here()
    sent(session)
    assert heard(session, BLOB) == []
    assert sent(session) == [(MessageType.VERSION, MessageType.UPGRADE_TAKE_CHECKPOINT)]
    assert heard(session, BLOB) == [BlobPiece(b"state"), Ended()]


def test_following_ends_when_asked_to() -> None:
    session = restored(route=Route(HEADER, None))
    session.give_record(value(11), TRAILER)
    assert session.wants_records
    session.end_here()
    session.end_here()
    assert sent(session) == [b"blob", TOLD, SOURCES, 11, (MessageType.TAKE_CHECKPOINT,)]
    assert not session.give_record(value(12), TRAILER)


@pytest.mark.parametrize(
    ("upgrade_to", "control"),
    [
        (OWN_VERSION, (MessageType.UPGRADE_SERVICE,)),
        (3, (MessageType.VERSION, MessageType.UPGRADE_SERVICE)),
    ],
)
def test_a_what_if_upgrades_right_behind_the_blob(upgrade_to: int, control: tuple[int, ...]) -> None:
    session = restored(route=replace(ROUTE, upgrade_to=upgrade_to))
    assert sent(session) == [b"blob", TOLD, control]
    assert session.wants_records


def test_a_handler_that_raises_ends_it() -> None:
    session = restored()
    session.give_record(value(11), TRAILER)
    failure = HandlerFailure(11, 0, "Counter.count raised ValueError")
    assert heard(session, encode_handler_failed(failure), b"whatever follows") == [Ended(failure)]
    assert not session.wants_records


def test_a_failed_upgrade_is_told() -> None:
    session = restored(route=replace(ROUTE, versions=[VersionStart(2, 10)]))
    with pytest.raises(UpgradeFailedError, match="the upgrade failed: no such attribute"):
        heard(session, encode_message(MessageType.UPGRADE_FAILED, b"no such attribute"))


def test_the_app_describes_itself() -> None:
    session = ReplaySession("counter", SUMMARY, ROUTE)
    description = AppDescription(2, {("b", 3): "B.take"})
    heard(session, HELLO, encode_app_description(description))
    assert session.description == description


def test_a_state_that_comes_beside_the_apps_work() -> None:
    session = restored(route=replace(ROUTE, last_sequence_id=10))
    events = heard(
        session,
        encode_message(MessageType.SNAPSHOT_BEGIN),
        encode_message(MessageType.SNAPSHOT_CHUNK, b"sta"),
        encode_message(MessageType.SNAPSHOT_CHUNK, b"te"),
        encode_message(MessageType.SNAPSHOT_END),
    )
    assert events == [BlobPiece(b"sta"), BlobPiece(b"te"), Ended()]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (BLOB, "a checkpoint in the phase 'replaying': none was asked for"),
        (encode_message(MessageType.SNAPSHOT_BEGIN), "none was asked for"),
        (encode_app_batch(MessageType.IMPULSE_BATCH, "", 1, rpc(1)), "an impulse in the phase 'replaying'"),
        (encode_app_batch(MessageType.STREAM_BATCH, "b", 1, rpc(1)), "called 'b' without AttachTo"),
        (
            encode_origins([Origin(1, 0, 2)]) + encode_app_batch(MessageType.STREAM_BATCH, "", 1, rpc(1)),
            "origins for another number of messages than 1",
        ),
        (encode_message(MessageType.INITIAL_MESSAGE, b"x"), "type 9, which has no place in a replay"),
        (HELLO, "a Hello must be the app's first message"),
    ],
)
def test_what_an_app_may_not_say(data: bytes, said: str) -> None:
    session = restored()
    with pytest.raises(RemoteProtocolError, match=said):
        heard(session, data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (encode_message(MessageType.SNAPSHOT_CHUNK, b"x"), "out of turn"),
        (encode_message(MessageType.SNAPSHOT_BEGIN) * 2, "out of turn"),
        (
            encode_message(MessageType.SNAPSHOT_BEGIN) + encode_message(MessageType.SNAPSHOT_END, b"killed"),
            "could not give its state: killed",
        ),
    ],
)
def test_snapshots_that_make_no_sense(data: bytes, said: str) -> None:
    session = restored(route=replace(ROUTE, last_sequence_id=10))
    with pytest.raises(AppProtocolError, match=said):
        heard(session, data)


def test_an_app_may_answer_in_any_pieces() -> None:
    whole = restored(route=replace(ROUTE, last_sequence_id=10))
    data = encode_attach_to("b") + encode_app_batch(MessageType.STREAM_BATCH, "b", 1, rpc(1)) + BLOB
    expected = heard(whole, data)
    pieces = restored(route=replace(ROUTE, last_sequence_id=10))
    events = [event for byte in data for event in heard(pieces, bytes((byte,)))]
    blob = b"".join(event.data for event in events if isinstance(event, BlobPiece))
    assert blob == b"state"
    assert [event for event in events if not isinstance(event, BlobPiece)] == [expected[0], expected[-1]]


def test_a_call_that_was_too_large_in_service_is_dropped_in_a_replay_too() -> None:
    session = ReplaySession("counter", replace(SUMMARY, extensions=frozenset()), ROUTE, rpc_limit_mib=1)
    large, small = (encode_outgoing_rpc("b", 3, 1, bytes(size_bytes)) for size_bytes in (2 << 20, 1 << 20))
    (made,) = heard(session, large, small)
    assert isinstance(made, Outputs)
    assert (made.first_position, made.count) == (6, 1)
