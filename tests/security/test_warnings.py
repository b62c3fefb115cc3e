"""Who can cause a line of the log can cause many: few are written, all are counted, and what repeats slows down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.core.notices import PeerRefused
from immortal.coordinator.notices import Notices
from immortal.coordinator.notices.sinks import RateLimitedSink
from immortal.messenger import Messenger, Received
from immortal.protocol.safe_output import BURST, INTERVAL_NS, KINDS_MAX, RateLimit
from tests.helpers.notices import Told
from tests.helpers.processes import DEADLINE_S, House

# --- how many pass ----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2 * INTERVAL_NS)), max_size=200),
    st.integers(1, BURST),
)
def test_no_kind_passes_more_often_than_it_may_and_all_are_counted(came: list[tuple[str, int]], burst: int) -> None:
    limit = RateLimit(burst)
    now_ns = 0
    passed: dict[str, list[int]] = {kind: [] for kind in "abc"}
    told, offered = Counter[str](), Counter[str]()
    for kind, pause_ns in came:
        now_ns += pause_ns
        offered[kind] += 1
        left_out = limit.admit(kind, now_ns)
        if left_out is not None:
            passed[kind].append(now_ns)
            told[kind] += left_out + 1
    for kind, times_ns in passed.items():
        for first, first_ns in enumerate(times_ns):
            for count, last_ns in enumerate(times_ns[first:], 1):
                assert count <= burst + (last_ns - first_ns) // INTERVAL_NS
        last = limit.admit(kind, now_ns + (BURST + len(came)) * INTERVAL_NS)
        assert last is not None
        assert told[kind] + last == offered[kind]


def test_a_stranger_cannot_fill_the_memory_or_the_log_with_new_names() -> None:
    limit = RateLimit()
    passed = sum(limit.admit(f"name {number}", number) is not None for number in range(100_000))
    assert passed == KINDS_MAX + BURST
    assert len(limit._kinds) == KINDS_MAX + 1
    assert limit.admit("one more", 100_000) is None
    assert limit.admit("name 7", 100_000) == 0, "who was known before is held up by the others"
    later_ns = 2 * INTERVAL_NS + 100_000
    assert limit.admit("one more", later_ns) == 0
    assert len(limit._kinds) <= 2, "what is not used any more is kept"


def test_a_flood_of_one_kind_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    told = Told()
    limited = RateLimitedSink(told)
    log = Notices("counter", limited)
    for number in range(1000):
        log.warning(f"stranger {number}", kind="stranger")
    log.emit(PeerRefused("bob", "its log was replaced"))
    assert told.lines[BURST:] == [("error", "stream refused: its log was replaced", {"peer": "bob"})]
    due_ns = limited.next_deadline_ns()
    assert due_ns is not None
    now_ns = due_ns - 1
    limited.process()
    assert len(told.lines) == BURST + 1
    now_ns = due_ns
    limited.process()
    assert told.lines[-1] == ("warning", "stranger 999", {"left_out": 1000 - BURST - 1})
    assert limited.next_deadline_ns() is None


def test_lines_with_made_up_names_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    told = Told()
    limited = RateLimitedSink(told)
    for number in range(10_000):
        limited.emit(PeerRefused(f"stranger {number}", "it is none"))
    assert len(told.lines) == KINDS_MAX + BURST
    while (due_ns := limited.next_deadline_ns()) is not None:
        now_ns = due_ns
        limited.process()
    counted = sum(1 + int(str(values.get("left_out", 0))) for _, _, values in told.lines)
    assert counted == 10_000


# --- coordinators -----------------------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    yield made
    made.close()


def until_s(deadline_s: float) -> Iterator[None]:
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.001)
    raise AssertionError("it does not come about")


@pytest.mark.slow
def test_a_peer_cannot_fill_the_log_with_frames_that_are_none(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    endpoint = house.registry.resolve("alice")
    replies: list[list[bytes]] = []
    with Messenger() as stranger:
        for number in range(300):
            stranger.send_message(endpoint, b"no frame %d\x1b[2J" % number, replies.append)
        for _ in until_s(time.monotonic() + DEADLINE_S):
            if len(replies) == 300:
                break
    assert process.count("a frame was dropped") <= 2 * BURST
    assert "a frame was dropped" in process.line("left_out="), "the last one is written once it is due"
    app.impulse(1)
    app.until(lambda: app.state["forwarded"] == [1])


def test_an_app_cannot_fill_the_log_by_breaking_the_protocol(house: House) -> None:
    house.register("alice")
    process, app = house.both("alice")
    app.close()
    for _ in range(4 * BURST):
        one = house.app("alice").ready()
        one.send(b"\x04\x7f\x7f\x7f")
        one.until_closed()
    assert process.count("the app broke the protocol") == BURST
    assert process.count("the app disconnected") <= BURST + 1
    house.app("alice").ready()


def test_a_peer_that_answers_nonsense_is_asked_ever_more_rarely(house: House) -> None:
    house.register("alice")
    asked: list[float] = []

    def answer(received: Received) -> None:
        asked.append(time.monotonic())
        received.reply(b"no frame")

    with Messenger() as bob:
        endpoint = bob.listen("tcp://127.0.0.1:*", answer)
        with house.registry.path("alice").open("a") as file:
            file.write(f'[peers]\nbob = "{endpoint}"\n')
        process, alice = house.both("alice", peer="bob")
        alice.impulse(1)
        alice.until(lambda: alice.state["forwarded"] == [1])
        for _ in until_s(time.monotonic() + DEADLINE_S):
            if asked and time.monotonic() > asked[0] + 1.5:
                break
        assert 4 <= len(asked) <= 12, "as fast as it answers"
        assert asked[-1] - asked[-2] > asked[2] - asked[1]
        assert process.count("a frame was dropped") <= BURST + 1
        assert process.status()["phase"] == "normal"
