"""What peers and clients try at a machine: to have it keep, say or take more than it may. No I/O."""

from __future__ import annotations

import struct

import msgspec
import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.client.table import REPLY_OVERHEAD_BYTES
from immortal.coordinator.core.limits import Limits
from immortal.protocol.checksum import crc64
from immortal.protocol.client_frames import (
    ASKED_MAX,
    CALL_SIZE_BYTES_MIN,
    ClientCode,
    ClientFrame,
    ClientFrameType,
    decode_client_frame,
    decode_replies,
    encode_client_frame,
    encode_numbers,
)
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import RpcKind, encode_outgoing_rpc
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, decode_frame, encode_frame
from tests.helpers.clients import call, request, said
from tests.helpers.core import Driven, attach, rpc

MIB = 1 << 20
SECOND_NS = 10**9


# --- clients ----------------------------------------------------------------------------------------------------------


def with_replies(count: int, size_bytes: int, limits: Limits | None = None) -> Driven:
    """Client c has ``count`` replies waiting for it."""
    driven = Driven.started(limits=limits)
    driven.data(attach("~"))
    driven.handle(request("t", 1, *[call(number) for number in range(count)]))
    for number in range(1, count + 1):
        answer = msgspec.msgpack.encode(("~c", number, bytes(size_bytes)))
        driven.data(encode_outgoing_rpc("~", 3, 0, answer, RpcKind.RETURNED_VALUE))
    driven.forget()
    return driven


def ping(*numbers: int) -> ev.ClientFrameReceived:
    frame = ClientFrame(ClientFrameType.PING, "c", "a", count=len(numbers), payload=encode_numbers(numbers))
    return ev.ClientFrameReceived("t", decode_client_frame(encode_client_frame(frame)))


def told(effects: list[ef.Effect]) -> list[tuple[int, int]]:
    """(number, bytes) of each reply that a client is sent."""
    return [
        (reply.number, len(reply.value))
        for effect in effects
        if isinstance(effect, ef.ReplyToClient) and effect.frame.frame_type is ClientFrameType.REPLY
        for reply in decode_replies(effect.frame.payload, effect.frame.count)
    ]


def test_a_client_cannot_have_one_reply_sent_4096_times_by_one_ping() -> None:
    driven = with_replies(1, MIB)
    assert [number for number, _ in told(driven.handle(ping(*[1] * ASKED_MAX)))] == [1]


def test_a_client_cannot_have_a_reply_sent_by_each_of_many_pings_of_a_turn() -> None:
    driven = with_replies(1, MIB)
    assert [number for number, _ in told(driven.handle(*[ping(1)] * 100, ping(1, 1)))] == [1]


def test_a_client_cannot_be_told_again_more_than_its_share_a_second() -> None:
    driven = with_replies(3, MIB)
    again: list[tuple[int, int]] = []
    for _ in range(100):
        again += told(driven.handle(ping(1, 2, 3)))
    limits = Limits()
    assert sum(size_bytes for _, size_bytes in again) <= limits.client_resend_bytes + MIB
    assert len(again) >= 7, "what fits is told"
    driven.now_ns += SECOND_NS
    assert len(told(driven.handle(ping(1, 2, 3)))) == 3, "a second later there is room again"


def test_clients_cannot_together_be_told_again_more_than_all_may() -> None:
    driven = with_replies(1, 1000, Limits(resend_bytes=3 * (1000 + REPLY_OVERHEAD_BYTES)))
    assert len([driven for _ in range(50) if told(driven.handle(ping(1)))]) <= 4


def test_a_request_cannot_name_more_calls_than_it_has() -> None:
    """Six frames of 70 bytes had 200,000 replies sent."""
    frame = ClientFrame(ClientFrameType.REQUEST, "c", "a", number=1, count=33_333, time_ns=1, payload=call(1))
    with pytest.raises(RemoteProtocolError, match="a request of 33333 calls"):
        decode_client_frame(encode_client_frame(frame))
    assert len(call(1)) >= CALL_SIZE_BYTES_MIN


def test_a_request_that_is_repeated_is_answered_once_and_within_the_allowance() -> None:
    driven = with_replies(100, 10, Limits(client_resend_bytes=40 * REPLY_OVERHEAD_BYTES))
    repeated = [request("t", 1, *[call(number) for number in range(100)])] * 6
    numbers = [number for number, _ in told(driven.handle(*repeated))]
    assert len(numbers) == len(set(numbers)) <= 41


def test_tiny_replies_cannot_take_more_memory_than_large_ones() -> None:
    driven = with_replies(200, 0, Limits(client_replies_bytes=100 * REPLY_OVERHEAD_BYTES))
    assert driven.machine.view.status(0)["clients"]["replies"] <= 100  # type: ignore[index]


def test_a_client_cannot_grow_the_numbers_behind_an_open_request_without_bound() -> None:
    driven = Driven.started(limits=Limits(client_replies_max=1, gone_replies_max=10))
    driven.data(attach("~"))
    first = 1
    for _ in range(50):
        effects = driven.handle(request("t", first, call(first)))
        if said(effects):
            break
        if first > 1:  # the first stays open
            answer = msgspec.msgpack.encode(("~c", first, 1))
            driven.data(encode_outgoing_rpc("~", 3, 0, answer, RpcKind.RETURNED_VALUE))
        first += 1
    assert said(effects) == [("t", "PONG", ClientCode.BUSY)]
    assert first <= 14


@pytest.mark.parametrize(
    ("at", "value", "what"), [(1, 10, "a frame of type 10"), (0, 0xC2, "a frame of version 2")], ids=["type", "version"]
)
def test_a_client_of_a_later_build_is_told_once_what_is_known(at: int, value: int, what: str) -> None:
    data = bytearray(encode_client_frame(ClientFrame(ClientFrameType.HELLO, "c", "a")))
    data[at] = value
    data[36:44] = bytes(8)
    data[36:44] = struct.pack("<Q", crc64(bytes(data)))
    driven = Driven.started()
    effects = driven.handle(ev.ClientFrameReceived("t", decode_client_frame(bytes(data))))
    (answer,) = [effect.frame for effect in effects if isinstance(effect, ef.ReplyToClient)]
    assert (answer.frame_type, answer.code) == (ClientFrameType.REFUSED, ClientCode.UNKNOWN)
    known = "this coordinator takes version 1, types 1 (Hello), 3 (Request), 5 (Ping) and 8 (Query)"
    assert answer.reason == f"{what} is not known here: {known}"


# --- peers ------------------------------------------------------------------------------------------------------------


def refusals(effects: list[ef.Effect]) -> list[tuple[int, str]]:
    return [
        (effect.frame.code, effect.frame.reason)
        for effect in effects
        if isinstance(effect, ef.ReplyToPeer) and effect.frame.frame_type is FrameType.REFUSED
    ]


def test_a_sender_cannot_go_beyond_its_window() -> None:
    large = rpc(b"x" * 400)
    limits = Limits(receive_budget_bytes=1000, grant_bytes_min=10, peer_window_bytes=1000)
    driven = Driven.started(limits=limits, auto=False)
    driven.greeted("h")
    assert not refusals(driven.batch("t", 1, large))
    assert not refusals(driven.batch("t", 2, large))
    ((code, reason),) = refusals(driven.batch("t", 3, large))
    assert code == RefusedCode.BEYOND_WINDOW
    assert reason == f"{2 * len(large)} bytes wait for the disk and {len(large)} more came; 1000 were granted"
    assert refusals(driven.batch("t", 3, large)), "nothing of it was taken"
    driven.disk_all()
    assert not refusals(driven.batch("t", 3, large)), "what is durable does not count"


def test_a_message_larger_than_the_window_is_taken_alone_and_only_alone() -> None:
    limits = Limits(receive_budget_bytes=100, grant_bytes_min=10, peer_window_bytes=100)
    driven = Driven.started(limits=limits, auto=False)
    driven.greeted("h")
    assert not refusals(driven.batch("t", 1, rpc(b"x" * 400)))
    assert refusals(driven.batch("t", 2, rpc(b"x")))


def test_a_window_that_has_shrunk_takes_nothing_back_but_not_for_ever() -> None:
    limits = Limits(receive_budget_bytes=1000, grant_bytes_min=10, peer_window_bytes=1000)
    driven = Driven.started(limits=limits, auto=False)
    grants = driven.machine.components.peers.inbound.grants
    driven.greeted("h")
    assert grants.allowed_bytes("b") == 1000
    grants.window_bytes("b", 900)
    assert (grants.granted_bytes["b"], grants.allowed_bytes("b")) == (100, 1000)
    grants.now_ns += limits.active_ns
    grants.window_bytes("b", 900)
    assert grants.allowed_bytes("b") == 1000, "the sender may have heard of the smaller one just now"
    grants.now_ns += limits.active_ns
    grants.window_bytes("b", 900)
    assert grants.allowed_bytes("b") == 100


def test_a_sender_cannot_have_endless_tiny_frames_wait() -> None:
    driven = Driven.started(limits=Limits(waiting_frames_max=5), auto=False)
    driven.greeted("h")
    answers = [refusals(driven.batch("t", position, rpc(b""))) for position in range(1, 10)]
    assert [bool(answer) for answer in answers] == [False] * 5 + [True] * 4


def test_names_that_are_refused_leave_nothing() -> None:
    """Each says that it was acknowledged more than is here."""
    driven = Driven.started()
    before = dict(driven.machine.components.peers.inbound.streams)
    for number in range(2000):
        frame = driven.peer_frame(FrameType.HELLO, 5, sender=f"n{number}")
        assert refusals(driven.handle(ev.PeerFrameReceived("t", frame)))
        batch = driven.peer_frame(FrameType.BATCH, 1, sender=f"m{number}", count=1, payload=rpc(1))
        driven.handle(ev.PeerFrameReceived("t", batch))
    peers = driven.machine.components.peers
    assert peers.inbound.streams == before
    assert len(peers.inbound.senders.refused) <= Limits().refused_senders_max
    assert peers.inbound.grants.granted_bytes == {}


def test_names_that_only_say_hello_are_forgotten() -> None:
    driven = Driven.started(limits=Limits(greeted_senders_max=10))
    driven.greeted("h")
    driven.batch("t", 1, rpc(1))
    for number in range(100):
        driven.greeted("h", sender=f"n{number}")
    peers = driven.machine.components.peers
    assert len([name for name in peers.inbound.streams if name.startswith("n")]) <= 11
    assert len(peers.inbound.grants.granted_bytes) <= 12
    assert "b" in peers.inbound.streams, "of this one something was taken"


def test_why_a_name_is_refused_is_said_once() -> None:
    driven = Driven.started()
    for _ in range(10):
        driven.handle(ev.PeerFrameReceived("t", driven.peer_frame(FrameType.HELLO, 5, sender="n")))
    assert len([text for _, text in driven.reports if text.startswith("stream refused")]) == 1


def test_a_peer_of_a_later_build_is_told_once_what_is_known() -> None:
    driven = Driven.started()
    header, *_ = encode_frame(driven.peer_frame(FrameType.HELLO, 0))
    header = header[:1] + b"\x4d" + header[2:36] + bytes(8) + header[44:]
    frame = decode_frame([header[:36] + struct.pack("<Q", crc64(header)) + header[44:]])
    answers = refusals(driven.handle(ev.PeerFrameReceived("t", frame)))
    known = "this coordinator takes version 1, types 5 (Batch) and 32 (Hello)"
    assert answers == [(RefusedCode.UNKNOWN, f"a frame of type 77 is not known here: {known}")]


def test_what_a_hello_brings_with_it_is_not_kept() -> None:
    frame = PeerFrame(FrameType.HELLO, "b", "a", 7, 1, 0, payload=bytes(MIB))
    assert decode_frame(encode_frame(frame)).payload == b""
