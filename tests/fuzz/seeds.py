"""Whole and valid inputs of each target: where a fuzzer begins, and what the mutation tests mutate."""

from __future__ import annotations

from collections.abc import Mapping

from immortal.coordinator.messenger.envelope import as_conversation_message, encode_parts, encode_reply
from immortal.coordinator.messenger.envelope import encode_message as encode_envelope
from immortal.protocol import app_handshake, extensions
from immortal.protocol.batch import encode_batch, encode_replayable_batch
from immortal.protocol.client_frames import (
    ClientCode,
    ClientFrame,
    ClientFrameType,
    Reply,
    encode_client_frame,
    encode_methods,
    encode_numbers,
    encode_replies,
    encode_request,
)
from immortal.protocol.messages import (
    MessageType,
    encode_attach_to,
    encode_checkpoint,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode, encode_frame
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, CONTROL_SEQUENCE_ID, encode_record
from tests.helpers.core import HELLO, NOW_NS, first_start, rpc

ENVELOPES = (
    encode_envelope(1, 2, 3, 1, 4),
    encode_envelope(0xFFFFFFFF, (1 << 64) - 1, 8000, 8000, 0),
    encode_envelope(1, 2, 9, 1, 4, 5),
    encode_reply(2, 1, 2, 3, 3, 4),
    encode_reply(3, 1, 2, 3, 8, 0),
    encode_reply(2, 1, 2, 3, 3, 4, 5),
    encode_reply(7, 1, 2, 3, 3, 4),
    as_conversation_message(encode_envelope(1, 2, 10, 9, 4), 7),
    encode_reply(4, 1, 2, 3, 8, 4),
)

CALLS = (rpc(1), rpc(2), rpc(b"a longer argument"))
FRAMES = (
    PeerFrame(FrameType.HELLO, "b", "a", 77, 1, 0),
    PeerFrame(FrameType.WELCOME, "a", "b", 77, 1, 12),
    PeerFrame(FrameType.BATCH, "b", "a", 77, 1, 1, 3, NOW_NS, b"".join(CALLS)),
    PeerFrame(FrameType.TRIM_TO, "a", "b", 77, 1, 12),
    PeerFrame(FrameType.RESEND, "a", "b", 77, 1, 12),
    PeerFrame(FrameType.REFUSED, "a", "b", 77, 1, 0, code=RefusedCode.MALFORMED, reason="because"),
)

FROM_APP = (
    HELLO,
    encode_message(MessageType.INITIAL_MESSAGE, b"begin") + encode_checkpoint(5) + b"state",
    encode_attach_to("b") + encode_outgoing_rpc("b", 3, 1, b"argument"),
    encode_message(MessageType.CHECKPOINT, (300).to_bytes(8, "little")) + bytes(300),
    extensions.encode_app_batch(MessageType.STREAM_BATCH, "b", 3, b"".join(CALLS)),
    extensions.encode_app_batch(MessageType.IMPULSE_BATCH, "", 2, rpc(1, rpc_type=2) * 2),
    encode_batch(b"".join([encode_outgoing_rpc("", 3, 1, b"x")] * 2), 2) + encode_outgoing_rpc("", 3, 1, b"x") * 2,
    encode_replayable_batch(CALLS[0] * 3, 3, 2),
    extensions.encode_app_description(extensions.AppDescription(2, {("", 3): "A.b", ("b", 1): "B.c"})),
    extensions.encode_origins([extensions.Origin(7, 0, 2), extensions.Origin(7, 3, 1)]),
    extensions.encode_handler_failed(extensions.HandlerFailure(7, 3, "no")),
    encode_message(MessageType.SNAPSHOT_BEGIN)
    + encode_message(MessageType.SNAPSHOT_CHUNK, b"ab")
    + encode_message(MessageType.SNAPSHOT_END),
    app_handshake.encode_challenge(bytes(range(32))) + app_handshake.encode_proof(bytes(32)) + HELLO,
)

TO_APP = (
    encode_record(7, CONTROL_SEQUENCE_ID, encode_message(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)),
    encode_record(7, CHECKPOINT_SEQUENCE_ID, encode_checkpoint(4)) + b"blob",
    encode_record(7, 0, extensions.encode_record_time(NOW_NS) + encode_message(MessageType.INITIAL_MESSAGE, b"begin")),
    encode_record(7, 1, extensions.encode_record_time(NOW_NS) + encode_batch(CALLS[0] * 3, 3) + CALLS[0] * 3),
    encode_record(7, CONTROL_SEQUENCE_ID, extensions.encode_version(2) + extensions.encode_impulses_accepted(9)),
    encode_record(7, CONTROL_SEQUENCE_ID, encode_message(MessageType.REFUSAL, b"why")),
    encode_record(1, CONTROL_SEQUENCE_ID, app_handshake.encode_answer(app_handshake.Answer(bytes(32), bytes(32), "a"))),
)


REQUESTS = encode_request(3, b"\x91\1") + encode_request(300000, b"\x92\xa1x\xc0")
CLIENT_FRAMES = (
    ClientFrame(ClientFrameType.HELLO, "c", "a"),
    ClientFrame(ClientFrameType.WELCOME, "c", "a", 77, 5, 4, 0, NOW_NS, encode_methods({3: "A.b", 300000: "A.c"}, [3])),
    ClientFrame(ClientFrameType.REQUEST, "c", "a", 0, 6, 5, 2, NOW_NS, REQUESTS),
    ClientFrame(
        ClientFrameType.REPLY,
        "c",
        "a",
        77,
        7,
        5,
        2,
        0,
        encode_replies([Reply(6, 1, b"\1"), Reply(7, 3, b"\xa1x\x90\x80")]),
    ),
    ClientFrame(ClientFrameType.PING, "c", "a", 0, 0, 5, 2, 0, encode_numbers([6, 7])),
    ClientFrame(ClientFrameType.PONG, "c", "a", 77, 7, 5, code=ClientCode.BUSY),
    ClientFrame(ClientFrameType.REFUSED, "c", "a", 77, code=ClientCode.NOT_ME, reason="because"),
)


def _two_parts(frame: PeerFrame) -> bytes:
    header, *payload = encode_frame(frame)
    return len(header).to_bytes(2, "little") + header + b"".join(payload)


SEEDS: Mapping[str, tuple[bytes, ...]] = {
    "envelope": ENVELOPES,
    "reply": (b"", encode_parts((b"one",)), encode_parts((b"", b"two", bytes(300)))),
    "inbox": (b"".join(encode_envelope(1, 2, number, 1, 0) for number in (1, 2, 4, 3, 4, 9)), b"".join(ENVELOPES)),
    "frame": tuple(_two_parts(frame) for frame in FRAMES),
    "peers": (
        bytes((2, 1, 3, 1, 4, 1, 0, 1)) + bytes(7),
        bytes((1, 1, 3, 1, 0, 1)) + bytes(7) + bytes((1, 1, 3, 1, 0, 2)) + bytes(7),
        bytes((1, 0, 7)) + CALLS[0] + bytes((0, 1)) + bytes(7),
    ),
    "client_frame": tuple(encode_client_frame(frame) for frame in CLIENT_FRAMES),
    "clients": (
        bytes((0, 0, 5, 0, 1, 7, 0, 9, 0, 0, 9, 0, 1, 8, 1, 9, 3, 0, 1, 42, 1, 1)),
        bytes((0, 7, 5, 0, 0, 1, 0, 9, 3, 1, 1, 5, 0, 1)),
    ),
    "app_stream": tuple(bytes((index,)) + stream for index, stream in enumerate(FROM_APP)),
    "coordinator_stream": tuple(bytes((index,)) + stream for index, stream in enumerate((*TO_APP, b"".join(TO_APP)))),
    "app": (
        *(b"\1" + stream for stream in FROM_APP),
        b"\0" + HELLO + first_start() + b"".join(FROM_APP[2:5]),
        b"\0" + first_start(),
    ),
    "session": (
        bytes((8, 7, 8, 3, 0, 5, 9, 7, 0, 1, 5, 12)),  # ask, the ghost answers; honest peer and client around a crash
        bytes(
            (8, 3, 0, 3, 1, 3, 2, 9, 7, 10, 200, 11, 0, 2)
        ),  # forged answers to open calls, before and behind a crash
        bytes((1, 0, 0, 1, 1, 1, 9, 3, 2, 6, 0, 1, 5, 2, 9, 11)),  # a call in the name of a client, a client's request
        bytes(
            (1, 0, 0, 16, 10, 7, 2, 0, 0, 17, 10, 4, 1, 9, *b"\2\x40")
        ),  # the system's methods; an app that says more
    ),
}
