"""Damage to logs in memory."""

from __future__ import annotations

from immortal.coordinator.log.format import CHUNK_KEY, CRC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.memory import MemoryLogStore


def damage_record(store: MemoryLogStore, sequence_id: int, offset_bytes: int) -> None:
    """Flip one bit of a value."""
    _flip(store, "records", SEQUENCE_KEY.pack(sequence_id), offset_bytes)


def damage_chunk(store: MemoryLogStore, checkpoint_id: int, index: int) -> None:
    """Flip one bit of a chunk."""
    _flip(store, "chunks", CHUNK_KEY.pack(checkpoint_id, index), CRC_SIZE_BYTES)


def _flip(store: MemoryLogStore, table: str, key: bytes, offset_bytes: int) -> None:
    value = bytearray(store.backend.durable.tables[table].rows[key])
    value[offset_bytes] ^= 1
    store.backend.durable.put(table, key, value)
