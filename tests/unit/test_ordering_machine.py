"""The machine of ordered multicasts, message by message."""

from __future__ import annotations

from immortal.appsdk.ordering.machine import TIMESTAMP_MAX, Ordering, Release, Send
from immortal.appsdk.ordering.messages import Commit, Propose, Proposed, Refused, Settle, Settled


def sent(machine: Ordering) -> list[tuple[str, object]]:
    actions, machine.actions = machine.actions, []
    return [(one.destination, one.message) for one in actions if isinstance(one, Send)]


def released(machine: Ordering) -> list[list[bytes]]:
    actions, machine.actions = machine.actions, []
    return [one.filed.calls for one in actions if isinstance(one, Release)]


def test_a_sender_alone_estimates_right_from_its_second_run_on() -> None:
    sender, a, b = Ordering("s"), Ordering("a"), Ordering("b")
    a.state.clock = 7
    for is_first in (True, False, False):
        number = sender.multicast(1, ["a", "b"], [[b"x"]])
        for name, message in sent(sender):
            assert isinstance(message, Propose)
            {"a": a, "b": b}[name].handle_propose(message)
        for name, machine in (("a", a), ("b", b)):
            ((_, proposed),) = sent(machine)
            assert isinstance(proposed, Proposed)
            sender.handle_message(name, proposed)
        told = sent(sender)
        if is_first:
            assert told == [("b", Settle(number, 8))]
            b.handle_message("s", Settle(number, 8))
            assert sent(b) == [("s", Settled(number))]
            sender.handle_message("b", Settled(number))
            told = sent(sender)
        assert [type(message) for _, message in told] == [Commit, Commit]
        for name, message in told:
            assert {"a": a, "b": b}[name].handle_message("s", message)  # type: ignore[arg-type]
        assert released(a) == released(b) == [[b"x"]]
        a.note_executed()
        b.note_executed()
    assert sender.is_idle
    assert a.is_idle
    assert b.is_idle


def test_a_destination_that_refuses_is_left_out() -> None:
    sender = Ordering("s")
    sender.multicast(1, ["a", "b"], [[b"x"]])
    sent(sender)
    assert sender.handle_message("b", Refused(1, "not you"))
    assert sender.handle_message("a", Proposed(1, 5))
    assert sent(sender) == [("a", Commit(1, 5))]


def test_what_can_not_be_right_changes_nothing() -> None:
    sender = Ordering("s")
    sender.multicast(1, ["a", "b"], [[b"x"]])
    sent(sender)
    before = sender.save()
    for source, message in [
        ("c", Proposed(1, 5)),  # it was not asked
        ("a", Proposed(2, 5)),  # there is no such run
        ("a", Proposed(1, 0)),  # below the estimate
        ("a", Proposed(1, TIMESTAMP_MAX + 1)),
        ("a", Settled(1)),  # it was not told to
        ("a", Commit(1, 5)),  # it has sent nothing
        ("s", Settle(1, 5)),
    ]:
        assert not sender.handle_message(source, message)
    assert sender.handle_message("a", Proposed(1, 5))
    assert not sender.handle_message("a", Proposed(1, 6))  # twice
    assert sender.save().sent == before.sent

    receiver = Ordering("r")
    receiver.handle_propose(Propose(1, "s", 1, 9, [b"x"]))
    sent(receiver)
    assert not receiver.handle_message("s", Commit(1, 8))  # below its own block
    assert not receiver.handle_message("t", Commit(1, 9))  # somebody else's
    assert receiver.handle_message("s", Commit(1, 9))
    assert not receiver.handle_message("s", Commit(1, 9))  # it is delivered


def test_a_run_to_one_needs_no_commit() -> None:
    sender, a = Ordering("s"), Ordering("a")
    a.state.clock = 7
    sender.multicast(1, ["a"], [[b"x"]])
    sender.multicast(1, ["a"], [[b"y"]])  # the one before does not stand yet
    (_, first), (_, second) = sent(sender)
    assert isinstance(first, Propose)
    assert isinstance(second, Propose)
    assert (first.alone, second.alone) == (True, False)
    a.handle_propose(first)
    assert [type(one) for one in a.actions] == [Send, Release]
    ((_, proposed),) = sent(a)
    assert proposed == Proposed(1, 8)
    a.handle_propose(second)
    assert sent(a) == [("s", Proposed(2, 9))]
    assert sender.handle_message("a", Proposed(1, 8))
    assert sent(sender) == []
    assert sender.state.standing == 1
    assert sender.handle_message("a", Proposed(2, 9))
    assert sent(sender) == [("a", Commit(2, 9))]
