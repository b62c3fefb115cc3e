"""The journal as logs of format 4 had it: made here as that version made it, a header without a nonce."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import msgspec

from immortal.coordinator.log.backends.lmdb.journal import BLOCK_SIZE_BYTES, FILE_SIZE_BYTES
from immortal.log import LogIdentity
from immortal.protocol.checksum import crc64


def journal_of_format_4(
    identity: LogIdentity, transaction_id: int, entries: Iterable[Mapping[tuple[str, bytes], bytes]]
) -> bytes:
    """``entries``: rows by (table, key), each of one block at most."""
    journal = bytearray(FILE_SIZE_BYTES)
    seed = crc64(struct.pack("<QQ", identity.committer_id, identity.created_ns))
    for number, rows in enumerate(entries):
        packed = msgspec.msgpack.encode([(table, key, value) for (table, key), value in rows.items()])
        checked = struct.pack("<4sIQQ", b"IMJ1", len(packed), transaction_id, number)
        entry = checked + crc64(packed, crc64(checked, seed)).to_bytes(8, "little") + packed
        journal[number * BLOCK_SIZE_BYTES : number * BLOCK_SIZE_BYTES + len(entry)] = entry
    return bytes(journal)
