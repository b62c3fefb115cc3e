"""A peer whose log was wiped or replaced: its streams stop alone, say the way out, and begin anew after a reset."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import SourcePosition, StreamStart
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.peers import RECLAIM_EPOCHS, reclaim_transaction, reset_transaction
from immortal.protocol.messages import MessageType
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from tests.helpers.core import HELLO, PEER_COMMITTER_ID, Driven, arguments, attach, call, checkpoint, first_start, rpc

NEW_COMMITTER_ID = 5
SAME = {"committer_id": PEER_COMMITTER_ID}
OTHER = {"committer_id": NEW_COMMITTER_ID}


def errors(driven: Driven) -> list[str]:
    return [text for level, text in driven.reports if level == "error"]


def state_of(driven: Driven) -> dict:
    return driven.machine.view.status(0)["outputs"]["b"]  # type: ignore[index]


def peer_of(driven: Driven) -> dict:
    return driven.machine.view.peers()["b"]


def sent(driven: Driven) -> list[tuple[int, bytes]]:
    return [(frame.position, frame.payload) for frame in driven.frames(FrameType.BATCH)]


def hellos(driven: Driven) -> list[int]:
    return [frame.position for frame in driven.frames(FrameType.HELLO)]


def reset(driven: Driven, token: object = "operator") -> None:
    driven.handle(ev.PeerReset("b", token))


def later(driven: Driven) -> None:
    """The moment has come at which stopped streams are tried again."""
    (wake,) = driven.of(ef.WakeAt)[-1:]
    driven.now_ns = wake.time_ns
    driven.handle(ev.Tick())


def three_of_five() -> Driven:
    """Five calls to b, which has acknowledged three of them; one record of b is in the log."""
    driven = Driven.started()
    driven.open_stream()
    for number in (2, 3, 4, 5):
        driven.data(call("b", number))
    driven.reply(FrameType.TRIM_TO, 2)  # upon which the rest is sent
    driven.reply(FrameType.TRIM_TO, 3)
    driven.batch("t", 1, rpc(1), epoch=3)  # takes the acknowledgement to the disk
    driven.forget()
    return driven


def all_calls() -> bytes:
    return attach("b") + b"".join(call("b", number) for number in (1, 2, 3, 4, 5))


# --- the receiver has another log ------------------------------------------------------------------------------------


def stopped_by_a_wiped_receiver() -> Driven:
    driven = three_of_five()
    driven.reply(FrameType.RESEND, 0, **OTHER)
    assert state_of(driven)["state"] == "failed"
    return driven


def test_a_wiped_receiver_stops_the_stream_with_the_way_out() -> None:
    driven = stopped_by_a_wiped_receiver()
    assert errors(driven) == [
        "stream stopped: 'b' was committer 77 and is 5 now: its log was wiped or swapped; it had acknowledged 3 of 5 "
        "messages; restore it, or run 'immortal peers reset a b'; its messages are kept"
    ]
    assert not driven.of(ef.Stop)


def test_after_a_reset_what_was_not_acknowledged_goes_to_the_new_log_from_1_on() -> None:
    driven = stopped_by_a_wiped_receiver()
    driven.forget()
    reset(driven)
    assert hellos(driven) == [0]
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    assert sent(driven) == [(1, rpc(4) + rpc(5))]
    assert (state_of(driven)["state"], state_of(driven)["position"]) == ("open", 5), "our own numbers never change"
    driven.data(call("b", 6))
    driven.reply(FrameType.TRIM_TO, 2, **OTHER)
    assert (state_of(driven)["acknowledged"], state_of(driven)["error"]) == (5, None)
    driven.reply(FrameType.TRIM_TO, 3, **OTHER)
    assert (state_of(driven)["acknowledged"], state_of(driven)["waiting_bytes"]) == (6, 0)
    assert sent(driven) == [(1, rpc(4) + rpc(5)), (3, rpc(6))]


def test_nothing_goes_to_the_new_log_before_its_numbers_are_durable() -> None:
    driven = stopped_by_a_wiped_receiver()
    driven.forget()
    driven.auto = False
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.data(call("b", 6))
    assert sent(driven) == []
    driven.disk_all()
    assert sent(driven) == [(1, rpc(4) + rpc(5) + rpc(6))]
    summary = driven.store.summary()
    assert (summary.peers["b"], summary.stream_starts["b"]) == (NEW_COMMITTER_ID, StreamStart(3))


def test_the_numbers_of_the_new_log_survive_a_crash() -> None:
    driven = stopped_by_a_wiped_receiver()
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.reply(FrameType.TRIM_TO, 1, **OTHER)
    driven.batch("u", 2, rpc(2), epoch=3)
    second = driven.crash()
    second.connect(HELLO)
    second.data(all_calls() + checkpoint(b"x"))
    assert hellos(second) == [1]
    second.reply(FrameType.WELCOME, 2, **OTHER)
    second.data(call("b", 6))
    assert sent(second) == [(3, rpc(6))], "the two that were sent before the crash have arrived"
    assert state_of(second)["acknowledged"] == 5


def test_a_crash_before_the_new_numbers_are_durable_sends_nothing_twice() -> None:
    driven = stopped_by_a_wiped_receiver()
    driven.auto = False
    reset(driven)
    driven.disk_all()
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    second = driven.crash()
    second.auto = True
    second.connect()
    second.data(HELLO + all_calls())
    assert hellos(second) == [0]
    second.reply(FrameType.WELCOME, 0, **OTHER)
    assert sent(second) == [(1, rpc(4) + rpc(5))]


def test_impulses_keep_their_place_behind_a_reset() -> None:
    driven = stopped_by_a_wiped_receiver()
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.data(call("b", 6, rpc_type=2))
    driven.data(call("b", 7))
    second = driven.crash()
    second.connect(HELLO)
    second.data(all_calls() + call("b", 7) + checkpoint(b"x"))
    second.reply(FrameType.WELCOME, 2, **OTHER)
    assert sent(second) == [(3, rpc(6, rpc_type=2) + rpc(7))]
    assert second.phase is Phase.NORMAL


def test_a_second_reset_counts_from_where_the_first_one_began() -> None:
    driven = stopped_by_a_wiped_receiver()
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.reply(FrameType.TRIM_TO, 1, **OTHER)
    driven.reply(FrameType.RESEND, 0, committer_id=6)
    assert "it had acknowledged 4 of 5" in errors(driven)[-1]
    reset(driven)
    driven.forget()
    driven.reply(FrameType.WELCOME, 0, committer_id=6)
    assert sent(driven) == [(1, rpc(5))]


def test_answers_from_before_a_reset_do_not_count() -> None:
    driven = three_of_five()
    tag = driven.tags["b"]
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.reply(FrameType.TRIM_TO, 5, tag=tag, **SAME)
    driven.reply(FrameType.REFUSED, 0, tag=tag, code=RefusedCode.STALE_EPOCH, reason="old", **SAME)
    assert (state_of(driven)["state"], state_of(driven)["acknowledged"]) == ("open", 3)


# --- the receiver has an older copy of its log -----------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 2])
def test_an_older_copy_goes_on_behind_what_it_has(position: int) -> None:
    driven = three_of_five()
    driven.close()
    driven.connect(HELLO)
    driven.data(all_calls() + checkpoint(b"x"))
    driven.reply(FrameType.WELCOME, position)
    (error,) = errors(driven)
    assert f"'b' has {position} messages of this instance, it once had 3: its log was replaced by an older" in error
    assert "'immortal peers reset a b'" in error
    driven.forget()
    reset(driven)
    driven.reply(FrameType.WELCOME, position)
    assert sent(driven) == [(position + 1, rpc(4) + rpc(5))]
    driven.reply(FrameType.TRIM_TO, position + 2)
    assert state_of(driven)["acknowledged"] == 5


def test_a_receiver_that_falls_back_while_the_stream_is_open_is_greeted_again() -> None:
    # Its coordinator was killed and its log replaced: what is on its way to it is a gap there, for ever.
    driven = three_of_five()
    driven.reply(FrameType.RESEND, 1)
    assert hellos(driven) == [3]
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.ROLLED_BACK, reason="'b' has 1 messages of 'a'")
    (error,) = errors(driven)
    assert error == (
        "stream stopped: 'b' refuses this instance's messages: 'b' has 1 messages of 'a'; restore the log that was "
        "replaced, or run 'immortal peers reset a b'; its messages are kept"
    )


def test_a_late_resend_is_no_harm() -> None:
    driven = three_of_five()
    driven.reply(FrameType.RESEND, 1)
    driven.reply(FrameType.WELCOME, 4)
    assert sent(driven) == [(5, rpc(5))]
    assert errors(driven) == []


def test_a_reset_of_a_peer_that_has_its_log_changes_nothing() -> None:
    driven = three_of_five()
    reset(driven)
    driven.reply(FrameType.WELCOME, 4)
    assert sent(driven) == [(5, rpc(5))]
    assert state_of(driven)["acknowledged"] == 4
    assert peer_of(driven)["offset"] == 0


def refused_as_an_older_copy(driven: Driven) -> None:
    driven.handle(ev.PeerMoved("b"))
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.STALE_EPOCH, reason="epoch 1 of 'a' has begun twice")
    reset(driven)


def has_more_than_was_made_until_now(driven: Driven) -> None:
    driven.reply(FrameType.TRIM_TO, 6)
    driven.data(call("b", 6) + call("b", 7))
    reset(driven)


def the_receiver_says_so(driven: Driven) -> None:
    reset(driven)


@pytest.mark.parametrize("sign", [refused_as_an_older_copy, has_more_than_was_made_until_now, the_receiver_says_so])
@pytest.mark.parametrize("crash", [False, True])
def test_an_older_copy_of_this_log_never_takes_what_the_receiver_has_for_its_own(sign: object, crash: bool) -> None:
    # The receiver has as many as were made here, or fewer, and yet the 4th and 5th may be others.
    driven = three_of_five()
    sign(driven)  # type: ignore[operator]
    more = [number for number in (6, 7) if driven.machine.view.peers()["b"]["made"] > 5]
    if crash:
        driven = driven.crash()
        driven.connect()
        driven.data(HELLO + all_calls() + b"".join(call("b", number) for number in more))
        driven.data(checkpoint(b"x"))
    code = RefusedCode.STALE_EPOCH if sign is the_receiver_says_so else RefusedCode.NONE
    driven.forget()
    driven.reply(FrameType.WELCOME, 5, code=code)
    assert sent(driven) == [(6, b"".join(rpc(number) for number in (4, 5, *more)))]
    driven.batch("again", 1, rpc(1), rpc(2), epoch=3)
    assert driven.replies[-1] == ("again", FrameType.TRIM_TO, 2)
    assert arguments(bytes(driven.app_bytes)) == [rpc(2)]


# --- this instance has an older copy of its log ----------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False], ids=["it says so during the replay", "it says so afterwards"])
def test_a_receiver_that_has_more_than_the_replay_makes_stops_only_its_stream(early: bool) -> None:
    driven = three_of_five().crash()
    driven.connect()
    driven.data(HELLO + all_calls())
    if early:
        driven.reply(FrameType.WELCOME, 9)
    driven.data(checkpoint(b"x"))
    if not early:
        driven.reply(FrameType.WELCOME, 9)
    assert driven.phase is Phase.NORMAL
    (error,) = errors(driven)
    assert error == (
        "stream stopped: 'b' has 9 messages of this instance, which has sent only 5: this instance's log was replaced "
        "by an older copy; restore it, or run 'immortal peers reset a b'; its messages are kept"
    )
    driven.data(call("b", 6))
    driven.forget()
    reset(driven)
    driven.reply(FrameType.WELCOME, 9)
    (first, payload), *_ = sent(driven)
    assert first == 10
    assert payload.endswith(rpc(6)), "a call that was made since is not taken for one that b has"
    assert driven.store.summary().acknowledged["b"] <= 5


@pytest.mark.parametrize("late", [False, True], ids=["it is asked again", "its answer is late"])
def test_an_older_copy_that_makes_more_than_the_receiver_has_stays_stopped(late: bool) -> None:
    # Found by the simulation (two copies of a log): the calls 6 to 9 were taken for those that b has, and lost.
    driven = three_of_five().crash()
    driven.recover(all_calls())
    if not late:
        driven.reply(FrameType.WELCOME, 9)
    driven.data(b"".join(call("b", number) for number in (6, 7, 8, 9, 10)))
    if not late:
        later(driven)
    driven.forget()
    driven.reply(FrameType.WELCOME, 9)
    assert (state_of(driven)["state"], sent(driven)) == ("failed", [])
    assert "'b' has 9 messages of this instance, which has sent only 5" in state_of(driven)["error"]
    reset(driven)
    driven.forget()
    driven.reply(FrameType.WELCOME, 9)
    assert sent(driven)[0][0] == 10
    assert sent(driven)[0][1].endswith(b"".join(rpc(number) for number in (6, 7, 8, 9, 10)))


# --- the sender has another log --------------------------------------------------------------------------------------


def test_a_wiped_sender_is_refused_with_the_way_out_and_told_once() -> None:
    driven = three_of_five()
    for token in ("h1", "h2", "h3"):
        driven.greeted(token, **OTHER)
    assert errors(driven) == [
        "stream refused: 'b' was committer 77 here and is 5 now: its log was wiped or swapped; 1 of its messages are "
        "here; restore it, or run 'immortal peers reset a b'"
    ]
    assert [reply.frame.code for reply in driven.of(ef.ReplyToPeer)] == [RefusedCode.COMMITTER_CHANGED] * 3
    assert errors(driven)[0].endswith(str(peer_of(driven)["error"]))
    driven.greeted("h4", epoch=4)
    assert peer_of(driven)["error"] is None
    driven.greeted("h5", **OTHER)
    assert len(errors(driven)) == 2, "it was right again in between"


def test_after_a_reset_the_streams_of_a_new_log_are_taken_from_1_on() -> None:
    driven = three_of_five()
    reset(driven)
    driven.greeted("h", **OTHER)
    driven.batch("t1", 1, rpc(11), rpc(12), **OTHER)
    driven.batch("old", 2, rpc(2), epoch=3)
    assert [(token, kind) for token, kind, _ in driven.replies] == [
        ("h", FrameType.WELCOME),
        ("t1", FrameType.TRIM_TO),
        ("old", FrameType.REFUSED),
    ]
    assert driven.store.summary().sources["b"] == SourcePosition(NEW_COMMITTER_ID, 1, 2)
    assert arguments(bytes(driven.app_bytes)) == [rpc(11), rpc(12)]
    second = driven.crash()
    second.greeted("h", epoch=2, position=2, **OTHER)
    assert second.replies == [("h", FrameType.WELCOME, 2)]


def test_a_reset_lets_in_one_new_log_and_only_by_its_hello() -> None:
    driven = three_of_five()
    reset(driven)
    driven.batch("t", 1, rpc(11), **OTHER)
    driven.greeted("h", **OTHER)
    driven.greeted("third", committer_id=6)
    assert [kind for _, kind, _ in driven.replies] == [FrameType.REFUSED, FrameType.WELCOME, FrameType.REFUSED]


def test_a_reset_that_was_not_used_survives_a_crash() -> None:
    driven = three_of_five()
    reset(driven)
    driven.greeted("h", **OTHER)  # welcomed, and nothing of it logged
    second = driven.crash()
    assert peer_of(second)["reset_pending"]
    second.greeted("h", **OTHER)
    assert second.replies == [("h", FrameType.WELCOME, 0)]
    assert not second.machine.components.peers.inbound.streams["b"].reset_pending


def test_operators_see_a_reset_until_both_streams_have_met_the_new_log() -> None:
    driven = three_of_five()
    assert peer_of(driven)["reset_pending"] is False
    reset(driven)
    assert peer_of(driven)["reset_pending"] is True
    driven.greeted("h", **OTHER)
    driven.batch("t", 1, rpc(11), **OTHER)
    assert peer_of(driven)["reset_pending"] is True, "what goes there has no answer yet"
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    assert peer_of(driven)["reset_pending"] is False


def test_an_older_copy_of_the_sender_may_have_a_lower_epoch_and_is_not_taken_twice() -> None:
    driven = three_of_five()
    for token in ("h1", "h2"):
        driven.greeted(token, epoch=2)
    assert [reply.frame.code for reply in driven.of(ef.ReplyToPeer)] == [RefusedCode.STALE_EPOCH] * 2
    (warning,) = [text for level, text in driven.reports if level == "warning"]
    assert warning == (
        "stream refused: a frame of epoch 2 of 'b', which has since started epoch 3; if its log was replaced by an "
        "older copy, or a copy has run, restore it, or run 'immortal peers reclaim b'"
    )
    reset(driven)
    driven.forget()
    driven.greeted("not reset itself", epoch=2, position=1)
    driven.greeted("h3", epoch=2)
    driven.batch("t", 1, rpc(1), rpc(2), epoch=2)
    assert driven.replies == [
        ("not reset itself", FrameType.REFUSED, 0),
        ("h3", FrameType.WELCOME, 1),
        ("t", FrameType.TRIM_TO, 2),
    ]
    assert arguments(bytes(driven.app_bytes)) == [rpc(2)]


def test_an_epoch_that_begins_twice_is_of_an_older_copy() -> None:
    # It may have made as many calls again, others, at the places of those that are here.
    driven = three_of_five()
    driven.greeted("h1", epoch=4, position=1, time_ns=1000)
    driven.greeted("h1 again", epoch=4, position=1, time_ns=1000)
    driven.greeted("h2", epoch=4, position=1, time_ns=2000)
    driven.greeted("h3", epoch=5, position=1, time_ns=3000)
    assert [kind for _, kind, _ in driven.replies] == [FrameType.WELCOME] * 2 + [FrameType.REFUSED, FrameType.WELCOME]
    (refused,) = [reply.frame for reply in driven.of(ef.ReplyToPeer) if reply.frame.frame_type is FrameType.REFUSED]
    assert refused.code == RefusedCode.STALE_EPOCH
    assert refused.reason == "epoch 4 of 'b' has begun twice: its log was replaced by an older copy"
    reset(driven)
    driven.forget()
    driven.greeted("h4", epoch=5, position=1, time_ns=4000)
    driven.greeted("h5", epoch=5, position=0, time_ns=4000)
    assert [kind for _, kind, _ in driven.replies] == [FrameType.REFUSED, FrameType.WELCOME]
    driven.greeted("h6", epoch=5, position=0, time_ns=4000)
    driven.batch("t", 2, rpc(2), epoch=5)
    driven.greeted("h7", epoch=5, position=1, time_ns=4000)
    codes = [reply.frame.code for reply in driven.of(ef.ReplyToPeer) if reply.frame.frame_type is FrameType.WELCOME]
    assert codes == [RefusedCode.STALE_EPOCH, RefusedCode.STALE_EPOCH, RefusedCode.NONE], "told until it has been heard"


def test_a_batch_that_overtakes_its_hello_does_not_make_the_epoch_begin_twice() -> None:
    # Found by the simulation: the Hello was compared with the time of the epoch before.
    driven = Driven.started()
    driven.greeted("late hello", epoch=2, time_ns=1000)
    driven.batch("early", 3, rpc(3), epoch=3)
    driven.greeted("hello", epoch=3, time_ns=2000)
    assert [reply[:2] for reply in driven.replies] == [
        ("late hello", FrameType.WELCOME),
        ("early", FrameType.RESEND),
        ("hello", FrameType.WELCOME),
    ]


def test_a_sender_that_is_wiped_before_anything_of_it_is_here_is_simply_another_one() -> None:
    driven = Driven.started()
    driven.greeted("h1", epoch=3, time_ns=1000)
    driven.greeted("h2", epoch=1, time_ns=2000, **OTHER)
    driven.greeted("h3", epoch=3, time_ns=3000, committer_id=6)
    assert [kind for _, kind, _ in driven.replies] == [FrameType.WELCOME] * 3


def test_what_was_on_its_way_to_a_wiped_log_is_not_taken_by_the_new_one() -> None:
    # The messenger delivers it as soon as somebody answers there; its sender does not know yet who that is.
    driven = Driven.started()
    driven.batch("late", 1, rpc(1), greeted=False)
    driven.greeted("h")
    driven.batch("t", 1, rpc(1), greeted=False)
    driven.batch("late, of the sender's own past", 2, rpc(2), greeted=False, **OTHER)
    assert [kind for _, kind, _ in driven.replies] == [
        FrameType.RESEND,
        FrameType.WELCOME,
        FrameType.TRIM_TO,
        FrameType.REFUSED,
    ]
    assert arguments(bytes(driven.app_bytes)) == [rpc(1)]


def test_a_receiver_that_has_heard_nothing_is_greeted_again() -> None:
    driven = Driven.started()
    driven.open_stream()
    driven.forget()
    driven.reply(FrameType.RESEND, 0)
    assert (hellos(driven), sent(driven)) == ([0], [])
    driven.reply(FrameType.WELCOME, 0)
    assert sent(driven) == [(1, rpc(1))]


def test_a_hello_says_when_its_epoch_began() -> None:
    driven = three_of_five()
    first = driven.machine.state.epoch_began_ns
    driven.now_ns += 5
    driven.handle(ev.PeerMoved("b"))
    (again,) = driven.frames(FrameType.HELLO)
    assert again.time_ns == first > 0
    driven.close()
    driven.connect()
    driven.data(HELLO + all_calls())
    assert driven.frames(FrameType.HELLO)[-1].time_ns == first + 5


def test_records_of_the_old_log_that_become_durable_late_are_not_the_new_ones() -> None:
    driven = three_of_five()
    driven.auto = False
    driven.batch("t", 2, *[rpc(number) for number in range(2, 9)], epoch=3)
    reset(driven)
    driven.greeted("h", **OTHER)
    driven.disk_all()
    driven.greeted("again", **OTHER)
    assert [(kind, position) for _, kind, position in driven.replies] == [
        (FrameType.WELCOME, 0),
        (FrameType.WELCOME, 0),
    ]


# --- this log counts, and no copy of it -----------------------------------------------------------------------------


def test_a_sender_that_had_more_acknowledged_is_let_in_once_by_a_reset() -> None:
    driven = three_of_five()
    driven.greeted("before", position=4, epoch=3)
    reset(driven)
    driven.greeted("after", position=4, epoch=3)
    driven.greeted("later", position=1, epoch=3)
    driven.batch("t", 2, rpc(2), epoch=3)
    driven.greeted("again", position=9, epoch=3)
    said = [(reply.frame.frame_type, reply.frame.position, reply.frame.code) for reply in driven.of(ef.ReplyToPeer)]
    assert said == [
        (FrameType.REFUSED, 0, RefusedCode.ROLLED_BACK),
        (FrameType.WELCOME, 1, RefusedCode.ROLLED_BACK),
        (FrameType.WELCOME, 1, RefusedCode.NONE),
        (FrameType.TRIM_TO, 2, RefusedCode.NONE),
        (FrameType.REFUSED, 0, RefusedCode.ROLLED_BACK),
    ]


def test_a_reset_lets_in_a_sender_that_had_more_acknowledged_after_a_crash_too() -> None:
    driven = three_of_five()
    reset(driven)
    driven.greeted("welcomed, and then forgotten", position=4, epoch=3)
    second = driven.crash()
    second.greeted("h", position=4, epoch=3)
    assert second.replies == [("h", FrameType.WELCOME, 1)]


@pytest.mark.parametrize("crash", [False, True])
def test_a_sender_goes_on_behind_what_a_receiver_has_that_was_reset(crash: bool) -> None:
    driven = three_of_five()
    driven.auto = crash
    driven.handle(ev.PeerMoved("b"))
    driven.reply(FrameType.WELCOME, 1, code=RefusedCode.ROLLED_BACK)
    assert crash or sent(driven) == [], "not before its new numbers are durable"
    driven.disk_all()
    assert sent(driven) == [(2, rpc(4) + rpc(5))]
    if crash:
        driven = driven.crash()
        driven.connect(HELLO)
        driven.data(all_calls() + checkpoint(b"x"))
        assert hellos(driven) == [1]
        driven.reply(FrameType.WELCOME, 2)
        assert sent(driven) == [(3, rpc(5))]
    assert errors(driven) == []


def reclaimed(crash: bool) -> Driven:
    driven = three_of_five()
    if not crash:
        driven.handle(ev.Reclaimed("operator"))
        return driven
    driven.store.commit(reclaim_transaction(driven.store.summary()))
    second = driven.crash()
    second.connect(HELLO)
    second.data(all_calls() + checkpoint(b"x"))
    return second


@pytest.mark.parametrize("stopped", [False, True])
def test_a_log_that_counts_is_ahead_of_its_copy_and_takes_nothing_of_it_for_its_own(stopped: bool) -> None:
    driven = reclaimed(stopped)
    hello = driven.frames(FrameType.HELLO)[-1]
    assert hello.epoch > RECLAIM_EPOCHS
    assert hello.position == 0
    driven.forget()
    driven.reply(FrameType.WELCOME, 5)  # as many as were made here: two of them are the copy's
    assert sent(driven) == [(6, rpc(4) + rpc(5))]
    assert {frame.epoch for frame in driven.frames(FrameType.BATCH)} == {hello.epoch}
    driven.greeted("h", position=4, epoch=3)
    assert driven.replies == [("h", FrameType.WELCOME, 1)]


def test_nobody_hears_of_the_epoch_of_a_log_that_counts_before_it_is_durable() -> None:
    driven = three_of_five()
    driven.auto = False
    driven.handle(ev.Reclaimed("operator"))
    assert (hellos(driven), driven.of(ef.PeerResetDone)) == ([], [])
    driven.disk()
    assert hellos(driven) == [0]
    driven.disk_all()
    assert [done.token for done in driven.of(ef.PeerResetDone)] == ["operator"]
    assert driven.store.summary().epoch > RECLAIM_EPOCHS


# --- this instance was wiped: the words come from the other side -----------------------------------------------------


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (RefusedCode.COMMITTER_CHANGED, "'immortal peers reset b a'"),
        (RefusedCode.STALE_EPOCH, "'immortal peers reclaim a'"),
        (RefusedCode.ROLLED_BACK, "'immortal peers reset a b'"),
    ],
)
def test_a_refusal_names_the_way_out_on_the_senders_side_too(code: RefusedCode, command: str) -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.REFUSED, 0, code=code, reason="what it says")
    (error,) = errors(driven)
    assert error.count(command) == 1


def test_a_receiver_that_was_wiped_says_so_and_names_the_way_out_of_its_sender() -> None:
    driven = Driven.started()
    driven.greeted("h", position=8)
    (reply,) = driven.of(ef.ReplyToPeer)
    assert reply.frame.code == RefusedCode.ROLLED_BACK
    assert reply.frame.reason == (
        "'a' has 0 messages of 'b', it once had 8: its log was wiped or replaced by an older copy; restore it, or run "
        "'immortal peers reset b a'"
    )


# --- tried again -----------------------------------------------------------------------------------------------------


def test_a_stopped_stream_is_tried_again_and_goes_on_once_the_other_side_is_mended() -> None:
    driven = three_of_five()
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.COMMITTER_CHANGED, reason="another log")
    for _ in range(3):
        driven.forget()
        driven.handle(ev.Tick())
        assert hellos(driven) == [], "too early"
        driven.data(call("", 9))
    driven.now_ns += driven.machine.state.limits.stream_retry_ns
    driven.handle(ev.Tick())
    assert hellos(driven) == [3]
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.COMMITTER_CHANGED, reason="another log")
    assert errors(driven) == [], "told once"
    assert state_of(driven)["state"] == "failed"
    later(driven)
    driven.reply(FrameType.WELCOME, 3)
    assert sent(driven) == [(3, rpc(3) + rpc(4) + rpc(5))], "b drops the one that it has"
    assert state_of(driven)["error"] is None


def test_a_clock_that_is_stepped_does_not_hold_up_a_stopped_stream() -> None:
    driven = three_of_five()
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.COMMITTER_CHANGED, reason="another log")
    driven.forget()
    driven.now_ns += 5 * 3600 * 10**9
    driven.handle(ev.Tick())  # two seconds later, by a clock that nobody sets
    assert hellos(driven) == [3]
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.COMMITTER_CHANGED, reason="another log")
    assert driven.of(ef.WakeAt)[-1].time_ns == driven.now_ns + driven.machine.state.limits.stream_retry_ns


def test_the_wake_up_of_a_stopped_stream_does_not_take_the_place_of_the_checkpoints() -> None:
    driven = Driven(limits=Limits(checkpoint_age_ns=6_000_000_000))
    driven.connect()
    driven.data(HELLO + first_start())
    (age,) = driven.of(ef.WakeAt)
    driven.data(attach("b") + call("b", 1))
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.NOT_ME, reason="no")
    retry = driven.of(ef.WakeAt)[-1]
    assert retry.time_ns < age.time_ns
    driven.now_ns = retry.time_ns
    driven.handle(ev.Tick())
    driven.reply(FrameType.WELCOME, 0)
    assert driven.of(ef.WakeAt)[-1] == age
    driven.now_ns = age.time_ns
    driven.handle(ev.Tick())
    assert driven.heard[-1] == (-1, MessageType.TAKE_CHECKPOINT.name)


def test_a_failure_is_told_once_although_more_calls_are_made_meanwhile() -> None:
    driven = stopped_by_a_wiped_receiver()
    for number in (6, 7):
        driven.data(call("b", number))
        later(driven)
        driven.reply(FrameType.WELCOME, 0, **OTHER)
    assert len(errors(driven)) == 1
    assert "3 of 7 messages" in state_of(driven)["error"], "status shows the figures of now"


# --- moved -----------------------------------------------------------------------------------------------------------


def test_a_peer_that_has_moved_is_greeted_and_gets_what_was_on_its_way() -> None:
    driven = three_of_five()
    driven.handle(ev.PeerMoved("b"))
    assert hellos(driven) == [3]
    driven.reply(FrameType.WELCOME, 4)
    assert sent(driven) == [(5, rpc(5))]


def test_a_peer_that_is_found_late_is_greeted_then() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.forget()
    driven.handle(ev.PeerMoved("b"), ev.PeerMoved("never called"))
    assert hellos(driven) == [0]
    driven.reply(FrameType.WELCOME, 0)
    assert sent(driven) == [(1, rpc(1))]


# --- the operator ----------------------------------------------------------------------------------------------------


def test_a_reset_is_answered_once_it_is_durable() -> None:
    driven = three_of_five()
    driven.auto = False
    reset(driven, "first")
    assert driven.of(ef.PeerResetDone) == []
    driven.disk_all()
    assert driven.of(ef.PeerResetDone) == [ef.PeerResetDone("first", True)]


def test_a_peer_that_nobody_knows_cannot_be_reset() -> None:
    driven = Driven.started()
    reset(driven)
    assert driven.of(ef.PeerResetDone) == [ef.PeerResetDone("operator", False)]
    assert reset_transaction(driven.store.summary(), "b") is None


@pytest.mark.parametrize("name", ["", "a", "!impulses"])
def test_an_instance_cannot_reset_itself(name: str) -> None:
    driven = Driven.started()
    driven.data(call("", 1) + call("", 2, rpc_type=2))
    before = driven.store.summary().sources
    driven.handle(ev.PeerReset(name, "operator"))
    assert driven.of(ef.PeerResetDone) == [ef.PeerResetDone("operator", False)]
    assert driven.store.summary().sources == before


def test_a_reset_of_a_stopped_instance_is_the_same() -> None:
    running, stopped = three_of_five(), three_of_five()
    reset(running)
    transaction = reset_transaction(stopped.store.summary(), "b")
    assert transaction is not None
    stopped.store.commit(transaction)
    first, second = running.store.summary(), stopped.store.summary()
    assert (first.sources, first.peers, first.stream_starts, first.acknowledged) == (
        second.sources,
        second.peers,
        second.stream_starts,
        second.acknowledged,
    )
    assert first.stream_starts == {"b": StreamStart(0, pending=True)}


def test_a_reset_while_no_app_is_there_or_during_a_replay() -> None:
    driven = three_of_five().crash()
    reset(driven)
    assert driven.of(ef.PeerResetDone) == [ef.PeerResetDone("operator", True)]
    driven.connect()
    driven.data(HELLO + attach("b") + call("b", 1))
    reset(driven)
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.data(b"".join(call("b", number) for number in (2, 3, 4)))
    assert sent(driven) == [(1, rpc(4))]
    driven.data(call("b", 5) + checkpoint(b"x"))
    driven.reply(FrameType.TRIM_TO, 2, **OTHER)
    assert state_of(driven)["acknowledged"] == 5
    assert driven.phase is Phase.NORMAL


def test_a_reset_during_a_replay_keeps_what_the_receiver_was_said_to_have() -> None:
    driven = three_of_five().crash()
    driven.connect()
    driven.data(HELLO + attach("b") + call("b", 1))
    driven.reply(FrameType.WELCOME, 5)
    driven.data(call("b", 2) + call("b", 3) + call("b", 4))
    reset(driven)
    driven.data(call("b", 5))
    driven.reply(FrameType.WELCOME, 0, **OTHER)
    driven.data(checkpoint(b"x") + call("b", 6))
    assert driven.phase is Phase.NORMAL
    assert b"".join(payload for _, payload in sent(driven)) == rpc(5) + rpc(6)
    assert sent(driven)[0][0] == 1


def test_only_the_streams_of_that_peer_are_reset() -> None:
    driven = three_of_five()
    driven.data(attach("c") + call("c", 1))
    driven.reply(FrameType.WELCOME, 0, destination="c", committer_id=6)
    driven.forget()
    reset(driven)
    assert {effect.destination for effect in driven.of(ef.SendToPeer)} == {"b"}
    assert [effect.destination for effect in driven.of(ef.ResetPeer)] == ["b"]
    frame = PeerFrame(FrameType.TRIM_TO, "c", "a", 6, 1, 1)
    driven.handle(ev.PeerReplied("c", driven.tags["c"], frame))
    assert driven.machine.view.status(0)["outputs"]["c"]["acknowledged"] == 1  # type: ignore[index]


def test_what_late_frames_brought_to_a_new_log_is_not_sent_again() -> None:
    """They had reached it before anybody saw that it is another one; it had acknowledged nothing by these numbers."""
    driven = Driven.started()
    driven.open_stream()
    for number in (2, 3, 4, 5):
        driven.data(call("b", number))
    driven.reply(FrameType.RESEND, 0, **OTHER)
    reset(driven)
    driven.forget()
    driven.reply(FrameType.WELCOME, 2, **OTHER)
    assert sent(driven) == [(3, rpc(3) + rpc(4) + rpc(5))]


def test_the_window_of_a_new_log_holds_from_its_welcome_on() -> None:
    driven = three_of_five()
    driven.reply(FrameType.RESEND, 0, **OTHER)
    reset(driven)
    driven.forget()
    driven.reply(FrameType.WELCOME, 0, count=len(rpc(4)), **OTHER)
    assert sent(driven) == [(1, rpc(4))], "there is room for one of the two"
