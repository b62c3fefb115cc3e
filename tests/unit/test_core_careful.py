"""What ends the app's process is found by careful runs; what takes long is told."""

from __future__ import annotations

from typing import Any

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.failures.poison_guard import KILLED_TYPE, PoisonGuard
from immortal.coordinator.core.interfaces import NO_SUSPECT, UNKNOWN, Suspect
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.protocol.extensions import AppDescription, Hello, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.verdicts import RECORD, Careful, Handling, Verdict, VerdictKind, encode_handling
from tests.helpers.core import EXTENSIONS, NOW_NS, Driven, call, checkpoint, first_start, rpc
from tests.unit.test_core_verdicts import HELLO, KEY, careful, told, with_record

LEAVING = encode_message(MessageType.LEAVING, b"its secret has changed")
BLAMED = Handling(1, 0, 0.0, "Orders.place", "shop")


def suspect_of(driven: Driven) -> Suspect:
    return driven.store.summary().suspect


def dies(driven: Driven, *noted: Handling) -> None:
    """The next app, which says ``noted`` and dies."""
    driven.connect(HELLO)
    driven.data(b"".join(map(encode_handling, noted)))
    driven.close()


# --- sessions --------------------------------------------------------------------------------------------------------


def test_the_next_run_is_careful() -> None:
    driven = with_record()
    driven.close()
    assert suspect_of(driven) == Suspect(UNKNOWN, RECORD, 1, 1)
    driven.connect(HELLO)
    assert careful(driven) == Careful(1, -1, True)
    assert driven.heard[:3] == [b"state one", (-1, "VERDICTS"), (-1, "CAREFUL")]
    driven.data(encode_handling(Handling(0)) + encode_handling(Handling(1)))
    assert suspect_of(driven).runs_count == 1
    driven.data(encode_handling(Handling(-1)))
    assert suspect_of(driven) == NO_SUSPECT


def test_a_long_handler_of_a_careful_run_keeps_what_was_said_of_it() -> None:
    guard = PoisonGuard(Suspect(1, 0, 2), 3)
    guard.session_began(0)
    guard.note_handling(Handling(1, 0, 0.0, "Orders.place", "shop", b"the call"), NOW_NS)
    guard.note_handling(Handling(1, 0, 12.0, "Orders.place", "shop"), NOW_NS)
    assert "12 s" in guard.long_handler_text(NOW_NS)
    verdict = guard.app_died(1, all_read=True)
    assert verdict is not None
    assert verdict.message == b"the call"


def test_a_long_handler_that_has_come_back_shows_no_more_and_clears_no_suspicion() -> None:
    guard = PoisonGuard(Suspect(1, 0, 2), 3)
    guard.session_began(0)
    guard.note_handling(Handling(1, 0, 0.0, "Orders.place", "shop", b"the call"), NOW_NS)
    guard.note_handling(Handling(1, 0, 12.0, "Orders.place", "shop"), NOW_NS)
    guard.note_handling(Handling(-1, for_s=1.0), NOW_NS)
    assert guard.long_handler_text(NOW_NS) == ""
    assert guard.suspect == Suspect(1, 0, 2)
    guard.note_handling(Handling(-1), NOW_NS)
    assert guard.suspect == NO_SUSPECT


def test_three_deaths_at_a_message_are_a_verdict() -> None:
    driven = with_record()
    driven.close()
    dies(driven, Handling(0), Handling(1))
    assert suspect_of(driven) == Suspect(1, RECORD, 2)
    driven.connect(HELLO)
    assert careful(driven) == Careful(1, 1, True)
    driven.data(encode_handling(BLAMED))
    driven.auto = False
    driven.close()
    driven.disk_all()
    (line,) = [text for level, text in driven.reports if level == "error"]
    text = "it ended the app's process 3 times"
    blamed = "Orders.place (record 1, message 0, called by shop)"
    assert line == f"{blamed} is no longer called: {text}; its caller is told"
    verdict = Verdict(1, 0, VerdictKind.KILLED, KILLED_TYPE, text, method="Orders.place", caller="shop")
    assert driven.store.summary().verdicts == [verdict]
    assert suspect_of(driven) == NO_SUSPECT
    driven.auto = True
    driven.connect(HELLO)
    assert (told(driven), careful(driven)) == ([verdict], None)


def test_deaths_at_a_message_that_failed_before_are_said() -> None:
    driven = with_record()
    driven.close()
    for _ in range(2 * 3):
        dies(driven, BLAMED)
    _, line = [text for level, text in driven.reports if level == "error"]
    where = "record 1, message 0, called by shop"
    said = "where it failed before: deploy code that does not end the process there"
    assert line == f"it ended the app's process 3 times at {where}, {said}"
    assert len(driven.store.summary().verdicts) == 1


def test_what_ends_an_app_that_is_to_upgrade_behind_it_is_found_as_well() -> None:
    # Found by the simulation: the app was asked to upgrade while it had not come to that record, and died for ever.
    driven = with_record().crash(upgrade_to=2)
    said = HELLO + encode_app_description(AppDescription(2))
    for runs_count, noted in enumerate([(), (Handling(0), Handling(1)), (BLAMED,)], start=1):
        driven.connect()
        driven.data(said)
        assert driven.phase is Phase.UPGRADING
        driven.data(b"".join(map(encode_handling, noted)))
        suspect: Any = driven.machine.view.status(driven.now_ns)["suspect"]
        assert (suspect["runs"] if suspect else 0) == runs_count - 1
        driven.close()
    (verdict,) = driven.store.summary().verdicts
    assert (verdict.key, verdict.kind) == ((1, 0, 0, 0), VerdictKind.KILLED)


def test_the_verdict_is_durable_before_the_next_session_loads_the_log() -> None:
    driven = with_record(limits=Limits(kills_max=1))
    driven.data(encode_handling(BLAMED))
    driven.auto = False
    driven.close()
    driven.connect(HELLO)
    driven.disk()
    assert driven.store.summary().verdicts
    assert not driven.of(ef.LoadLog)
    driven.auto = True
    driven.disk_all()
    assert told(driven) == driven.store.summary().verdicts


def test_a_message_that_nobody_waits_for_is_a_letter() -> None:
    driven = with_record(limits=Limits(kills_max=1))
    driven.data(encode_handling(Handling(1, 0, 12.0, "Orders.place", None, rpc(1))))
    driven.close()
    assert driven.store.letter(KEY).verdict.message == rpc(1)
    (line,) = [text for level, text in driven.reports if level == "error"]
    assert line.endswith("it ended the app's process once; see 'immortal dead-letters a'")


def test_the_count_goes_on_when_the_coordinator_was_started_again() -> None:
    driven = with_record()
    driven.close()
    second = driven.crash()
    dies(second, Handling(1))
    third = second.crash()
    third.connect(HELLO)
    assert careful(third) == Careful(1, 1, True)
    third.data(encode_handling(BLAMED))
    third.close()
    assert [verdict.kind for verdict in third.store.summary().verdicts] == [VerdictKind.KILLED]


def test_deaths_are_counted_without_a_verdict_where_there_is_to_be_none() -> None:
    driven = with_record(limits=Limits(kills_max=None))
    driven.data(encode_handling(BLAMED))
    driven.close()
    for _ in range(5):
        dies(driven, BLAMED)
    assert suspect_of(driven) == Suspect(1, 0, 6)
    assert not driven.store.summary().verdicts
    status = driven.machine.view.status(NOW_NS)["suspect"]
    assert status == {"record": 1, "message": 0, "runs": 6}


def lives(driven: Driven) -> None:
    """Nothing that ends the connection now makes the next run careful."""
    driven.close()
    assert suspect_of(driven) == NO_SUSPECT
    driven.connect(HELLO)
    assert careful(driven) is None


def test_who_leaves_did_not_crash() -> None:
    driven = with_record()
    driven.data(LEAVING)
    assert ("info", "the app leaves: its secret has changed") in driven.reports
    lives(driven)


def test_who_broke_the_protocol_did_not_crash() -> None:
    driven = with_record()
    driven.data(b"\x00")
    lives(driven)


def test_who_was_given_nothing_since_its_checkpoint_did_not_crash_of_it() -> None:
    driven = with_record()
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"state two"))
    lives(driven)


def test_who_knows_no_careful_runs_is_not_asked_for_them() -> None:
    driven = Driven()
    driven.connect(encode_hello(Hello(EXTENSIONS - {MessageType.CAREFUL})))
    driven.data(first_start())
    lives(driven)


def test_a_clean_stop_clears_the_suspicion() -> None:
    driven = with_record()
    driven.close()
    driven.connect(HELLO)
    driven.data(checkpoint(b"state two"))
    assert driven.phase is Phase.NORMAL
    assert suspect_of(driven).runs_count == 1, "it has not said that it is through"
    driven.handle(ev.StopRequested())
    driven.data(checkpoint(b"state three"))
    driven.app_took_all()
    assert driven.stop.error is None
    assert suspect_of(driven) == NO_SUSPECT


def test_who_dies_while_its_coordinator_stops_is_no_suspect() -> None:
    driven = with_record()
    driven.handle(ev.StopRequested())
    driven.close()
    assert suspect_of(driven) == NO_SUSPECT


def test_a_checkpoint_behind_the_suspect_has_lived_through_it() -> None:
    driven = with_record()
    driven.close()
    driven.connect(HELLO)
    driven.data(checkpoint(b"state two"))
    second = driven.crash()
    second.connect(HELLO)
    assert careful(second) is None
    assert suspect_of(second) == NO_SUSPECT


def test_what_was_not_read_blames_nobody() -> None:
    """While the app is not read, what it said last may be lost: it may be at another message by then."""
    driven = with_record(limits=Limits(kills_max=1, log_pending_bytes=10))
    driven.auto = False
    driven.data(encode_handling(BLAMED))
    driven.data(call("", b"x" * 100, rpc_type=2))
    assert driven.of(ef.PauseApp)
    driven.close()
    driven.disk_all()
    assert not driven.store.summary().verdicts
    assert suspect_of(driven).sequence_id == UNKNOWN


# --- the rules -------------------------------------------------------------------------------------------------------

UNKNOWN_ONCE = Suspect(UNKNOWN, RECORD, 1, 9)


@pytest.mark.parametrize(
    ("before", "noted", "after"),
    [
        (NO_SUSPECT, None, UNKNOWN_ONCE),
        (NO_SUSPECT, Handling(4), Suspect(4, RECORD, 1)),
        (NO_SUSPECT, Handling(4, 2, 7.0), Suspect(4, 2, 1)),
        (UNKNOWN_ONCE, Handling(4), Suspect(4, RECORD, 2)),
        (UNKNOWN_ONCE, Handling(4, 0), Suspect(4, 0, 2)),
        (UNKNOWN_ONCE, None, UNKNOWN_ONCE),
        (Suspect(4, RECORD, 2), Handling(4, 2), None),
        (Suspect(4, RECORD, 7), Handling(4), Suspect(4, RECORD, 8)),  # one more run, at its messages
        (Suspect(4, RECORD, 2), Handling(5), Suspect(5, RECORD, 1)),
        (Suspect(4, 2, 2), Handling(4, 2), None),
        (Suspect(4, 2, 2), Handling(4, 3), Suspect(4, 3, 1)),
        (Suspect(4, 2, 2), Handling(5, 2), Suspect(5, 2, 1)),
        (Suspect(4, 2, 2), None, Suspect(4, 2, 2)),  # it did not come there
    ],
)
def test_a_death(before: Suspect, noted: Handling | None, after: Suspect | None) -> None:
    guard = PoisonGuard(before, 3)
    guard.session_began(-1)
    if noted is not None:
        guard.note_handling(noted, 0)
    verdict = guard.app_died(9, all_read=True)
    assert guard.suspect == (after or NO_SUSPECT)
    assert (verdict is not None) is (after is None)


def test_who_lives_past_it_is_no_suspect() -> None:
    guard = PoisonGuard(Suspect(4, 2, 2), 3)
    assert guard.session_began(-1) == Careful(4, 4, True)
    guard.note_handling(Handling(4, 2), 0)
    guard.note_handling(Handling(-1), 0)
    assert guard.suspect == NO_SUSPECT
    assert guard.app_died(9, all_read=True) is None
    assert guard.suspect == UNKNOWN_ONCE


def test_a_run_that_ends_without_blame_is_careful_no_more() -> None:
    guard = PoisonGuard(Suspect(4, 2, 2), 3)
    guard.session_began(-1)
    guard.forget()
    guard.app_died(9, all_read=True)
    assert guard.suspect == UNKNOWN_ONCE


# --- handlers that take long -----------------------------------------------------------------------------------------


def test_a_long_handler_shows_in_the_status() -> None:
    driven = with_record()
    assert driven.machine.view.status(NOW_NS)["handling"] is None
    driven.data(encode_handling(Handling(1, 0, 5.0, "Orders.place", "shop")))
    assert driven.machine.view.status(NOW_NS + 1_500_000_000)["handling"] == {
        "method": "Orders.place",
        "for_s": 6.5,
        "record": 1,
        "message": 0,
        "caller": "shop",
    }
    assert driven.machine.view.long_handler_text(NOW_NS) == (
        "handling Orders.place for 5 s (record 1, message 0, called by shop)"
    )
    driven.data(encode_handling(Handling(-1)))
    assert driven.machine.view.status(NOW_NS)["handling"] is None
    assert driven.machine.view.long_handler_text(NOW_NS) == ""


def test_it_is_told_once_when_it_takes_too_long() -> None:
    driven = with_record()
    for for_s in (5.0, 11.6, 20.0):
        driven.data(encode_handling(Handling(1, 0, for_s, "Orders.place", "~c7")))
    driven.data(encode_handling(Handling(1, 1, 12.0, "Orders.place")))
    assert [text for level, text in driven.reports if level == "warning"] == [
        "handling Orders.place for 12 s (record 1, message 0, called by the client c7)",
        "handling Orders.place for 12 s (record 1, message 1)",
    ]


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_says_what_it_waits_for(before: bool) -> None:
    driven = with_record()
    said = encode_handling(Handling(1, 0, 6.0, "Orders.place", ""))
    if before:
        driven.data(said)
    driven.handle(ev.StopRequested())
    if not before:
        driven.data(said + said)
    line = "the stop waits for the app: it is handling Orders.place for 6 s (record 1, message 0, called by itself)"
    assert driven.reports == [("warning", line)]


# --- handlers that a message lets go on ------------------------------------------------------------------------------


def test_a_handler_has_a_verdict_of_its_own() -> None:
    driven = with_record()
    driven.close()
    at_handler = Handling(1, 0, 0.0, "Orders.remind", "shop", b"", 12)
    dies(driven, Handling(1))
    driven.connect(HELLO)
    driven.data(encode_handling(Handling(1, 0)) + encode_handling(at_handler))
    driven.close()
    (verdict,) = driven.store.summary().verdicts
    assert (verdict.key, verdict.kind, verdict.caller) == ((1, 0, 12, 0), VerdictKind.KILLED, "shop")


def test_deaths_of_two_handlers_at_one_message_are_counted_apart() -> None:
    guard = PoisonGuard(Suspect(1, 0, 3, task=12), 5)
    guard.session_began(0)
    guard.note_handling(Handling(1, 0, task=13), NOW_NS)
    assert guard.app_died(1, all_read=True) is None
    assert guard.suspect == Suspect(1, 0, 1, task=13)
    guard.session_began(0)
    guard.note_handling(Handling(1, 0, task=13), NOW_NS)
    assert guard.app_died(1, all_read=True) is None
    assert guard.suspect == Suspect(1, 0, 2, task=13)


def test_what_takes_long_keeps_the_handler_that_was_said() -> None:
    guard = PoisonGuard(Suspect(1, 0, 2), 3)
    guard.session_began(0)
    guard.note_handling(Handling(1, 0, 0.0, "Orders.remind", None, b"the call", 12), NOW_NS)
    guard.note_handling(Handling(1, 0, 12.0, "method -2"), NOW_NS)
    verdict = guard.app_died(1, all_read=True)
    assert verdict is not None
    assert (verdict.task, verdict.method, verdict.message) == (12, "Orders.remind", b"the call")
