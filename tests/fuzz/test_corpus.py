"""What the fuzzer found is replayed, and valid inputs are mutated: no defect, whatever comes in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal.coordinator.messenger.envelope import EnvelopeError, Kind, decode_envelope
from immortal.protocol.errors import DamagedRecordError, LimitExceededError, RemoteProtocolError
from immortal.protocol.limits import MESSAGE_SIZE_BYTES_MAX, RECORD_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import PAYLOAD_SIZE_BYTES_MAX, FrameType, decode_frame, encode_frame
from immortal.protocol.readers import BlobData, MessageReader, RecordReader
from immortal.protocol.record import CHECKPOINT_SEQUENCE_ID, encode_record
from immortal.protocol.varint import encode_zigzag
from tests.fuzz.run import CORPUS, corpus_of
from tests.fuzz.seeds import ENVELOPES, FRAMES, FROM_APP, SEEDS, TO_APP
from tests.fuzz.targets import TARGETS, read_all, with_check
from tests.helpers.effort import effort

NAMES = tuple(TARGETS)
SLOW = {"peers", "app", "clients", "session"}  # a whole instance each time


def test_every_target_has_seeds_and_a_corpus() -> None:
    assert tuple(SEEDS) == NAMES
    assert {path.name for path in CORPUS.iterdir()} == set(NAMES)
    assert all(corpus_of(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_seeds_and_the_corpus(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed)
    for path in corpus_of(name):
        try:
            TARGETS[name](path.read_bytes())
        except Exception as error:
            pytest.fail(f"{path.relative_to(Path(__file__).parents[2])}: {error!r}")


@st.composite
def mutations(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A valid input with a few pieces changed, removed, doubled or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(("change", "flip", "remove", "insert", "double", "cut off")))
        size_bytes = draw(st.integers(1, 9))
        if kind == "change":
            data[at : at + size_bytes] = draw(st.binary(min_size=size_bytes, max_size=size_bytes))
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "remove":
            del data[at : at + size_bytes]
        elif kind == "insert":
            data[at:at] = draw(st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * size_bytes)))
        elif kind == "double":
            data[at:at] = data[at : at + 8 * size_bytes]
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs(name: str) -> None:
    @settings(
        max_examples=effort(25 if name in SLOW else 100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(mutations(SEEDS[name]))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


# --- each field by itself --------------------------------------------------------------------------------------------

FRAME_FIELDS = {
    "version": (0, 1),
    "type": (1, 1),
    "code": (2, 2),
    "committer ID": (4, 4),
    "epoch": (8, 8),
    "position": (16, 8),
    "count": (24, 4),
    "time": (28, 8),
    "check": (36, 8),
}


@pytest.mark.parametrize("field", FRAME_FIELDS)
@given(frame=st.sampled_from(FRAMES), data=st.data())
def test_a_changed_field_of_a_frame_never_passes(field: str, frame: object, data: st.DataObject) -> None:
    """Without a right check it is damage; with one, the field has a documented error or the value that came in."""
    header, *payload = encode_frame(frame)  # type: ignore[arg-type]
    offset, size_bytes = FRAME_FIELDS[field]
    value = data.draw(st.binary(min_size=size_bytes, max_size=size_bytes), label=field)
    changed = header[:offset] + value + header[offset + size_bytes :]
    if changed == header:
        return
    with pytest.raises(RemoteProtocolError) as refused:
        decode_frame([changed, *payload])
    assert isinstance(refused.value, DamagedRecordError)
    if field == "check":
        return
    try:
        found = decode_frame([with_check(changed, b"".join(payload)), *payload])
    except RemoteProtocolError:
        assert field not in ("code", "time")
        return
    if found.frame_type is FrameType.UNKNOWN:
        assert field in ("version", "type")
        return
    again, *_ = encode_frame(found)
    assert again[offset : offset + size_bytes] == value


@given(frame=st.sampled_from(FRAMES), data=st.data())
def test_names_of_a_frame_that_lie_about_their_lengths(frame: object, data: st.DataObject) -> None:
    header, *payload = encode_frame(frame)  # type: ignore[arg-type]
    names = data.draw(st.one_of(st.binary(max_size=20), mutations((header[44:],))))
    try:
        found = decode_frame([with_check(header[:44] + names, b"".join(payload)), *payload])
    except RemoteProtocolError:
        return
    assert all(len(name.encode()) <= 255 and "\0" not in name for name in (found.sender, found.receiver, found.reason))


def test_a_payload_that_is_too_large_is_refused_before_its_check() -> None:
    header, *_ = encode_frame(FRAMES[2])
    with pytest.raises(LimitExceededError, match=f"{PAYLOAD_SIZE_BYTES_MAX} are accepted"):
        decode_frame([header, bytes(PAYLOAD_SIZE_BYTES_MAX + 1)])


@pytest.mark.parametrize("parts", [[], [b""], [b"x" * 43], [b"", b"", b""]])
def test_frames_of_the_wrong_parts(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="expected"):
        decode_frame(parts)


@given(st.sampled_from(ENVELOPES), st.integers(0, 47), st.integers(1, 255))
def test_a_changed_byte_of_an_envelope(envelope: bytes, place: int, flips: int) -> None:
    """It is refused, or says what its bytes say; none of its sizes lead anywhere."""
    changed = envelope[:place] + bytes((envelope[place] ^ flips,)) + envelope[place + 1 :]
    try:
        found = decode_envelope(changed)
    except EnvelopeError:
        return
    assert found != decode_envelope(envelope)
    assert found.kind in tuple(Kind)
    assert found.version == 2
    assert found.link_id
    assert found.message_id


@given(st.sampled_from(ENVELOPES), st.integers(0, 200))
def test_an_envelope_of_another_size(envelope: bytes, size_bytes: int) -> None:
    if size_bytes == len(envelope):
        return
    with pytest.raises(EnvelopeError, match=f"of {size_bytes} bytes came in, it has 48"):
        decode_envelope((envelope * 5)[:size_bytes])


@pytest.mark.parametrize("size_bytes", [MESSAGE_SIZE_BYTES_MAX + 1, (1 << 31) - 1])
def test_an_oversized_message_is_refused_by_its_size_alone(size_bytes: int) -> None:
    reader = MessageReader()
    reader.receive_data(encode_zigzag(size_bytes))
    with pytest.raises(LimitExceededError, match=f"{size_bytes} bytes"):
        reader.next_event()


@pytest.mark.parametrize("size_bytes", [-1, 0, 23, RECORD_SIZE_BYTES_MAX + 1])
def test_a_record_of_an_impossible_size_is_refused_by_its_header_alone(size_bytes: int) -> None:
    record = encode_record(7, 0, b"")
    reader = RecordReader()
    reader.receive_data(record[:4] + size_bytes.to_bytes(4, "little", signed=True) + record[8:])
    with pytest.raises(RemoteProtocolError, match=str(size_bytes)):
        reader.next_event()


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff" * 10, b"\xff" * 9 + b"\x7f", b"\x02\x02", b"\xff" * 8])
def test_a_checkpoint_of_an_impossible_size(data: bytes) -> None:
    message = encode_message(MessageType.CHECKPOINT, data)
    for reader, stream in (
        (MessageReader(), message),
        (RecordReader(), encode_record(7, CHECKPOINT_SEQUENCE_ID, message)),
    ):
        reader.receive_data(stream)
        with pytest.raises(RemoteProtocolError):
            reader.next_event()


@given(st.integers(0, 400))
def test_streams_that_end_anywhere_are_waited_for(cut: int) -> None:
    """What was cut off is no event and no error: the rest may still come."""
    for make, streams in ((MessageReader, FROM_APP), (RecordReader, TO_APP)):
        for stream in streams:
            whole, refused = read_all(make(), iter([stream]))
            assert not refused
            begun, refused = read_all(make(), iter([stream[:cut]]))
            assert not refused
            begun = [event for event in begun if not isinstance(event, BlobData)]
            assert begun == [event for event in whole if not isinstance(event, BlobData)][: len(begun)]
