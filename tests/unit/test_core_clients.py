"""Clients at one instance, frame by frame: what is taken, answered, kept, let go of and refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import (
    ClientCode,
    ClientFrame,
    ClientFrameType,
    decode_methods,
    encode_numbers,
    encode_request,
)
from immortal.protocol.extensions import QUERIES, AppDescription, encode_app_description
from immortal.protocol.messages import RpcKind, encode_incoming_rpc, encode_message, encode_outgoing_rpc
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import BatchKind, BatchSource, decode_trailer
from tests.helpers.clients import call, request, said
from tests.helpers.core import HELLO, NOW_NS, Driven, arguments, attach, checkpoint, first_start

ATTACH = attach("~")


def answer(number: int, value: Any, *, client_id: str = "c", kind: int = RpcKind.RETURNED_VALUE) -> bytes:
    """What the app says to a request."""
    data = msgspec.msgpack.encode((f"~{client_id}", number, value))
    return encode_outgoing_rpc("~", 3, 0, data, kind)


def ping(token: object, *numbers: int, client_id: str = "c", acknowledged: int = 0) -> ev.ClientFrameReceived:
    frame = ClientFrame(
        ClientFrameType.PING,
        client_id,
        "a",
        acknowledged=acknowledged,
        count=len(numbers),
        payload=encode_numbers(numbers),
    )
    return ev.ClientFrameReceived(token, frame)


def hello(token: object, **fields: Any) -> ev.ClientFrameReceived:
    values = {"client_id": "c", "instance": "a"} | fields
    return ev.ClientFrameReceived(token, ClientFrame(ClientFrameType.HELLO, **values))


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def started(limits: Limits | None = None, *, auto: bool = True) -> Driven:
    """Up, and its app attached to the clients."""
    driven = Driven.started(auto=auto, limits=limits)
    driven.data(ATTACH)
    driven.forget()
    return driven


def test_a_request_is_logged_given_to_the_app_and_answered() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7)))
    (given,) = arguments(bytes(driven.app_bytes))
    assert given == encode_incoming_rpc(3, 0, packed(("~c", 1, 7)))
    value = driven.store.read(1, 1 << 20)[0]
    header = decode_header(value)
    (source,) = decode_trailer(value[header.size_bytes :], header.check).batches
    assert (source.kind, source.name, source.first_position, source.count) == (BatchKind.CLIENT, "~c", 1, 1)
    assert said(driven.data(answer(1, "seven"))) == [("t", "REPLY", {1: (1, packed("seven"))})]


def sources(driven: Driven) -> list[BatchSource]:
    """Of the clients, in all records."""
    found: list[BatchSource] = []
    for value in driven.store.read(0, 1 << 20):
        header = decode_header(value)
        found += decode_trailer(value[header.size_bytes :], header.check).batches
    return [source for source in found if source.kind == BatchKind.CLIENT]


def test_the_trace_of_a_request_is_in_the_log_and_the_app_sees_nothing_of_it() -> None:
    context = f"{'4b' * 16}-{'0f' * 8}-01"
    driven = started()
    driven.handle(request("t", 1, call(7), reason=context))
    (given,) = arguments(bytes(driven.app_bytes))
    assert given == encode_incoming_rpc(3, 0, packed(("~c", 1, 7)))
    assert said(driven.data(answer(1, "seven"))) == [("t", "REPLY", {1: (1, packed("seven"))})]
    driven.handle(request("t", 2, call(8), reason="no trace"))
    driven.handle(request("t", 3, call(9)))
    assert [(source.name, source.trace_context) for source in sources(driven)] == [
        ("~c", context), ("~c", ""), ("~c", ""),
    ]  # fmt: skip


def test_those_that_were_heard_last_are_told() -> None:
    driven = started()
    for client_id, number in (("c", 1), ("d", 1), ("c", 2)):
        driven.handle(request("t", number, call(7), client_id=client_id))
    driven.data(answer(1, "seven"))
    told = driven.machine.view.clients()
    assert told["count"] == 2
    assert [(one["id"], one["requests"], one["open_requests"], one["replies"]) for one in told["clients"]] == [
        ("c", 2, 1, 1), ("d", 1, 1, 0),
    ]  # fmt: skip


def test_an_id_that_the_log_would_take_for_another_is_refused() -> None:
    driven = started()
    effects = driven.handle(request("t", 1, call(7), client_id=f"c\0{'4b' * 16}-{'0f' * 8}-01"))
    (reply,) = [effect for effect in effects if isinstance(effect, ef.ReplyToClient)]
    assert (reply.frame.frame_type, reply.frame.code) == (ClientFrameType.REFUSED, ClientCode.MALFORMED)
    assert sources(driven) == []


def test_a_repeated_request_is_answered_and_not_logged_again() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7)))
    driven.data(answer(1, "seven"))
    last = driven.machine.view.status(0)["sequence_id"]
    assert said(driven.handle(request("u", 1, call(7)))) == [("u", "REPLY", {1: (1, packed("seven"))})]
    assert driven.machine.view.status(0)["sequence_id"] == last


def test_an_open_request_is_answered_where_it_was_last_asked_for() -> None:
    driven = started()
    driven.handle(request("old", 1, call(7)))
    assert said(driven.handle(request("new", 1, call(7)))) == []
    assert said(driven.data(answer(1, "seven"))) == [("new", "REPLY", {1: (1, packed("seven"))})]


def test_of_a_request_that_overlaps_only_what_is_new_is_taken() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1), call(2)))
    driven.handle(request("t", 1, call(1), call(2), call(3)))
    given = [msgspec.msgpack.decode(data[5:]) for data in arguments(bytes(driven.app_bytes))]
    assert given == [["~c", 1, 1], ["~c", 2, 2], ["~c", 3, 3]]


def test_what_comes_before_its_turn_is_not_taken() -> None:
    driven = started()
    assert said(driven.handle(request("t", 2, call(2)))) == [("t", "PONG", 0)]
    assert arguments(bytes(driven.app_bytes)) == []


def test_nothing_is_given_to_the_app_before_it_is_durable() -> None:
    driven = started(auto=False)
    driven.handle(request("t", 1, call(7)))
    assert arguments(bytes(driven.app_bytes)) == []
    assert said(driven.handle(ping("t", 1))) == [("t", "PONG", ClientCode.PENDING)]
    driven.disk_all()
    assert said(driven.handle(ping("t", 1))) == [("t", "PONG", 1)]
    assert len(arguments(bytes(driven.app_bytes))) == 1


def test_a_crash_before_the_commit_takes_the_request_back() -> None:
    driven = started(auto=False)
    driven.handle(request("t", 1, call(7)))
    second = driven.crash()
    assert said(second.handle(ping("t", 1))) == [("t", "PONG", 0)]


def test_a_reply_that_was_not_durable_is_made_again_by_the_replay() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7)))
    driven.data(answer(1, "seven"))  # it waits for the next commit
    second = driven.crash()
    assert said(second.handle(request("u", 1, call(7)))) == []
    second.recover(ATTACH + answer(1, "seven"))
    assert said(second.handle(ping("u", 1))) == [("u", "PONG", 1), ("u", "REPLY", {1: (1, packed("seven"))})]


def test_a_durable_reply_is_there_before_the_app_is() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7)))
    driven.data(answer(1, "seven"))
    driven.handle(request("t", 2, call(8)))  # its commit takes the reply along
    second = driven.crash()
    assert said(second.handle(request("u", 1, call(7)))) == [("u", "REPLY", {1: (1, packed("seven"))})]
    second.recover(ATTACH + answer(1, "seven") + answer(2, "eight"))
    assert said(second.handle(ping("u", 1, 2)))[1] == (
        "u",
        "REPLY",
        {1: (1, packed("seven")), 2: (1, packed("eight"))},
    )


def test_replies_that_wait_are_part_of_a_checkpoint() -> None:
    driven = started(auto=False)
    driven.handle(request("t", 1, call(7)))
    driven.disk_all()
    driven.data(answer(1, "seven"))
    driven.handle(ev.CheckpointRequested())
    driven.data(checkpoint(b"state three"))
    driven.disk_all()
    second = driven.crash()
    second.auto = True
    second.recover()  # it replays nothing, and makes nothing again
    assert said(second.handle(ping("u", 1)))[1] == ("u", "REPLY", {1: (1, packed("seven"))})


def test_acknowledged_replies_go() -> None:
    driven = started()
    for number in (1, 2):
        driven.handle(request("t", number, call(number)))
        driven.data(answer(number, number))
    driven.handle(request("t", 3, call(3), acknowledged=2))
    assert set(driven.store.clients().replies) == {("c", 3)}  # what it is, as long as it is open
    assert driven.machine.view.status(0)["clients"] == {
        "known": 1, "open_requests": 1, "replies": 0, "replies_bytes": 0, "open_queries": 0, "answered_queries": 0,
    }  # fmt: skip
    assert said(driven.handle(request("t", 1, call(1))))[0] == ("t", "REPLY", {1: (0, b"")})


def test_a_ping_acknowledges_too() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1)))
    driven.data(answer(1, 1))
    driven.handle(ping("t", acknowledged=1))
    assert driven.machine.view.status(0)["clients"]["replies"] == 0  # type: ignore[index]


@pytest.mark.parametrize("limits", [Limits(client_replies_max=2), Limits(client_replies_bytes=404)])
def test_beyond_its_window_the_oldest_replies_go_and_nothing_is_done_again(limits: Limits) -> None:
    driven = started(limits)
    driven.handle(request("t", 1, call(1), call(2), call(3), call(4)))
    driven.data(answer(2, 2) + answer(3, 3) + answer(4, 4))  # the first is still open
    assert said(driven.handle(ping("t", 1, 2, 3, 4)))[1] == (
        "t",
        "REPLY",
        {2: (0, b""), 3: (1, b"\3"), 4: (1, b"\4")},
    )
    driven.handle(request("t", 5, call(5)))
    second = driven.crash()
    assert said(second.handle(ping("t", 1, 2, 3, 4)))[1] == ("t", "REPLY", {2: (0, b""), 3: (1, b"\3"), 4: (1, b"\4")})
    driven.data(answer(1, 1))
    assert driven.machine.view.status(0)["clients"]["open_requests"] == 1  # type: ignore[index]


def test_of_all_clients_those_unused_for_longest_lose_their_replies() -> None:
    driven = started(Limits(replies_bytes=30))
    for client_id in "xyz":
        driven.now_ns += 1
        driven.handle(request(client_id, 1, call(1), client_id=client_id))
        driven.data(answer(1, "0123456789", client_id=client_id))
    assert said(driven.handle(ping("x", 1, client_id="x")))[1][2] == {1: (0, b"")}
    assert said(driven.handle(ping("z", 1, client_id="z")))[1][2] == {1: (1, packed("0123456789"))}


def test_the_oldest_client_loses_replies_as_well_though_one_has_just_come_for_it() -> None:
    # What came for the one that was unused for longest was kept beyond the limit: nobody was before it.
    driven = started(Limits(replies_bytes=1000))
    driven.handle(request("x", 1, *[call(1)] * 10, client_id="x"))
    driven.handle(request("y", 1, call(1), client_id="y"))
    driven.data(answer(1, "0123456789", client_id="y"))
    for number in range(1, 11):
        driven.data(answer(number, "0123456789", client_id="x"))
        status = driven.machine.view.status(0)["clients"]
        assert status["replies_bytes"] <= 1000  # type: ignore[index]
    assert said(driven.handle(ping("y", 1, client_id="y")))[1][2] == {1: (1, packed("0123456789"))}
    kept = said(driven.handle(ping("x", *range(1, 11), client_id="x")))[1][2]
    assert [number for number, (kind, _) in kept.items() if kind] == [8, 9, 10]


class Counted(OrderedDict[str, Any]):
    """Counts what is looked at when it is gone through."""

    looked_at = 0

    def items(self) -> Any:
        for item in super().items():
            self.looked_at += 1
            yield item


def test_clients_without_replies_are_not_gone_through_for_each_answer() -> None:
    driven = started(Limits(replies_bytes=1000))
    table = driven.machine.components.clients.table
    table._clients = counted = Counted()
    count = 100
    for number in range(count):
        driven.handle(request("t", 1, call(1), client_id=f"idle {number}"))
        driven.data(answer(1, 1, client_id=f"idle {number}"))
        driven.handle(ping("t", client_id=f"idle {number}", acknowledged=1))
    counted.looked_at = 0
    for number in range(count):
        driven.handle(request("t", 1, call(1), client_id=f"busy {number}"))
        driven.data(answer(1, "0123456789", client_id=f"busy {number}"))
    assert driven.machine.view.status(0)["clients"]["replies"] == 4  # type: ignore[index]
    assert counted.looked_at <= 2 * count
    assert len(table._holders) <= 5, "who has no replies any more is not remembered"


def test_of_forgotten_clients_nothing_is_left() -> None:
    driven = started(Limits(clients_max=3))
    table = driven.machine.components.clients.table
    for number in range(100):
        driven.now_ns += 10
        driven.handle(request("t", 1, call(1), client_id=f"{number}", time_ns=driven.now_ns))
        driven.data(answer(1, 1, client_id=f"{number}"))
        assert len(table) <= 4
        assert len(table._holders) <= 8
    assert {client_id for _, client_id, client in table._holders if client.replies} == {"97", "98", "99"}


def test_who_calls_again_is_not_the_one_that_was_unused_for_longest() -> None:
    driven = started(Limits(replies_bytes=500))
    for client_id in "xy":
        driven.handle(request(client_id, 1, call(1), client_id=client_id))
        driven.data(answer(1, "0123456789", client_id=client_id))
    driven.handle(request("x", 2, call(1), client_id="x"))
    driven.handle(request("z", 1, call(1), client_id="z"))
    driven.data(answer(1, "0123456789", client_id="z"))
    assert said(driven.handle(ping("x", 1, client_id="x")))[1][2] == {1: (1, packed("0123456789"))}
    assert said(driven.handle(ping("y", 1, client_id="y")))[1][2] == {1: (0, b"")}


def test_a_forgotten_client_is_not_taken_for_a_new_one() -> None:
    driven = started(Limits(clients_max=1))
    driven.handle(request("x", 1, call(1), client_id="x", time_ns=NOW_NS))
    driven.data(answer(1, 1, client_id="x"))
    driven.now_ns += 10
    driven.handle(request("y", 1, call(1), client_id="y", time_ns=driven.now_ns))
    assert driven.machine.view.status(0)["clients"]["known"] == 1  # type: ignore[index]
    late = request("x", 1, call(1), client_id="x", time_ns=NOW_NS)
    assert said(driven.handle(late)) == [("x", "REFUSED", ClientCode.FORGOTTEN)]
    second = driven.crash()
    assert said(second.handle(late)) == [("x", "REFUSED", ClientCode.FORGOTTEN)]
    fresh = request("x", 1, call(1), client_id="x", time_ns=driven.now_ns + 1)
    assert said(second.handle(fresh)) == []


def test_a_client_that_was_unused_for_a_day_is_forgotten() -> None:
    driven = started(Limits(client_keep_ns=1000))
    driven.handle(request("x", 1, call(1), client_id="x"))
    driven.data(answer(1, 1, client_id="x"))
    driven.now_ns += 1001
    driven.handle(request("y", 1, call(1), client_id="y"))
    assert set(driven.store.clients().positions) == {"y"}
    assert set(driven.store.clients().replies) == {("y", 1)}


def test_a_client_with_an_open_request_is_not_forgotten() -> None:
    driven = started(Limits(clients_max=1))
    driven.handle(request("x", 1, call(1), client_id="x"))
    driven.handle(request("y", 1, call(1), client_id="y"))
    assert said(driven.data(answer(1, 1, client_id="x"))) == [("x", "REPLY", {1: (1, b"\1")})]


@pytest.mark.parametrize("limits", [Limits(requests_open_max=2), Limits(client_span_max=2)])
def test_too_much_that_waits_is_not_taken(limits: Limits) -> None:
    driven = started(limits)
    driven.handle(request("t", 1, call(1), call(2)))
    assert said(driven.handle(request("t", 3, call(3)))) == [("t", "PONG", ClientCode.BUSY)]
    driven.data(answer(1, 1) + answer(2, 2))
    driven.handle(request("t", 3, call(3), acknowledged=2))
    assert len(arguments(bytes(driven.app_bytes))) == 3


def test_a_slow_disk_holds_up_clients() -> None:
    driven = started(Limits(log_pending_bytes=20), auto=False)
    driven.handle(request("t", 1, call(1), call(2)))
    assert said(driven.handle(request("t", 3, call(3)))) == [("t", "PONG", ClientCode.BUSY)]
    driven.disk_all()
    assert said(driven.handle(request("t", 3, call(3)))) == []


@pytest.mark.parametrize(
    "payload",
    [
        call(1) + b"\0",
        encode_request(-2, packed((1,))),
        encode_incoming_rpc(3, 1, packed((1,))),
        encode_incoming_rpc(3, 0, packed((1,)), RpcKind.RETURNED_VALUE),
        encode_incoming_rpc(3, 0, b"\x81\1\2"),
        encode_incoming_rpc(3, 0, b""),
        encode_message(5, b"12345"),
    ],
)
def test_what_is_no_call_is_refused_whole(payload: bytes) -> None:
    driven = started()
    event = request("t", 1, call(1), payload)
    assert said(driven.handle(event)) == [("t", "REFUSED", ClientCode.MALFORMED)]
    assert arguments(bytes(driven.app_bytes)) == []
    assert said(driven.handle(request("t", 1, call(1)))) == []


def test_hello_tells_the_methods_the_position_and_the_time() -> None:
    driven = started()
    methods = {("", 3): "Counter.add", ("", 5): "Counter.total", (QUERIES, 5): "Counter.total"}
    description = AppDescription(1, {**methods, ("", -1): "Counter.initial", ("b", 4): "B.other"})
    driven.data(encode_app_description(description))
    driven.handle(request("t", 1, call(1)))
    (welcome,) = [effect.frame for effect in driven.handle(hello("t")) if isinstance(effect, ef.ReplyToClient)]
    assert (welcome.frame_type, welcome.number, welcome.time_ns) == (ClientFrameType.WELCOME, 1, driven.now_ns)
    assert decode_methods(welcome.payload) == ({3: "Counter.add", 5: "Counter.total"}, {5})
    driven.close()  # the methods are known still
    (welcome,) = [effect.frame for effect in driven.handle(hello("t")) if isinstance(effect, ef.ReplyToClient)]
    assert decode_methods(welcome.payload) == ({3: "Counter.add", 5: "Counter.total"}, {5})


def test_only_a_welcome_tells_the_time() -> None:
    driven = started()
    effects = [*driven.handle(hello("t")), *driven.handle(ping("t")), *driven.handle(hello("t", instance="b"))]
    told = {
        effect.frame.frame_type.name: effect.frame.time_ns for effect in effects if isinstance(effect, ef.ReplyToClient)
    }
    assert told == {"WELCOME": NOW_NS, "PONG": 0, "REFUSED": 0}


def test_who_is_not_the_writer_of_its_log_tells_clients_no_committer() -> None:
    follower = Driven(started().store, follow=True)
    (effect,) = [one for one in follower.handle(hello("t")) if isinstance(one, ef.ReplyToClient)]
    assert (effect.frame.code, effect.frame.committer_id) == (ClientCode.NOT_READY, 0)


def test_a_request_for_somebody_else_is_refused() -> None:
    driven = started()
    assert said(driven.handle(hello("t", instance="b"))) == [("t", "REFUSED", ClientCode.NOT_ME)]


def test_before_the_first_start_and_while_stopping_clients_are_to_wait() -> None:
    driven = Driven()
    assert said(driven.handle(hello("t"))) == [("t", "REFUSED", ClientCode.NOT_READY)]
    driven = started(auto=False)
    driven.handle(ev.StopRequested())
    assert said(driven.handle(request("t", 1, call(1)))) == [("t", "REFUSED", ClientCode.NOT_READY)]


def test_frames_that_only_a_coordinator_sends_are_refused() -> None:
    driven = started()
    frame = ClientFrame(ClientFrameType.PONG, "c", "a")
    assert said(driven.handle(ev.ClientFrameReceived("t", frame))) == [("t", "REFUSED", ClientCode.MALFORMED)]


def test_requests_are_taken_while_the_app_is_gone() -> None:
    driven = started()
    driven.close()
    assert said(driven.handle(request("t", 1, call(1)))) == []
    driven.recover(ATTACH)
    assert said(driven.data(answer(1, 1))) == [("t", "REPLY", {1: (1, b"\1")})]


@pytest.mark.parametrize(
    "strange",
    [
        encode_outgoing_rpc("~", 3, 0, packed(("~c", 1, 1))),  # a call
        encode_outgoing_rpc("~", 3, 0, packed(("~nobody", 1, 1)), RpcKind.RETURNED_VALUE),
        encode_outgoing_rpc("~", 3, 0, packed(("~c", 9, 1)), RpcKind.RETURNED_VALUE),
        encode_outgoing_rpc("~", 3, 0, packed((1, 1)), RpcKind.RETURNED_VALUE),
        encode_outgoing_rpc("~", 3, 0, b"strange", RpcKind.RETURNED_VALUE),
    ],
)
def test_what_the_app_sends_to_no_open_request_is_passed_over(strange: bytes) -> None:
    driven = started()
    driven.handle(request("t", 1, call(1)))
    assert said(driven.data(strange)) == []
    assert said(driven.data(answer(1, 1) + answer(1, 2))) == [("t", "REPLY", {1: (1, b"\1")})]


def test_an_impulse_to_clients_is_refused() -> None:
    driven = started()
    driven.data(encode_outgoing_rpc("~", 3, 2, packed(("~c", 1, 1)), RpcKind.RETURNED_VALUE))
    assert driven.of(ef.CloseApp)


def test_the_clients_are_no_peer() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1)))
    driven.data(answer(1, 1))
    assert not driven.of(ef.OpenPeer)
    assert not driven.of(ef.SendToPeer)
    assert "~" not in driven.machine.view.status(0)["outputs"]  # type: ignore[operator]
    assert driven.machine.view.peers() == {}
    driven.close()
    assert not driven.of(ef.ResetPeer)


def test_a_replay_that_answers_otherwise_is_a_divergence() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7)))
    driven.data(answer(1, "seven"))
    driven.handle(request("t", 2, call(8)))  # the record holds the mark of the answers
    second = driven.crash()
    second.connect()
    second.data(HELLO + ATTACH + answer(1, "other") + answer(2, "eight"))
    second.data(checkpoint(b"state two"))
    assert "does not do again what it did before" in str(second.stop.error)


def test_after_a_cut_what_is_open_may_be_lost() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1)))
    driven.data(answer(1, "one"))
    driven.handle(request("t", 2, call(2)))
    driven.data(answer(2, "two"))
    driven.handle(request("t", 3, call(3)))
    driven.store.cut(2)
    second = driven.crash()
    second.connect()
    second.data(HELLO + ATTACH + answer(1, "one"))
    second.data(checkpoint(b"state two"))
    second.settle()
    replies = {1: (1, packed("one")), 2: (1, packed("two")), 3: (4, b"")}
    assert said(second.handle(ping("t", 1, 2, 3)))[1] == ("t", "REPLY", replies)
    assert said(second.handle(request("t", 4, call(4)))) == []
    assert said(second.data(answer(4, "four"))) == [("t", "REPLY", {4: (1, packed("four"))})]
    third = second.crash()
    assert said(third.handle(ping("t", 3)))[1] == ("t", "REPLY", {3: (4, b"")})


def test_large_replies_are_sent_in_several_frames() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1), call(2)))
    large = "x" * (700 << 10)
    frames = said(driven.data(answer(1, large) + answer(2, large)))
    assert [list(what) for _, _, what in frames] == [[1], [2]]


def test_once_the_first_start_is_complete_clients_are_welcome() -> None:
    driven = Driven()
    driven.connect()
    assert said(driven.handle(hello("t"))) == [("t", "REFUSED", ClientCode.NOT_READY)]
    driven.data(HELLO + first_start())
    assert said(driven.handle(hello("t"))) == [("t", "WELCOME", 0)]


def test_a_full_log_takes_no_requests_until_there_is_room() -> None:
    driven = started(Limits(log_limit_bytes=1000))
    driven.handle(request("t", 1, call(1)))
    driven.handle(ev.LogMeasured(LogSpace(2000, 1)))
    assert said(driven.handle(request("t", 2, call(2)))) == [("t", "PONG", ClientCode.BUSY)]
    driven.handle(ev.LogMeasured(LogSpace(100, 1)))
    assert said(driven.handle(request("t", 2, call(2)))) == []
    assert len(arguments(bytes(driven.app_bytes))) == 2
