"""What somebody can do to a log who can write its files, knows the format, and has no key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from immortal.coordinator.core.interfaces import CheckpointHeader, OutputMark
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backends.lmdb.environment import open_environment
from immortal.coordinator.log.backends.lmdb.tables import open_tables
from immortal.coordinator.log.format import CHUNK_KEY, SEQUENCE_KEY, record_key
from immortal.protocol.checksum import crc64
from immortal.protocol.record import encode_record
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from immortal.protocol.verdicts import Verdict, VerdictKind
from tests.faults.sample_log import COMMITTER_ID


@contextmanager
def written(folder: Path) -> Iterator[tuple[lmdb.Transaction[memoryview], Any]]:
    """A transaction past the store, and the tables."""
    environment = open_environment(folder, readonly=False, map_size_bytes=1 << 26)
    try:
        tables = open_tables(environment, folder)
        with environment.begin(write=True, buffers=True) as transaction:
            yield transaction, tables
    finally:
        environment.close()


def row(folder: Path, table: str, key: bytes) -> bytes:
    with written(folder) as (transaction, tables):
        value = transaction.get(key, db=tables[table])
        assert value is not None
        return bytes(value)


def put(folder: Path, table: str, key: bytes, value: bytes | None) -> None:
    with written(folder) as (transaction, tables):
        if value is None:
            assert transaction.delete(key, db=tables[table])
        else:
            transaction.put(key, value, db=tables[table])


def forged_record(sequence_id: int, content: bytes = b"pay everything to mallory") -> bytes:
    """With check bytes and a trailer that are right."""
    encoded = encode_record(COMMITTER_ID, sequence_id, content)
    batches = [
        BatchSource(BatchKind.STREAM, "bob", sequence_id + 1, 1, 0),
        BatchSource(BatchKind.IMPULSES, "", sequence_id + 1, 1, 0),
    ]
    return encoded + encode_trailer(Trailer(5 + sequence_id, batches), int.from_bytes(encoded[8:16], "little"))


def rechecked(value: bytes, sequence_id: int) -> bytes:
    """The value with one byte of its content changed and all CRCs put right."""
    size_bytes = int.from_bytes(value[4:8], "little")
    content = bytearray(value[24:size_bytes])
    content[0] ^= 1
    return forged_record(sequence_id, bytes(content))


def change_a_record(folder: Path) -> None:
    put(folder, "records", SEQUENCE_KEY.pack(90), rechecked(row(folder, "records", SEQUENCE_KEY.pack(90)), 90))


def invent_a_record(folder: Path) -> None:
    """Behind the last one, with the tables and the mark that go with it."""
    put(folder, "records", SEQUENCE_KEY.pack(120), forged_record(120))
    for name in ("bob", "!impulses"):
        key = log_format.name_key(name)
        committer_id = 5 if name == "bob" else COMMITTER_ID
        put(folder, "sources", key, log_format.seal(b"sources", key, (committer_id, 1, 121)))
    (folder / "high-water-mark").unlink()


def invent_a_record_and_a_mac(folder: Path) -> None:
    invent_a_record(folder)
    put(folder, "record_seals", SEQUENCE_KEY.pack(120), bytes(range(16)))


def put_a_record_under_another_number(folder: Path) -> None:
    """Two records change places, each with what it says of itself put right."""
    ours, theirs = (row(folder, "records", SEQUENCE_KEY.pack(number)) for number in (90, 91))
    for number, value in ((90, theirs), (91, ours)):
        size_bytes = int.from_bytes(value[4:8], "little")
        put(folder, "records", SEQUENCE_KEY.pack(number), forged_record(number, value[24:size_bytes]))


def swap_two_records_with_their_macs(folder: Path) -> None:
    for table in ("records", "record_seals"):
        ours, theirs = (row(folder, table, SEQUENCE_KEY.pack(number)) for number in (90, 91))
        put(folder, table, SEQUENCE_KEY.pack(90), theirs)
        put(folder, table, SEQUENCE_KEY.pack(91), ours)


def drop_a_record(folder: Path) -> None:
    """And move those behind it up, so that no number is missing."""
    for number in range(90, 119):
        value = row(folder, "records", SEQUENCE_KEY.pack(number + 1))
        size_bytes = int.from_bytes(value[4:8], "little")
        put(folder, "records", SEQUENCE_KEY.pack(number), forged_record(number, value[24:size_bytes]))
    put(folder, "records", SEQUENCE_KEY.pack(119), None)
    (folder / "high-water-mark").unlink()


def drop_the_last_record(folder: Path) -> None:
    put(folder, "records", SEQUENCE_KEY.pack(119), None)
    (folder / "high-water-mark").unlink()


def change_a_position(folder: Path) -> None:
    """What bob sends again would be taken once more."""
    key = log_format.name_key("sender-007")
    put(folder, "sources", key, log_format.seal(b"sources", key, (6, 1, 0)))


def add_a_position(folder: Path) -> None:
    key = log_format.name_key("mallory")
    put(folder, "sources", key, log_format.seal(b"sources", key, (666, 1, 1000)))


def remove_a_position(folder: Path) -> None:
    put(folder, "sources", log_format.name_key("sender-007"), None)


def forge_a_checkpoint(folder: Path) -> None:
    """A newer one: recovery would begin with its state."""
    blob = b"all belongs to mallory"
    chunk_key = CHUNK_KEY.pack(3, 0)
    put(folder, "chunks", chunk_key, log_format.seal_chunk(chunk_key, blob))
    header = CheckpointHeader(3, 100, len(blob), crc64(blob), 9, {"carol": OutputMark(100, 2)}, {})
    put(folder, "checkpoints", SEQUENCE_KEY.pack(3), log_format.encode_header(header, 1, b""))


def change_a_blob(folder: Path) -> None:
    """Of the same size and with the same CRC-64, which is easily had: the header stays as it is."""
    keys = [CHUNK_KEY.pack(2, index) for index in range(3)]
    chunks = [row(folder, "chunks", key)[8:] for key in keys]
    wanted = crc64(b"".join(chunks))
    forged = [b"mallory" + chunks[0][7:], chunks[1], chunks[2]]
    forged[2] = _with_crc(forged[0] + forged[1], forged[2], wanted)
    assert crc64(b"".join(forged)) == wanted
    for key, chunk in zip(keys, forged, strict=True):
        put(folder, "chunks", key, log_format.seal_chunk(key, chunk))


def _with_crc(before: bytes, last: bytes, wanted: int) -> bytes:
    """``last`` with its last 8 bytes such that the CRC of all is ``wanted``: it is linear in them."""
    front = before + last[:-8]
    base = crc64(front + bytes(8))
    basis = [crc64(front + (1 << bit).to_bytes(8, "little")) ^ base for bit in range(64)]
    rows = [(value, 1 << bit) for bit, value in enumerate(basis)]
    solution, rest = 0, wanted ^ base
    for bit in reversed(range(64)):
        pivot = next((one for one in rows if one[0] >> bit & 1), None)
        assert pivot is not None
        rows.remove(pivot)
        rows = [(value ^ pivot[0], mask ^ pivot[1]) if value >> bit & 1 else (value, mask) for value, mask in rows]
        if rest >> bit & 1:
            rest, solution = rest ^ pivot[0], solution ^ pivot[1]
    return last[:-8] + solution.to_bytes(8, "little")


def forge_a_verdict(folder: Path) -> None:
    """A message that was handled would be passed over."""
    key = record_key(100)
    verdict = Verdict(100, 0, VerdictKind.SKIPPED)
    put(folder, "verdicts", key, log_format.seal(b"verdicts", key, verdict))


def invent_an_impulse(folder: Path) -> None:
    key = log_format.batch_key("carol", 1000)
    put(folder, "impulses", key, log_format.encode_batch(b"impulses", key, 1, b"from mallory"))


def forge_an_output(folder: Path) -> None:
    key = log_format.batch_key("carol", 2000)
    put(folder, "spilled", key, log_format.encode_batch(b"spilled", key, 1, b"from mallory"))


def forge_an_audit_entry(folder: Path) -> None:
    key = SEQUENCE_KEY.pack(1)
    put(folder, "audit", key, log_format.seal(b"audit", key, (1, "somebody else", "did it")))


def forge_a_version(folder: Path) -> None:
    key = SEQUENCE_KEY.pack(2)
    put(folder, "versions", key, log_format.seal(b"versions", key, (2, 50, "mallory:App")))


def change_the_epoch(folder: Path) -> None:
    key = log_format.META_EPOCH
    put(folder, "meta", key, log_format.seal(b"meta", key, 99))


def take_the_key_away(folder: Path) -> None:
    """As a log looks that never had one."""
    change_a_record(folder)
    with written(folder) as (transaction, tables):
        transaction.drop(tables["record_seals"], delete=True)
        transaction.drop(tables["checkpoint_seals"], delete=True)
        for key in (log_format.META_AUTHENTICATED, log_format.META_SEAL):
            transaction.delete(key, db=tables["meta"])
        key = log_format.META_FORMAT
        transaction.put(key, log_format.seal(b"meta", key, log_format.FORMAT_VERSION), db=tables["meta"])
    (folder / "high-water-mark").unlink()
