"""A log that does not answer for a while, and one that another has taken: what the machine does, and what it never
does."""

from __future__ import annotations

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.availability.write_lease import LeaseRole
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.errors import FencedError, LogLockedError, LogUnavailableError
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.presenters.status import problems
from immortal.protocol.peer_frames import FrameType
from tests.helpers.core import Driven, call, checkpoint, rpc

SILENT = LogUnavailableError("the network is down")


def fail_first(driven: Driven) -> list[ef.Effect]:
    """The log does not say what has become of the write that it was asked for first; nor of those behind it."""
    job = driven.jobs[0]
    driven.jobs.clear()
    return driven.handle(ev.LogFailed(SILENT, True, job))


def later(driven: Driven, seconds: float) -> list[ef.Effect]:
    driven.now_ns += int(seconds * 1e9)
    return driven.handle(ev.Tick())


def silent(count: int = 1) -> Driven:
    """``count`` calls of b are on their way to a log that has failed to answer."""
    driven = Driven.started(auto=False)
    for number in range(1, count + 1):
        driven.batch(f"t{number}", number, rpc(number))
    fail_first(driven)
    return driven


def test_an_append_says_where_the_log_has_to_end_and_whose_it_is() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    (commit,) = driven.of(ef.Commit)
    assert (commit.expected_last_sequence_id, commit.fence) == (0, 1)


def test_the_right_to_write_comes_before_the_log_is_loaded() -> None:
    machine = Machine(Components("a"))
    assert machine.view.status(0)["role"] == LeaseRole.STARTING.value
    machine.handle([ev.Started()], 1)
    assert list(machine.handle([ev.WriteLeaseGranted(7)], 1)) == []
    assert list(machine.advance()) == [ef.LoadLog(with_clients=True)]
    store = MemoryLogStore(5)
    machine.handle([ev.LogLoaded(store.summary(), store.clients())], 1)
    status = machine.view.status(0)
    assert (status["role"], status["committer_id"], machine.state.write_lease.fence) == (LeaseRole.WRITING.value, 5, 7)


def test_a_right_that_another_has_ends_who_is_not_to_follow() -> None:
    machine = Machine(Components("a"))
    machine.handle([ev.Started()], 1)
    (stop,) = machine.handle([ev.WriteLeaseHeld("process 77")], 1)
    assert isinstance(stop, ef.Stop)
    assert isinstance(stop.error, LogLockedError)
    assert "process 77" in str(stop.error)


def test_it_is_fenced_and_stops_with_the_name_of_who_writes() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t", 1, rpc(1))
    driven.forget()
    effects = driven.handle(ev.Fenced(driven.jobs[0].ticket, "process 77"))  # type: ignore[union-attr]
    assert isinstance(driven.stop.error, FencedError)
    assert str(driven.stop.error).startswith("fenced by process 77 at epoch 1: ")
    assert driven.stop.error.holder == "process 77"
    assert not [one for one in effects if isinstance(one, ef.SendToPeer | ef.ReplyToPeer)]
    assert driven.handle(ev.Committed(3)) == [], "nothing follows"


def test_a_silent_log_is_told_once_and_holds_back_what_comes() -> None:
    driven = silent()
    driven.batch("t2", 2, rpc(2))
    assert [level for level, text in driven.reports if "does not answer, trying again" in text] == ["warning"]
    assert not driven.jobs, "nothing is written before it is known what was"
    assert driven.replies == []
    driven.now_ns += 2_000_000_000
    assert driven.machine.view.status(driven.now_ns)["log_silent_s"] == 2.0
    assert not driven.of(ef.Stop)


def test_what_the_log_has_is_durable_and_is_not_written_again() -> None:
    driven = silent()
    (commit,) = driven.of(ef.Commit)
    driven.store.commit(commit.transaction)
    driven.unanswered = (ef.ReadTail,)
    assert ef.ReadTail() in later(driven, 0.05)
    driven.forget()
    driven.handle(ev.TailRead(commit.ticket, 1))
    assert driven.replies == [("t1", FrameType.TRIM_TO, 1)]
    assert driven.of(ef.Commit) == []
    assert ("info", "the log answers again") in driven.reports
    assert driven.machine.view.status(driven.now_ns)["log_silent_s"] is None


def test_what_the_log_has_not_is_written_again_the_same_bytes() -> None:
    driven = silent()
    (commit,) = driven.of(ef.Commit)
    driven.unanswered = (ef.ReadTail,)
    later(driven, 0.05)
    driven.forget()
    driven.handle(ev.TailRead(commit.ticket - 1, 0))
    assert driven.of(ef.Commit) == [commit]
    assert driven.replies == []
    driven.disk()
    assert driven.replies == [("t1", FrameType.TRIM_TO, 1)]


def test_it_is_asked_again_after_longer_and_longer_pauses() -> None:
    driven = silent()
    driven.unanswered = (ef.ReadTail,)
    pauses = []
    for _ in range(8):
        due_ns = driven.machine.state.log_requests.due_ns
        assert due_ns is not None
        pauses.append(round((due_ns - driven.now_ns) / 1e9, 3))
        later(driven, (due_ns - driven.now_ns) / 1e9)
        driven.handle(ev.LogFailed(SILENT, True, ef.ReadTail()))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert len([text for _, text in driven.reports if "does not answer" in text]) == 1


def test_a_read_that_fails_for_a_while_is_asked_again() -> None:
    driven = Driven.started()
    driven.batch("t", 1, rpc(1))
    driven = driven.crash()
    driven.unanswered = (ef.LoadLog,)
    driven.connect()
    driven.disk_all()
    asked = driven.of(ef.LoadLog)[-1]
    driven.handle(ev.LogFailed(SILENT, True, asked))
    assert driven.phase is Phase.LOADING
    driven.unanswered = ()
    later(driven, 0.05)
    assert driven.phase is Phase.REPLAYING
    assert ("info", "the log answers again") in driven.reports


def test_chunks_of_a_checkpoint_are_written_again_in_front_of_their_header() -> None:
    driven = Driven.started(auto=False)
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"a state"))
    chunk, header = driven.jobs
    assert isinstance(chunk, ef.WriteCheckpointChunk)
    fail_first(driven)
    driven.forget()
    later(driven, 0.05)
    assert [type(one) for one in driven.effects if isinstance(one, ef.WriteCheckpointChunk | ef.Commit)] == [
        ef.WriteCheckpointChunk,
        ef.Commit,
    ]
    driven.disk_all()
    assert any("checkpoint taken" in text for _, text in driven.reports)
    assert header is not chunk


def test_several_appends_are_under_way_where_the_log_takes_them() -> None:
    driven = Driven.started(auto=False)
    driven.machine.state.log.appends_max = 3
    for number in range(1, 6):
        driven.batch(f"t{number}", number, rpc(number))
    commits = driven.of(ef.Commit)
    assert [commit.expected_last_sequence_id for commit in commits] == [0, 1, 2]
    driven.disk()
    assert [token for token, _, _ in driven.replies] == ["t1"], "they are answered in their order"


def test_an_app_that_calls_on_is_slowed_while_the_log_is_silent() -> None:
    driven = silent()
    limit = driven.machine.state.limits.log_pending_bytes
    driven.data(call("a", bytes(limit + 1)))
    assert driven.of(ef.PauseApp)


def test_an_operator_sees_since_when_it_is_silent() -> None:
    driven = silent()
    driven.now_ns += 5_000_000_000
    row = driven.machine.view.status(driven.now_ns)
    assert problems(row) == ["a: the log has not answered for 5 s, trying again"]
