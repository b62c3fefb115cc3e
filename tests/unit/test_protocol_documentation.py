"""docs/WIRE.md says what the code does: its bytes, its tables, its limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from immortal.protocol import extensions as numbers
from immortal.protocol import system_methods
from immortal.protocol.app_handshake import (
    NONCE_SIZE_BYTES,
    Answer,
    Handshake,
    Role,
    channel_of,
    encode_answer,
    encode_challenge,
    encode_proof,
)
from immortal.protocol.batch import encode_batch
from immortal.protocol.call_permissions import ROWS
from immortal.protocol.client_frames import (
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    ReplyKind,
    encode_client_frame,
    encode_methods,
    encode_numbers,
    encode_replies,
    encode_request,
    logged_calls,
)
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    ANSWERS,
    QUERIES,
    REPORTS,
    SECRET_SIZE_BYTES_MAX,
    TAKING_BACK,
    TRACE_EXTENSIONS,
    AppDescription,
    AppTime,
    HandlerFailure,
    Hello,
    Origin,
    encode_app_batch,
    encode_app_description,
    encode_app_time,
    encode_handler_failed,
    encode_hello,
    encode_impulses_accepted,
    encode_origins,
    encode_record_time,
    encode_sources,
    encode_version,
)
from immortal.protocol.limits import EXTENSIONS_MAX, MESSAGE_SIZE_BYTES_MAX, NAME_SIZE_BYTES_MAX, RECORD_SIZE_BYTES_MAX
from immortal.protocol.messages import (
    MessageType,
    RpcKind,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, encode_frame
from immortal.protocol.queries import QueryAnswer, QueryQuestion, encode_query, encode_query_answer
from immortal.protocol.record import encode_record
from immortal.protocol.varint import encode_zigzag
from immortal.protocol.verdicts import (
    Careful,
    Cause,
    Handling,
    Unsaved,
    Verdict,
    VerdictKind,
    encode_careful,
    encode_handling,
    encode_unsaved,
    encode_verdict,
    encode_verdicts,
)
from scripts.docs_site.tables import with_tables

PAGE = with_tables((Path(__file__).parents[2] / "docs" / "WIRE.md").read_text(encoding="utf-8"))

COMMITTER = 0x01020304
TIME_NS = 1_700_000_000_000_000_000
CALL = encode_incoming_rpc(3, 1, b"\1")
INITIAL = encode_message(MessageType.INITIAL_MESSAGE, encode_incoming_rpc(32, 1, b"\5\4\3"))
BATCH_FRAME = encode_frame(PeerFrame(FrameType.BATCH, "a", "counter", COMMITTER, 3, 41, 2, TIME_NS, CALL * 2))

HANDSHAKE = Handshake(bytes(range(NONCE_SIZE_BYTES)), bytes(range(NONCE_SIZE_BYTES, 64)), "counter", "")

BEFORE_ALL_ELSE = {MessageType.CHALLENGE, MessageType.PROOF, MessageType.HELLO}

DEAD = Verdict(7, 3, VerdictKind.REFUSED, text="no", cause=Cause.METHOD, message=CALL)

CLIENT_CALL = encode_request(3, b"\x91\x01")


def client_frame(frame_type: ClientFrameType, **fields: Any) -> ClientFrame:
    return ClientFrame(frame_type, "web", "counter", **fields)


INTEGERS = (0, -1, 1, 63, -64, 64, 8191, 8192, -8192, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1)
BYTES = {
    **{f"ZigZag of {value}": encode_zigzag(value) for value in INTEGERS},
    "incoming call: method 32, fork, arguments 05 04 03": INITIAL[2:],
    "outgoing call to counter: method 3, fork, argument 01": encode_outgoing_rpc("counter", 3, 1, b"\1"),
    "the same to oneself": encode_outgoing_rpc("", 3, 1, b"\1"),
    "RPCBatch of 2 incoming calls": encode_batch(CALL * 2, 2) + CALL * 2,
    "Checkpoint of 9 bytes": encode_checkpoint(9),
    "Checkpoint of 9 bytes, fixed width": encode_message(MessageType.CHECKPOINT, (9).to_bytes(8, "little")),
    "Checkpoint of 128 bytes": encode_checkpoint(128),
    "Checkpoint of 128 bytes, fixed width": encode_message(MessageType.CHECKPOINT, (128).to_bytes(8, "little")),
    "control record with TakeBecomingPrimaryCheckpoint": encode_record(COMMITTER, -1, encode_message(11)),
    "InitialMessage with that call": INITIAL,
    "record 0 with that InitialMessage": encode_record(COMMITTER, 0, INITIAL),
    "record that announces a checkpoint of 9 bytes": encode_record(COMMITTER, -2, encode_checkpoint(9)),
    "Hello, all extensions, label immortal-py, no secret": encode_hello(Hello(ALL_EXTENSIONS, "immortal-py")),
    "Hello, RecordTime only, label py, secret aa bb": encode_hello(Hello(frozenset({65}), "py", b"\xaa\xbb")),
    "RecordTime 1700000000000000000": encode_record_time(TIME_NS),
    "StreamBatch of 2 calls to counter": encode_app_batch(MessageType.STREAM_BATCH, "counter", 2, CALL * 2),
    "ImpulseBatch of 1 to oneself": encode_app_batch(
        MessageType.IMPULSE_BATCH, "", 1, encode_incoming_rpc(3, 2, b"\1")
    ),
    "ImpulsesAccepted 70": encode_impulses_accepted(70),
    "Goodbye, stopped": encode_message(MessageType.GOODBYE, b"stopped"),
    "Refusal, no": encode_message(MessageType.REFUSAL, b"no"),
    "SnapshotBegin": encode_message(MessageType.SNAPSHOT_BEGIN),
    "SnapshotChunk, ab": encode_message(MessageType.SNAPSHOT_CHUNK, b"ab"),
    "SnapshotEnd, complete": encode_message(MessageType.SNAPSHOT_END),
    "AppDescription: version 1, its own method 3, which only reads": encode_app_description(
        AppDescription(1, {("", 3): "Till.total", (QUERIES, 3): "Till.total"})
    ),
    "AppDescription: version 2, its own method 3, the method 5 of feeder": encode_app_description(
        AppDescription(2, {("", 3): "Counter.add", ("feeder", 5): "Feeder.reply"})
    ),
    "UpgradeFailed, no": encode_message(MessageType.UPGRADE_FAILED, b"no"),
    "Version 2": encode_version(2),
    "Sources: the first batch is b's, the next two are the instance's own": encode_sources([(1, "b"), (2, "")]),
    "Origins: two calls by message 0 of record 7, one by message 3": encode_origins([Origin(7, 0, 2), Origin(7, 3, 1)]),
    "Verdict: message 3 of record 7 is refused, no, a dead letter": encode_verdict(DEAD),
    "Verdicts: that, and nothing more": encode_verdicts([DEAD])[0],
    "CheckpointFailed: no, since message 3 of record 7": encode_unsaved(Unsaved("no", 7, 3, "A.add", "~x", "why")),
    "TakenBack: message 3 of record 7, behind record 9": encode_verdict(
        Verdict(7, 3, VerdictKind.TAKEN_BACK, text="no", behind=9), MessageType.TAKEN_BACK
    ),
    "Handling: message 3 of record 7 is next": encode_handling(Handling(7, 3)),
    "Careful: up to record 9, and each message of record 7": encode_careful(Careful(9, 7)),
    "AppTime 1700000000000000000 at 5 s, no step": encode_app_time(AppTime(TIME_NS, 5_000_000_000)),
    "HandlersAsked: question 7, for the handler 12": system_methods.encode_handlers_question(
        system_methods.HandlersQuestion(7, 12)
    ),
    "Handlers: to question 7, none of that number waits": system_methods.encode_handlers_answer(
        system_methods.HandlersAnswer(7, {"handler": None})
    ),
    "QueryAsked: query 7, method 4 without arguments, at 1700000000000000000": encode_query(
        QueryQuestion(7, 4, b"\x90", TIME_NS)
    ),
    "QueryAnswered: query 7 returned 9": encode_query_answer(QueryAnswer(7, ReplyKind.VALUE, b"\x09")),
    "Leaving, no": encode_message(MessageType.LEAVING, b"no"),
    "Challenge with the nonce 00 01 ... 1f": encode_challenge(HANDSHAKE.app_nonce),
    "Proof of the coordinator of counter with the nonce 20 21 ... 3f, secret ab, Unix socket": encode_answer(
        Answer(HANDSHAKE.coordinator_nonce, HANDSHAKE.proof(b"ab", Role.COORDINATOR), "counter")
    ),
    "Proof of its app": encode_proof(HANDSHAKE.proof(b"ab", Role.APP)),
    "the same, from 127.0.0.1:40001 to 127.0.0.1:7002": encode_proof(
        replace(HANDSHAKE, channel=channel_of(("127.0.0.1", 40001), ("127.0.0.1", 7002))).proof(b"ab", Role.APP)
    ),
    "HandlerFailed: message 3 of record 7, no": encode_handler_failed(HandlerFailure(7, 3, "no")),
    "InstanceName, counter": encode_message(MessageType.INSTANCE_NAME, b"counter"),
    "Numbers of record 7: handler 12 by message 3, its timer 13": numbers.encode_numbers(
        7, [numbers.RandomDraw(12, 0, "", 3), numbers.RandomDraw(13, 12, "timer", 5)]
    ),
    "record 1 with its time and an RPCBatch of 2": encode_record(
        COMMITTER, 1, encode_record_time(TIME_NS) + encode_batch(CALL * 2, 2) + CALL * 2
    ),
    "header of a Batch of 2 from position 41, a to counter, epoch 3": BATCH_FRAME[0],
    "payload of that Batch": BATCH_FRAME[1],
    "TrimTo 42, counter to a, epoch 9": encode_frame(PeerFrame(FrameType.TRIM_TO, "counter", "a", 0x05060708, 9, 42))[
        0
    ],
    "the same with a window of 1 MiB": encode_frame(
        PeerFrame(FrameType.TRIM_TO, "counter", "a", 0x05060708, 9, 42, 1 << 20)
    )[0],
    "Hello of client web to counter": encode_client_frame(client_frame(ClientFrameType.HELLO)),
    "Request 7 of web: method 3 with argument 1, replies up to 5 acknowledged": encode_client_frame(
        client_frame(ClientFrameType.REQUEST, number=7, acknowledged=5, count=1, time_ns=TIME_NS, payload=CLIENT_CALL)
    ),
    "Reply: request 7 returned 9": encode_client_frame(
        client_frame(
            ClientFrameType.REPLY,
            committer_id=COMMITTER,
            number=7,
            acknowledged=5,
            count=1,
            payload=encode_replies([Reply(7, ReplyKind.VALUE, b"\x09")]),
        )
    ),
    "Ping for 8": encode_client_frame(
        client_frame(ClientFrameType.PING, acknowledged=7, count=1, payload=encode_numbers([8]))
    ),
    "Pong: 7 was the last one taken": encode_client_frame(
        client_frame(ClientFrameType.PONG, committer_id=COMMITTER, number=7, acknowledged=5)
    ),
    "Query 3 of web: method 4 without arguments": encode_client_frame(
        client_frame(ClientFrameType.QUERY, number=3, count=1, payload=encode_request(4, b"\x90"))
    ),
    "Answer: query 3 returned 9": encode_client_frame(
        client_frame(
            ClientFrameType.ANSWER,
            committer_id=COMMITTER,
            number=3,
            count=1,
            payload=encode_replies([Reply(3, ReplyKind.VALUE, b"\x09")]),
        )
    ),
    "that call as the app gets it": logged_calls(CLIENT_CALL, 1, "web", 7)[0],
    "the app's answer, to ~": encode_incoming_rpc(3, 0, b"\x93\xa4~web\x07\x09", RpcKind.RETURNED_VALUE),
    "names of methods: 3 is Counter.add": encode_methods({3: "Counter.add"}),
    "... and with a query, 4": encode_methods({3: "Counter.add", 4: "Counter.total"}, [4]),
}


KNOWN_EXTENSIONS = ALL_EXTENSIONS | REPORTS | ANSWERS | TAKING_BACK | TRACE_EXTENSIONS | BEFORE_ALL_ELSE


def documented_bytes() -> list[tuple[str, bytes]]:
    blocks = re.findall(r"^```bytes\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line.partition("#") for block in blocks for line in block.splitlines()]
    return [(meaning.strip(), bytes.fromhex(data)) for data, _, meaning in lines]


@pytest.mark.parametrize(
    ("meaning", "data"), documented_bytes(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_bytes(meaning: str, data: bytes) -> None:
    assert BYTES[meaning] == data


def test_all_bytes_are_there() -> None:
    assert {meaning for meaning, _ in documented_bytes()} == set(BYTES)


def camel(name: str) -> str:
    return name.replace("_", "").lower()


def table_rows(heading: str) -> dict[int, str]:
    """Number and name from the table behind ``heading``'s first row."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", table, re.MULTILINE)
    return {int(number): camel(name) for number, name in rows}


def test_the_tables_of_types() -> None:
    base = table_rows("| type | name | app -> coordinator | coordinator -> app | data |")
    extensions = table_rows("| type | name | direction | data |")
    assert base | extensions == {int(member): camel(member.name) for member in MessageType}
    assert set(extensions) == {int(member) for member in KNOWN_EXTENSIONS}
    frames = table_rows("| type | name | written by | position |")
    assert frames == {int(member): camel(member.name) for member in FrameType if member}
    codes = PAGE.partition("| code | name | why |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| (\d+) \| (\w+) \|", codes, re.MULTILINE)) == {
        str(int(member)): member.name for member in RefusedCode
    }


def test_the_tables_of_clients() -> None:
    frames = table_rows("| type | name | from | number | acknowledged | count, payload |")
    assert frames == {int(member): camel(member.name) for member in ClientFrameType if member}
    codes = PAGE.partition("| code | reason | why |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| (\d+) \| (\w+) \|", codes, re.MULTILINE)) == {
        str(int(member)): member.name for member in ClientCode
    }
    kinds = PAGE.partition("| kind | value |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\d+) \|", kinds, re.MULTILINE) == [str(int(member)) for member in ReplyKind]


def test_who_may_send_what() -> None:
    table = PAGE.partition("| from | to | in |")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.split("\n")[2:]]
    assert rows == [
        (
            row.sender,
            row.receiver,
            row.carried,
            ", ".join(map(str, row.kinds)),
            ", ".join(map(str, row.rpc_types)),
            row.method_ids,
            row.caller,
        )
        for row in ROWS
    ]


def test_the_limits() -> None:
    limits = PAGE.partition("### Limits")[2].partition("###")[0].partition("\n## ")[0]
    stated = [int(number.replace(",", "")) for number in re.findall(r"([\d,]*\d)(?: bytes)? \|", limits)]
    assert stated[:5] == [
        MESSAGE_SIZE_BYTES_MAX,
        RECORD_SIZE_BYTES_MAX,
        NAME_SIZE_BYTES_MAX,
        EXTENSIONS_MAX,
        SECRET_SIZE_BYTES_MAX,
    ]


def test_each_statement_of_the_base_protocol_has_a_test() -> None:
    tests = Path(__file__).parents[1]
    section = (tests / "contract" / "base_protocol.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.(?:py|txt))(?:::(\w+))?` \|$", section, re.MULTILINE)
    assert len(named) == section.count("\n| ") - 2  # a row each, but for the head
    for path, function in named:
        assert f"def {function}(" in (tests / path).read_text() if function else (tests / path).exists(), (
            path,
            function,
        )
