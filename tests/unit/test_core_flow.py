"""Windows, memory, spilling, a full log: who is slowed, who is not, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DivergenceError
from immortal.coordinator.core.input.back_pressure import HELD_OVERHEAD_BYTES
from immortal.coordinator.core.input.input_stream import WindowGrants
from immortal.coordinator.core.interfaces import CheckpointHeader, LogSpace, SpilledBatch, Transaction
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.state import LogCapacity
from immortal.coordinator.log.backend import Span
from immortal.coordinator.log.format import SEQUENCE_KEY, decode_batch_count
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.messages import decode_incoming_rpc, decode_messages, encode_outgoing_rpc
from immortal.protocol.peer_frames import FrameType, RefusedCode
from tests.helpers.core import HELLO, Driven, attach, call, checkpoint, rpc

SMALL = Limits(output_memory_bytes=400, spill_row_bytes=100, spill_limit_bytes=1000, peer_frame_bytes=80)
SECOND_NS = 10**9


def large(number: int) -> bytes:
    return number.to_bytes(4, "little") + b"x" * 60


def calls(destination: str, first: int, last: int) -> bytes:
    return b"".join(call(destination, large(number)) for number in range(first, last + 1))


def stream(driven: Driven, destination: str = "b") -> dict:
    outputs: dict = driven.machine.view.status(driven.now_ns)["outputs"]  # type: ignore[assignment]
    return outputs[destination]


def pauses(driven: Driven) -> list[str]:
    return [type(effect).__name__ for effect in driven.effects if isinstance(effect, ef.PauseApp | ef.ResumeApp)]


def sent(driven: Driven, destination: str = "b") -> list[int]:
    """The numbers of the calls sent, and every Batch acknowledged until no more comes."""
    found: list[int] = []
    while frames := [
        effect.frame
        for effect in driven.of(ef.SendToPeer)
        if effect.destination == destination and effect.frame.frame_type is FrameType.BATCH
    ]:
        driven.effects.clear()
        for frame in frames:
            for _, start, end in decode_messages(frame.payload):
                arguments = decode_incoming_rpc(frame.payload, start, end).arguments
                found.append(int.from_bytes(bytes(arguments[:4]), "little"))
        driven.reply(FrameType.TRIM_TO, frames[-1].position + frames[-1].count - 1, destination=destination)
    return found


# --- spilling --------------------------------------------------------------------------------------------------------


def spilled_rows(store: MemoryLogStore) -> list[tuple[bytes, bytes]]:
    """As they are in the log."""
    return [(bytes(key), bytes(value)) for key, value in store.backend.durable.scan("spilled")]


def test_what_a_dead_peer_does_not_take_goes_to_the_log_and_comes_back_in_order() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b") + calls("b", 1, 12))
    assert stream(driven)["memory_bytes"] <= 400
    assert stream(driven)["spilled_bytes"] > 300
    assert stream(driven)["waiting_bytes"] == 12 * len(rpc(large(1)))
    assert driven.store.summary().spilled["b"][0].first_position == 5
    assert pauses(driven) == []
    driven.reply(FrameType.WELCOME, 0)
    assert sent(driven) == list(range(1, 13))
    assert stream(driven)["waiting_bytes"] == 0
    assert not driven.store.summary().spilled, "what was acknowledged is removed at once: the log is idle"
    driven.forget()
    driven.data(call("b", large(13)))
    assert sent(driven) == [13]
    assert not driven.of(ef.ReadSpilled)


def test_beyond_the_limit_the_app_is_not_read_until_there_is_room() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b"))
    for number in range(1, 40):
        driven.data(call("b", large(number)))
        if pauses(driven):
            break
    assert pauses(driven) == ["PauseApp"]
    status = driven.machine.view.status(driven.now_ns)
    assert (status["held_up_for"], status["app_paused"]) == (["b"], True)
    assert driven.machine.view.peers()["b"]["held_up"] is True
    assert 1000 < stream(driven)["waiting_bytes"] <= 1000 + 400 + 100
    driven.reply(FrameType.WELCOME, 0)
    assert sent(driven) == list(range(1, number + 1))
    assert driven.machine.view.status(driven.now_ns)["held_up_for"] == []
    assert not driven.machine.view.status(driven.now_ns)["app_paused"]


def test_a_crash_of_the_app_and_a_replay_do_not_spill_twice() -> None:
    driven = Driven.started(limits=SMALL)
    driven.batch("t", 1, rpc(1))
    driven.data(attach("b") + calls("b", 1, 12))
    rows = spilled_rows(driven.store)
    assert len(rows) >= 2
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + calls("b", 1, 9))
    assert spilled_rows(second.store) == rows
    second.data(calls("b", 10, 12) + checkpoint(b"two"))
    second.settle()
    second.data(calls("b", 13, 15))
    second.forget()
    second.reply(FrameType.WELCOME, 0)
    assert sent(second) == list(range(1, 16))


def test_a_replay_that_makes_less_than_was_spilled_diverges() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b") + calls("b", 1, 12))
    second = driven.crash()
    second.connect(HELLO)
    second.data(attach("b") + calls("b", 1, 6) + checkpoint(b"two"))
    assert isinstance(second.stop.error, DivergenceError)
    assert "messages for 'b', the replay made only 6" in str(second.stop.error)


def test_a_checkpoint_holds_what_is_in_memory_and_relies_on_the_log_for_the_rest() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b") + calls("b", 1, 12))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"later"))
    header = driven.store.summary().checkpoints[-1]
    kept = {
        number
        for batch in header.unacknowledged["b"]
        for number in range(batch.first_position, 1 + batch.last_position)
    }
    assert {1, 2, 3, 4} <= kept < set(range(1, 13))
    driven.data(calls("b", 13, 14))
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + calls("b", 13, 14) + checkpoint(b"two"))
    assert stream(second)["waiting_bytes"] == 14 * len(rpc(large(1)))
    second.forget()
    second.reply(FrameType.WELCOME, 0)
    assert sent(second) == list(range(1, 15))


def test_a_checkpoint_whose_outputs_the_log_has_lost_is_no_way_to_lose_them() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b") + calls("b", 1, 12))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"later"))
    driven.store.backend.durable.delete(Span("spilled"))
    second = driven.crash()
    second.recover()
    second.reply(FrameType.WELCOME, 4)
    assert "the message 5 to 'b' waits to be sent and is not in the log" in str(second.stop.error)


def test_what_is_spilled_of_a_part_that_is_cut_off_goes() -> None:
    driven = Driven.started(limits=SMALL)
    driven.batch("t1", 1, rpc(1))  # record 1
    driven.data(attach("b") + calls("b", 1, 6))
    driven.batch("t2", 2, rpc(2))  # record 2
    driven.data(calls("b", 7, 12))
    assert driven.store.summary().spilled["b"][-1].last_position >= 11
    driven.store.cut(2)
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + calls("b", 1, 6))
    second.reply(FrameType.WELCOME, 2)
    second.data(checkpoint(b"cut"))
    assert second.phase is Phase.NORMAL, second.reports
    assert all(extent.last_position <= 6 for extents in second.store.summary().spilled.values() for extent in extents)
    found = [3, 4, 5, 6]
    second.data(calls("b", 21, 26))
    assert sent(second) == [*found, *range(21, 27)]


def test_a_stream_that_the_cut_log_never_makes_again_begins_with_nothing() -> None:
    driven = Driven.started(limits=SMALL)
    driven.batch("t1", 1, rpc(1))
    driven.data(attach("b") + calls("b", 1, 12))
    driven.store.cut(1)
    second = driven.crash()
    second.connect()
    second.data(HELLO)
    second.reply(FrameType.WELCOME, 0)
    second.data(checkpoint(b"cut"))
    assert second.phase is Phase.NORMAL, second.reports
    assert not second.store.summary().spilled
    second.data(attach("b") + calls("b", 21, 26))
    assert sent(second) == list(range(21, 27))


# --- wait, or spill --------------------------------------------------------------------------------------------------


def open_and_full(driven: Driven) -> None:
    """b is up and has just acknowledged something; more waits for it than memory may hold."""
    driven.data(attach("b") + attach("c") + call("b", large(1)))
    driven.reply(FrameType.WELCOME, 0)
    driven.reply(FrameType.TRIM_TO, 1)
    driven.data(calls("b", 2, 9))


def test_for_a_peer_that_takes_what_it_can_the_app_waits() -> None:
    driven = Driven.started(limits=SMALL)
    open_and_full(driven)
    assert pauses(driven) == ["PauseApp"]
    assert not driven.store.summary().spilled
    assert driven.machine.view.status(driven.now_ns)["held_up_for"] == ["b"]
    assert any(
        "the app is slowed down: it calls 'b' faster" in message for level, message in driven.reports if level == "info"
    )
    assert not [one for one in driven.reports if one[0] in ("warning", "error")]
    driven.reply(FrameType.TRIM_TO, 4)
    assert pauses(driven) == ["PauseApp", "ResumeApp"]


def test_for_others_that_were_called_long_ago_nothing_is_spilled() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("c") + call("c", 1))
    driven.reply(FrameType.WELCOME, 0, destination="c")
    driven.now_ns += driven.machine.state.limits.recent_ns
    open_and_full(driven)
    assert pauses(driven) == ["PauseApp"]
    assert not driven.store.summary().spilled


def test_a_peer_that_stops_to_take_anything_holds_nobody_up() -> None:
    driven = Driven.started(limits=SMALL)
    open_and_full(driven)
    (wake,) = driven.of(ef.WakeAt)[-1:]
    assert wake.time_ns == driven.now_ns + driven.machine.state.limits.recent_ns
    driven.now_ns = wake.time_ns
    driven.handle(ev.Tick())
    assert pauses(driven) == ["PauseApp", "ResumeApp"]
    assert driven.store.summary().spilled


def test_while_others_are_called_the_app_does_not_wait_for_a_slow_one() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("c") + call("c", 1))
    driven.reply(FrameType.WELCOME, 0, destination="c")
    open_and_full(driven)
    assert pauses(driven) == []
    assert driven.store.summary().spilled


def test_what_was_spilled_shrinks_while_the_app_goes_on() -> None:
    """For each two bytes that the receiver takes, one may be spilled."""
    driven = Driven.started(limits=replace(SMALL, spill_limit_bytes=1 << 20))
    driven.data(attach("b") + calls("b", 1, 60))
    driven.reply(FrameType.WELCOME, 0)
    number = 60
    most_bytes = stream(driven)["waiting_bytes"]
    for _ in range(200):
        frames = driven.frames(FrameType.BATCH)
        driven.reply(FrameType.TRIM_TO, frames[-1].position + frames[-1].count - 1)
        while not driven.machine.view.status(driven.now_ns)["app_paused"]:
            number += 1
            driven.data(call("b", large(number)))
        if not stream(driven)["spilled_bytes"]:
            break
        assert stream(driven)["waiting_bytes"] <= most_bytes + 600
    assert not stream(driven)["spilled_bytes"]
    assert number > 80, "the app went on meanwhile"


# --- what is said ----------------------------------------------------------------------------------------------------


def lines(driven: Driven) -> list[str]:
    return [message for level, message in driven.reports if level in ("info", "warning") and "'b'" in message]


def test_each_change_is_told_once() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b") + calls("b", 1, 9))
    assert ["'b' takes no messages" in line and "further ones go to disk" in line for line in lines(driven)] == [True]
    for number in range(10, 40):
        driven.data(call("b", large(number)))
        if pauses(driven):
            break
    assert "the app is held up" in lines(driven)[1]
    assert len(lines(driven)) == 2
    driven.reply(FrameType.WELCOME, 0)
    driven.effects[:] = [effect for effect in driven.effects if not isinstance(effect, ef.Report)]
    sent(driven)
    assert lines(driven) == [], "it may be only for a moment"
    driven.now_ns += 11 * SECOND_NS
    driven.handle(ev.Tick())
    assert lines(driven) == ["all messages that wait for 'b' are in memory again"]
    driven.handle(ev.Tick())
    assert len(lines(driven)) == 1


# --- windows ---------------------------------------------------------------------------------------------------------


def test_the_sender_obeys_the_window_that_it_is_granted() -> None:
    driven = Driven.started(limits=Limits(peer_frame_bytes=10))
    driven.data(attach("b") + calls("b", 1, 9))
    size_bytes = len(rpc(large(1)))
    driven.reply(FrameType.WELCOME, 0, count=2 * size_bytes + 5)
    assert [frame.position for frame in driven.frames(FrameType.BATCH)] == [1, 2]
    assert stream(driven)["window_bytes"] == 2 * size_bytes + 5
    driven.reply(FrameType.TRIM_TO, 1, count=4 * size_bytes)
    assert [frame.position for frame in driven.frames(FrameType.BATCH)] == [1, 2, 3, 4, 5]
    driven.reply(FrameType.TRIM_TO, 4, count=1)
    assert [frame.position for frame in driven.frames(FrameType.BATCH)] == [1, 2, 3, 4, 5]
    driven.reply(FrameType.TRIM_TO, 5, count=1)
    assert [frame.position for frame in driven.frames(FrameType.BATCH)][-1] == 6, "one that is too large goes alone"
    driven.reply(FrameType.TRIM_TO, 6)
    assert stream(driven)["window_bytes"] == Limits().assumed_window_bytes, "a receiver that says none"


def test_a_batch_of_the_app_is_cut_to_the_window() -> None:
    driven = Driven.started()
    driven.data(attach("b"))
    payload = b"".join(encode_outgoing_rpc("b", 3, 1, large(number)) for number in range(1, 10))
    driven.data(payload)
    size_bytes = len(rpc(large(1)))
    driven.reply(FrameType.WELCOME, 0, count=3 * size_bytes)
    frames = driven.frames(FrameType.BATCH)
    assert sum(len(frame.payload) for frame in frames) == 3 * size_bytes
    assert sent(driven) == list(range(1, 10))


def test_the_budget_is_shared_by_those_that_send() -> None:
    limits = Limits(receive_budget_bytes=1000, grant_bytes_min=100, peer_window_bytes=800)
    grants = WindowGrants(limits)
    assert grants.window_bytes("b", 0) == 800, "no more than a window is"
    grants.sent("b", 0)
    grants.sent("c", 1)
    assert grants.window_bytes("b", 0) == 500
    assert grants.window_bytes("d", 0) == 333, "it is about to send"
    assert grants.window_bytes("b", 600) == 200, "what waits for the disk counts"
    assert grants.window_bytes("b", 5000) == 100, "never shut out"
    grants.sent("b", limits.active_ns + 1)
    assert grants.window_bytes("b", 0) == 800, "c is silent for long"
    assert grants.granted_bytes == {"b": 800, "d": 333}


def test_a_welcome_and_an_acknowledgement_say_the_window() -> None:
    driven = Driven.started(limits=Limits(receive_budget_bytes=1 << 20))
    driven.greeted("h")
    driven.batch("t", 1, rpc(1))
    replies = [effect.frame for effect in driven.of(ef.ReplyToPeer)]
    assert [(frame.frame_type, frame.count) for frame in replies] == [
        (FrameType.WELCOME, 1 << 20),
        (FrameType.TRIM_TO, 1 << 20),
    ]
    assert driven.machine.view.peers()["b"]["granted_bytes"] == 1 << 20


def test_a_disk_that_is_behind_makes_windows_smaller() -> None:
    driven = Driven.started(limits=Limits(receive_budget_bytes=1000, grant_bytes_min=10), auto=False)
    driven.batch("t", 1, rpc(b"x" * 300))
    driven.batch("t", 2, rpc(b"x" * 300))
    driven.greeted("h", sender="c", committer_id=5)
    (welcome,) = [effect.frame for effect in driven.of(ef.ReplyToPeer)]
    assert welcome.count == (1000 - 2 * len(rpc(b"x" * 300))) // 2


# --- a full log ------------------------------------------------------------------------------------------------------

FULL = Limits(log_limit_bytes=1000, disk_free_bytes_min=50)
ROOM, NO_ROOM = LogSpace(500, 1000), LogSpace(2_000_000, 1000)


def refusals(driven: Driven) -> Iterator[tuple[int, str]]:
    for effect in driven.of(ef.ReplyToPeer):
        if effect.frame.frame_type is FrameType.REFUSED:
            yield effect.frame.code, effect.frame.reason


def test_a_full_log_takes_no_input_from_peers_until_there_is_room() -> None:
    driven = Driven.started(limits=FULL)
    driven.batch("t1", 1, rpc(1))
    driven.handle(ev.LogMeasured(NO_ROOM))
    driven.forget()
    driven.batch("t2", 2, rpc(2))
    driven.greeted("h")
    found = list(refusals(driven))
    assert [code for code, _ in found] == [RefusedCode.LOG_FULL] * 2
    reason = "'a' is full: its log takes 2 MiB, log_limit_mb is 0 MiB; its app must catch up, or the limit be raised"
    assert found[0][1] == reason
    assert driven.reports == [], "it was told once, for all"
    assert driven.machine.view.status(0)["log"]["full"] == reason  # type: ignore[index]
    driven.handle(ev.LogMeasured(LogSpace(950, 1000)))
    driven.batch("t3", 2, rpc(2))
    assert len(list(refusals(driven))) == 3, "not at once, or it would go to and fro"
    driven.handle(ev.LogMeasured(ROOM))
    driven.batch("t4", 2, rpc(2))
    assert ("t4", FrameType.TRIM_TO, 2) in driven.replies
    assert any("the log has room again" in message for _, message in driven.reports)
    assert driven.machine.view.status(0)["log"]["full"] is None  # type: ignore[index]


def test_a_disk_with_too_little_left_counts_as_well() -> None:
    driven = Driven.started(limits=FULL)
    driven.handle(ev.LogMeasured(LogSpace(10, 49)))
    assert any("its disk has 0 MiB left, disk_free_mb is 0 MiB" in message for _, message in driven.reports)


def test_impulses_wait_for_room_and_keep_their_order() -> None:
    driven = Driven.started(limits=FULL)
    driven.handle(ev.LogMeasured(NO_ROOM))
    sequence_id = driven.machine.view.status(0)["sequence_id"]
    driven.data(call("", 1, rpc_type=2) + call("", 2, rpc_type=2))
    assert driven.machine.view.status(0)["sequence_id"] == sequence_id
    assert driven.machine.view.status(0)["impulses"] == 0
    driven.data(call("", 3))  # a call to itself is what it makes of its input: that goes on
    assert driven.machine.view.status(0)["sequence_id"] == sequence_id + 1  # type: ignore[operator]
    driven.handle(ev.LogMeasured(ROOM))
    assert driven.machine.view.status(0)["impulses"] == 2


def test_impulses_that_wait_are_forgotten_with_their_app() -> None:
    driven = Driven.started(limits=FULL)
    driven.handle(ev.LogMeasured(NO_ROOM))
    driven.data(call("", 1, rpc_type=2))
    driven.close()
    driven.recover()
    driven.handle(ev.LogMeasured(ROOM))
    assert driven.machine.view.status(0)["impulses"] == 0


def test_an_app_that_floods_a_full_log_with_impulses_is_not_read_but_for_its_checkpoint() -> None:
    driven = Driven.started(limits=replace(FULL, log_pending_bytes=100))
    driven.batch("t1", 1, rpc(1))
    driven.app_took_all()
    driven.handle(ev.LogMeasured(NO_ROOM))
    assert driven.phase is Phase.CHECKPOINTING, "a checkpoint is the way to room"
    driven.data(call("", large(1), rpc_type=2) + call("", large(2), rpc_type=2))
    assert pauses(driven) == []
    driven.data(checkpoint(b"now"))
    driven.app_took_all()
    assert pauses(driven) == ["PauseApp"]
    driven.handle(ev.LogMeasured(NO_ROOM))  # with the checkpoint before still kept, one more is needed
    assert driven.phase is Phase.CHECKPOINTING
    assert pauses(driven) == ["PauseApp", "ResumeApp"]
    driven.data(checkpoint(b"again"))
    driven.app_took_all()
    driven.handle(ev.LogMeasured(NO_ROOM))
    assert driven.phase is Phase.NORMAL, "more of them help nothing"
    driven.handle(ev.LogMeasured(ROOM))
    assert pauses(driven)[-1] == "ResumeApp"


def test_an_app_that_goes_on_sending_impulses_that_wait_is_turned_away() -> None:
    # While it has something to do it must be read, and what it sent was held in memory without end.
    held_bytes = len(rpc(1, rpc_type=2)) + HELD_OVERHEAD_BYTES  # by one: what it takes to keep it counts
    limits = replace(FULL, log_pending_bytes=100, held_impulses_bytes=20 * held_bytes - 100, arguments_bytes_max=100)
    driven = Driven.started(limits=limits)
    driven.batch("t1", 1, rpc(1))
    driven.app_took_all()
    driven.handle(ev.LogMeasured(NO_ROOM))
    assert driven.phase is Phase.CHECKPOINTING
    sent_count = 0
    while not driven.of(ef.CloseApp):
        driven.data(call("", 1, rpc_type=2))
        sent_count += 1
        assert sent_count <= 22
    assert sent_count == 22, "one is taken while no more than the limit waits"
    assert pauses(driven) == []
    (refusal,) = [message for _, message in driven.reports if "broke the protocol" in message]
    assert "impulses that wait take" in refusal
    assert "ImpulsesAccepted" in refusal
    driven.close()
    driven.recover()
    driven.handle(ev.LogMeasured(ROOM))
    assert driven.machine.view.status(0)["impulses"] == 0, "nobody was told that they were accepted"


def test_when_a_checkpoint_makes_room() -> None:
    room = LogCapacity("a", FULL)
    last = CheckpointHeader(1, 100, 0, 0, 0)
    assert not room.wants_checkpoint(200, 200, last), "there is room"
    assert room.measured(NO_ROOM)
    assert not room.measured(NO_ROOM), "no change"
    assert not room.wants_checkpoint(200, 200, None)
    assert not room.wants_checkpoint(124, 200, last), "the app has hardly begun"
    assert room.wants_checkpoint(125, 200, last)
    assert room.wants_checkpoint(200, 200, last)
    assert room.wants_checkpoint(200, 200, last)
    assert not room.wants_checkpoint(200, 200, last)


def test_a_sender_that_is_refused_for_a_full_log_waits_and_says_so_once() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    reason = "'b' is full: its log takes 9 MiB"
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.LOG_FULL, reason=reason)
    assert stream(driven)["state"] == "failed"
    driven.now_ns += 3 * SECOND_NS
    driven.handle(ev.Tick())
    driven.reply(FrameType.REFUSED, 0, code=RefusedCode.LOG_FULL, reason="'b' is full: its log takes 10 MiB")
    told = [(level, message) for level, message in driven.reports if "stream stopped" in message]
    assert told == [
        ("warning", f"stream stopped: 'b' refuses this instance's messages: {reason}; its messages are kept")
    ]
    driven.now_ns += 3 * SECOND_NS
    driven.handle(ev.Tick())
    driven.reply(FrameType.WELCOME, 0)
    assert (stream(driven)["state"], stream(driven)["error"]) == ("open", None)
    assert driven.frames(FrameType.BATCH)


# --- impulses to peers -----------------------------------------------------------------------------------------------


def test_impulses_are_spilled_by_leaving_them_where_they_are() -> None:
    driven = Driven.started(limits=SMALL)
    driven.data(attach("b"))
    for number in range(1, 13):
        driven.data(call("b", large(number), rpc_type=2 if number % 2 else 1))
    spilled = spilled_rows(driven.store)
    assert spilled
    assert all(SEQUENCE_KEY.unpack(key[-8:])[0] % 2 == 0 for key, _ in spilled)
    assert all(decode_batch_count(b"spilled", key, value) == 1 for key, value in spilled)
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + b"".join(call("b", large(number)) for number in range(2, 13, 2)))
    second.data(checkpoint(b"two"))
    second.settle()
    second.reply(FrameType.WELCOME, 0)
    assert sent(second) == list(range(1, 13))


def test_a_stored_row_may_reach_further_than_the_replay_has_got() -> None:
    driven = Driven.started(limits=SMALL)
    driven.batch("t", 1, rpc(1))
    payload = b"".join(rpc(large(number)) for number in range(5, 13))
    driven.store.commit(Transaction(spilled=[SpilledBatch(5, 8, payload, "b")]))
    second = driven.crash()
    second.connect()
    second.data(HELLO + attach("b") + calls("b", 1, 7))
    second.reply(FrameType.WELCOME, 0)
    assert sent(second) == list(range(1, 8))
    second.data(calls("b", 8, 12) + checkpoint(b"two"))
    assert sent(second) == list(range(8, 13))
    assert stream(second)["acknowledged"] == 12
