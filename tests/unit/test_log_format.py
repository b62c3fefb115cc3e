"""Keys and small values, byte by byte, as docs/LOG_FORMAT.md has them."""

from __future__ import annotations

import pytest

from immortal.coordinator.core.errors import DamagedLogError, InvariantError
from immortal.coordinator.core.interfaces import (
    CheckpointHeader,
    ClientPosition,
    OutputBatch,
    OutputMark,
    Suspect,
    VersionStart,
)
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backends.lmdb.journal import HEADER_SIZE_BYTES, Place, encode_entry, place_of
from immortal.coordinator.log.verdicts import dead_letter_name, suspect_row, verdict_rows
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import Cause, MessageKey, Verdict, VerdictKind


def crc(data: bytes) -> bytes:
    return crc64(data).to_bytes(8, "little")


def test_keys() -> None:
    assert log_format.SEQUENCE_KEY.pack(258) == bytes.fromhex("0000000000000102")
    assert log_format.CHUNK_KEY.pack(1, 2) == bytes.fromhex("0000000000000001 00000002")
    assert log_format.name_key("") == b"\0"
    assert log_format.name_key("é") == b"\xc3\xa9\0"
    assert log_format.batch_key("bob", 3) == b"bob\0" + bytes(7) + b"\3"
    assert log_format.batch_of_key(b"impulses", log_format.batch_key("bob", 3)) == ("bob", 3)
    assert log_format.name_of_key(log_format.name_key("x" * 255)) == "x" * 255


@pytest.mark.parametrize("name", ["x" * 256, "a\0b"])
def test_names_that_no_key_can_hold(name: str) -> None:
    with pytest.raises(InvariantError):
        log_format.name_key(name)


@pytest.mark.parametrize("key", [b"", b"\0" * 8, b"bob" + bytes(7) + b"\3", b"bobx" + b"\1" * 8])
def test_damaged_impulse_keys(key: bytes) -> None:
    with pytest.raises(DamagedLogError):
        log_format.batch_of_key(b"impulses", key)


def test_a_sealed_value() -> None:
    value = log_format.seal(b"sources", b"bob\0", (5, 2, 300))
    assert value == crc(b"sources\0bob\0\x93\x05\x02\xcd\x01\x2c") + b"\x93\x05\x02\xcd\x01\x2c"
    assert log_format.unseal(b"sources", b"bob\0", value, log_format.SOURCE) == (5, 2, 300)
    for table, key, changed in (
        (b"peers", b"bob\0", value),
        (b"sources", b"bot\0", value),
        (b"sources", b"bob\0", value[:-1]),
        (b"sources", b"bob\0", value + b"\0"),
        (b"sources", b"bob\0", value[:8]),
        (b"sources", b"bob\0", b""),
    ):
        with pytest.raises(DamagedLogError, match=f"table '{table.decode()}' is damaged at key"):
            log_format.unseal(table, key, changed, log_format.SOURCE)


def test_verdicts_and_letters() -> None:
    verdict = Verdict(258, 3, VerdictKind.REFUSED, text="no", cause=Cause.METHOD, message=b"m", trace="t")
    key = bytes.fromhex("0000000000000102 0000000000000003 0000000000000000 0000000000000000")
    front = bytes.fromhex("9d cd0102 03 01 a0") + b"\xa2no" + bytes.fromhex("01 00 00 a0 c0")
    kept = front + b"\xc4\0\xa0\xff"
    letter = b"\x92\x05" + front + b"\xc4\1m\xa1t\xff"
    assert verdict_rows([verdict], 5) == [
        ("verdicts", key, crc(b"verdicts\0" + key + kept) + kept),
        ("letters", key, crc(b"letters\0" + key + letter) + letter),
    ]
    waited_for = Verdict(258, 3, VerdictKind.KEPT, task=1, step=2, caller="shop")
    assert [(table, key[16:].hex()) for table, key, _ in verdict_rows([waited_for], 5)] == [
        ("verdicts", "00000000000000010000000000000002")
    ]


@pytest.mark.parametrize(
    ("key", "name"),
    [((1, 2, 0, 0), "1:2"), ((1, 2, 3, 0), "1:2:3:0"), ((1, 2, 0, 4), "1:2:0:4"), ((1, 2, 3, 4), "1:2:3:4")],
)
def test_what_people_call_a_letter(key: MessageKey, name: str) -> None:
    assert dead_letter_name(key) == name


def test_a_suspect() -> None:
    payload = b"\x94\x07\xff\x02\x09"
    assert suspect_row(Suspect(7, -1, 2, 9)) == ("meta", b"suspect", crc(b"meta\0suspect" + payload) + payload)


def test_a_client_without_an_owner_is_what_it_was_before_there_were_owners() -> None:
    key = log_format.name_key("ann")
    value = log_format.encode_client(key, ClientPosition(3, 1, 100))
    assert value[8:] == bytes.fromhex("93 03 01 64")
    assert log_format.decode_client(key, value) == ClientPosition(3, 1, 100)
    owned = ClientPosition(3, 1, 100, "web")
    assert log_format.decode_client(key, log_format.encode_client(key, owned)) == owned


def test_where_an_entry_of_the_journal_says_that_it_belongs() -> None:
    entry = encode_entry(7, 5, 2, 9, b"rows")
    assert place_of(entry) == place_of(entry[:HEADER_SIZE_BYTES]) == Place(5, 2, 9)
    assert place_of(entry[: HEADER_SIZE_BYTES - 1]) is None
    assert place_of(b"IMJ3" + entry[4:]) is None


def test_a_sealed_value_of_another_type() -> None:
    value = log_format.seal(b"meta", b"format", "1")
    with pytest.raises(DamagedLogError, match="strange value at key 'format'"):
        log_format.unseal(b"meta", b"format", value, log_format.INT)


def test_chunks() -> None:
    key = log_format.CHUNK_KEY.pack(1, 0)
    value = log_format.seal_chunk(key, memoryview(b"data"))
    assert value == crc(key + b"data") + b"data"
    assert log_format.unseal_chunk(key, memoryview(value)) == b"data"
    for cut in range(len(value)):
        assert log_format.unseal_chunk(key, value[:cut]) is None
    assert log_format.unseal_chunk(log_format.CHUNK_KEY.pack(1, 1), value) is None


def test_impulses() -> None:
    key = log_format.batch_key("bob", 3)
    value = log_format.encode_batch(b"impulses", key, 2, b"payload")
    counted = b"\2\0\0\0" + crc(b"payload")
    assert value == crc(b"impulses\0" + key + counted) + counted + b"payload"
    assert log_format.decode_batch_count(b"impulses", key, value[:20]) == 2  # without the payload
    assert log_format.decode_batch_payload(b"impulses", key, value) == b"payload"
    with pytest.raises(DamagedLogError):
        log_format.decode_batch_payload(b"impulses", key, value[:-1])
    with pytest.raises(DamagedLogError):
        log_format.decode_batch_count(b"impulses", log_format.batch_key("bob", 4), value)
    with pytest.raises(DamagedLogError):
        log_format.decode_batch_count(b"impulses", key, value[:19])


def test_a_version_start() -> None:
    key = log_format.SEQUENCE_KEY.pack(2)
    value = log_format.encode_version_start(key, VersionStart(3, -1, "a:B"))
    packed = b"\x93\x03\xff\xa3a:B"
    assert value == crc(b"versions\0" + key + packed) + packed
    assert log_format.decode_version_start(key, value) == VersionStart(3, -1, "a:B")
    with pytest.raises(DamagedLogError, match="table 'versions' is damaged"):
        log_format.decode_version_start(log_format.SEQUENCE_KEY.pack(1), value)


def test_a_header() -> None:
    outputs = {"bob": OutputMark((1 << 63) - 1, (1 << 64) - 1)}
    unacknowledged = {"bob": [OutputBatch(1, 2, b"ab"), OutputBatch(3, 1, b"")]}
    header = CheckpointHeader(3, -1, 10, (1 << 64) - 1, 5, outputs, unacknowledged, version=7)
    kept = log_format.encode_outputs(unacknowledged)
    assert log_format.decode_outputs(kept) == unacknowledged
    key = log_format.SEQUENCE_KEY.pack(3)
    value = log_format.encode_header(header, 4, kept)
    stored = log_format.decode_header(key, value)
    assert stored.header == CheckpointHeader(3, -1, 10, (1 << 64) - 1, 5, outputs, version=7)
    assert (stored.chunk_count, stored.outputs_size_bytes, stored.outputs_check) == (4, len(kept), crc64(kept))
    assert value[8:12] == b"\x9a\x03\xff\x0a"  # an array of 10: ID, sequence ID -1, size
    assert value[-1:] == b"\x07"  # the app's version comes last
    assert log_format.encode_outputs({}) == b""
    with pytest.raises(DamagedLogError):
        log_format.decode_header(log_format.SEQUENCE_KEY.pack(4), value)


def test_a_header_with_open_calls() -> None:
    """Only where there are any, so that other logs are read by versions that know nothing of them."""
    header = CheckpointHeader(3, 1, 0, 0, 5, version=7, open_calls={"bob": [4, 1 << 40]})
    key = log_format.SEQUENCE_KEY.pack(3)
    value = log_format.encode_header(header, 0, b"")
    assert log_format.decode_header(key, value).header == header
    assert value[8:9] == b"\x9b"  # an array of 11
    assert value.endswith(b"\x07\x81\xa3bob\x92\x04\xcf" + (1 << 40).to_bytes(8, "big"))
