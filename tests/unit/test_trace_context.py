"""What a caller outside says of its trace: what counts, and what the spans of its call become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from immortal.appsdk.client.clients import Proxy, with_traceparent
from immortal.appsdk.client.connection import Connection
from immortal.appsdk.client.session import Call
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, decode_client_frame, encode_client_frame
from immortal.protocol.errors import LocalProtocolError
from immortal.protocol.trace_context import (
    TRACE_CONTEXT_SIZE_BYTES,
    is_trace_context,
    join_name,
    read_traceparent,
    split_context,
    split_name,
)
from immortal.protocol.trailer import BatchKind
from immortal.replay.trace.messages import CLIENTS, Executed
from immortal.replay.trace.spans import Spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = f"{TRACE}-{PARENT}-01"


def test_what_the_standard_shows() -> None:
    assert read_traceparent(f"00-{CONTEXT}") == CONTEXT
    assert read_traceparent(f"cc-{CONTEXT}-what-will-be-the-future-will-be-like") == CONTEXT
    assert split_context(CONTEXT) == (TRACE, PARENT)
    assert len(CONTEXT) == TRACE_CONTEXT_SIZE_BYTES


@pytest.mark.parametrize(
    "header",
    [
        "",
        CONTEXT,
        f"ff-{CONTEXT}",
        f"00-{CONTEXT}-more",
        f"01-{CONTEXT}0",
        f"00-{CONTEXT.upper()}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-0\u0661",
    ],
)
def test_what_is_none(header: str) -> None:
    with pytest.raises(LocalProtocolError, match="32 hexadecimal digits"):
        read_traceparent(header)
    with pytest.raises(TypeError, match="traceparent"):
        with_traceparent(Proxy(None, None, "a", None, None), header)  # type: ignore[arg-type]


@given(st.text(), st.from_regex(r"[1-9a-f]{32}-[1-9a-f]{16}-[0-9a-f]{2}", fullmatch=True))
def test_a_name_and_a_context_come_apart_again(name: str, context: str) -> None:
    assert is_trace_context(context)
    assert split_name(join_name(name, context)) == (name, context)
    assert split_name(join_name(name, "")) == (name, "") or is_trace_context(name[-TRACE_CONTEXT_SIZE_BYTES:])


def sent(connection: Connection, now_s: float) -> list[ClientFrame]:
    frames = [decode_client_frame(data) for data in connection.data_to_send(now_s)]
    return [frame for frame in frames if frame.frame_type is ClientFrameType.REQUEST]


def test_calls_of_one_trace_share_a_request_also_when_it_is_sent_again() -> None:
    connection = Connection("a", None, 100.0)

    def welcome(now_s: float) -> None:
        frame = ClientFrame(ClientFrameType.WELCOME, connection.client_id, "a", committer_id=7, payload=b"\0")
        connection.receive(encode_client_frame(frame), now_s)

    connection.data_to_send(100.0)
    welcome(100.0)
    for context in ("", "", CONTEXT, CONTEXT, ""):
        connection.submit(Call(3, b"\x90", lambda call: None, context))
    expected = [(1, 2, ""), (3, 2, CONTEXT), (5, 1, "")]
    assert [(frame.number, frame.count, frame.reason) for frame in sent(connection, 100.0)] == expected
    connection.reopened(101.0)
    connection.data_to_send(101.0)
    welcome(101.0)
    assert [(frame.number, frame.count, frame.reason) for frame in sent(connection, 101.0)] == expected


def test_its_call_is_below_the_callers_span() -> None:
    message = Executed("a", 7, 4, 0, CLIENTS, BatchKind.CLIENT, 1, 10, 20, "A.add", 1, None, trace_context=CONTEXT)
    call, handler = Spans().all_of([message])
    assert (call.trace_id, call.parent_id) == (TRACE, PARENT)
    assert (handler.trace_id, handler.parent_id) == (TRACE, call.span_id)
    own, _ = Spans().all_of([replace(message, trace_context="")])
    assert own.parent_id is None
    assert own.trace_id != TRACE
    assert own.span_id == call.span_id  # whoever reads the log finds the message by it


def test_what_it_calls_is_in_the_trace_too() -> None:
    class Causes:
        def cause_of(self, caller: str, receiver: str, position: int) -> tuple[int, int, int] | None:
            return (7, 4, 0) if caller == "a" else None

    first = Executed("a", 7, 4, 0, CLIENTS, BatchKind.CLIENT, 1, 10, 20, "A.add", 1, None, trace_context=CONTEXT)
    second = Executed("b", 8, 1, 0, "a", BatchKind.STREAM, 1, 21, 22, "B.add", 1, None)
    spans = list(Spans(Causes()).all_of([first, second]))
    assert {span.trace_id for span in spans} == {TRACE}
    assert spans[2].parent_id == spans[1].span_id
