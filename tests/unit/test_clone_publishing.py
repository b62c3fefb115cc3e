"""A publisher's rules, one by one: slow, silent and refused clients, rights, forwarders."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from immortal.appsdk.patterns.clone import model, publication
from immortal.appsdk.patterns.clone.frames import (
    MAGIC,
    POLICIES,
    Activate,
    Activated,
    Answer,
    Deactivate,
    Deactivated,
    Dropped,
    Finished,
    Look,
    Part,
    Ping,
    Pong,
    Received,
    Refused,
    Report,
    decode_answer,
    decode_request,
    encode,
)
from immortal.appsdk.patterns.clone.model import Entries, Row
from immortal.appsdk.patterns.clone.model import encode as encode_value
from immortal.appsdk.patterns.clone.publication import Publication
from immortal.appsdk.patterns.clone.publisher import drain_presences
from immortal.patterns.clone import Entitlement
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import RemoteProtocolError
from tests.helpers.effort import effort

S = model.SECOND_NS
MARK = publication.MARK_BYTES_MIN
ROUTE = b"client"
_TEXT = st.text(st.characters(codec="utf-8"), max_size=5)  # what UTF-8 has no bytes for can't be sent
_NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-1, 5)
_SUBTREES = st.lists(st.sampled_from(["", "@", "@present", "@entitled", "a", "b", "a//b", "/"]) | _TEXT)
_REQUESTS = st.one_of(
    st.builds(
        Activate,
        stream=_NUMBERS,
        subtrees=_SUBTREES,
        table=st.sampled_from(["", "table", "other"]),
        number=_NUMBERS,
        had=_SUBTREES,
        window_bytes=_NUMBERS | st.just(publication.WINDOW_BYTES_MIN),
        mark_bytes=_NUMBERS | st.just(publication.MARK_BYTES_MIN),
        policy=st.sampled_from(POLICIES),
        label=_TEXT,
        relay=st.booleans(),
    ),
    st.builds(Received, _NUMBERS, _NUMBERS),
    st.builds(Deactivate, _NUMBERS),
    st.builds(Ping, _NUMBERS),
    st.builds(Look),
)


class Driven:
    """A publisher, the time, and what it has said to whom."""

    def __init__(self, **options: Any) -> None:
        self.publishing = Publication("p", "table", Entries(), **{"blocking_s": 10.0, **options})
        self.now_ns = 100 * S
        self.number = 0
        self.heard: dict[bytes, list[Answer]] = {}

    def change(self, *keys: str, size_bytes: int = 1) -> None:
        rows = [Row(key, self.number + index, b"v" * size_bytes) for index, key in enumerate(keys, 1)]
        self.number += len(rows)
        self.publishing.publish(rows)

    def entitle(self, name: str, *subtrees: str, **options: bool) -> None:
        self.number += 1
        entitlement = Entitlement(subtrees, **options)
        self.publishing.publish([Row(f"@entitled/{name}", self.number, encode_value(entitlement))])

    def activate(self, route: bytes = ROUTE, name: str = "", **options: Any) -> list[Answer]:
        asked = {
            "stream": 1,
            "subtrees": [""],
            "table": "",
            "number": 0,
            "had": [],
            "window_bytes": publication.WINDOW_BYTES_MIN,
            "mark_bytes": MARK,
            "policy": "drop",
            "label": "",
            "relay": False,
        }
        return self.say(Activate(**{**asked, **options}), route, name)

    def say(self, request: Any, route: bytes = ROUTE, name: str = "") -> list[Answer]:
        self.publishing.handle_request(route, name, decode_request(encode(request)), self.now_ns)
        return self.flush(route)

    def flush(self, route: bytes = ROUTE) -> list[Answer]:
        """What this one hears now."""
        self.publishing.flush(self.now_ns)
        outgoing, self.publishing.outgoing = self.publishing.outgoing, []
        for to, data in outgoing:
            self.heard.setdefault(to, []).append(decode_answer(data))
        return self.heard.pop(route, [])

    def overrun(self) -> None:
        """More than any window and mark."""
        for _ in range(20):
            self.change(*(f"k{index}" for index in range(10)), size_bytes=200)
            self.publishing.flush(self.now_ns)


def reason(answers: list[Answer]) -> str:
    (answer,) = answers
    assert isinstance(answer, (Refused, Finished))
    return answer.reason


def test_a_slow_client_is_told_how_many_changes_were_dropped_and_gets_each_key_as_it_is() -> None:
    driven = Driven()
    driven.activate()
    driven.overrun()
    told = [answer for answer in driven.flush() if isinstance(answer, Part)]
    before = sum(len(part.changes) for part in told)
    dropped: list[Dropped] = []
    total_bytes = 0
    changes: dict[str, int] = {}
    for _ in range(100):
        total_bytes += 10_000
        answers = driven.say(Received(1, total_bytes))
        dropped += [answer for answer in answers if isinstance(answer, Dropped)]
        parts = [answer for answer in answers if isinstance(answer, Part)]
        assert all(part.is_conflated for part in parts)
        changes |= {key: number for part in parts for key, number, _ in part.changes}
        if parts and not parts[-1].more:
            break
    assert dropped[-1].count == 200 - before
    assert changes == {f"k{index}": 191 + index for index in range(10)}
    (report,) = driven.publishing.report().streams
    assert (report.dropped, report.state) == (200 - before, "in step")


def test_one_that_would_rather_end_ends() -> None:
    driven = Driven()
    driven.activate(policy="disconnect")
    driven.activate(b"other", stream=7)
    driven.overrun()
    *_, last = driven.flush()
    assert isinstance(last, Finished)
    assert not last.again
    assert "too slow: " in last.reason
    assert "high-water mark is 4 KiB" in last.reason
    assert len(driven.publishing) == 1, "the other one has its own policy"
    assert driven.publishing.report().ended_slow == 1
    assert list(driven.publishing.joined) == ["p.2"]


def test_one_that_blocks_holds_up_writers_loses_nothing_and_not_for_ever() -> None:
    driven = Driven(blocking_s=2.0)
    driven.activate(policy="block", label="ledger")
    driven.overrun()
    told = [answer for answer in driven.flush() if isinstance(answer, Part)]
    assert driven.publishing.held_by == ["ledger (p.1)"]
    total_bytes = 0
    while len([key for part in told for key, _, _ in part.changes]) < 200:
        total_bytes += 5_000
        told += [answer for answer in driven.say(Received(1, total_bytes)) if isinstance(answer, Part)]
    assert [number for part in told for _, number, _ in part.changes] == list(range(1, 201))
    assert driven.publishing.held_by == []
    driven.overrun()
    driven.now_ns += 2 * S
    *_, last = driven.flush()
    assert isinstance(last, Finished)
    assert "held up others for 2 s" in last.reason
    assert driven.publishing.held_by == []


def test_where_nobody_may_block_it_is_refused() -> None:
    assert "nobody may hold up writers here" in reason(Driven(blocking_s=0.0).activate(policy="block"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window_bytes": 1}, "a window of 1 bytes: 4096 to"),
        ({"mark_bytes": 1 << 40}, "a high-water mark of"),
        ({"label": "x" * 129}, "a label of more than 128"),
        ({"label": "\x1b[2J"}, "printable text was expected"),
        ({"number": -1}, "update -1"),
        ({"subtrees": ["a//b"]}, "printable parts"),
        ({"subtrees": [str(index) for index in range(101)]}, "at most 100"),
        ({"subtrees": [f"{index:x>200}" for index in range(21)]}, "subtrees of 4200 bytes: at most 4096"),
        ({"subtrees": []}, "may see nothing of no subtree at all"),
        ({"subtrees": ["@entitled"]}, "may see nothing of '@entitled'"),
    ],
)
def test_what_a_client_gets_wrong(options: dict[str, Any], text: str) -> None:
    assert text in reason(Driven().activate(**options))


def test_a_silent_client_is_gone_and_may_come_back() -> None:
    driven = Driven()
    driven.activate()
    for _ in range(10):
        driven.now_ns += S
        assert driven.say(Ping(1))[-1] == Pong(1, driven.publishing.report().streams[0].in_flight_bytes)
    driven.now_ns += 6 * S
    (last,) = driven.flush()
    assert isinstance(last, Finished)
    assert last.again
    assert driven.publishing.report().ended_silent == 1
    assert driven.say(Ping(1)) == [Pong(0)], "it has no stream"


def test_the_end_of_a_stream_is_acknowledged() -> None:
    driven = Driven()
    driven.activate()
    assert driven.say(Deactivate(1)) == [Deactivated(1)]
    assert not driven.publishing.joined, "who came and went before anybody was told is not told of"
    assert not driven.publishing.left
    driven.change("a")
    assert driven.flush() == []
    assert driven.say(Deactivate(1)) == [Deactivated(1)], "it was asked again"


def test_nobody_goes_back_in_time() -> None:
    driven = Driven()
    driven.change("a")
    (refused,) = driven.activate(table="table", number=5, had=[""])
    assert isinstance(refused, Refused)
    assert refused.again
    assert "update 5 has not come here yet" in refused.reason
    assert isinstance(driven.activate(table="other", number=5, had=[""])[0], Activated), "of another table: all anew"


def test_with_entitlements_each_sees_its_own_and_changes_are_at_once() -> None:
    driven = Driven(owner="table")
    driven.change("a/1", "b/1")
    driven.entitle("ann", "a")
    driven.entitle("edge", relay=True)
    assert "'bob' may see nothing of ''" in reason(driven.activate(b"bob", "bob"))
    assert "'ann' is no forwarder here" in reason(driven.activate(b"ann", "ann", relay=True))
    (activated, part) = driven.activate(b"ann", "ann")
    assert isinstance(activated, Activated)
    assert activated.subtrees == ["a"]
    assert isinstance(part, Part)
    assert [key for key, _, _ in part.changes] == ["a/1"]
    (_, part) = driven.activate(b"edge", "edge", relay=True)
    assert isinstance(part, Part)
    assert {key for key, _, _ in part.changes} == {"a/1", "b/1", "@entitled/ann", "@entitled/edge"}
    (_, part) = driven.activate(b"owner", "table")
    assert isinstance(part, Part)
    assert {key for key, _, _ in part.changes} == {"a/1", "b/1"}, "the table's own keys see everything"
    driven.entitle("ann", "b")
    (activated, part) = driven.flush(b"ann")
    assert isinstance(activated, Activated)
    assert isinstance(part, Part)
    assert (part.after, [key for key, _, _ in part.changes]) == (-1, ["b/1"]), "in place of all that it had"
    driven.entitle("ann")
    assert "may see nothing" in reason(driven.flush(b"ann"))
    assert "may not look" in reason(driven.say(Look(), b"ann", "ann"))


def test_only_those_that_are_entitled_to_hold_up_writers_do() -> None:
    driven = Driven(owner="table")
    driven.entitle("ann", "")
    driven.entitle("ledger", "", may_block=True)
    driven.entitle("edge", relay=True)
    assert "'ann' may not hold up writers" in reason(driven.activate(b"ann", "ann", policy="block"))
    assert isinstance(driven.activate(b"ann", "ann")[0], Activated)
    assert isinstance(driven.activate(b"edge", "edge", relay=True, policy="block")[0], Activated)
    assert isinstance(driven.activate(b"owner", "table", policy="block")[0], Activated)
    assert isinstance(driven.activate(b"ledger", "ledger", policy="block")[0], Activated)
    driven.entitle("ledger", "")
    assert "'ledger' may not hold up writers" in reason(driven.flush(b"ledger")), "at once"


def test_who_went_before_anybody_was_told_leaves_nothing_to_tell() -> None:
    driven = Driven()
    for _ in range(5):
        driven.activate()
    assert list(driven.publishing.joined) == ["p.5"]
    assert drain_presences(driven.publishing)[0][0].stream == "p.5"
    driven.activate()
    assert drain_presences(driven.publishing)[1] == ["p.5"]


@settings(max_examples=effort(120), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), _REQUESTS), max_size=12))
def test_no_request_stops_a_publisher(requests: list[tuple[int, Any]]) -> None:
    """What a client says is well-formed, and else as it likes."""
    driven = Driven()
    driven.entitle("a", "b", may_block=True)
    driven.change("a", "b/c")
    for who, request in requests:
        driven.now_ns += S // 3
        driven.say(request, bytes([who]), ("", "a", "b")[who])
        driven.change("b/c", size_bytes=3000)
    assert len(driven.publishing) <= 3


@given(st.binary(max_size=200), st.booleans())
def test_no_frame_stops_a_publisher(body: bytes, has_check: bool) -> None:
    data = MAGIC + body
    with suppress(RemoteProtocolError):
        decode_request(data + crc64(data).to_bytes(8, "big") if has_check else data)


def test_operators_see_each_client_but_not_all_the_time() -> None:
    driven = Driven()
    driven.activate(label="one")
    (report,) = driven.say(Look(), b"operator")
    assert isinstance(report, Report)
    assert [(one.label, one.state) for one in report.streams] == [("one", "in step")]
    assert driven.say(Look(), b"operator") == []
    driven.now_ns += S
    assert len(driven.say(Look(), b"operator")) == 1


def test_there_are_so_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.clone.publication.STREAMS_MAX", 1)
    driven = Driven()
    driven.activate()
    assert "ask another forwarder" in reason(driven.activate(b"other"))
    driven.publishing.end_stream_of(ROUTE)
    assert isinstance(driven.activate(b"other")[0], Activated)


def test_frames_of_others_are_no_messages() -> None:
    data = encode(Ping(1))
    for wrong, text in (
        (b"", "0 bytes that are no message"),
        (b"XXX\x01" + data[4:], "begins with b'XXX"),
        (data[:3] + b"\x07" + data[4:], "version 7, 1 is known here"),
        (data[:-1] + bytes([data[-1] ^ 1]), "was damaged"),
        (encode(Pong(1)), "can't be read"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            decode_request(wrong)


def test_one_that_walks_for_too_long_is_brought_up_to_date_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows its walk is not kept for it."""
    monkeypatch.setattr("immortal.appsdk.patterns.clone.streams.HISTORY_BYTES", 0)
    monkeypatch.setattr("immortal.appsdk.patterns.clone.streams.PART_CHANGES_MAX", 5)
    driven = Driven()
    driven.change(*(f"k{index}" for index in range(50)), size_bytes=500)
    told = [answer for answer in driven.activate() if isinstance(answer, Part)]
    assert told[-1].more, "its window is full"
    for _ in range(5):
        driven.change("late")
        driven.publishing.flush(driven.now_ns)
    total_bytes = 0
    while told[-1].number < driven.number:
        total_bytes += 4000
        assert total_bytes < 100_000, "it stands still"
        told += [answer for answer in driven.say(Received(1, total_bytes)) if isinstance(answer, Part)]
    assert [part.changes for part in told[-1:]] == [[("late", 55, b"v")]]
    assert told[-1].after == 50


def test_a_ping_says_again_what_has_come_where_the_acknowledgement_was_lost() -> None:
    driven = Driven()
    heard = driven.activate()
    driven.overrun()
    heard += driven.flush()
    came_bytes = sum(len(encode(one)) for one in heard if isinstance(one, Part))
    assert came_bytes >= publication.WINDOW_BYTES_MIN
    assert driven.say(Ping(1)) == [Pong(1, came_bytes)]
    assert any(isinstance(one, Part) for one in driven.say(Ping(1, came_bytes)))
