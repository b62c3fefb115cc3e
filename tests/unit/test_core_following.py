"""A machine that follows a log which another writes, and takes it over: beside the machine that writes it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.availability.write_lease import LeaseRole
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.errors import DivergenceError, FencedError, FollowerError
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction, VersionStart
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.protocol.extensions import Hello, encode_hello
from immortal.protocol.messages import RpcType
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind, encode_verdict
from tests.helpers.core import EXTENSIONS, HELLO, Driven, arguments, attach, call, checkpoint, rpc
from tests.unit.test_core_verdicts import told

ALL_HELLO = encode_hello(Hello(EXTENSIONS, "test"))


def both() -> tuple[Driven, Driven]:
    """A writer in normal processing, and a follower of its log whose app is where the writer's is."""
    writer = Driven.started()
    writer.open_stream()
    follower = Driven(writer.store, follow=True)
    follower.connect(HELLO)
    follower.data(attach("b") + attach("c"))
    return writer, follower


def record(writer: Driven, position: int) -> None:
    writer.batch(f"t{position}", position, rpc(position))
    writer.app_took_all()


def test_it_is_fed_what_the_log_has_and_what_comes() -> None:
    writer, follower = both()
    assert follower.phase is Phase.FOLLOWING
    assert follower.machine.state.write_lease.holder == "process 77"
    for position in (1, 2):
        record(writer, position)
        follower.look()
    assert arguments(bytes(follower.app_bytes)) == [rpc(1), rpc(2)]
    status = follower.machine.view.status(0)
    assert (status["role"], status["follows"], status["phase"]) == ("following", "process 77", "following")
    assert (status["sequence_id"], status["backlog_records"]) == (2, 0)


def test_what_its_app_makes_goes_nowhere_and_nothing_is_written() -> None:
    writer, follower = both()
    record(writer, 1)
    follower.look()
    follower.forget()
    follower.data(call("b", 1) + call("b", 2) + call("c", 3))
    assert not [one for one in follower.effects if isinstance(one, ef.SendToPeer | ef.OpenPeer | ef.Commit)]
    assert follower.jobs == writer.jobs


def test_it_takes_no_checkpoint_and_answers_no_peer() -> None:
    _, follower = both()
    follower.forget()
    follower.handle(ev.CheckpointRequested())
    follower.greeted("hello")
    assert follower.effects == []


def test_what_the_writers_log_says_was_acknowledged_leaves_its_memory() -> None:
    writer, follower = both()
    follower.data(call("b", 1))
    record(writer, 1)  # its mark covers the call
    follower.look()
    assert follower.machine.components.peers.outbound.streams["b"].memory_bytes > 0
    writer.reply(FrameType.TRIM_TO, 1)
    record(writer, 2)
    follower.look()
    assert follower.machine.components.peers.outbound.streams["b"].memory_bytes == 0


def test_one_whose_app_waits_for_room_looks_at_what_the_log_says_by_now() -> None:
    """It gets no record that would tell: its app, which is not read, reads nothing either."""
    limits = Limits(output_memory_bytes=100, spill_row_bytes=50, app_window_bytes=1)
    writer = Driven.started()
    writer.open_stream()
    follower = Driven(writer.store, follow=True, limits=limits)
    follower.connect(HELLO)
    follower.data(attach("b"))
    while follower.machine.view.status(0)["unsent_bytes"]:
        follower.app_took_all()
    for _ in range(2):
        writer.data(call("b", bytes(90)))
    record(writer, 1)
    follower.look()  # the app is given it, and takes nothing
    for _ in range(2):
        follower.data(call("b", bytes(90)))
    assert ef.PauseApp() in follower.effects
    wake = follower.of(ef.WakeAt)[-1]
    record(writer, 2)
    follower.forget()
    follower.look()
    assert follower.of(ef.ReadRecords) == follower.of(ef.ResumeApp) == []
    writer.reply(FrameType.TRIM_TO, 2)
    record(writer, 3)
    follower.now_ns = wake.time_ns
    follower.handle(ev.Tick())
    assert follower.of(ef.ResumeApp) == [ef.ResumeApp()]


def test_one_that_has_read_all_looks_too_while_its_app_waits_for_room() -> None:
    """The next record may be long in coming, and what its writer has sent on by now is acknowledged without one."""
    limits = Limits(output_memory_bytes=100, spill_row_bytes=50)
    writer = Driven.started()
    writer.open_stream()
    follower = Driven(writer.store, follow=True, limits=limits)
    follower.connect(HELLO)
    follower.data(attach("b"))
    for driven in (writer, follower):
        for _ in range(2):
            driven.data(call("b", bytes(90)))
    record(writer, 1)
    follower.look()
    assert ef.PauseApp() in follower.effects
    assert follower.machine.state.session.reading, "it waits for record 2"
    follower.now_ns = follower.of(ef.WakeAt)[-1].time_ns
    follower.forget()
    follower.handle(ev.Tick())
    assert follower.of(ef.LoadLog) == [ef.LoadLog()]


def test_a_call_takes_its_place_behind_an_impulse_that_is_read_later() -> None:
    """The writer's app sends an impulse while it handles a record: what comes of that record stands behind it."""
    writer, follower = both()
    follower.data(call("b", 1))
    record(writer, 1)
    follower.look()
    follower.data(call("b", 2))  # of record 1; which place it has is not known yet
    assert follower.machine.components.peers.outbound.streams["b"].position == 1
    writer.data(call("b", 7, rpc_type=RpcType.IMPULSE) + call("b", 2))
    record(writer, 2)
    follower.look()
    stream = follower.machine.components.peers.outbound.streams["b"]
    assert (stream.position, stream.mark) == (3, writer.machine.components.peers.outbound.streams["b"].mark)


def test_it_takes_over_at_any_record_under_an_epoch_of_its_own() -> None:
    writer, follower = both()
    follower.data(call("b", 1))
    record(writer, 1)
    record(writer, 2)
    follower.forget()
    follower.take_over()
    assert follower.phase is Phase.NORMAL, "the log was read to its end, and no checkpoint is waited for"
    assert arguments(bytes(follower.app_bytes)) == [rpc(1), rpc(2)]
    (hello,) = follower.frames(FrameType.HELLO)
    assert (hello.receiver, hello.epoch, hello.position) == ("b", 2, 0)
    commits = follower.of(ef.Commit)
    assert [(commit.transaction.epoch, commit.fence) for commit in commits] == [(2, 2)]
    kinds = [type(one) for one in follower.effects]
    assert kinds.index(ef.Commit) < kinds.index(ef.SendToPeer), "the epoch is durable before anybody hears of it"
    assert follower.machine.state.write_lease.role is LeaseRole.WRITING
    follower.reply(FrameType.WELCOME, 0)
    assert follower.frames(FrameType.BATCH)[0].count == 1


def test_it_is_not_promoted_before_its_app_has_made_all_that_the_marks_say() -> None:
    writer, follower = both()
    record(writer, 1)  # with the mark of the writer's first call, which the follower's app has not made yet
    follower.take_over()
    assert follower.phase is Phase.REPLAYING
    follower.data(call("b", 1))
    assert follower.phase is Phase.NORMAL


def test_one_that_makes_other_calls_says_so_and_is_not_promoted() -> None:
    writer, follower = both()
    follower.data(call("b", 99))
    record(writer, 1)
    follower.look()
    assert isinstance(follower.stop.error, DivergenceError)


def test_a_right_that_comes_while_no_app_is_there_makes_it_the_writer_at_once() -> None:
    writer = Driven.started()
    follower = Driven(writer.store, follow=True)
    follower.take_over()
    assert follower.machine.state.write_lease.role is LeaseRole.WRITING
    follower.connect(HELLO)
    assert follower.machine.state.epoch == 2
    assert follower.phase is Phase.BECOMING_PRIMARY


@pytest.mark.parametrize("problem", [None, "that log is closed"])
def test_a_checkpoint_that_was_chosen_before_the_right_came_is_chosen_anew(problem: str | None) -> None:
    """Its header reads from the log as the follower had it open."""
    writer = Driven.started()
    follower = Driven(writer.store, follow=True)
    follower.unanswered = (ef.CheckCheckpoint,)
    follower.connect(HELLO)
    (check,) = follower.of(ef.CheckCheckpoint)
    follower.forget()
    follower.unanswered = ()
    follower.held_by = ""
    follower.handle(ev.WriteLeaseGranted(2), ev.CheckpointChecked(check.header.checkpoint_id, problem))
    asked = [
        one for one in follower.effects if isinstance(one, ef.LoadLog | ef.CheckCheckpoint | ef.ReadCheckpointChunk)
    ]
    assert asked[0] == ef.LoadLog(with_clients=True)
    assert [type(one) for one in asked[1:]] == [ef.LoadLog, ef.CheckCheckpoint, ef.ReadCheckpointChunk]
    assert follower.phase is Phase.BECOMING_PRIMARY
    assert not [text for level, text in follower.reports if level == "error"]


def test_it_begins_anew_where_the_log_was_trimmed_before_it() -> None:
    _, follower = both()
    summary = follower.store.summary()

    behind = replace(summary, first_sequence_id=40, last_sequence_id=41)
    follower.handle(ev.RecordsRead([], behind))
    assert follower.of(ef.CloseApp)
    assert any("begins with record 40 by now" in text for _, text in follower.reports)
    assert not follower.of(ef.Stop)


def test_another_version_of_the_app_in_the_log_ends_it() -> None:
    writer, follower = both()
    writer.store.commit(Transaction(version=VersionStart(2, 0, "x")))
    record(writer, 1)
    follower.look()
    assert isinstance(follower.stop.error, FollowerError)
    assert "goes on with version 2 of the app behind record 0" in str(follower.stop.error)


def test_what_an_app_says_before_the_log_is_loaded_is_judged_once_it_is() -> None:
    """An app of the base protocol, at the log of one that is none."""
    writer = Driven.started()
    machine = Machine(Components("a"))
    machine.handle([ev.Started(), ev.WriteLeaseGranted(1), ev.AppConnected(), ev.AppData(attach("b"))], 1)
    machine.advance()
    effects = list(machine.handle([ev.LogLoaded(writer.store.summary(), writer.store.clients())], 1))
    assert [one for one in effects if isinstance(one, ef.CloseApp)], "it is turned away"


def test_a_stop_before_the_log_is_loaded_says_nothing_to_the_app() -> None:
    machine = Machine(Components("a"))
    machine.handle([ev.Started(), ev.AppConnected(), ev.AppData(HELLO)], 1)
    effects = list(machine.handle([ev.StopRequested()], 1))
    assert [type(one) for one in effects] == [ef.Stop]


def failed(sequence_id: int) -> bytes:
    """What an app says of a message that has failed."""
    return encode_verdict(Verdict(sequence_id, 0, VerdictKind.UNDONE, "ValueError", "no", method="m"))


def following_failures() -> tuple[Driven, Driven]:
    """As both(), of apps that take verdicts; both have record 1."""
    store = Driven.started().store
    writer = Driven(store)
    writer.connect(ALL_HELLO)
    writer.data(checkpoint(b"state"))
    writer.settle()
    follower = Driven(store, follow=True)
    follower.connect(ALL_HELLO)
    record(writer, 1)
    follower.look()
    return writer, follower


def test_a_message_that_fails_for_both_stands_in_no_way() -> None:
    writer, follower = following_failures()
    follower.data(failed(1))
    assert follower.of(ef.Commit) == []
    writer.data(failed(1))
    follower.take_over()
    assert follower.phase is Phase.NORMAL
    assert [commit.transaction.verdicts for commit in follower.of(ef.Commit)] == [[]]


def test_a_message_that_fails_for_one_alone_keeps_that_state_from_being_promoted() -> None:
    for of_writer in (True, False):
        writer, follower = following_failures()
        (writer if of_writer else follower).data(failed(1))
        follower.take_over()
        assert follower.of(ef.CloseApp), of_writer
        assert follower.phase is not Phase.NORMAL
        follower.close()
        follower.connect(ALL_HELLO)
        assert follower.phase is Phase.BECOMING_PRIMARY, "it recovers as any"


def test_a_message_that_the_writers_app_died_of_makes_it_begin_anew() -> None:
    writer, follower = following_failures()
    killed = Verdict(1, 0, VerdictKind.KILLED, "ProcessEnded", "it ended the app's process 3 times")
    writer.store.commit(Transaction(verdicts=[killed]))
    record(writer, 2)
    follower.look()
    assert follower.of(ef.CloseApp)
    assert any("passed over by now" in text for _, text in follower.reports)


def test_a_verdict_on_a_record_to_come_is_told_before_it() -> None:
    writer, follower = following_failures()
    refused = Verdict(2, 0, VerdictKind.REFUSED, "", "no", Cause.FORBIDDEN)
    writer.store.commit(Transaction(verdicts=[refused]))
    record(writer, 2)
    follower.forget()
    follower.look()
    assert [entry[1] for entry in follower.heard if isinstance(entry, tuple)] == ["VERDICTS", "RECORD_TIME"]
    assert told(follower) == [refused]


@pytest.mark.parametrize("writer_is_first", [True, False])
def test_the_following_app_hears_that_the_log_has_its_verdict(writer_is_first: bool) -> None:
    """So it does not report a failure that the writer's app has reported."""
    writer, follower = following_failures()
    follower.forget()
    if not writer_is_first:
        follower.data(failed(1))
        assert told(follower) == []
    writer.data(failed(1))
    record(writer, 2)
    follower.look()
    if writer_is_first:
        follower.data(failed(1))
    assert [verdict.key for verdict in told(follower)] == [(1, 0, 0, 0)]


def test_a_log_that_grows_without_verdicts_tells_none() -> None:
    writer, follower = following_failures()
    follower.forget()
    record(writer, 2)
    follower.look()
    assert [entry[1] for entry in follower.heard if isinstance(entry, tuple)] == ["RECORD_TIME"]


def test_a_writer_that_reads_a_later_epoch_in_its_log_is_fenced() -> None:
    """It had nothing to write meanwhile: what it reads tells it."""
    writer = Driven.started()
    writer.close()
    writer.unanswered = (ef.LoadLog,)
    writer.connect(HELLO)
    writer.handle(ev.LogLoaded(replace(writer.store.summary(), epoch=9)))
    assert isinstance(writer.stop.error, FencedError)


def test_who_hands_over_ends_once_all_it_took_is_durable_and_without_a_checkpoint() -> None:
    writer = Driven.started(auto=False)
    writer.disk_all()
    writer.open_stream()
    writer.disk_all()
    writer.forget()
    writer.batch("t1", 1, rpc(1))
    writer.handle(ev.StopRequested(hands_over=True))
    assert writer.of(ef.PauseApp)
    assert not writer.of(ef.Stop)
    writer.batch("t2", 2, rpc(2))  # that comes too late: its sender keeps it
    writer.disk_all()
    assert writer.stop.error is None
    assert writer.store.last_sequence_id == 1
    assert bytes(writer.app_bytes).count(rpc(1)) == 0  # whoever goes on gives it to its app
    assert not any(isinstance(commit.transaction.checkpoint, CheckpointHeader) for commit in writer.of(ef.Commit))


def test_who_has_followed_goes_on_where_the_log_was_handed_over() -> None:
    writer, follower = both()
    follower.data(call("b", 1))
    record(writer, 1)
    follower.look()
    writer.handle(ev.StopRequested(hands_over=True))
    assert writer.stop.error is None
    follower.take_over()
    assert follower.phase is Phase.NORMAL
    assert arguments(bytes(follower.app_bytes)) == [rpc(1)]


def test_one_whose_app_does_not_work_hands_nothing_over() -> None:
    """Nobody could follow it any better than from its last checkpoint: it stops as ever."""
    writer = Driven.started()
    writer.close()
    assert not writer.machine.view.can_hand_over
    writer.handle(ev.StopRequested(hands_over=True))
    assert writer.stop.error is None
