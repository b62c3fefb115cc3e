"""MACs of a log, byte by byte, as docs/LOG_FORMAT.md has them."""

from __future__ import annotations

import hashlib

from blake3 import blake3

from immortal.coordinator.log.authentication import SUMMED_TABLES, LogKey, Macs, Marker
from immortal.log import LogIdentity

SECRET = bytes(range(32))
NONCE = bytes(range(16))
IDENTITY = LogIdentity(6, "alice", 77, 1_700_000_000_000_000_000)
MACS = Macs(LogKey(SECRET), IDENTITY, Marker(LogKey(SECRET).id, NONCE, 0))


def mac(purpose: bytes, size_bytes: int, *parts: bytes) -> bytes:
    whose = (77).to_bytes(8, "little") + (1_700_000_000_000_000_000).to_bytes(8, "little")
    own = hashlib.blake2b(whose, key=SECRET, salt=NONCE, person=b"immortal log", digest_size=64).digest()
    return hashlib.blake2b(b"".join(parts), key=own, person=purpose, digest_size=size_bytes).digest()


def bulk_mac(purpose: bytes, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), key=mac(purpose, 32)).digest()[:16]


def test_the_id_of_a_key() -> None:
    assert LogKey(SECRET).id == hashlib.blake2b(SECRET, person=b"immortal key id", digest_size=8).hexdigest()
    assert LogKey.new() != LogKey.new()


def test_records_and_chunks() -> None:
    assert MACS.genesis == mac(b"genesis", 16)
    first = MACS.record(MACS.genesis, b"value")
    assert first == bulk_mac(b"record", MACS.genesis, b"value")
    assert MACS.record(first, memoryview(b"next")) == bulk_mac(b"record", first, b"next")
    assert MACS.chunk(bytes(12), b"data") == bulk_mac(b"chunk", bytes(12), b"data")


def test_a_large_record_counts_to_its_last_byte_and_is_not_changed_by_how_it_is_held() -> None:
    value = bytes(range(256)) * 4096
    whole = MACS.record(MACS.genesis, value)
    assert whole == MACS.record(MACS.genesis, memoryview(bytearray(value)))
    for changed in (value[:-1], value + b"\0", value[:-1] + b"\0", b"\1" + value[1:]):
        assert MACS.record(MACS.genesis, changed) != whole
    assert MACS.record(bytes(16), value) != whole


def test_rows_tags_seal_and_mark() -> None:
    row = mac(b"sources", 32, (4).to_bytes(4, "little"), b"bob\0", b"value")
    assert MACS.row("sources", b"bob\0", b"value") == int.from_bytes(row, "little")
    assert MACS.row("peers", b"bob\0", b"value") != int.from_bytes(row, "little")
    tag = mac(b"tag", 16, (258).to_bytes(32, "little"), b"sources")
    assert MACS.tag("sources", 258) == tag
    assert MACS.seal(b"head", tag) == tag + mac(b"tag", 16, b"head", tag)
    assert MACS.mark(b"checked") == mac(b"mark", 16, b"checked")


def test_each_table_has_a_purpose_of_its_own_that_fits() -> None:
    assert all(len(table.encode()) <= 16 for table in SUMMED_TABLES)
    assert not {"record", "chunk", "tag", "mark", "genesis"} & set(SUMMED_TABLES)


def test_another_key_nonce_or_log_gives_others() -> None:
    marker = Marker("", NONCE, 0)
    others = [
        Macs(LogKey(bytes(32)), IDENTITY, marker),
        Macs(LogKey(SECRET), IDENTITY, Marker("", bytes(16), 0)),
        Macs(LogKey(SECRET), LogIdentity(6, "alice", 78, IDENTITY.created_ns), marker),
        Macs(LogKey(SECRET), LogIdentity(6, "alice", 77, IDENTITY.created_ns + 1), marker),
    ]
    assert len({one.record(bytes(16), b"value") for one in (MACS, *others)}) == 5
