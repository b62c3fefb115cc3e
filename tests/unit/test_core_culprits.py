"""Calls and queries that end the app's process: they are not asked again, and their callers are held off."""

from __future__ import annotations

from typing import Any

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.failures.poison_guard import FREE_DEATHS, CallerPenalties, digest_of
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import ClientCode, ClientFrameType, encode_request
from immortal.protocol.extensions import Hello, encode_app_description, encode_hello
from immortal.protocol.limits import NESTING_MAX_DEFAULT
from immortal.protocol.verdicts import Cause, Handling, VerdictKind, encode_handling
from tests.helpers.clients import call, request
from tests.helpers.core import EXTENSIONS, NOW_NS, Driven, checkpoint, rpc
from tests.unit.test_core_queries import DESCRIPTION, answer, asked, query, told, working

SECOND_NS = 1_000_000_000


def test_a_caller_is_held_off_for_a_time_that_doubles_up_to_a_minute() -> None:
    penalties, now_ns = CallerPenalties(Limits()), NOW_NS
    holds = []
    for _ in range(20):
        deaths, hold_ns = penalties.count_deaths("evil", now_ns)
        holds.append(hold_ns)
        assert bool(penalties.hold_off_reason("evil", now_ns)) == (deaths > FREE_DEATHS)
        assert not penalties.hold_off_reason("good", now_ns)
        now_ns += hold_ns
        assert not penalties.hold_off_ns("evil", now_ns)
    assert holds[:5] == [0, 0, Limits().hold_off_ns_min, 2 * Limits().hold_off_ns_min, 4 * Limits().hold_off_ns_min]
    assert holds[-1] == Limits().hold_off_ns_max
    assert penalties.count_deaths("evil", now_ns + 601 * SECOND_NS) == (1, 0), "ten minutes later it is forgotten"


def test_a_clock_that_is_set_back_holds_nobody_off_for_longer_than_a_minute() -> None:
    penalties = CallerPenalties(Limits())
    for _ in range(3):
        penalties.count_deaths("evil", NOW_NS)
    assert penalties.hold_off_ns("evil", NOW_NS - 10**18) == Limits().hold_off_ns_max


def test_what_is_remembered_is_bounded() -> None:
    penalties = CallerPenalties(Limits())
    for number in range(30_000):
        penalties.count_deaths(str(number), NOW_NS)
        penalties.query_died(digest_of(str(number), 1, b""))
    assert len(penalties.deaths) == len(penalties._queries) == 10_000


def die(driven: Driven) -> list[notices.CallerHeldOff]:
    """The app's process ends, and the next one has recovered."""
    told_of = [one.notice for one in driven.close() if isinstance(one, ef.Report)]
    driven.connect(encode_hello(Hello(EXTENSIONS, "test")) + encode_app_description(DESCRIPTION))
    driven.data(encode_handling(Handling(-1)) + checkpoint(b"state"))
    driven.settle()
    return [one for one in told_of if isinstance(one, notices.CallerHeldOff)]


def test_a_query_that_ends_the_process_has_a_verdict_by_what_it_is_and_who_asks() -> None:
    driven = working()
    for death in range(3):
        driven.now_ns += 10 * SECOND_NS
        assert told(driven.handle(query("t", death + 1, caller="evil"))) == []
        assert len(asked(driven)) == 1
        die(driven)
    driven.now_ns += 10 * SECOND_NS
    ((_, _, code),) = told(driven.handle(query("t", 9, caller="evil")))
    assert code is ClientCode.MALFORMED
    assert asked(driven) == []
    driven.handle(query("t", 10, caller="good"))
    (question,) = asked(driven)
    assert told(driven.data(answer(question))) == [("t", 10, 5)]


def test_a_caller_of_queries_that_differ_is_held_off() -> None:
    driven, found = working(), []
    for death in range(3):
        arguments = b"\x91" + bytes((death,))
        driven.handle(query("t", death + 1, caller="evil", payload=encode_request(4, arguments)))
        assert len(asked(driven)) == 1
        found += die(driven)
    (held,) = found
    assert (held.caller, held.deaths) == ("evil", 3)
    ((_, _, code),) = told(driven.handle(query("t", 9, caller="evil", payload=encode_request(4, b"\x91\x09"))))
    assert code is ClientCode.BUSY
    driven.handle(ev.ClientFrameReceived("t", request("t", 1, call(7)).frame, "evil"))
    assert driven.machine.view.status(NOW_NS)["clients"]["open_requests"] == 0  # type: ignore[index]
    driven.now_ns += 2 * SECOND_NS
    driven.handle(query("t", 10, caller="evil", payload=encode_request(4, b"\x91\x09")))
    assert len(asked(driven)) == 1
    assert driven.machine.view.status(NOW_NS)["deaths_caused"] == {"evil": 3}


def test_a_suspect_is_asked_alone() -> None:
    """So that a death is known to be its own."""
    driven = working()
    driven.handle(query("t", 1, caller="evil"))
    asked(driven)
    die(driven)
    driven.handle(query("t", 2, caller="good", payload=encode_request(4, b"\x91\x01")))
    (first,) = asked(driven)
    driven.handle(query("t", 3, caller="evil"))
    driven.handle(query("t", 4, caller="good", payload=encode_request(4, b"\x91\x02")))
    assert asked(driven) == []
    driven.data(answer(first))
    (suspect,) = asked(driven)
    assert suspect.arguments == b"\x90"
    assert told(driven.data(answer(suspect))) == [("t", 3, 5)], "it has lived through it"
    (last,) = asked(driven)
    assert last.arguments == b"\x91\x02"


def test_an_answered_query_is_suspected_no_more() -> None:
    driven = working()
    for number in range(1, 9):
        driven.handle(query("t", number, caller="good"))
        asked(driven)
        die(driven)
        driven.now_ns += 601 * SECOND_NS
        driven.handle(query("t", number, caller="good"))
        (question,) = asked(driven)
        assert told(driven.data(answer(question))) == [("t", number, 5)]


def test_kills_that_give_no_verdict_give_none_to_queries() -> None:
    driven = working(limits=Limits(kills_max=None))
    for number in range(1, 9):
        driven.now_ns += 2 * Limits().hold_off_ns_max
        driven.handle(query("t", number, caller="evil"))
        assert len(asked(driven)) == 1
        die(driven)


# --- nested too deeply ------------------------------------------------------------------------------------------------


def deep(depth: int) -> bytes:
    return b"\x91" * depth + b"\x01"


def refusals(effects: list[Any]) -> list[str]:
    return [
        one.frame.reason
        for one in effects
        if isinstance(one, ef.ReplyToClient) and one.frame.frame_type is ClientFrameType.REFUSED
    ]


def test_a_query_that_is_nested_too_deeply_is_refused_and_not_asked() -> None:
    driven = working()
    driven.handle(query("t", 1, caller="evil", payload=encode_request(4, b"\x91" + deep(NESTING_MAX_DEFAULT))))
    assert len(asked(driven)) == 1
    effects = driven.handle(query("t", 2, caller="evil", payload=encode_request(4, deep(NESTING_MAX_DEFAULT + 2))))
    (reason,) = refusals(effects)
    assert "nested more than 64 levels deep (nesting_max)" in reason
    assert asked(driven) == []
    assert driven.machine.view.refusals["refused: nested too deeply"] == {"evil": 1}


def test_an_answer_to_a_query_that_is_nested_too_deeply_fails_that_query() -> None:
    driven = working()
    driven.handle(query("t", 1))
    (question,) = asked(driven)
    value: Any = 1
    for _ in range(NESTING_MAX_DEFAULT + 1):
        value = [value]
    effects = driven.data(answer(question, value))
    (reply,) = [one for one in effects if isinstance(one, ef.ReplyToClient)]
    assert b"~failed" in reply.frame.payload
    assert b"nested more than 64" in reply.frame.payload


def test_the_limit_is_a_setting() -> None:
    driven = working(limits=Limits(nesting_max=100))
    driven.handle(query("t", 1, payload=encode_request(4, b"\x91" + deep(100))))
    assert len(asked(driven)) == 1
    assert refusals(driven.handle(query("t", 2, payload=encode_request(4, b"\x91" + deep(101)))))


def test_a_batch_of_a_peer_is_logged_with_verdicts_on_what_is_too_deep_and_these_are_told() -> None:
    driven = working()
    driven.greeted("hello")
    messages = [rpc(one) for one in (b"\x91\x01", deep(NESTING_MAX_DEFAULT + 2), b"\x91\x02", deep(1100))]
    driven.batch("t", 1, *messages)
    verdicts = driven.store.summary().verdicts
    assert [(one.message_index, one.kind, one.cause, one.caller) for one in verdicts] == [
        (1, VerdictKind.REFUSED, Cause.UNUSABLE, "b"),
        (3, VerdictKind.REFUSED, Cause.UNUSABLE, "b"),
    ]
    assert "(from 'b')" in verdicts[0].text
    assert driven.machine.view.refusals["refused: nested too deeply"] == {"b": 2}


@pytest.mark.parametrize("data", [deep(1100), b"\x9f" * 300, b"\xd0\x9f\xd1\x80" * 100])
def test_bytes_for_an_app_that_said_no_hello_are_its_own_matter(data: bytes) -> None:
    driven = Driven.started(hello=False)
    driven.greeted("hello")
    driven.batch("t", 1, rpc(data))
    assert driven.store.summary().verdicts == []
    assert data in bytes(driven.app_bytes)


def test_the_deaths_of_a_logged_message_count_with_its_verdict() -> None:
    driven = working()
    driven.greeted("hello")
    driven.batch("t", 1, rpc(b"\x90"))
    driven.app_took_all()
    handling = Handling(1, 0, 0.0, "Counter.add", source="b")
    for death in range(3):
        assert driven.machine.view.status(NOW_NS)["deaths_caused"] == {}
        if death:
            driven.data(encode_handling(handling))
        driven.close()
        driven.connect(encode_hello(Hello(EXTENSIONS, "test")) + encode_app_description(DESCRIPTION))
    assert driven.machine.view.status(NOW_NS)["deaths_caused"] == {"b": 3}
    assert driven.machine.components.admission.hold_off_reason("b")
    driven.batch("u", 2, rpc(b"\x91"))
    assert driven.store.summary().sources["b"].position == 1, "it is to come again later"
