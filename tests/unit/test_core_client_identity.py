"""A number, or a key, of a client that comes again: with the same call it is answered, with another one refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.core.limits import Limits
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, encode_numbers, encode_request
from immortal.protocol.extensions import AppDescription, encode_app_description
from immortal.protocol.messages import RpcKind, encode_outgoing_rpc
from immortal.protocol.system_methods import CANCEL_CALL_METHOD_ID
from tests.helpers.clients import call, request, said
from tests.helpers.core import Driven, arguments, attach, checkpoint

KEY = "key order-17"


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def answer(number: int, value: Any, client_id: str = KEY) -> bytes:
    data = msgspec.msgpack.encode((f"~{client_id}", number, value))
    return encode_outgoing_rpc("~", 3, 0, data, RpcKind.RETURNED_VALUE)


def started(limits: Limits | None = None, *, auto: bool = True) -> Driven:
    driven = Driven.started(auto=auto, limits=limits)
    driven.data(attach("~") + encode_app_description(AppDescription(1, {("", 3): "C.add", ("", 4): "C.take"})))
    driven.forget()
    return driven


def ask(token: object, *numbers: int, reason: str = "", client_id: str = KEY) -> ev.ClientFrameReceived:
    payload = encode_numbers(numbers)
    frame = ClientFrame(ClientFrameType.PING, client_id, "a", count=len(numbers), payload=payload, reason=reason)
    return ev.ClientFrameReceived(token, frame)


def first_reply(driven: Driven, event: ev.Event, number: int = 1) -> tuple[int, Any]:
    """(kind, value) of what is told at once; what was raised in full."""
    replies = [what for _, kind, what in said(driven.handle(event)) if kind == "REPLY"]
    assert len(replies) == 1, replies
    kind, value = replies[0][number]
    return kind, msgspec.msgpack.decode(b"\x93" + value if kind == 3 else value) if value else None


def assert_conflict(reply: tuple[int, Any], *, known: str, given: str) -> None:
    kind, (name, (text,), fields) = reply
    assert (kind, name) == (3, "~refused")
    assert fields["known"].startswith(known), fields
    assert fields["given"].startswith(given), fields
    assert fields["known"] in text
    assert fields["given"] in text


def test_a_key_with_the_same_call_gives_its_reply() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    driven.data(answer(1, "seven"))
    assert first_reply(driven, request("u", 1, call(7), client_id=KEY)) == (1, "seven")


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize(
    ("other", "given"),
    [
        (call(8), "C.add with 2 bytes"),
        (call(7, 4), "C.take with 2 bytes"),
        (call(70_000), "C.add with 6 bytes"),
        (call(7, 9), "method 9 with 2 bytes"),
    ],
)
def test_a_key_with_another_call_is_refused_and_nothing_is_done(other: bytes, given: str, *, answered: bool) -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    if answered:
        driven.data(answer(1, "seven"))
    driven.app_bytes.clear()
    reply = first_reply(driven, request("u", 1, other, client_id=KEY))
    assert_conflict(reply, known="C.add with 2 bytes", given=given)
    assert arguments(bytes(driven.app_bytes)) == []
    if not answered:
        told = said(driven.data(answer(1, "seven")))
        assert told == [("t", "REPLY", {1: (1, packed("seven"))})], "who asked for it gets it, and nobody else"
    assert first_reply(driven, request("t", 1, call(7), client_id=KEY)) == (1, "seven")


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_what_a_key_is_of_is_known_to_the_next_life(*, answered: bool, with_checkpoint: bool) -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    if answered:
        driven.data(answer(1, "seven"))
    if with_checkpoint:
        driven.handle(ev.CheckpointRequested())
        driven.data(checkpoint(b"with"))
    second = driven.crash()
    reply = first_reply(second, request("u", 1, call(8), client_id=KEY))
    assert_conflict(reply, known="method 3 with 2 bytes", given="method 3 with 2 bytes")


def test_what_earlier_versions_have_kept_is_compared_with_nothing() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    driven.data(answer(1, "seven"))
    driven.handle(request("t", 1, call(7), client_id="other"))  # so that the reply is durable
    table = driven.machine.components.clients.table
    table.get(KEY).replies[1] = b"\1" + packed("seven")  # type: ignore[union-attr]
    assert first_reply(driven, request("u", 1, call(8), client_id=KEY)) == (1, "seven")


def test_of_a_client_with_an_id_each_number_is_compared_and_nothing_new_is_taken_beside_another_call() -> None:
    driven = started()
    driven.handle(request("t", 1, call(1), call(2), client_id="script"))
    driven.data(answer(1, "one", "script") + answer(2, "two", "script"))
    frame = request("u", 1, call(1), call(9), call(3), client_id="script")
    assert_conflict(first_reply(driven, frame, 2), known="C.add with 2 bytes", given="C.add with 2 bytes")
    assert driven.machine.components.clients.table.get("script").number == 2  # type: ignore[union-attr]
    driven.handle(request("u", 3, call(3), client_id="script"))
    assert driven.machine.components.clients.table.get("script").number == 3  # type: ignore[union-attr]


def test_many_conflicts_in_one_frame_are_told_a_few_at_a_time() -> None:
    driven = started()
    numbers = range(1, 101)
    driven.handle(request("t", 1, *map(call, numbers), client_id="script"))
    ((_, kind, replies),) = said(driven.handle(request("u", 1, *[call(0)] * 100, client_id="script")))
    assert (kind, list(replies)) == ("REPLY", list(range(1, 17)))
    ((_, kind, replies),) = said(driven.handle(request("u", 17, *[call(0)] * 84, client_id="script")))
    assert list(replies) == list(range(17, 33))


def test_a_reply_that_is_gone_is_no_other_calls() -> None:
    driven = started(Limits(client_replies_max=1))
    driven.handle(request("t", 1, call(1), call(2), call(3), client_id="script"))
    driven.data(answer(2, "two", "script") + answer(3, "three", "script"))  # 1 is open, 2 is gone
    assert first_reply(driven, request("u", 2, call(2), client_id="script"), 2) == (0, None)
    assert_conflict(first_reply(driven, request("u", 2, call(9), client_id="script"), 2), known="C.add", given="C.add")


def test_a_handle_of_another_method_gets_no_reply() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    driven.data(answer(1, "seven"))
    assert first_reply(driven, ask("u", 1, reason="3")) == (1, "seven")
    assert_conflict(first_reply(driven, ask("u", 1, reason="4")), known="C.add with 2 bytes", given="a call of C.take")
    assert first_reply(driven, ask("u", 1)) == (1, "seven")  # of an earlier version
    assert first_reply(driven, ask("u", 1, reason="?")) == (1, "seven")


def test_a_second_cancellation_may_have_another_reason() -> None:
    driven = started()
    cancel = [encode_request(CANCEL_CALL_METHOD_ID, packed((1, reason))) for reason in ("late", "too late")]
    driven.handle(request("t", 1, call(7), cancel[0], client_id=KEY))
    driven.data(answer(2, True))
    assert first_reply(driven, request("u", 2, cancel[1], client_id=KEY), 2) == (1, True)


def test_a_repeated_request_that_makes_no_sense_is_refused() -> None:
    driven = started()
    driven.handle(request("t", 1, call(7), client_id=KEY))
    assert said(driven.handle(request("u", 1, b"no call at all", client_id=KEY, count=1)))[0][1] == "REFUSED"


def test_nothing_is_left_of_what_was_released_or_forgotten() -> None:
    driven = started(Limits(clients_max=2))
    for number in range(1, 6):
        driven.handle(request("t", number, call(number), acknowledged=number - 1))
        driven.data(answer(number, number, "c"))
    assert set(driven.store.clients().replies) <= {("c", 4), ("c", 5)}
    for client_id in ("x", "y", "z"):
        driven.now_ns += 10
        driven.handle(request("t", 1, call(1), client_id=client_id, time_ns=driven.now_ns))
        driven.data(answer(1, 1, client_id))
    driven.handle(request("t", 2, call(1), client_id="z", time_ns=driven.now_ns))
    assert {client_id for client_id, _ in driven.store.clients().replies} == {"y", "z"}


def test_a_full_log_still_says_that_a_key_is_of_another_call() -> None:
    driven = started(Limits(log_limit_bytes=1000))
    driven.handle(request("t", 1, call(7), client_id=KEY))
    driven.handle(ev.LogMeasured(LogSpace(2000, 1)))
    assert_conflict(first_reply(driven, request("u", 1, call(8), client_id=KEY)), known="C.add", given="C.add")
