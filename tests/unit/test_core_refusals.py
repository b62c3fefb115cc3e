"""What an app must not say: each is refused with words that say what to do, and the next app recovers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_app_batch, encode_hello
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType
from immortal.protocol.varint import encode_zigzag
from tests.helpers.core import HELLO, INITIAL, Driven, arguments, attach, call, checkpoint, first_start, rpc

INITIAL_MESSAGE = encode_message(MessageType.INITIAL_MESSAGE, INITIAL)


def waiting_for_first() -> Driven:
    driven = Driven()
    driven.connect()
    driven.forget()
    return driven


def primary() -> Driven:
    return Driven.started()


def base() -> Driven:
    return Driven.started(hello=False)


def becoming_primary() -> Driven:
    driven = Driven.started().crash()
    driven.connect()
    driven.data(HELLO)
    driven.forget()
    return driven


def rpc_batch(count: int, *messages: bytes) -> bytes:
    return encode_message(MessageType.RPC_BATCH, encode_zigzag(count) + b"".join(messages))


def stream_batch(destination: str, count: int, *messages: bytes) -> bytes:
    return encode_app_batch(MessageType.STREAM_BATCH, destination, count, b"".join(messages))


def impulse_batch(destination: str, count: int, *messages: bytes) -> bytes:
    return encode_app_batch(MessageType.IMPULSE_BATCH, destination, count, b"".join(messages))


REFUSED: dict[str, tuple[Callable[[], Driven], bytes, str]] = {
    "a kind that there is not": (
        primary,
        stream_batch("", 2, rpc(1), encode_message(MessageType.RPC, b"\x07\x06\x01")),
        "message 1 of a batch is an RPC of kind 7, 0 to 3 were expected",
    ),
    "an RPC type that there is not": (
        primary,
        impulse_batch("", 1, rpc(1, rpc_type=3)),
        "message 0 of a batch has the RPC type 3, 0 to 2 were expected",
    ),
    "a call of another's own methods": (
        primary,
        attach("b") + stream_batch("b", 1, rpc(1, method_id=-1)),
        "has the method -1: only an app itself may call negative ones",
    ),
    "a call in the name of another instance": (
        primary,
        attach("b") + stream_batch("b", 1, rpc(b"\x92\xa1c\1", rpc_type=0)),
        "a call whose answer is to go to 'c', its sender may give only 'a'",
    ),
    "a type for coordinators": (primary, encode_message(MessageType.TRIM_TO, b"\0"), "type 14, which is not for apps"),
    "a type of others": (primary, encode_message(3), "type 3, which is not for apps to send"),  # type: ignore[arg-type]
    "an unknown extension": (primary, b"\x02\xc8", "type 200, which is not for apps to send"),
    "a type that only goes out": (primary, b"\x02\x0b", "type 11, which is not for apps to send"),
    "a call before the first checkpoint": (
        waiting_for_first,
        INITIAL_MESSAGE + call("", 1),
        "a call in the phase 'first start': calls may come behind the first checkpoint",
    ),
    "a call before anything": (waiting_for_first, call("", 1), "a call in the phase 'first start'"),
    "a call without AttachTo": (primary, call("counter", 1), "called 'counter' without AttachTo: send AttachTo once"),
    "a batch without AttachTo": (primary, stream_batch("counter", 1, rpc(1)), "'counter' without AttachTo"),
    "an impulse before it is primary": (
        becoming_primary,
        call("", 1, rpc_type=2),
        "an impulse in the phase 'becoming primary': impulses may come once it is primary",
    ),
    "an impulse batch before it is primary": (becoming_primary, impulse_batch("", 1, rpc(1)), "an impulse in the"),
    "a checkpoint that nobody asked for": (primary, checkpoint(b"x"), "Checkpoint in the phase 'normal', none was"),
    "a first checkpoint without an InitialMessage": (
        waiting_for_first,
        checkpoint(b"x"),
        "first checkpoint came without an InitialMessage (type 9)",
    ),
    "two InitialMessages": (waiting_for_first, INITIAL_MESSAGE * 2, "an InitialMessage may come once"),
    "a late InitialMessage": (primary, INITIAL_MESSAGE, "an InitialMessage may come once, at the first start"),
    "a Hello that is not first": (waiting_for_first, INITIAL_MESSAGE + HELLO, "a Hello must be the app's first"),
    "a second Hello": (primary, HELLO, "a Hello must be the app's first message"),
    "a Hello of another version": (
        waiting_for_first,
        encode_message(MessageType.HELLO, b"\x02\x00\x00\x00"),
        "a Hello of version 2, expected 1",
    ),
    "an extension not asked for": (base, stream_batch("", 1, rpc(1)), "extension 66, which its Hello did not ask for"),
    "impulses not asked for": (base, impulse_batch("", 1, rpc(1)), "extension 67, which its Hello did not ask for"),
    "a batch with too few": (primary, rpc_batch(3, call("", 1), call("", 2)), "its count as 3 and holds 2 messages"),
    "a batch with too many": (primary, rpc_batch(1, call("", 1), call("", 2)), "its count as 1 and holds 2 messages"),
    "a batch of other messages": (
        primary,
        rpc_batch(1, attach("b")),
        "an RPCBatch holds a message of type 1, only RPCs (0) are allowed",
    ),
    "a negative count": (primary, rpc_batch(-1), "gives its count as -1"),
    "a stream batch with too few": (primary, stream_batch("", 3, rpc(1), rpc(2)), "a batch of 3 messages ends after 2"),
    "a stream batch with too many": (primary, stream_batch("", 1, rpc(1), rpc(2)), "has 9 bytes too many"),
    "an oversized message": (
        primary,
        encode_zigzag(MESSAGE_SIZE_BYTES_MAX + 1) + bytes((MessageType.INITIAL_MESSAGE,)),
        f"of {MESSAGE_SIZE_BYTES_MAX + 1} bytes, at most {MESSAGE_SIZE_BYTES_MAX} are accepted",
    ),
    "an empty message": (primary, b"\x00", "gives its size as 0"),
    "a negative size": (primary, b"\x01", "gives its size as -1"),
    "a size without end": (primary, b"\xff" * 6, "longer than 5 bytes"),
    "a call that ends early": (primary, encode_message(MessageType.RPC, b"\x00\x00"), "an RPC of 1 bytes"),
    "a destination that is no UTF-8": (primary, encode_message(MessageType.RPC, b"\x02\xff\0\0\0"), "not UTF-8"),
    "an AttachTo to nobody": (primary, encode_message(MessageType.ATTACH_TO), "AttachTo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, data, message = REFUSED[case]
    driven = make()
    extended = bool(driven.machine.state.session.extensions)
    driven.data(data)
    (error,) = [text for level, text in driven.reports if level == "error"]
    assert error.startswith("the app broke the protocol: ")
    assert error.endswith("its connection is closed, nothing logged is lost")
    assert message in error
    assert len(driven.of(ef.CloseApp)) == 1
    assert not driven.of(ef.Stop)
    if extended:
        assert (-1, "REFUSAL") in driven.heard
    else:
        assert driven.heard == [], "an app without extensions was sent one"
    # Nothing more of it counts, and the next one starts as if it had never been there.
    before = driven.store.summary()
    assert driven.data(call("", 9, rpc_type=2)) == []
    driven.forget()
    driven.close()
    assert [text for level, text in driven.reports if level != "debug"] == [
        "the app disconnected; waiting for the next one"
    ]
    driven.connect()
    driven.data(encode_hello(Hello(ALL_EXTENSIONS)) if make is not base else b"")
    driven.data(first_start() if driven.phase is Phase.FIRST_START else checkpoint(b"next"))
    assert driven.phase is Phase.NORMAL
    assert driven.store.summary().last_sequence_id == max(0, before.last_sequence_id)


def test_what_came_before_the_nonsense_still_counts() -> None:
    driven = primary()
    driven.data(call("", 1, rpc_type=2) + b"\x00" + call("", 2, rpc_type=2))
    assert [kind[1:] for kind in driven.heard if kind[0] >= 0] == [("RECORD_TIME", "RPC")]


@pytest.mark.parametrize(("began", "comes"), [(True, False), (False, True)])
def test_an_instance_keeps_the_kind_of_app_it_began_with(began: bool, comes: bool) -> None:
    driven = Driven.started(hello=began)
    driven.close()
    driven.forget()
    driven.connect()
    driven.data((HELLO if comes else b"") + checkpoint(b"x"))
    (error,) = [text for level, text in driven.reports if level == "error"]
    assert "an instance keeps the kind of app that it was begun with" in error
    assert ("[65, 79], this one asks for []" in error) is began
    assert driven.of(ef.CloseApp)


def test_an_extension_that_nobody_has_is_no_error() -> None:
    driven = Driven()
    driven.connect()
    driven.data(encode_hello(Hello(frozenset({65, 99}))) + first_start())
    assert driven.phase is Phase.NORMAL
    assert driven.store.summary().extensions == frozenset({65})


def test_an_app_may_call_its_own_methods_whatever_their_numbers() -> None:
    driven = primary()
    driven.data(stream_batch("", 1, rpc(1, method_id=-1)) + impulse_batch("a", 1, rpc(2, rpc_type=2, method_id=-4)))
    assert not [text for level, text in driven.reports if level == "error"]
    assert len(arguments(bytes(driven.app_bytes))) == 2


def test_attaching_twice_or_to_oneself_is_harmless() -> None:
    driven = primary()
    driven.data(attach("b") * 2 + attach("a") + call("a", 1) + call("b", 2))
    assert [text for level, text in driven.reports if level == "error"] == []
    assert {effect.destination for effect in driven.of(ef.OpenPeer)} == {"b"}
    assert (1, "RECORD_TIME", "RPC") in driven.heard


# --- any split -------------------------------------------------------------------------------------------------------


def conversation() -> list[bytes]:
    """All that an app says between two coordinator turns, in a first start and after it."""
    calls = rpc_batch(3, call("b", 1), call("", 2), call("b", 3))
    return [
        HELLO + attach("b") + first_start(b"a blob of some bytes"),
        calls + call("", 4, rpc_type=2) + stream_batch("b", 2, rpc(5), rpc(6)) + impulse_batch("b", 1, rpc(7)),
        encode_message(MessageType.TAKE_CHECKPOINT),
        checkpoint(b"second blob") + call("b", 8),
    ]


def outcome(pieces: Callable[[bytes], list[bytes]]) -> tuple[object, ...]:
    """What an app, its log and its peer got in the end; how often there was a turn must not matter."""
    driven = Driven()
    driven.connect()
    for said in conversation():
        for piece in pieces(said):
            driven.data(piece)
        if not driven.frames(FrameType.HELLO):
            continue
        driven.reply(FrameType.WELCOME, 0)
    sent = b"".join(frame.payload for frame in driven.frames(FrameType.BATCH))
    logged = b"".join(message for message in _logged(driven))
    blobs = [driven.store.read_checkpoint_chunk(h.checkpoint_id, 0) for h in driven.store.summary().checkpoints]
    marks = [dict(header.outputs) for header in driven.store.summary().checkpoints]
    return sent, logged, blobs, marks, driven.phase, driven.machine.view.status(0)["outputs"]


def _logged(driven: Driven) -> list[bytes]:
    from tests.helpers.core import arguments

    return arguments(bytes(driven.app_bytes))


WHOLE = outcome(lambda data: [data])


def test_whole_messages_give_what_was_sent() -> None:
    sent, logged, blobs, *_ = WHOLE
    assert sent == rpc(1) + rpc(3) + rpc(5) + rpc(6) + rpc(7) + rpc(8)
    assert sorted((rpc(2), rpc(4, rpc_type=2))) == sorted((logged[: len(rpc(2))], logged[len(rpc(2)) :]))
    assert blobs == [b"a blob of some bytes", b"second blob"]


@pytest.mark.parametrize("at", range(1, max(map(len, conversation()))))
def test_split_at_every_byte(at: int) -> None:
    assert _comparable(outcome(lambda data: [data[:at], data[at:]])) == _comparable(WHOLE)


def test_one_byte_at_a_time() -> None:
    assert _comparable(outcome(lambda data: [bytes((byte,)) for byte in data])) == _comparable(WHOLE)


def _comparable(found: tuple[object, ...]) -> tuple[object, ...]:
    sent, logged, *rest = found
    assert isinstance(logged, bytes)
    return sent, sorted(logged[offset : offset + len(rpc(0))] for offset in range(0, len(logged), len(rpc(0)))), *rest
