"""Turns at the log: while others send, too, nobody has more than a turn on its way to the disk."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.input.inbound import FairTurns
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.notices import FrameRefused
from immortal.protocol.batch import decode_batch
from immortal.protocol.client_frames import ClientFrame, ClientFrameType
from immortal.protocol.messages import decode_incoming_rpc, decode_messages
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from tests.helpers.core import Driven, rpc

TURN_BYTES = 250
LIMITS = Limits(turn_bytes=TURN_BYTES, group_size_bytes=100)
MS = 1_000_000


def small(number: int) -> bytes:
    return rpc(number.to_bytes(4, "little") + b"s" * 80)  # two fit a turn


def large(number: int) -> bytes:
    return rpc(number.to_bytes(4, "little") + b"l" * TURN_BYTES)


def driven_with(limits: Limits = LIMITS) -> Driven:
    driven = Driven.started(limits=limits, auto=False)
    driven.forget()
    return driven


def send(driven: Driven, sender: str, position: int, message: bytes) -> None:
    driven.batch(f"{sender}{position}", position, message, sender=sender, committer_id=100 + ord(sender))


def to_the_disk(driven: Driven) -> list[str]:
    """What was handed over since the last call: senders with the numbers of their calls, commit by commit."""
    found: list[str] = []
    for commit in driven.of(ef.Commit):
        for _, record in commit.transaction.records:
            found.append(" ".join(calls_of(record)))
    driven.effects[:] = [effect for effect in driven.effects if not isinstance(effect, ef.Commit)]
    return found


def calls_of(record: bytes) -> list[str]:
    calls = []
    for _, start, end in decode_messages(record[24 : int.from_bytes(record[4:8], "little")]):
        data = record[24 + start : 24 + end]
        try:
            arguments = bytes(decode_incoming_rpc(data).arguments)
        except Exception:  # a batch
            arguments = data[decode_batch(data)[1] :]
        if arguments[4:5] in (b"s", b"l"):
            calls.append(f"{arguments[4:5].decode()}{arguments[0]}")
    return calls


def acknowledged(driven: Driven) -> list[object]:
    return [token for token, frame_type, _ in driven.replies if frame_type is FrameType.TRIM_TO]


def until_all_durable(driven: Driven) -> list[str]:
    order = to_the_disk(driven)
    while driven.jobs:
        driven.disk()
        order += to_the_disk(driven)
    return order


def test_a_sender_alone_has_its_whole_window_under_way() -> None:
    driven = driven_with()
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    assert not driven.machine.components.peers.inbound.turns.waiting_bytes
    assert until_all_durable(driven) == [f"s{number}" for number in range(1, 7)]


def test_who_comes_behind_much_of_another_does_not_wait_for_all_of_it() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    send(driven, "c", 2, small(101))
    order = until_all_durable(driven)
    assert order.index("s101") == 3, f"two of b's fill its turn: {order}"
    assert [number for number in order if number not in ("s100", "s101")] == [f"s{number}" for number in range(1, 7)]
    assert acknowledged(driven) == ["c1", "b1", "b2", "c2", "b3", "b4", "b5", "b6"]


def test_several_that_wait_take_turns() -> None:
    driven = driven_with()
    for position in range(1, 5):
        for number, sender in enumerate("bcd"):
            send(driven, sender, position, small(10 * number + position))
    order = until_all_durable(driven)
    assert sorted(order[:6]) == ["s1", "s11", "s12", "s2", "s21", "s22"]
    assert [order[at : at + 3] for at in (6, 9)] == [["s3", "s13", "s23"], ["s4", "s14", "s24"]]


def test_a_batch_larger_than_a_turn_is_taken_alone_and_then_there_is_a_pause() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    send(driven, "b", 1, large(1))
    send(driven, "b", 2, large(2))
    send(driven, "c", 2, small(101))  # it has to wait for the first
    driven.now_ns += 10 * MS
    assert until_all_durable(driven) == ["s100", "l1", "s101"]
    driven.now_ns += 39 * MS
    send(driven, "c", 3, small(102))
    assert until_all_durable(driven) == ["s102"], "four times as long as the first took"
    (wake,) = driven.of(ef.WakeAt)[-1:]
    driven.now_ns += 1 * MS
    assert wake.time_ns == driven.now_ns
    driven.handle(ev.Tick())
    assert until_all_durable(driven) == ["l2"]


def test_a_large_batch_that_nobody_waits_for_is_followed_by_the_next_at_once() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    driven.now_ns += 1 * MS
    send(driven, "b", 1, large(1))
    send(driven, "b", 2, large(2))
    driven.now_ns += 10 * MS
    assert until_all_durable(driven) == ["s100", "l1", "l2"]


def test_two_with_large_batches_do_not_pass_the_pause_to_each_other() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    for position, number in ((1, 1), (2, 2), (3, 3)):
        send(driven, "b", position, large(number))
    for position, number in ((1, 11), (2, 12)):
        send(driven, "d", position, large(number))
    send(driven, "c", 2, small(101))
    driven.now_ns += 10 * MS
    assert until_all_durable(driven) == ["s100", "l1", "s101"]
    driven.now_ns += 40 * MS
    driven.handle(ev.Tick())
    assert until_all_durable(driven) == ["l2", "l11", "l3", "l12"], (
        "one after the other, in turns; nobody waits for them"
    )


def test_what_comes_behind_a_batch_that_waits_waits_too() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    send(driven, "b", 1, large(1))
    send(driven, "b", 2, large(2))
    send(driven, "c", 2, small(101))
    driven.now_ns += 10 * MS
    driven.disk_all()
    send(driven, "b", 3, small(3))
    assert not driven.jobs
    driven.now_ns += 40 * MS
    driven.handle(ev.Tick())
    assert until_all_durable(driven)[-2:] == ["l2", "s3"]
    assert {kind for token, kind, _ in driven.replies if str(token).startswith("b")} == {FrameType.TRIM_TO}


def test_what_waited_keeps_to_a_window_that_has_shrunk_meanwhile() -> None:
    turns = FairTurns(LIMITS)
    frames = [PeerFrame(FrameType.BATCH, "b", "a", 7, 1, number, 1, 5, small(number)) for number in (1, 2)]
    for frame in frames:
        turns.wait(ev.PeerFrameReceived(frame.position, frame))
    size_bytes, pending_bytes = len(small(1)), 0

    def pending(sender: str) -> int:
        return pending_bytes

    def allowed(sender: str) -> int:
        return 2 * size_bytes - 1

    first = turns.next(pending, allowed, 10**12)
    assert first is not None
    assert first.frame is frames[0], "one batch always"
    pending_bytes = size_bytes
    assert turns.next(pending, allowed, 10**12) is None
    pending_bytes = 0
    second = turns.next(pending, allowed, 10**12)
    assert second is not None
    assert second.frame is frames[1]
    assert (turns.waiting_bytes, turns.count_waiting("b")) == (0, (0, 0))


def test_who_has_sent_nothing_for_long_holds_nobody_back() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    driven.now_ns += LIMITS.recent_ns
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    assert not driven.machine.components.peers.inbound.turns.waiting_bytes


def test_clients_count_as_others() -> None:
    driven = driven_with()
    frame = ClientFrame(ClientFrameType.REQUEST, "m", "a", number=1, count=1, payload=b"\0")  # refused, and heard
    driven.handle(ev.ClientFrameReceived("t", frame, ""))
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    assert driven.machine.components.peers.inbound.turns.waiting_bytes == 4 * len(small(1))


@pytest.mark.parametrize("window_bytes", [5 * len(small(1)), 6 * len(small(1)) - 1])
def test_what_waits_counts_for_the_window(window_bytes: int) -> None:
    limits = Limits(
        turn_bytes=TURN_BYTES, group_size_bytes=100, peer_window_bytes=window_bytes, assumed_window_bytes=window_bytes
    )
    driven = driven_with(limits)
    send(driven, "c", 1, small(100))
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    (refused,) = [effect for effect in driven.of(ef.ReplyToPeer) if effect.frame.code == RefusedCode.BEYOND_WINDOW]
    assert refused.token == "b6"
    assert driven.machine.components.peers.inbound.turns.waiting_bytes == 3 * len(small(1))
    send(driven, "b", 6, small(6))
    told = [effect.notice for effect in driven.of(ef.Report) if isinstance(effect.notice, FrameRefused)]
    assert len(told) == 1, "it is said once of a sender"


def test_what_waits_counts_for_what_is_granted_to_others() -> None:
    limits = Limits(turn_bytes=TURN_BYTES, group_size_bytes=100, receive_budget_bytes=10_000, grant_bytes_min=10)
    driven = driven_with(limits)
    send(driven, "c", 1, small(100))
    for position in range(1, 7):
        send(driven, "b", position, small(position))
    driven.greeted("h", sender="d", committer_id=7)
    (welcome,) = [effect.frame for effect in driven.of(ef.ReplyToPeer)]
    assert welcome.count == (10_000 - 7 * len(small(1))) // 3


def test_frames_of_a_past_life_that_waited_are_refused() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    for position in range(1, 5):
        send(driven, "b", position, small(position))
    driven.greeted("h", sender="b", committer_id=100 + ord("b"), epoch=2)
    driven.disk_all()
    codes = {effect.token: effect.frame.code for effect in driven.of(ef.ReplyToPeer)}
    assert (codes["b3"], codes["b4"]) == (RefusedCode.STALE_EPOCH, RefusedCode.STALE_EPOCH)
    assert ("h", FrameType.WELCOME, 2) in driven.replies


def test_while_stopping_none_is_taken() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    for position in range(1, 5):
        send(driven, "b", position, small(position))
    driven.handle(ev.StopRequested())
    assert until_all_durable(driven) == ["s100", "s1", "s2"]
    assert {"b3", "b4"}.isdisjoint(token for token, _, _ in driven.replies)


def test_a_clock_that_goes_back_ends_a_pause() -> None:
    driven = driven_with()
    send(driven, "c", 1, small(100))
    driven.disk_all()
    send(driven, "b", 1, large(1))
    send(driven, "b", 2, large(2))
    send(driven, "c", 2, small(101))
    driven.now_ns += 10 * MS
    driven.disk_all()
    assert not driven.jobs
    driven.now_ns -= 2 * LIMITS.turn_pause_ns_max
    driven.handle(ev.Tick())
    assert "l2" in until_all_durable(driven)


# --- found by the simulation: what is sent again is no more than what may be sent -------------------------------------


def with_window(frames: int) -> Driven:
    """A window for so many small frames; one of another sender is on its way, two of "b" are, the others wait."""
    window_bytes = frames * len(small(1))
    limits = Limits(
        turn_bytes=TURN_BYTES, group_size_bytes=100, peer_window_bytes=window_bytes, assumed_window_bytes=window_bytes
    )
    driven = driven_with(limits)
    send(driven, "c", 1, small(100))
    for position in range(1, 5):
        send(driven, "b", position, small(position))
    return driven


def refused(driven: Driven) -> list[object]:
    return [effect.token for effect in driven.of(ef.ReplyToPeer) if effect.frame.frame_type is FrameType.REFUSED]


def test_frames_that_come_again_are_sent_back_where_there_is_no_room_for_them() -> None:
    driven = with_window(5)
    for position in (3, 4):  # by the messenger, since they are not answered yet
        send(driven, "b", position, small(position))
    assert refused(driven) == []
    resent = [
        token for token, frame_type, position in driven.replies if (frame_type, position) == (FrameType.RESEND, 2)
    ]
    assert sorted(map(str, resent)) == ["b3", "b3", "b4", "b4"], "each of them has an answer"
    assert driven.machine.components.peers.inbound.turns.waiting_bytes == 0
    driven.disk_all()
    for position in (3, 4):
        send(driven, "b", position, small(position))
    driven.disk_all()
    assert driven.machine.view.peers()["b"]["received"] == 4


@pytest.mark.parametrize("position", [1, 2])
def test_what_is_here_already_does_not_wait(position: int) -> None:
    driven = with_window(5)
    for _ in range(3):
        send(driven, "b", position, small(position))
    assert driven.replies == [], "each waits for the disk alone"
    assert driven.machine.components.peers.inbound.turns.waiting_bytes == 2 * len(small(1)), "only what is new waits"
