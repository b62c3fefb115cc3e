"""Streams between instances through the machine: opening, taking, refusing, and that one failure stops one stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.interfaces import ImpulseBatch
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.protocol.extensions import Hello, decode_sources, encode_hello
from immortal.protocol.messages import MessageType, decode_messages, encode_incoming_rpc, encode_message
from immortal.protocol.peer_frames import FrameType, RefusedCode
from tests.helpers.core import (
    COMMITTER_ID,
    EXTENSIONS,
    HELLO,
    INITIAL,
    PEER_COMMITTER_ID,
    Driven,
    arguments,
    attach,
    call,
    checkpoint,
    first_start,
    records,
    rpc,
)


def refusals(driven: Driven) -> list[tuple[int, str]]:
    return [
        (reply.frame.code, reply.frame.reason)
        for reply in driven.of(ef.ReplyToPeer)
        if reply.frame.frame_type is FrameType.REFUSED
    ]


def errors(driven: Driven) -> list[str]:
    return [text for level, text in driven.reports if level == "error"]


def state_of(driven: Driven, destination: str = "b") -> dict:
    return driven.machine.view.status(0)["outputs"][destination]  # type: ignore[index]


# --- receiving -------------------------------------------------------------------------------------------------------


def test_a_hello_is_welcomed_once_all_that_was_taken_is_durable() -> None:
    # Found by the simulation: a copy of the sender's log, told of less, took what was on its way here for its own.
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    driven.greeted("h")
    driven.greeted("newer", epoch=2)
    assert driven.replies == []
    driven.disk()
    assert driven.replies == [("t", FrameType.TRIM_TO, 1), ("h", FrameType.REFUSED, 0)]
    driven.disk()
    assert driven.replies[2:] == [("newer", FrameType.WELCOME, 1)]
    assert refusals(driven) == [(RefusedCode.STALE_EPOCH, "a frame of epoch 1 of 'b', which has since started epoch 2")]


def test_a_new_epoch_is_durable_before_its_hello_is_welcomed() -> None:
    # Found by the simulation (two copies of a log): after a crash of the receiver the older copy went on where the
    # newer one had been welcomed, and what both then sent was mixed.
    driven = Driven.started()
    driven.batch("t1", 1, rpc(1), epoch=1)
    driven.auto = False
    driven.forget()
    driven.greeted("h", epoch=2)
    driven.greeted("h again", epoch=2)
    assert driven.replies == []
    driven.disk()
    assert driven.replies == [("h", FrameType.WELCOME, 1), ("h again", FrameType.WELCOME, 1)]
    assert driven.jobs == deque(), "once"
    second = driven.crash()
    second.auto = True
    second.recover()
    second.batch("older", 2, rpc(2), epoch=1)
    second.greeted("older h", epoch=1)
    second.batch("newer", 2, rpc(3), epoch=2)
    assert second.replies == [
        ("older", FrameType.REFUSED, 0),
        ("older h", FrameType.REFUSED, 0),
        ("newer", FrameType.TRIM_TO, 2),
    ]
    assert arguments(bytes(second.app_bytes)) == [rpc(3)]


def test_a_hello_of_the_epoch_that_the_log_knows_is_welcomed_at_once() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1), epoch=2)
    driven.auto = False
    driven.forget()
    driven.greeted("h", epoch=2)
    assert driven.replies == [("h", FrameType.WELCOME, 1)]
    assert driven.jobs == deque()


def test_a_reply_says_who_it_is_from() -> None:
    driven = Driven.started()
    driven.greeted("h")
    (reply,) = driven.of(ef.ReplyToPeer)
    frame = reply.frame
    assert (frame.sender, frame.receiver, frame.committer_id, frame.epoch) == ("a", "b", COMMITTER_ID, 1)


def test_hellos_wait_until_the_first_start_is_complete() -> None:
    driven = Driven(auto=False)
    driven.greeted("h1")
    driven.greeted("h2", sender="c")
    driven.connect()
    driven.disk_all()
    driven.data(first_start())
    assert driven.replies == []
    driven.disk_all()
    assert driven.replies == [("h1", FrameType.WELCOME, 0), ("h2", FrameType.WELCOME, 0)]
    driven.greeted("h3")
    assert driven.replies[2:] == [("h3", FrameType.WELCOME, 0)]


def test_a_limited_number_of_hellos_waits_for_the_first_start() -> None:
    driven = Driven(auto=False, limits=Limits(parked_senders_max=2, parked_hellos_max=2))
    for number, sender in enumerate(("c", "d", "e", "d", "d")):
        driven.greeted(number, sender=sender)
    assert driven.replies == [(2, FrameType.REFUSED, 0)]  # of one sender too many
    assert refusals(driven) == [(RefusedCode.NOT_READY, "'a' has not completed its first start")]
    driven.connect()
    driven.disk_all()
    driven.data(first_start())
    driven.disk_all()
    assert driven.replies[1:] == [(number, FrameType.WELCOME, 0) for number in (0, 3, 4)]
    driven.greeted(5, sender="e")
    assert driven.replies[4:] == [(5, FrameType.WELCOME, 0)]


def test_a_batch_before_the_first_start_is_refused_as_not_ready() -> None:
    driven = Driven()
    driven.batch("t", 1, rpc(1))
    assert refusals(driven) == [(RefusedCode.NOT_READY, "'a' has not completed its first start")]
    assert not driven.jobs


def test_duplicates_gaps_and_overlaps() -> None:
    driven = Driven.started()
    driven.batch("t1", 1, rpc(1), rpc(2))
    driven.batch("again", 1, rpc(1), rpc(2))
    driven.batch("overlap", 2, rpc(2), rpc(3))
    driven.batch("gap", 6, rpc(6))
    driven.batch("t4", 4, rpc(4))
    assert driven.replies == [
        ("t1", FrameType.TRIM_TO, 2),
        ("again", FrameType.TRIM_TO, 2),
        ("overlap", FrameType.TRIM_TO, 3),
        ("gap", FrameType.RESEND, 3),
        ("t4", FrameType.TRIM_TO, 4),
    ]
    assert arguments(bytes(driven.app_bytes)) == [rpc(1), rpc(2), rpc(3), rpc(4)]


def test_a_duplicate_of_what_is_on_its_way_to_the_disk_is_acknowledged_with_it() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    driven.batch("again", 1, rpc(1))
    assert driven.replies == []
    driven.disk_all()
    assert driven.replies == [("t", FrameType.TRIM_TO, 1), ("again", FrameType.TRIM_TO, 1)]
    assert arguments(bytes(driven.app_bytes)) == [rpc(1)]


def test_positions_survive_a_crash() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1), rpc(2))
    second = driven.crash()
    second.greeted("h")
    second.batch("t", 1, rpc(1), rpc(2), rpc(3))
    assert second.replies == [("h", FrameType.WELCOME, 2), ("t", FrameType.TRIM_TO, 3)]
    second.connect(HELLO)
    assert arguments(bytes(second.app_bytes)) == [rpc(1), rpc(2), rpc(3)]


def test_two_senders_are_two_streams() -> None:
    driven = Driven.started()
    driven.batch("b1", 1, rpc(1))
    driven.batch("c1", 1, rpc(2), sender="c", committer_id=5)
    driven.batch("c2", 2, rpc(3), sender="c", committer_id=5)
    assert [position for _, _, position in driven.replies] == [1, 1, 2]
    inputs: dict = driven.machine.view.status(0)["inputs"]  # type: ignore[assignment]
    assert {source: stream["position"] for source, stream in inputs.items()} == {"b": 1, "c": 2}


@pytest.mark.parametrize(
    ("frame", "code", "reason", "reported"),
    [
        ({"receiver": "other"}, RefusedCode.NOT_ME, "this is 'a', the message is for 'other'", False),
        ({"sender": "a"}, RefusedCode.MALFORMED, "no peer can be called 'a'", False),
        ({"sender": ""}, RefusedCode.MALFORMED, "no peer can be called ''", False),
        ({"sender": "!impulses"}, RefusedCode.MALFORMED, "no peer can be called '!impulses'", False),
        ({"epoch": 2}, RefusedCode.STALE_EPOCH, "a frame of epoch 2 of 'b', which has since started epoch 3", False),
        ({"committer_id": 9, "epoch": 3}, RefusedCode.COMMITTER_CHANGED, "was committer 77 here and is 9 now", True),
        ({"epoch": 3, "position": 8}, RefusedCode.ROLLED_BACK, "'a' has 1 messages of 'b', it once had 8", True),
    ],
)
def test_a_hello_that_is_refused(frame: dict, code: RefusedCode, reason: str, reported: bool) -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1), epoch=3)
    driven.forget()
    driven.greeted("h", **({"position": 1} | frame))
    ((found_code, found_reason),) = refusals(driven)
    assert found_code is code
    assert reason in found_reason
    assert bool(errors(driven)) is reported
    assert not driven.of(ef.Stop)
    driven.forget()
    driven.batch("next", 2, rpc(2), epoch=3)
    assert driven.replies == [("next", FrameType.TRIM_TO, 2)], "the stream itself must go on"


def test_batches_of_a_past_life_or_another_log_are_not_taken() -> None:
    driven = Driven.started()
    driven.greeted("h", epoch=4)
    driven.batch("stale", 1, rpc(1), epoch=3)
    driven.batch("t", 1, rpc(2), epoch=4)
    driven.batch("foreign", 2, rpc(3), epoch=4, committer_id=9)
    assert [code for code, _ in refusals(driven)] == [RefusedCode.STALE_EPOCH, RefusedCode.COMMITTER_CHANGED]
    assert arguments(bytes(driven.app_bytes)) == [rpc(2)]


def test_a_batch_that_lies_about_its_count_is_refused() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    driven.batch("lie", 1, rpc(1), count=3)
    ((code, reason),) = refusals(driven)
    assert code is RefusedCode.MALFORMED
    assert "a batch of 3 messages ends after 1" in reason


@pytest.mark.parametrize(
    ("payload", "count"),
    [(b"no call", 1), (rpc(1) + b"x", 1), (rpc(1)[:-1], 1), (rpc(1), 2), (rpc(1) * 2, 1), (rpc(1), 0x7FFFFFFF)],
    ids=["nonsense", "bytes too many", "cut off", "too few", "too many", "a count that passes over what is to come"],
)
def test_a_batch_that_is_not_whole_calls_never_gets_into_the_log(payload: bytes, count: int) -> None:
    driven = Driven.started()
    driven.batch("t", 1, payload, count=count)
    assert [code for code, _ in refusals(driven)] == [RefusedCode.MALFORMED]
    assert not driven.app_bytes
    driven.batch("right", 1, rpc(1))
    assert driven.replies[1:] == [("right", FrameType.TRIM_TO, 1)]
    assert arguments(bytes(driven.app_bytes)) == [rpc(1)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (rpc(1, rpc_type=3), "message 1 of a batch has the RPC type 3, 0 to 2 were expected"),
        (
            rpc(1, method_id=-1),
            "message 1 of a batch has a negative method: only an app itself may call those",
        ),
        (
            encode_message(MessageType.RPC, b"\x04\x06\x01"),
            "message 1 of a batch is an RPC of kind 4, 0 to 3 were expected",
        ),
    ],
)
def test_what_no_app_can_be_given_is_never_logged(message: bytes, reason: str) -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1), message)
    assert refusals(driven) == [(RefusedCode.MALFORMED, reason)]
    assert driven.store.summary().last_sequence_id == 0
    driven.forget()
    driven.batch("u", 1, rpc(1), rpc(2, rpc_type=2))
    assert driven.replies == [("u", FrameType.TRIM_TO, 2)]


def test_only_a_caller_under_its_own_name_is_logged() -> None:
    driven = Driven.started()
    driven.batch("own", 1, rpc(b"\x92\xa1b\1", rpc_type=0))
    driven.batch("foreign", 2, rpc(b"\x92\xa1c\1", rpc_type=0))
    reason = "message 0 of a batch is a call whose answer is to go to 'c', its sender may give only 'b'"
    assert refusals(driven) == [(RefusedCode.MALFORMED, reason)]
    assert driven.replies[0] == ("own", FrameType.TRIM_TO, 1)


def test_arguments_to_an_app_of_the_base_protocol_are_its_own_matter() -> None:
    driven = Driven.started(hello=False)
    driven.batch("t", 1, rpc(b"\x92\xa1c\1", rpc_type=0))
    assert driven.replies == [("t", FrameType.TRIM_TO, 1)]


def test_an_app_is_told_who_sends_and_only_where_that_changes() -> None:
    driven = Driven()
    driven.connect(encode_hello(Hello(EXTENSIONS | {MessageType.SOURCES})))
    driven.data(first_start())
    driven.batch("1", 1, rpc(1))
    driven.batch("2", 2, rpc(2))
    driven.data(call("", 3))
    driven.data(call("", 4))
    driven.batch("3", 3, rpc(5))
    told: list[object] = []
    for record in records(bytes(driven.app_bytes)):
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.SOURCES:
                told.append(decode_sources(record.content[start:end]))
        if record.header.sequence_id >= 0:
            told.append(record.header.sequence_id)
    assert told == [[], 0, ["b"], 1, 2, [], 3, 4, ["b"], 5]


def test_an_answer_that_comes_as_a_message_is_refused() -> None:
    driven = Driven.started()
    driven.handle(ev.PeerFrameReceived("t", driven.peer_frame(FrameType.WELCOME, 0)))
    assert refusals(driven) == [(RefusedCode.MALFORMED, "unexpected frame WELCOME")]


def test_while_stopping_no_peer_is_answered() -> None:
    driven = Driven.started()
    driven.handle(ev.StopRequested())
    driven.greeted("h")
    driven.batch("t", 1, rpc(1))
    assert driven.replies == []


# --- sending ---------------------------------------------------------------------------------------------------------


def test_a_stream_opens_with_a_hello_and_sends_nothing_before_the_welcome() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    assert [type(effect) for effect in driven.effects] == [ef.OpenPeer, ef.OpenPeer, ef.SendToPeer]
    (hello,) = driven.frames()
    assert (hello.frame_type, hello.position, hello.epoch) == (FrameType.HELLO, 0, 1)
    driven.reply(FrameType.WELCOME, 0)
    (batch,) = driven.frames(FrameType.BATCH)
    assert (batch.position, batch.count, batch.payload, batch.sender, batch.receiver) == (1, 1, rpc(1), "a", "b")
    assert driven.store.summary().peers == {"b": PEER_COMMITTER_ID}


def test_a_recovered_sender_says_what_was_acknowledged_and_sends_only_the_rest() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1) + call("b", 2) + call("b", 3))
    driven.reply(FrameType.WELCOME, 0)
    driven.reply(FrameType.TRIM_TO, 1)
    driven.batch("t", 1, rpc(1))  # takes the acknowledgement to the disk
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + call("b", 1) + call("b", 2) + call("b", 3))
    (hello,) = second.frames()
    assert (hello.position, hello.epoch) == (1, 2)
    second.reply(FrameType.WELCOME, 2)
    assert [(frame.position, frame.payload) for frame in second.frames(FrameType.BATCH)] == [(3, rpc(3))]


def test_unacknowledged_outputs_come_back_from_the_checkpoint() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"with outputs"))
    second = driven.crash()
    second.recover()
    second.reply(FrameType.WELCOME, 1)
    assert [(frame.position, frame.payload) for frame in second.frames(FrameType.BATCH)] == [(2, rpc(2))]


def test_what_was_acknowledged_before_a_checkpoint_is_on_disk_with_it() -> None:
    # Its outputs begin behind that: a recovered stream that knew less would have a hole.
    driven = Driven.started()
    driven.open_stream()
    driven.handle(ev.CheckpointRequested())
    driven.reply(FrameType.TRIM_TO, 1)
    driven.data(checkpoint(b"x"))
    summary = driven.store.summary()
    assert (summary.acknowledged, summary.checkpoints[-1].unacknowledged) == ({"b": 1}, {})


def test_a_resend_gives_up_what_is_on_its_way_once() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.reply(FrameType.TRIM_TO, 1)
    driven.data(call("b", 2) + call("b", 3))
    tag = driven.of(ef.SendToPeer)[-1].tag
    driven.forget()
    driven.reply(FrameType.RESEND, 1, tag=tag)
    assert [(frame.position, frame.payload) for frame in driven.frames()] == [(2, rpc(2) + rpc(3))]
    driven.forget()
    driven.reply(FrameType.RESEND, 1, tag=tag)
    assert driven.frames() == [], "the second frame of the same gap was taken for another gap"


def test_the_answers_to_a_lost_app_do_not_count_for_the_next_one() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    tag = driven.of(ef.SendToPeer)[-1].tag
    driven.close()
    assert [effect.destination for effect in driven.of(ef.ResetPeer)] == ["b"]
    driven.connect()
    driven.data(HELLO + attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0, tag=tag)
    assert state_of(driven)["state"] == "greeting"
    assert driven.frames(FrameType.BATCH) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (FrameType.REFUSED, 0, {"code": RefusedCode.NOT_ME, "reason": "this is 'x'"}),
            "'b' refuses this instance's messages: this is 'x'",
        ),
        (
            (FrameType.REFUSED, 0, {"code": RefusedCode.ROLLED_BACK, "reason": "it once had 8"}),
            "'b' refuses this instance's messages: it once had 8",
        ),
        ((FrameType.WELCOME, 0, {}), "'b' has 0 messages of this instance, it once had 1"),
        ((FrameType.WELCOME, 9, {"committer_id": 5}), "'b' was committer 77 and is 5 now"),
        ((FrameType.TRIM_TO, 9, {"committer_id": 5}), "'b' was committer 77 and is 5 now"),
        (
            (FrameType.REFUSED, 0, {"committer_id": 5, "code": RefusedCode.NOT_READY, "reason": "not yet"}),
            "'b' was committer 77 and is 5 now",  # it was wiped: that it is not ready says nothing
        ),
    ],
)
def test_only_the_stream_concerned_stops(answer: tuple, words: str) -> None:
    driven = Driven.started()
    driven.open_stream("b")
    driven.reply(FrameType.TRIM_TO, 1)
    driven.batch("t", 1, rpc(1))
    driven = driven.crash()
    driven.recover(attach("b") + call("b", 1))
    driven.data(attach("c") + call("b", 2) + call("c", 3))
    frame_type, position, fields = answer
    driven.reply(frame_type, position, **fields)
    (error,) = errors(driven)
    assert words in error
    assert error.endswith("its messages are kept")
    assert state_of(driven)["state"] == "failed"
    assert state_of(driven)["waiting_bytes"] == len(rpc(2))
    assert words in state_of(driven)["error"]
    assert [effect.destination for effect in driven.of(ef.ResetPeer)] == ["b"]
    driven.reply(FrameType.WELCOME, 0, destination="c", committer_id=6)
    assert [frame.receiver for frame in driven.frames(FrameType.BATCH)] == ["c"]
    assert driven.phase is Phase.NORMAL
    driven.data(call("b", 4))
    driven.reply(FrameType.TRIM_TO, 1)
    assert len(errors(driven)) == 1, "a stopped stream is reported once"
    assert driven.frames(FrameType.BATCH)[1:] == []


def test_a_stopped_stream_is_tried_again_in_the_next_epoch_with_all_its_messages() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.NOT_ME, reason="no")
    driven.close()
    driven.connect()
    driven.data(HELLO + attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 0)
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(1)]


def test_a_late_refusal_of_a_past_attempt_is_not_heard() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.reply(FrameType.REFUSED, 0, tag=0, code=RefusedCode.STALE_EPOCH, reason="old")
    assert state_of(driven)["state"] == "open"


def test_calls_to_oneself_go_through_the_log_once() -> None:
    driven = Driven.started()
    driven.data(call("", 1) + call("a", 2))
    assert arguments(bytes(driven.app_bytes)) == [rpc(1), rpc(2)]
    second = driven.crash()
    second.connect()
    second.data(HELLO + call("", 1) + call("", 2) + call("", 3))
    second.data(checkpoint(b"x"))
    assert arguments(bytes(second.app_bytes)) == [rpc(1), rpc(2), rpc(3)]
    assert second.frames() == []


# --- replay compared with what receivers have ------------------------------------------------------------------------


def test_an_impulse_behind_the_last_call_is_no_divergence() -> None:
    # The mark counts the impulse; the replay puts it back only at its end.
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.data(call("b", 2, rpc_type=2))
    driven.batch("t", 1, rpc(9))  # a record with the mark, whose handler calls nobody
    second = driven.crash()
    second.connect(HELLO)
    second.data(attach("b") + call("b", 1) + checkpoint(b"same"))
    assert second.phase is Phase.NORMAL, second.reports


@pytest.mark.parametrize("destination", ["b", ""])
def test_a_replay_that_makes_less_stops_before_its_checkpoint_counts(destination: str) -> None:
    driven = Driven.started()
    driven.data(attach("b") + call(destination, 1) + call(destination, 2))
    if destination:
        driven.reply(FrameType.WELCOME, 0)
        driven.reply(FrameType.TRIM_TO, 2)
        driven.batch("t", 1, rpc(1))
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + call(destination, 1))
    second.data(checkpoint(b"wrong"))
    assert isinstance(second.stop.error, DivergenceError)
    to = "'b'" if destination else "itself"
    assert f"by record 1, the calls to {to} had reached number 2; the replay makes only 1" in str(second.stop.error)
    assert len(second.store.summary().checkpoints) == 1


def test_impulses_to_a_peer_leave_after_their_commit_and_come_back_at_their_place() -> None:
    driven = Driven.started(auto=False)
    driven.open_stream()
    driven.disk_all()
    driven.forget()
    driven.data(call("b", 91, rpc_type=2) + call("b", 2))
    assert driven.frames() == []
    driven.disk()
    assert [frame.payload for frame in driven.frames()] == [rpc(91, rpc_type=2) + rpc(2)]
    assert (-1, "IMPULSES_ACCEPTED") in driven.heard
    second = driven.crash()
    second.auto = True
    second.connect()
    second.data(HELLO + attach("b") + call("b", 1) + call("b", 2))
    second.data(checkpoint(b"x"))
    second.reply(FrameType.WELCOME, 0)
    sent = b"".join(frame.payload for frame in second.frames(FrameType.BATCH))
    assert sent == rpc(1) + rpc(91, rpc_type=2) + rpc(2)


def test_impulses_are_told_as_accepted_behind_the_record_that_holds_them() -> None:
    driven = Driven.started(auto=False)
    driven.data(call("", 1, rpc_type=2) + call("", 2, rpc_type=2))
    assert driven.heard == []
    driven.disk()
    assert [kind[1:] for kind in driven.heard] == [("RECORD_TIME", "RPC", "RPC"), ("IMPULSES_ACCEPTED",)]
    assert bytes(driven.app_bytes).endswith(encode_message(MessageType.IMPULSES_ACCEPTED, b"\x04"))


@pytest.mark.parametrize(("hello", "taken"), [(True, False), (False, True)])
def test_whether_calls_must_say_who_waits_for_them_is_known_from_the_log(hello: bool, taken: bool) -> None:
    driven = Driven.started(hello=hello).crash()
    driven.batch("t", 1, encode_incoming_rpc(3, 0, b"\x93\xa1c\x07\x05"))  # by "c", says "b"
    assert driven.replies == [("t", FrameType.TRIM_TO, 1) if taken else ("t", FrameType.REFUSED, 0)]


def test_a_base_app_is_never_told_of_acceptance() -> None:
    driven = Driven.started(hello=False)
    driven.data(call("", 1, rpc_type=2))
    assert driven.heard == [(1, "RPC")]


def test_a_base_app_may_hold_back_calls_that_come_before_an_impulse() -> None:
    # Found by the simulation: its recovery was taken for a divergence, as long as it held them back.
    driven = Driven.started(hello=False)
    driven.open_stream()
    driven.batch("t", 1, rpc(1))
    driven.data(call("b", 2) + call("b", 91, rpc_type=2))
    driven = driven.crash()
    driven.connect()
    driven.data(attach("b") + call("b", 1) + checkpoint(b"with the second call"))
    driven.reply(FrameType.WELCOME, 1)
    assert (driven.phase, driven.frames(FrameType.BATCH)) == (Phase.CHECKPOINTING, []), "they come before its end"
    driven.data(call("b", 2))
    (frame,) = driven.frames(FrameType.BATCH)
    assert (frame.position, frame.payload) == (2, rpc(2) + rpc(91, rpc_type=2))


# --- back-pressure ---------------------------------------------------------------------------------------------------


def pauses(driven: Driven) -> list[str]:
    return [type(effect).__name__ for effect in driven.effects if isinstance(effect, ef.PauseApp | ef.ResumeApp)]


def test_input_that_waits_for_the_disk_pauses_the_app() -> None:
    driven = Driven.started(auto=False, limits=Limits(log_pending_bytes=100, group_size_bytes=60))
    driven.data(call("", b"x" * 50, rpc_type=2))
    assert pauses(driven) == []
    driven.data(call("", b"x" * 50, rpc_type=2))
    assert pauses(driven) == ["PauseApp"]
    driven.data(call("", b"x" * 50, rpc_type=2))
    driven.disk()
    assert pauses(driven) == ["PauseApp"]
    driven.disk()
    assert pauses(driven) == ["PauseApp", "ResumeApp"]
    driven.disk()
    assert len(arguments(bytes(driven.app_bytes))) == 3


def test_input_of_peers_does_not_pause_the_app() -> None:
    driven = Driven.started(auto=False, limits=Limits(log_pending_bytes=10))
    driven.batch("t", 1, rpc(b"x" * 500))
    assert pauses(driven) == []


def test_outputs_that_a_peer_does_not_take_pause_the_app() -> None:
    driven = Driven.started(limits=Limits(output_memory_bytes=100, spill_limit_bytes=0))
    driven.open_stream()
    driven.data(call("b", b"x" * 60) + call("b", b"x" * 60))
    assert pauses(driven) == ["PauseApp"]
    driven.reply(FrameType.TRIM_TO, 1)
    assert pauses(driven) == ["PauseApp"]
    driven.reply(FrameType.TRIM_TO, 2)
    assert pauses(driven) == ["PauseApp", "ResumeApp"]


def test_a_checkpoint_that_the_disk_does_not_take_pauses_the_app() -> None:
    driven = Driven.started(auto=False, limits=Limits(chunk_size_bytes=10, chunks_pending_bytes=20))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"x" * 40)[:25])
    assert pauses(driven) == ["PauseApp"]
    driven.disk_all()
    assert pauses(driven) == ["PauseApp", "ResumeApp"]


def test_the_next_app_is_not_paused_for_the_last_one() -> None:
    driven = Driven.started(limits=Limits(output_memory_bytes=100, spill_limit_bytes=0))
    driven.open_stream()
    driven.data(call("b", b"x" * 200))
    assert pauses(driven) == ["PauseApp"]
    driven.close()
    driven.forget()
    driven.connect()
    assert pauses(driven) == []
    driven.data(HELLO + attach("b") + call("b", 1) + call("b", b"x" * 200))
    assert pauses(driven) == ["PauseApp"]


def test_a_slow_app_is_fed_from_the_log_and_its_peers_are_acknowledged_meanwhile() -> None:
    driven = Driven.started(limits=Limits(app_window_bytes=300, read_size_bytes=200))
    for position in range(1, 21):
        driven.batch(position, position, rpc(b"x" * 100))
    assert [position for _, _, position in driven.replies] == list(range(1, 21))
    assert len(driven.app_bytes) < 300 + 200 + 100
    assert driven.machine.view.status(0)["backlog_records"] > 10  # type: ignore[operator]
    while driven.unsent_bytes:
        driven.handle(ev.AppSent(min(50, driven.unsent_bytes)))
    assert arguments(bytes(driven.app_bytes)) == [rpc(b"x" * 100)] * 20
    assert driven.machine.view.status(0)["backlog_records"] == 0


def test_a_large_checkpoint_is_given_in_pieces_as_the_app_takes_them() -> None:
    driven = Driven(limits=Limits(chunk_size_bytes=100, app_window_bytes=250))
    blob = bytes(range(256)) * 10
    driven.connect()
    driven.data(encode_message(MessageType.INITIAL_MESSAGE, INITIAL) + checkpoint(blob)[:3])
    for start in range(0, len(blob), 100):
        driven.data((checkpoint(blob)[3:])[start : start + 100])
    driven.data((checkpoint(blob)[3:])[2600:])
    second = driven.crash()
    second.connect()
    assert len(second.app_bytes) < 500
    while second.unsent_bytes:
        second.handle(ev.AppSent(min(100, second.unsent_bytes)))
    assert second.heard[0] == blob


def test_a_receiver_that_has_more_than_was_ever_made_stops_the_stream() -> None:
    # Were it taken as acknowledged, the next messages would be dropped in silence.
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 5)
    assert errors(driven) == [
        "stream stopped: 'b' has 5 messages of this instance, which has sent only 0: this instance's log was "
        "replaced by an older copy; restore it, or run 'immortal peers reset a b'; its messages are kept"
    ]
    driven.data(call("b", 2))
    assert driven.frames(FrameType.BATCH) == []
    assert state_of(driven)["position"] == 2
    assert state_of(driven)["acknowledged"] == 0


@pytest.mark.parametrize("recovered", [False, True], ids=["first start", "recovered"])
@pytest.mark.parametrize("answer", [FrameType.WELCOME, FrameType.TRIM_TO, FrameType.RESEND])
def test_what_a_receiver_has_before_anything_was_sent_is_of_another_copy(answer: FrameType, recovered: bool) -> None:
    # Found by the simulation (two copies of a log): calls made while the Hello was on its way were taken for those that
    # the other copy had sent, and dropped. No replay had called there, so nothing said how much was sent before.
    driven = Driven.started()
    if recovered:
        driven = driven.crash()
        driven.recover()
    driven.data(attach("b") + b"".join(call("b", number) for number in (1, 2, 3)))
    driven.reply(answer, 2)
    (error,) = errors(driven)
    assert "'b' has 2 messages of this instance, which has sent only 0" in error
    assert (state_of(driven)["state"], state_of(driven)["acknowledged"]) == ("failed", 0)
    assert driven.frames(FrameType.BATCH) == []


def test_what_a_stream_has_sent_since_the_replay_may_be_acknowledged_after_it_was_greeted_again() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    driven.reply(FrameType.WELCOME, 0)
    driven.data(call("b", 3))
    driven.handle(ev.PeerMoved("b"))
    driven.reply(FrameType.WELCOME, 2)
    assert (errors(driven), state_of(driven)["state"], state_of(driven)["acknowledged"]) == ([], "open", 2)


def test_a_stop_is_not_held_up_by_outputs_that_nobody_takes() -> None:
    driven = Driven.started(limits=Limits(output_memory_bytes=10, spill_limit_bytes=0))
    driven.data(attach("b") + call("b", 1) + call("b", 2))
    assert driven.of(ef.PauseApp)
    driven.handle(ev.StopRequested())
    assert driven.of(ef.ResumeApp), "the last checkpoint would never be read"


def test_a_recovery_shows_no_stream_that_never_was() -> None:
    second = Driven.started().crash()
    second.recover()
    status = second.machine.view.status(0)
    assert (status["inputs"], status["outputs"]) == ({}, {})


class Counted(list[ImpulseBatch]):
    """Counts what is looked at when it is gone through."""

    looked_at = 0

    def __iter__(self) -> Iterator[ImpulseBatch]:
        for batch in super().__iter__():
            self.looked_at += 1
            yield batch


def test_a_restore_goes_through_the_kept_impulses_once_however_many_receivers_there_are() -> None:
    driven = Driven.started()
    names = [f"peer {number}" for number in range(50)]
    kept = Counted(ImpulseBatch(position, 1, rpc(position), name) for position in (1, 2) for name in names)
    peers = driven.machine.components.peers
    peers.outbound.forget()
    peers.replay.restore(None, replace(driven.store.summary(), impulses=kept))
    assert kept.looked_at <= 2 * len(kept)
    assert {len(peers.outbound.streams[name]._kept_impulses) for name in names} == {2}
