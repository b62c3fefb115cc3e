"""The parts of a turn: what waits for nothing comes first, what can wait comes last."""

from __future__ import annotations

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from tests.helpers.core import Driven, arguments, call, rpc


def kinds(effects: list[ef.Effect]) -> list[type[ef.Effect]]:
    return [type(effect) for effect in effects if not isinstance(effect, ef.Report)]


def test_an_app_has_its_record_before_the_rest_is_worked_out() -> None:
    driven = Driven.started(auto=False)
    machine = driven.machine
    machine.handle([ev.AppData(call("", 7, rpc_type=2))], driven.now_ns)
    (commit,) = machine.advance()
    assert isinstance(commit, ef.Commit)
    machine.settle()
    driven.store.commit(commit.transaction)
    first = machine.handle([ev.Committed(commit.ticket)], driven.now_ns)[0]
    assert isinstance(first, ef.SendToApp)
    assert arguments(bytes(first.data)) == [rpc(7, rpc_type=2)]


def test_what_can_wait_is_asked_for_at_the_end_of_a_turn() -> None:
    driven = Driven.started(auto=False)
    machine = driven.machine
    assert kinds(machine.handle([ev.CheckpointRequested()], driven.now_ns)) == []
    assert kinds(machine.advance()) == []
    assert kinds(machine.settle()) == [ef.SendToApp]
