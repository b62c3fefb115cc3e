"""Authentication of a log: only the holder of a key can write it. Each record, chunk and row has a MAC
(docs/decisions/0017).

Records form a chain: the MAC of each also covers the one before. For each other table the MACs of its rows are summed,
and each transaction writes a tag of the sum. So no row can be changed, added, removed or replaced by an older one. The
MACs of a checkpoint's chunks are in a row beside its header.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log import view_queries
from immortal.coordinator.log.backend import Span, View
from immortal.coordinator.log.format import CHUNK_KEY, MAC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, first_and_last_sequence_id, meta_value
from immortal.protocol import decoding
from immortal.protocol.varint import Readable

KEY_SIZE_BYTES = 32
_ROW_MAC_SIZE_BYTES = 32  # row MACs are summed: the sum must be as hard to forge
SUM_MODULUS = 1 << (8 * _ROW_MAC_SIZE_BYTES)
NONCE_SIZE_BYTES = 16
_IDENTITY = struct.Struct("<QQ")
_SIZE = struct.Struct("<I")
_BYTES = decoding.Decoder(bytes)

SUMMED_TABLES = (
    *("sources", "acknowledged", "peers", "impulses", "clients", "replies", "spilled", "versions", "meta"),
    *("verdicts", "letters", "audit", "checkpoints", "checkpoint_seals", "outputs"),
)
_SUMMED = frozenset(SUMMED_TABLES)
# META_JOURNAL is unsealed, as a backup has no journal. An attacker who changes it gets only an older state of the log.
# Wrapped data keys are unsealed, too: each writer adds one below the MACs, and a changed one decrypts nothing.
UNSEALED_META = frozenset((log_format.META_JOURNAL, log_format.META_SEAL))


class ForgedLogError(DamagedLogError):
    """Raised for data in the log that was not written with the log's key."""


class LogKeyError(LogError):
    """Raised if the key of an authenticated log is missing, or a log without a key should have one."""


@dataclass(frozen=True, slots=True)
class LogKey:
    """Secret of KEY_SIZE_BYTES. ``id`` identifies the key, and reveals nothing about it."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> LogKey:
        return cls(secrets.token_bytes(KEY_SIZE_BYTES))

    @property
    def id(self) -> str:
        return hashlib.blake2b(self.secret, digest_size=8, person=b"immortal key id").hexdigest()


def parse_keys(text: str, label: str) -> tuple[LogKey, ...]:
    """Decode keys in hex, one a line, the one in use first. Raises LogKeyError, which does not show the text."""
    try:
        keys = tuple(LogKey(bytes.fromhex(line)) for line in text.split())
    except ValueError:
        keys = ()
    if not keys or any(len(key.secret) != KEY_SIZE_BYTES for key in keys):
        raise LogKeyError(
            f"{label} does not hold keys of a log: one a line was expected, {2 * KEY_SIZE_BYTES} hex digits;"
            " restore it from a copy"
        )
    return keys


def read_key_file(path: Path, if_read: str) -> tuple[LogKey, ...]:
    """Read a file of keys. ``if_read``: the remedy if others can have read it. Raises LogKeyError, FileNotFoundError,
    NotADirectoryError.
    """
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise LogKeyError(
                f"{path} has mode {mode & 0o777:04o}, expected 0600: others may know the key of this log;"
                f" 'chmod 0600 {path}', {if_read}"
            )
        return parse_keys(path.read_text("ascii"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise LogKeyError(f"the key of the log in {path} cannot be read: {reason_of(error)}") from None


def reason_of(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason of an error without the path, which the message names already."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class Marker(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Row of a log that says how it is authenticated."""

    key_id: str
    nonce: bytes  # unique to this sealing of this log: earlier or foreign MACs never match
    first_sequence_id: int  # earlier records were already there when the log got the key, and were trusted as they were


_MARKER = decoding.Decoder(Marker)


class Macs:
    """MAC functions of one log under one key. Stateless: for any thread."""

    def __init__(self, key: LogKey, identity: LogIdentity, marker: Marker) -> None:
        self.marker = marker
        whose = _IDENTITY.pack(identity.committer_id, identity.created_ns)
        secret = hashlib.blake2b(whose, key=key.secret, salt=marker.nonce, person=b"immortal log").digest()

        def base(purpose: str, size_bytes: int) -> hashlib.blake2b:
            return hashlib.blake2b(key=secret, person=purpose.encode(), digest_size=size_bytes)

        from blake3 import blake3  # imported here: saves half a MiB for a log without a key

        def bulk(purpose: str) -> blake3:
            """Return the keyed hash for large values: BLAKE3 takes a seventh of HMAC's time for a MiB."""
            return blake3(key=base(purpose, blake3.key_size).digest())

        self._record = bulk("record")
        self._chunk = bulk("chunk")
        self._tag = base("tag", MAC_SIZE_BYTES)
        self._mark = base("mark", MAC_SIZE_BYTES)
        self._rows = {table: base(table, _ROW_MAC_SIZE_BYTES) for table in SUMMED_TABLES}
        self.genesis = base("genesis", MAC_SIZE_BYTES).digest()
        """MAC used in place of a record before the first one."""

    def record(self, before: bytes, value: Readable) -> bytes:
        """Return the MAC of a record with its trailer. ``before``: MAC of the record before it."""
        mac = self._record.copy()
        mac.update(before)
        mac.update(value)
        return mac.digest(MAC_SIZE_BYTES)

    def chunk(self, key: bytes, value: Readable) -> bytes:
        mac = self._chunk.copy()
        mac.update(key)  # all keys of chunks are of one size
        mac.update(value)
        return mac.digest(MAC_SIZE_BYTES)

    def row(self, table: str, key: bytes, value: Readable) -> int:
        mac = self._rows[table].copy()
        mac.update(_SIZE.pack(len(key)) + key)
        mac.update(value)
        return int.from_bytes(mac.digest(), "little")

    def tag(self, table: str, total: int) -> bytes:
        mac = self._tag.copy()
        mac.update(total.to_bytes(_ROW_MAC_SIZE_BYTES, "little") + table.encode())
        return mac.digest()

    def seal(self, head: bytes, tags: bytes) -> bytes:
        """Return the seal that a transaction writes over all tables. ``head``: MAC of the last record."""
        mac = self._tag.copy()
        mac.update(head + tags)
        return tags + mac.digest()

    def mark(self, checked: bytes) -> bytes:
        """Return the MAC of the high-water mark."""
        mac = self._mark.copy()
        mac.update(checked)
        return mac.digest()


def read_marker(view: View) -> Marker | None:
    """Read the marker; return None if the log is not authenticated. Raises DamagedLogError."""
    return meta_value(view, log_format.META_AUTHENTICATED, _MARKER)


def find_key(keys: Sequence[LogKey], marker: Marker, instance_name: str) -> LogKey:
    """Return the log's key among ``keys``. Raises LogKeyError if it is not there."""
    for key in keys:
        if key.id == marker.key_id:
            return key
    have = f"there are {', '.join(key.id for key in keys)}" if keys else "there is none"
    raise LogKeyError(
        f"the log of {instance_name!r} is authenticated with the key {marker.key_id}, and {have}: bring that key back"
        f" from a copy ('log_key' in the settings says where it belongs); if it is lost for good, 'immortal log key"
        f" {instance_name} --accept' takes the log as it is now, unchecked, and gives it a key"
    )


def check_state(view: View, macs: Macs, instance_name: str) -> dict[str, int]:
    """Check that all small tables are as the last commit left them; return the sum of each.

    It reads these tables completely, including messages that wait for peers. Raises ForgedLogError, DamagedLogError.
    """
    sums = {
        table: sum(macs.row(table, key, value) for key, value in summed_rows(view, table)) % SUM_MODULUS
        for table in SUMMED_TABLES
    }
    stored = meta_value(view, log_format.META_SEAL, _BYTES) or b""
    tags = [macs.tag(table, sums[table]) for table in SUMMED_TABLES]
    if stored == macs.seal(head_of(view, macs), b"".join(tags)):
        return sums
    theirs = [stored[at : at + MAC_SIZE_BYTES] for at in range(0, len(stored), MAC_SIZE_BYTES)]
    wrong = [table for table, tag, other in zip(SUMMED_TABLES, tags, theirs, strict=False) if tag != other]
    what = "its seal or its last record's is" if not wrong or len(stored) != MAC_SIZE_BYTES * (len(tags) + 1) else ""
    if not what:
        what = f"the table{'s' if len(wrong) > 1 else ''} {', '.join(map(repr, wrong))} {'are' if wrong[1:] else 'is'}"
    raise ForgedLogError(
        f"the log of {instance_name!r} is not authentic: {what} not what was written with its key"
        f" {macs.marker.key_id}; {forged_log_remedy(instance_name)}",
        -1,
    )


def not_authenticated_message(instance_name: str) -> str:
    return (
        f"the log of {instance_name!r} is not authenticated, but this instance had an authenticated log: this is an"
        " older copy, or somebody else made it; restore an authenticated copy"
        f" ('immortal log key {instance_name} --accept' takes it as it is now)"
    )


def forged_log_remedy(instance_name: str) -> str:
    return (
        f"somebody else wrote it, or a disk damaged it: restore the log from a copy ('immortal log verify"
        f" {instance_name}' says what is wrong; 'immortal log key {instance_name} --accept' takes it as it is)"
    )


def authenticate_records(view: View, macs: Macs | None, rows: Iterable[tuple[int, Readable]]) -> list[bool]:
    """Check each (sequence ID, value) against its MAC: True if it is authentic.

    Without ``macs`` all count as authentic.
    """
    if macs is None:
        return [True for _ in rows]
    found: list[bool] = []
    last, last_mac = -2, b""
    for sequence_id, value in rows:
        before = last_mac if sequence_id == last + 1 else record_mac(view, macs, sequence_id - 1)
        last, last_mac = sequence_id, record_mac(view, macs, sequence_id)
        found.append(bool(before) and macs.record(before, value) == last_mac)
    return found


def authentic_prefix(values: list[bytes], are: list[bool], first_sequence_id: int) -> list[bytes]:
    """Return ``values`` up to the first that is not authentic. Raises ForgedLogError if the very first is not."""
    if all(are):
        return values
    count = are.index(False)
    if count == 0 and values:
        raise forged_record(first_sequence_id)
    return values[:count]


def forged_record(sequence_id: int) -> ForgedLogError:
    return ForgedLogError(
        f"record {sequence_id} is not authentic: its contents or place are not what was written with the log's key",
        sequence_id,
    )


def read_chunk(view: View, macs: Macs | None, checkpoint_id: int, index: int) -> bytes:
    """Read a chunk and check its MAC. Raises DamagedCheckpointError, also if it is not authentic."""
    data = view_queries.read_chunk(view, checkpoint_id, index)
    if macs is None:
        return data
    stored = view.get("checkpoint_seals", SEQUENCE_KEY.pack(checkpoint_id))
    expected = b"" if stored is None else bytes(stored[MAC_SIZE_BYTES * index : MAC_SIZE_BYTES * (index + 1)])
    key = CHUNK_KEY.pack(checkpoint_id, index)
    actual = macs.chunk(key, log_format.seal_chunk(key, data)) if data else b""  # after the last one
    if actual != expected:
        raise DamagedCheckpointError(
            f"chunk {index} of checkpoint {checkpoint_id} is not authentic: it was not written with the log's key",
            checkpoint_id,
        )
    return data


def record_mac(view: View, macs: Macs, sequence_id: int) -> bytes:
    if sequence_id < 0:
        return macs.genesis
    value = view.get("record_seals", SEQUENCE_KEY.pack(sequence_id))
    return b"" if value is None else bytes(value)


def head_of(view: View, macs: Macs) -> bytes:
    return record_mac(view, macs, first_and_last_sequence_id(view)[1])


def summed_rows(view: View, table: str) -> Iterator[tuple[bytes, Readable]]:
    return ((key, value) for key, value in Span(table).rows(view) if is_summed(table, key))


def is_summed(table: str, key: bytes) -> bool:
    return table in _SUMMED and not (
        table == "meta" and (key in UNSEALED_META or key.startswith(log_format.META_DATA_KEY))
    )
