"""An instance that an operator has paused: what its app gets, what is logged, and how a pause meets other things."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.system_methods import Order
from tests.helpers.core import NOW_NS, Driven, arguments, checkpoint, rpc
from tests.unit.test_core_handlers import working
from tests.unit.test_core_verdicts import answers

PAUSED = {"by": "ann", "since_ns": NOW_NS}


def paused() -> Driven:
    driven = Driven.started()
    driven.handle(ev.InstancePaused("ann", "p"))
    assert answers(driven) == [("p", {"changed": True, "paused": PAUSED})]
    assert driven.reports == [("warning", "paused by ann: input is logged, and the app gets none until it is resumed")]
    driven.forget()
    return driven


def fed(driven: Driven) -> list[bytes]:
    return arguments(bytes(driven.app_bytes))


def test_input_is_durable_and_acknowledged_and_the_app_gets_none_until_somebody_resumes() -> None:
    driven = paused()
    driven.batch("t1", 1, rpc(1))
    driven.batch("t2", 2, rpc(2))
    assert [kind for _, kind, _ in driven.replies][-2:] == [FrameType.TRIM_TO, FrameType.TRIM_TO]
    assert driven.machine.view.status(NOW_NS)["backlog_records"] == 2
    assert driven.machine.view.status(NOW_NS)["paused"] == PAUSED
    assert fed(driven) == []
    driven.now_ns += 2_500_000_000
    driven.handle(ev.InstanceResumed("bob", "r"))
    assert fed(driven) == [rpc(1), rpc(2)]
    assert answers(driven) == [("r", {"changed": True, "paused": PAUSED})]
    assert ("info", "resumed by bob: it was paused by ann for 2.5 s") in driven.reports
    assert driven.machine.view.status(driven.now_ns)["paused"] is None
    driven.forget()
    driven.batch("t3", 3, rpc(3))
    assert fed(driven) == [rpc(3)]


def test_what_is_on_its_way_to_the_disk_at_the_pause_waits_too() -> None:
    driven = Driven.started(auto=False)
    driven.batch("t1", 1, rpc(1))
    driven.handle(ev.InstancePaused("ann", "p"))
    driven.disk_all()
    assert fed(driven) == []
    driven.handle(ev.InstanceResumed("ann", "r"))
    driven.disk_all()
    assert fed(driven) == [rpc(1)]


def test_records_that_are_read_at_the_pause_are_read_again() -> None:
    driven = paused()
    driven.batch("t1", 1, rpc(1))
    driven.unanswered = (ef.ReadRecords,)
    driven.handle(ev.InstanceResumed("ann", "r"))
    (read,) = driven.of(ef.ReadRecords)
    driven.handle(ev.InstancePaused("ann", "p"))
    driven.unanswered = ()
    driven.handle(driven.log.answer(read))
    assert fed(driven) == []
    driven.handle(ev.InstanceResumed("ann", "r"))
    assert fed(driven) == [rpc(1)]


def test_to_pause_or_resume_twice_changes_nothing() -> None:
    driven = paused()
    driven.now_ns += 1
    driven.handle(ev.InstancePaused("bob", "again"))
    assert answers(driven) == [("again", {"changed": False, "paused": PAUSED})]
    driven.handle(ev.InstanceResumed("bob", "r"), ev.InstanceResumed("bob", "r2"))
    assert answers(driven)[-1] == ("r2", {"changed": False, "paused": None})


def test_an_app_that_does_not_work_yet_is_not_paused() -> None:
    driven = Driven()
    driven.handle(ev.InstancePaused("ann", "p"))
    ((_, answer),) = answers(driven)
    assert str(answer["refused"]).startswith("the app of 'a' does not work now (phase: waiting for the app)")
    assert driven.machine.view.status(NOW_NS)["paused"] is None


def test_a_checkpoint_is_taken_where_the_app_stands() -> None:
    driven = paused()
    driven.batch("t1", 1, rpc(1))
    driven.handle(ev.CheckpointRequested())
    assert driven.heard == [(-1, "TAKE_CHECKPOINT")]
    driven.data(checkpoint(b"state two"))
    taken = driven.machine.view.status(NOW_NS)["checkpoint"]
    assert isinstance(taken, dict)
    assert (taken["id"], taken["sequence_id"]) == (2, 0)


def test_a_stop_takes_its_checkpoint_and_the_next_life_gets_what_waited() -> None:
    driven = paused()
    driven.batch("t1", 1, rpc(1))
    driven.handle(ev.StopRequested())
    driven.data(checkpoint(b"state two"))
    driven.close()
    assert driven.stop.error is None
    later = driven.crash()
    assert later.machine.view.status(NOW_NS)["paused"] is None
    later.recover()
    assert later.machine.view.status(NOW_NS)["fed_sequence_id"] == 1


def test_an_app_that_comes_while_it_is_paused_recovers_at_the_resume() -> None:
    driven = paused()
    driven.batch("t1", 1, rpc(1))
    driven.close()
    driven.connect()
    assert driven.phase is Phase.RESTORING
    assert driven.heard == []
    driven.handle(ev.InstanceResumed("ann", "r"))
    assert driven.phase is not Phase.RESTORING
    assert driven.heard


def test_a_stop_of_one_whose_app_has_not_come_back_ends_at_once() -> None:
    driven = paused()
    driven.close()
    driven.connect()
    driven.handle(ev.StopRequested())
    assert driven.stop.error is None


@pytest.mark.parametrize("verb", ["cancel", "signal"])
def test_an_order_that_nobody_would_obey_is_refused(verb: str) -> None:
    driven = working()
    driven.handle(ev.InstancePaused("ann", "p"))
    driven.forget()
    driven.handle(ev.HandlerOrdered(Order(verb, 5, "x", "bob"), "t"))
    ((_, answer),) = answers(driven)
    assert "is paused by ann" in str(answer["refused"])
    assert not driven.of(ef.Commit)
