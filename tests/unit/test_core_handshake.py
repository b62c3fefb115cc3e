"""The app's session as event and effect traces: first start, recovery, loss of the app, a clean stop."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DamagedLogError, InvariantError, LogError
from immortal.coordinator.core.life_cycle.session import TRANSITIONS, UPGRADES, AppSession, Phase, Step
from immortal.coordinator.core.limits import Limits
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.record import verify_record
from tests.helpers.core import (
    HELLO,
    INITIAL,
    NOW_NS,
    Driven,
    arguments,
    attach,
    call,
    checkpoint,
    first_start,
    records,
    rpc,
    time_of,
)
from tests.helpers.memory_logs import damage_chunk

ASKS_FOR_CHECKPOINT = (-1, "TAKE_CHECKPOINT")
PRIMARY = (-1, "TAKE_BECOMING_PRIMARY_CHECKPOINT")
GOODBYE = (-1, "GOODBYE")


def kinds(effects: list[ef.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects if not isinstance(effect, ef.Report)]


def without_check(data: bytes) -> bytes:
    verify_record(data)
    return data[:8] + bytes(8) + data[16:]


# --- first start -----------------------------------------------------------------------------------------------------


def test_a_first_start_is_byte_for_byte_that_of_the_wire_page() -> None:
    driven = Driven()
    driven.connect()
    assert without_check(bytes(driven.app_bytes)).hex(" ") == (
        "04 03 02 01 1a 00 00 00 00 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff 02 0b"
    )
    driven.app_bytes.clear()
    driven.data(bytes.fromhex("12 09 0e 00 00 40 01 05 04 03"))
    assert not driven.app_bytes
    driven.data(bytes.fromhex("04 08 12") + b"123456789")
    assert without_check(bytes(driven.app_bytes)).hex(" ") == (
        "04 03 02 01 22 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 12 09 0e 00 00 40 01 05 04 03"
    )
    (header,) = driven.store.summary().checkpoints
    assert (header.sequence_id, header.size_bytes, header.check) == (-1, 9, crc64(b"123456789"))
    assert driven.phase is Phase.NORMAL


def test_the_steps_of_a_first_start_and_what_waits_for_the_disk() -> None:
    driven = Driven(auto=False)
    assert kinds(driven.connect()) == ["Commit"]  # the new epoch
    assert not driven.app_bytes
    assert kinds(driven.disk()) == ["LoadLog", "SendToApp"]
    assert driven.heard == [PRIMARY]
    assert kinds(driven.data(first_start())) == ["WriteCheckpointChunk", "Commit"]
    assert driven.heard == [PRIMARY], "record 0 was given to the app before it was durable"
    assert kinds(driven.disk()) == []
    assert driven.store.summary().last_sequence_id == -1
    assert kinds(driven.disk()) == ["SendToApp", "Trim"]
    assert driven.heard == [PRIMARY, (0, "INITIAL_MESSAGE")]


def test_record_0_and_the_first_checkpoint_are_one_transaction() -> None:
    driven = Driven()
    driven.connect()
    driven.data(first_start())
    (with_record,) = [commit for commit in driven.of(ef.Commit) if commit.transaction.records]
    assert with_record.transaction.checkpoint is not None
    assert with_record.transaction.extensions == frozenset()


def test_a_crash_before_the_first_checkpoint_is_durable_makes_it_a_first_start_again() -> None:
    driven = Driven(auto=False)
    driven.connect()
    driven.disk_all()
    driven.data(first_start())
    driven.disk()  # the blob's chunk, not the commit
    second = driven.crash()
    second.auto = True
    second.connect()
    assert second.heard == [PRIMARY]
    second.data(first_start(b"other"))
    assert second.heard == [PRIMARY, (0, "INITIAL_MESSAGE")]
    assert second.store.summary().epoch == 2


def test_what_is_left_to_send_is_exactly_what_was_handed_over() -> None:
    # It was counted twice for the first record, so a first app looked stuck for ever.
    driven = Driven()
    driven.connect()
    driven.data(HELLO + first_start())
    driven.handle(ev.AppSent(len(driven.app_bytes)))
    assert driven.machine.view.status(NOW_NS)["unsent_bytes"] == 0


def test_calls_behind_the_first_checkpoint_leave_only_once_it_is_durable() -> None:
    # Sent before, they would be followed by others after a crash, at the same positions.
    driven = Driven(auto=False)
    driven.connect()
    driven.disk_all()
    driven.data(HELLO + attach("b") + first_start() + call("b", 7) + call("", 8))
    driven.reply(FrameType.WELCOME, 0)
    driven.disk()
    assert driven.frames(FrameType.BATCH) == []
    driven.disk_all()
    assert [frame.payload for frame in driven.frames(FrameType.BATCH)] == [rpc(7)]
    assert arguments(bytes(driven.app_bytes)) == [rpc(8)]


def test_an_extended_app_gets_the_time_in_every_record_and_a_base_app_never() -> None:
    extended, base = Driven.started(), Driven.started(hello=False)
    for driven in (extended, base):
        driven.batch("t", 1, rpc(1))
    assert extended.heard == [(1, "RECORD_TIME", "RPC")]
    assert base.heard == [(1, "RPC")]
    assert time_of(records(bytes(extended.app_bytes))[0]) == NOW_NS


def test_time_never_goes_back() -> None:
    driven = Driven.started()
    driven.now_ns = NOW_NS - 10**9
    driven.batch("t", 1, rpc(1))
    driven.now_ns = NOW_NS + 5
    driven.batch("t", 2, rpc(2))
    assert [time_of(record) for record in records(bytes(driven.app_bytes))] == [NOW_NS, NOW_NS + 5]
    second = driven.crash()
    second.now_ns = 3
    second.batch("t", 3, rpc(3))
    second.recover()
    second.batch("t", 4, rpc(4))
    assert time_of(records(bytes(second.app_bytes))[0]) == NOW_NS + 5


@pytest.mark.parametrize("blob", [b"", b"x", b"0123456789" * 50])
@pytest.mark.parametrize("fixed_width", [False, True])
def test_blobs_of_any_size_come_back_unchanged(blob: bytes, fixed_width: bool) -> None:
    driven = Driven(limits=Limits(chunk_size_bytes=64))
    driven.connect()
    announced = encode_message(MessageType.CHECKPOINT, len(blob).to_bytes(8, "little"))
    driven.data(encode_message(MessageType.INITIAL_MESSAGE, INITIAL))
    driven.data(announced + blob if fixed_width else checkpoint(blob))
    second = driven.crash()
    second.connect()
    assert second.heard[0] == blob


# --- recovery --------------------------------------------------------------------------------------------------------


def test_a_recovery_gives_checkpoint_records_and_type_11() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    driven.batch("t", 2, rpc(2), rpc(3))
    given = bytes(driven.app_bytes)
    second = driven.crash()
    second.auto = False
    assert kinds(second.connect(HELLO)) == ["Commit"]
    second.disk()
    assert second.heard == [
        b"state one",
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (1, "RECORD_TIME", "RPC"),
        (2, "RECORD_TIME", "RPC_BATCH"),
        PRIMARY,
    ]
    assert given in bytes(second.app_bytes), "the replay is not what the app had got"
    assert second.phase is Phase.BECOMING_PRIMARY
    second.data(checkpoint(b"state two"))
    assert second.phase is Phase.NORMAL
    second.disk_all()
    assert [header.sequence_id for header in second.store.summary().checkpoints] == [-1, 2]
    assert ("info", "recovered") in second.reports


def test_records_that_come_during_a_replay_follow_type_11() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    second = driven.crash()
    second.auto = False
    second.connect(HELLO)
    second.disk()
    second.batch("t", 2, rpc(2))
    second.disk()
    assert second.heard[-2:] == [PRIMARY, (2, "RECORD_TIME", "RPC")]


def test_input_of_peers_is_taken_and_acknowledged_while_no_app_is_there() -> None:
    driven = Driven.started()
    driven.close()
    driven.forget()
    driven.batch("t", 1, rpc(1))
    assert driven.replies == [("t", FrameType.TRIM_TO, 1)]
    driven.connect(HELLO)
    assert driven.heard == [
        b"state one",
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (1, "RECORD_TIME", "RPC"),
        PRIMARY,
    ]


def with_two_checkpoints() -> Driven:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"newer"))
    driven.batch("t", 2, rpc(2))
    assert [header.checkpoint_id for header in driven.store.summary().checkpoints] == [1, 2]
    return driven


def test_the_newest_checkpoint_is_used() -> None:
    second = with_two_checkpoints().crash()
    second.connect(HELLO)
    assert second.heard == [b"newer", (2, "RECORD_TIME", "RPC"), PRIMARY]


def test_a_damaged_newest_checkpoint_falls_back_and_is_reported() -> None:
    second = with_two_checkpoints().crash()
    damage_chunk(second.store, 2, 0)
    second.bad_checkpoints = {2}
    second.connect(HELLO)
    assert [report for report in second.reports if report[0] == "error"] == [
        ("error", "checkpoint 2 is damaged (bit rot); falling back to the one before")
    ]
    assert second.heard == [
        b"state one",
        (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"),
        (1, "RECORD_TIME", "RPC"),
        (2, "RECORD_TIME", "RPC"),
        PRIMARY,
    ]
    second.data(checkpoint(b"third"))
    assert [header.checkpoint_id for header in second.store.summary().checkpoints][-1] == 3


def test_without_a_usable_checkpoint_the_coordinator_stops_and_says_what_to_do() -> None:
    second = with_two_checkpoints().crash()
    second.bad_checkpoints = {1, 2}
    second.connect()
    error = second.stop.error
    assert isinstance(error, LogError)
    assert "'a' has no usable checkpoint" in str(error)
    assert "immortal log verify a" in str(error)
    assert [level for level, _ in second.reports].count("error") == 2
    assert second.heard == []


def test_a_damaged_record_stops_the_coordinator_with_its_error() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    second = driven.crash()
    second.auto = False
    second.connect()
    error = DamagedLogError("record 1 is damaged", 1)
    second.data(HELLO)
    second.forget()
    second.handle(ev.LogFailed(error))
    assert second.stop.error is error
    assert second.machine.stopped
    assert second.handle(ev.AppData(b"\x00")) == [], "a stopped machine still does something"


@pytest.mark.parametrize("hello", [True, False])
def test_who_asked_for_it_is_told_why_the_coordinator_stops(hello: bool) -> None:
    driven = Driven.started(hello=hello)
    driven.handle(ev.LogFailed(LogError("the disk is full")))
    assert driven.heard == ([(-1, "REFUSAL")] if hello else [])
    assert (b"the coordinator stops: the disk is full" in driven.app_bytes) is hello
    assert kinds(driven.effects)[-1] == "Stop"


@pytest.mark.parametrize("event", [ev.LogFailed(LogError("gone")), ev.StopRequested(), ev.AppData(b"\x01")])
def test_nothing_is_said_inside_a_blob(event: ev.Event) -> None:
    # The app would take it for a part of its state.
    driven = Driven.started()
    second = Driven(driven.store.crash())
    second.unanswered = (ef.ReadCheckpointChunk,)  # the app stays inside the blob
    second.connect()
    second.data(HELLO)
    assert second.phase is Phase.RESTORING
    second.app_bytes.clear()
    second.handle(event)
    assert not second.app_bytes


def test_an_app_may_call_as_soon_as_it_has_its_whole_state() -> None:
    # Found by the simulation: with a blob that fills the window the phase ended a turn too late.
    driven = Driven(limits=Limits(app_window_bytes=40))
    driven.connect()
    driven.data(first_start(b"calls that were held back" * 2))
    driven = driven.crash()
    driven.connect()
    driven.handle(ev.AppSent(driven.unsent_bytes), ev.AppData(attach("b") + call("b", 1)))
    assert driven.phase is Phase.BECOMING_PRIMARY
    assert driven.machine.view.status(0)["outputs"]["b"]["position"] == 1  # type: ignore[index]
    assert all(level != "error" for level, _ in driven.reports)


# --- the app is lost -------------------------------------------------------------------------------------------------


def in_phase(phase: Phase) -> Driven:
    if phase is Phase.FIRST_START:
        driven = Driven()
        driven.connect()
    else:
        driven = with_two_checkpoints()
    if phase is Phase.CHECKPOINTING:
        driven.handle(ev.CheckpointRequested())
        driven.data(checkpoint(b"half a blob")[:-4])
    elif phase in (Phase.LOADING, Phase.RESTORING, Phase.REPLAYING):
        driven = Driven(driven.store.crash(), auto=False)
        driven.unanswered = (ef.LoadLog, ef.CheckCheckpoint, ef.ReadCheckpointChunk, ef.ReadRecords)
        driven.connect()
        if phase is not Phase.LOADING:
            driven.disk()
            driven.handle(ev.LogLoaded(driven.store.summary()))
            driven.handle(ev.CheckpointChecked(2, None))
        if phase is Phase.REPLAYING:
            driven.handle(ev.CheckpointChunkRead(b"newer"))
    elif phase is Phase.BECOMING_PRIMARY:
        driven = driven.crash()
        driven.connect(HELLO)
    assert driven.phase is phase
    return driven


PHASES_WITH_APP = [phase for phase in Phase if phase not in {Phase.WAITING, Phase.FOLLOWING, Phase.STOPPED, *UPGRADES}]


@pytest.mark.parametrize("phase", PHASES_WITH_APP)
def test_an_app_lost_in_any_phase_is_waited_for_and_recovered_under_a_new_epoch(phase: Phase) -> None:
    driven = in_phase(phase)
    before = driven.machine.view.status(NOW_NS)["epoch"]
    driven.forget()
    driven.close()
    assert driven.phase is Phase.WAITING
    assert ("warning", "the app disconnected; waiting for the next one") in driven.reports
    driven.disk_all()
    driven.unanswered = ()
    driven.auto = True
    driven.connect(HELLO)
    status = driven.machine.view.status(NOW_NS)
    assert status["epoch"] == before + 1
    assert driven.store.summary().epoch == before + 1, "the epoch is used before it is durable"
    if phase is Phase.FIRST_START:
        assert driven.heard == [PRIMARY]
        driven.data(first_start())
    else:
        assert driven.heard == [b"newer", (2, "RECORD_TIME", "RPC"), PRIMARY]
        driven.data(checkpoint(b"recovered"))
    assert driven.phase is Phase.NORMAL
    assert not driven.of(ef.Stop)


def test_nothing_of_a_lost_app_reaches_the_next_one() -> None:
    driven = Driven.started(auto=False)
    driven.data(call("", 1, rpc_type=2)[:-2])
    driven.data(b"")
    driven.close()
    assert ("warning", "the app's connection ended in the middle of a message; that message is dropped") in (
        driven.reports
    )
    driven.connect(HELLO)
    driven.disk_all()
    assert driven.heard == [b"state one", (0, "RECORD_TIME", "INSTANCE_NAME", "INITIAL_MESSAGE"), PRIMARY]
    driven.data(checkpoint(b"x"))
    assert driven.phase is Phase.NORMAL


def test_impulses_of_a_lost_app_become_durable_but_are_not_told_to_the_next() -> None:
    driven = Driven.started(auto=False)
    driven.data(call("", 1, rpc_type=2))
    driven.close()
    driven.connect()
    driven.data(HELLO)
    driven.disk_all()
    driven.data(checkpoint(b"x"))
    driven.disk_all()
    assert (1, "RECORD_TIME", "RPC") in driven.heard
    assert (-1, "IMPULSES_ACCEPTED") not in driven.heard


def test_the_log_is_loaded_behind_all_that_the_last_app_has_sent() -> None:
    driven = Driven.started(auto=False)
    driven.data(call("", 1, rpc_type=2))  # on its way
    driven.data(call("", 2, rpc_type=2))  # gathers
    driven.close()
    driven.connect(HELLO)
    driven.disk()
    assert not driven.of(ef.LoadLog)
    driven.disk()
    assert driven.of(ef.LoadLog)
    assert arguments(bytes(driven.app_bytes)) == [rpc(1, rpc_type=2), rpc(2, rpc_type=2)]


def test_closing_without_an_app_does_nothing() -> None:
    assert Driven().close() == []


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_asked_for_by_size() -> None:
    driven = Driven.started(limits=Limits(checkpoint_trigger_bytes=2000))
    driven.batch("t", 1, rpc(b"x" * 1000))
    assert ASKS_FOR_CHECKPOINT not in driven.heard
    driven.batch("t", 2, rpc(b"x" * 1000))
    assert driven.heard.count(ASKS_FOR_CHECKPOINT) == 1
    driven.batch("t", 3, rpc(b"x" * 1000))
    assert driven.heard.count(ASKS_FOR_CHECKPOINT) == 1  # one at a time
    driven.data(checkpoint(b"now"))
    types = [record[1:] for record in driven.heard]
    assert driven.store.summary().checkpoints[-1].sequence_id == types.index(("TAKE_CHECKPOINT",))
    assert [type(effect) for effect in driven.effects].count(ef.Trim) == 1


@pytest.mark.parametrize("event", [ev.CheckpointRequested(), ev.AppData(b"\x02\x02")])
def test_a_checkpoint_on_request(event: ev.Event) -> None:
    driven = Driven.started()
    driven.handle(event)
    assert driven.heard == [ASKS_FOR_CHECKPOINT]
    driven.data(checkpoint(b"now"))
    assert ("info", "checkpoint taken") in driven.reports
    assert driven.heard == [ASKS_FOR_CHECKPOINT]


def test_records_go_on_while_a_checkpoint_is_taken() -> None:
    driven = Driven.started()
    driven.handle(ev.CheckpointRequested())
    driven.batch("t", 1, rpc(1))
    assert driven.heard == [ASKS_FOR_CHECKPOINT, (1, "RECORD_TIME", "RPC")]
    assert driven.replies == [("t", FrameType.TRIM_TO, 1)]


def test_a_checkpoint_holds_the_outputs_as_they_were_when_it_was_announced() -> None:
    driven = Driven.started()
    driven.data(attach("b") + call("b", 1))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"half")[:-1])
    driven.data(b"f" + call("b", 2))
    header = driven.store.summary().checkpoints[-1]
    assert header.outputs["b"].position == 1
    assert header.outputs["b"].checksum == crc64(rpc(1))
    assert [(batch.first_position, batch.payload) for batch in header.unacknowledged["b"]] == [(1, rpc(1))]


def test_a_blob_is_written_in_chunks_before_its_header() -> None:
    driven = Driven.started(auto=False, limits=Limits(chunk_size_bytes=10))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"0123456789abcdefghijKLM"))
    writes = [job for job in driven.jobs if isinstance(job, ef.WriteCheckpointChunk)]
    assert [(job.index, len(job.data)) for job in writes] == [(0, 23)]  # a piece is not cut
    driven.disk_all()
    driven.handle(ev.CheckpointRequested())
    for byte in checkpoint(b"0123456789abcdefghijKLM"):
        driven.data(bytes((byte,)))
    jobs = list(driven.jobs)
    assert [job.data for job in jobs[:-1]] == [b"0123456789", b"abcdefghij", b"KLM"]
    assert isinstance(jobs[-1], ef.Commit)
    assert jobs[-1].transaction.checkpoint is not None


# --- a clean stop ----------------------------------------------------------------------------------------------------


def test_a_stop_takes_a_last_checkpoint_and_says_goodbye() -> None:
    driven = Driven.started(auto=False)
    driven.handle(ev.StopRequested())
    assert driven.heard == [ASKS_FOR_CHECKPOINT]
    driven.batch("t", 1, rpc(1))
    assert driven.replies == [], "input was taken behind the request to stop"
    driven.data(checkpoint(b"last"))
    assert not driven.of(ef.CloseApp)
    driven.disk_all()
    assert driven.heard == [ASKS_FOR_CHECKPOINT, GOODBYE]
    assert kinds(driven.effects)[-3:] == ["Trim", "SendToApp", "CloseApp"]
    assert not driven.machine.stopped, "stopped before the goodbye was sent"
    driven.app_took_all()
    assert driven.stop.error is None
    second = driven.crash()
    second.auto = True
    second.connect(HELLO)
    assert second.heard == [b"last", PRIMARY]


def test_a_base_app_is_stopped_without_a_goodbye() -> None:
    driven = Driven.started(hello=False)
    driven.handle(ev.StopRequested())
    driven.data(checkpoint(b"last"))
    assert driven.heard == [ASKS_FOR_CHECKPOINT]
    assert driven.of(ef.CloseApp)
    driven.close()
    assert driven.stop.error is None


def test_no_record_follows_the_request_for_the_last_checkpoint() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    driven.handle(ev.StopRequested())
    driven.disk_all()
    assert driven.heard == [ASKS_FOR_CHECKPOINT]
    driven.data(checkpoint(b"last"))
    driven.disk_all()
    assert driven.store.summary().checkpoints[-1].sequence_id == 0
    second = driven.crash()
    second.auto = True
    second.connect(HELLO)
    assert second.heard == [b"last", (1, "RECORD_TIME", "RPC"), PRIMARY]


def test_a_stop_during_a_checkpoint_takes_another_one() -> None:
    driven = Driven.started()
    driven.handle(ev.CheckpointRequested())
    driven.handle(ev.StopRequested())
    driven.data(checkpoint(b"asked before"))
    assert not driven.of(ef.CloseApp)
    assert driven.heard == [ASKS_FOR_CHECKPOINT, ASKS_FOR_CHECKPOINT]
    driven.data(checkpoint(b"last"))
    assert driven.heard[-1] == GOODBYE


def test_a_stop_while_becoming_primary_waits_for_both_checkpoints() -> None:
    driven = in_phase(Phase.BECOMING_PRIMARY)
    driven.handle(ev.StopRequested())
    assert not driven.machine.stopped
    driven.data(checkpoint(b"primary"))
    driven.data(checkpoint(b"last"))
    assert driven.heard[-2:] == [ASKS_FOR_CHECKPOINT, GOODBYE]


def test_a_stop_without_an_app_is_at_once() -> None:
    driven = Driven()
    driven.handle(ev.StopRequested())
    assert driven.stop.error is None


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.RESTORING, Phase.REPLAYING, Phase.FIRST_START])
def test_a_stop_before_the_app_is_primary_is_at_once(phase: Phase) -> None:
    driven = in_phase(phase)
    driven.data(HELLO)
    driven.app_bytes.clear()
    driven.handle(ev.StopRequested())
    assert driven.stop.error is None
    if phase is not Phase.RESTORING:
        assert driven.heard == [GOODBYE]


def test_a_second_request_to_stop_changes_nothing() -> None:
    driven = Driven.started()
    driven.handle(ev.StopRequested())
    assert driven.handle(ev.StopRequested()) == []


def test_an_app_that_dies_instead_of_the_last_checkpoint_ends_the_stop() -> None:
    driven = Driven.started()
    driven.handle(ev.StopRequested())
    driven.close()
    assert driven.stop.error is None


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_step_that_the_table_does_not_have_is_an_internal_error() -> None:
    for phase in Phase:
        for step in Step:
            session = AppSession()
            session.phase = phase
            if (phase, step) in TRANSITIONS:
                session.advance(step)
                assert session.phase is TRANSITIONS[phase, step]
            else:
                with pytest.raises(InvariantError, match=step.value):
                    session.advance(step)


def test_every_phase_but_stopped_can_be_left_and_all_are_reached() -> None:
    reached = {Phase.WAITING} | set(TRANSITIONS.values())
    assert reached == set(Phase)
