"""A log that only the holder of a key can write: each record, chunk and row of it has a MAC (docs/decisions/0017).

Records make a chain: the MAC of each covers the one before. The MACs of the rows of each other table are added up, and
each transaction writes a tag of that sum: so no row can be changed, added, removed or brought back from before. A
checkpoint's chunks have their MACs in a row beside its header.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import lmdb
import msgspec
from blake3 import blake3

from coordinator.core.errors import DamagedCheckpointError, DamagedLogError, LogError
from coordinator.log import format as log_format
from coordinator.log import reading
from coordinator.log.environment import LogIdentity, Tables, make_seal_tables
from coordinator.log.format import CHUNK_KEY, META_AUTHENTICATED, META_JOURNAL, META_SEAL, SEQUENCE_KEY
from coordinator.log.journal import Rows
from coordinator.log.reading import ReadTransaction, first_and_last_sequence_id, meta_value
from protocol.varint import Readable

WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"

KEY_SIZE_BYTES = 32
MAC_SIZE_BYTES = 16
_ROW_MAC_SIZE_BYTES = 32  # they are added up: the sum has to be as hard to forge
_SUM_MODULUS = 1 << (8 * _ROW_MAC_SIZE_BYTES)
_NONCE_SIZE_BYTES = 16
_IDENTITY = struct.Struct("<QQ")
_SIZE = struct.Struct("<I")
_MARKER = msgspec.msgpack.Decoder(tuple[str, bytes, int])
_BYTES = msgspec.msgpack.Decoder(bytes)

SUMMED_TABLES = (
    *("sources", "acknowledged", "peers", "impulses", "clients", "replies", "spilled", "versions", "meta"),
    *("verdicts", "letters", "audit", "checkpoints", "checkpoint_seals", "outputs"),
)
_KEPT_TABLES = frozenset(("sources", "acknowledged", "verdicts", "letters", "meta"))  # what the journal may have
# Of the first: a backup has none. What an attacker gains by it is an older state of the whole log.
_UNSEALED_META = frozenset((META_JOURNAL, META_SEAL))


class ForgedLogError(DamagedLogError):
    """Something in the log was not written with its key."""


class LogKeyError(LogError):
    """The key of an authenticated log is not at hand, or the log has none and should have."""


@dataclass(frozen=True, slots=True)
class LogKey:
    """A secret of KEY_SIZE_BYTES. ``id`` says which one it is, and nothing about it."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> LogKey:
        return cls(secrets.token_bytes(KEY_SIZE_BYTES))

    @property
    def id(self) -> str:
        return hashlib.blake2b(self.secret, digest_size=8, person=b"immortal key id").hexdigest()


@dataclass(frozen=True, slots=True)
class Marker:
    """What the log says of its authentication."""

    key_id: str
    nonce: bytes  # of this sealing of this log: nothing that was sealed before, or elsewhere, counts
    first_sequence_id: int  # the records before it were there when the log got the key, and were taken as they were


class Macs:
    """The MACs of one log under one key. Without state: for any thread."""

    def __init__(self, key: LogKey, identity: LogIdentity, marker: Marker) -> None:
        self.marker = marker
        whose = _IDENTITY.pack(identity.committer_id, identity.created_ns)
        secret = hashlib.blake2b(whose, key=key.secret, salt=marker.nonce, person=b"immortal log").digest()

        def base(purpose: str, size_bytes: int) -> hashlib.blake2b:
            return hashlib.blake2b(key=secret, person=purpose.encode(), digest_size=size_bytes)

        def bulk(purpose: str) -> blake3:
            """For what may be large: BLAKE3 takes a seventh of the time for a MiB."""
            return blake3(key=base(purpose, blake3.key_size).digest())

        self._record = bulk("record")
        self._chunk = bulk("chunk")
        self._tag = base("tag", MAC_SIZE_BYTES)
        self._mark = base("mark", MAC_SIZE_BYTES)
        self._rows = {table: base(table, _ROW_MAC_SIZE_BYTES) for table in SUMMED_TABLES}
        self.genesis = base("genesis", MAC_SIZE_BYTES).digest()
        """Stands for the record before the first one."""

    def record(self, before: bytes, value: Readable) -> bytes:
        """Of a record with its trailer; ``before``: that of the record before it."""
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
        """What a transaction writes of all tables; ``head``: the MAC of the last record."""
        mac = self._tag.copy()
        mac.update(head + tags)
        return tags + mac.digest()

    def mark(self, checked: bytes) -> bytes:
        """Of the high-water mark."""
        mac = self._mark.copy()
        mac.update(checked)
        return mac.digest()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_marker(transaction: ReadTransaction, tables: Tables) -> Marker | None:
    """None where the log is not authenticated. Raises DamagedLogError."""
    row = meta_value(transaction, tables, META_AUTHENTICATED, _MARKER)
    return None if row is None else Marker(*row)


def find_key(keys: Sequence[LogKey], marker: Marker, instance_name: str) -> LogKey:
    """The key of the log. Raises LogKeyError where ``keys`` have it not."""
    for key in keys:
        if key.id == marker.key_id:
            return key
    have = f"there are {', '.join(key.id for key in keys)}" if keys else "there is none"
    raise LogKeyError(
        f"the log of {instance_name!r} is authenticated with the key {marker.key_id}, and {have}: bring that key back"
        f" from a copy ('log_key' in the settings says where it belongs); if it is lost for good, 'immortal log key"
        f" {instance_name} --accept' takes the log as it is now, unchecked, and gives it a key"
    )


def check_state(transaction: ReadTransaction, tables: Tables, macs: Macs, instance_name: str) -> dict[str, int]:
    """Whether all small tables are what the last commit left; the sum of each. Raises ForgedLogError, DamagedLogError.

    It reads all of them, what waits for peers as well.
    """
    sums = {table: _sum(transaction, tables, macs, table) for table in SUMMED_TABLES}
    stored = meta_value(transaction, tables, META_SEAL, _BYTES) or b""
    tags = [macs.tag(table, sums[table]) for table in SUMMED_TABLES]
    if stored == macs.seal(_head(transaction, tables, macs), b"".join(tags)):
        return sums
    theirs = [stored[at : at + MAC_SIZE_BYTES] for at in range(0, len(stored), MAC_SIZE_BYTES)]
    wrong = [table for table, tag, other in zip(SUMMED_TABLES, tags, theirs, strict=False) if tag != other]
    what = "its seal or its last record's is" if not wrong or len(stored) != MAC_SIZE_BYTES * (len(tags) + 1) else ""
    if not what:
        what = f"the table{'s' if len(wrong) > 1 else ''} {', '.join(map(repr, wrong))} {'are' if wrong[1:] else 'is'}"
    raise ForgedLogError(
        f"the log of {instance_name!r} is not authentic: {what} not what was written with its key"
        f" {macs.marker.key_id}; {way_out(instance_name)}",
        -1,
    )


def not_authenticated(instance_name: str) -> str:
    return (
        f"the log of {instance_name!r} is not authenticated, and was once, or another log was: this is an older copy,"
        " or somebody else's work; restore it from a copy that is"
        f" ('immortal log key {instance_name} --accept' takes it as it is now)"
    )


def way_out(instance_name: str) -> str:
    return (
        f"somebody else wrote it, or a disk damaged it: restore the log from a copy ('immortal log verify"
        f" {instance_name}' says what is wrong; 'immortal log key {instance_name} --accept' takes it as it is)"
    )


def are_authentic(
    transaction: ReadTransaction, tables: Tables, macs: Macs | None, rows: Iterable[tuple[int, Readable]]
) -> list[bool]:
    """Of each (sequence ID, value): whether it is what was written there. Without ``macs`` nobody can tell: True."""
    if macs is None:
        return [True for _ in rows]
    found: list[bool] = []
    last, last_mac = -2, b""
    for sequence_id, value in rows:
        before = last_mac if sequence_id == last + 1 else _record_mac(transaction, tables, macs, sequence_id - 1)
        last, last_mac = sequence_id, _record_mac(transaction, tables, macs, sequence_id)
        found.append(bool(before) and macs.record(before, value) == last_mac)
    return found


def authentic_prefix(values: list[bytes], are: list[bool], first_sequence_id: int) -> list[bytes]:
    """Those of ``values`` before the first that is not authentic. Raises ForgedLogError if that is the first."""
    if all(are):
        return values
    count = are.index(False)
    if count == 0 and values:
        raise forged_record(first_sequence_id)
    return values[:count]


def forged_record(sequence_id: int) -> ForgedLogError:
    return ForgedLogError(
        f"record {sequence_id} is not authentic: it, or where it stands, is not what was written with the log's key",
        sequence_id,
    )


def read_chunk(
    transaction: ReadTransaction, tables: Tables, macs: Macs | None, checkpoint_id: int, index: int
) -> bytes:
    """As :func:`coordinator.log.reading.read_chunk`; one that is not authentic is damaged."""
    data = reading.read_chunk(transaction, tables, checkpoint_id, index)
    if macs is None:
        return data
    table = tables.checkpoint_seals
    stored = None if table is None else transaction.get(SEQUENCE_KEY.pack(checkpoint_id), db=table)
    expected = b"" if stored is None else bytes(stored[MAC_SIZE_BYTES * index : MAC_SIZE_BYTES * (index + 1)])
    key = CHUNK_KEY.pack(checkpoint_id, index)
    actual = macs.chunk(key, log_format.seal_chunk(key, data)) if data else b""  # behind the last one
    if actual != expected:
        raise DamagedCheckpointError(
            f"chunk {index} of checkpoint {checkpoint_id} is not authentic: it was not written with the log's key",
            checkpoint_id,
        )
    return data


def _record_mac(transaction: ReadTransaction, tables: Tables, macs: Macs, sequence_id: int) -> bytes:
    if sequence_id < 0:
        return macs.genesis
    table = tables.record_seals
    value = None if table is None else transaction.get(SEQUENCE_KEY.pack(sequence_id), db=table)
    return b"" if value is None else bytes(value)


def _head(transaction: ReadTransaction, tables: Tables, macs: Macs) -> bytes:
    return _record_mac(transaction, tables, macs, first_and_last_sequence_id(transaction, tables)[1])


def _sum(transaction: ReadTransaction, tables: Tables, macs: Macs, name: str) -> int:
    return sum(macs.row(name, key, value) for key, value in _summed_rows(transaction, tables, name)) % _SUM_MODULUS


def _summed_rows(transaction: ReadTransaction, tables: Tables, name: str) -> Iterator[tuple[bytes, memoryview]]:
    table = getattr(tables, name)
    if table is None:
        return
    with transaction.cursor(table) as cursor:
        for key_view, value in cursor:
            key = bytes(key_view)
            if name != "meta" or key not in _UNSEALED_META:
                yield key, value


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Change:
    """What one transaction makes of the log's state. It counts once the transaction is durable."""

    head: bytes
    sums: dict[str, int]
    tags: dict[str, bytes]
    rows: dict[tuple[str, bytes], int | None] = field(default_factory=dict)  # of the tables that are kept; None: gone
    chunks: dict[int, list[bytes]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    is_any: bool = False

    def replace(self, table: str, key: bytes, old: int | None, new: int | None) -> None:
        self.sums[table] = (self.sums[table] - (old or 0) + (new or 0)) % _SUM_MODULUS
        self.changed.add(table)
        self.is_any = True
        if table in _KEPT_TABLES:
            self.rows[table, key] = new


class Sealer:
    """The writer's end: it gives each transaction the MACs of what it writes. For the thread that writes."""

    def __init__(self, macs: Macs, transaction: ReadTransaction, tables: Tables, instance_name: str) -> None:
        """Raises ForgedLogError where the tables are not what the last transaction left, DamagedLogError."""
        self.macs = macs
        self._sums = check_state(transaction, tables, macs, instance_name)
        self._tags = {table: macs.tag(table, total) for table, total in self._sums.items()}
        self._head = _head(transaction, tables, macs)
        self._rows = {  # of those that change without LMDB: their old values are not at hand then
            (table, key): macs.row(table, key, value)
            for table in _KEPT_TABLES
            for key, value in _summed_rows(transaction, tables, table)
        }
        self._chunks: dict[int, list[bytes]] = {}  # of checkpoints without a header yet

    def begin(self, write: WriteTransaction, tables: Tables) -> SealedTransaction:
        return SealedTransaction(self, write, tables, self._change())

    def seal_journaled(self, rows: Rows) -> tuple[Rows, _Change]:
        """``rows``, and what is to be durable with them. The change is for :meth:`adopt` then."""
        change = self._change()
        sealed = dict(rows)
        for (table, key), value in rows.items():
            if table == "records":
                sealed["record_seals", key] = self.add_record(change, value)
            else:
                change.replace(table, key, self._rows.get((table, key)), self.macs.row(table, key, value))
        sealed["meta", META_SEAL] = self.sealed_state(change)
        return sealed, change

    def adopt(self, change: _Change) -> None:
        """It is durable."""
        self._head, self._sums, self._tags, self._chunks = change.head, change.sums, change.tags, change.chunks
        for place, row in change.rows.items():
            if row is None:
                self._rows.pop(place, None)
            else:
                self._rows[place] = row

    def _change(self) -> _Change:
        return _Change(self._head, dict(self._sums), dict(self._tags), chunks=dict(self._chunks))

    def kept(self, change: _Change, table: str, key: bytes) -> int | None:
        place = table, key
        return change.rows[place] if place in change.rows else self._rows.get(place)

    def add_record(self, change: _Change, value: Readable) -> bytes:
        change.head = self.macs.record(change.head, value)
        change.is_any = True
        return change.head

    def sealed_state(self, change: _Change) -> bytes:
        """The row that says what all tables are now."""
        for table in change.changed:
            change.tags[table] = self.macs.tag(table, change.sums[table])
        tags = b"".join([change.tags[table] for table in SUMMED_TABLES])
        return log_format.seal(b"meta", META_SEAL, self.macs.seal(change.head, tags))


class SealedTransaction:
    """A write transaction of LMDB that counts what is written through it: only what the store's parts ask of one."""

    def __init__(self, sealer: Sealer, write: WriteTransaction, tables: Tables, change: _Change) -> None:
        self.change = change
        self._sealer = sealer
        self._write = write
        self._tables = tables
        self._names = {
            table: name for name in Tables.__dataclass_fields__ if (table := getattr(tables, name)) is not None
        }

    def as_transaction(self) -> WriteTransaction:
        return cast(WriteTransaction, cast(object, self))

    def finish(self) -> None:
        """Put the seal of what the tables are now, where anything changed."""
        if self.change.is_any:
            self._write.put(META_SEAL, self._sealer.sealed_state(self.change), db=self._tables.meta)

    def get(self, key: bytes, default: Any = None, db: Any = None) -> Any:
        return self._write.get(key, default, db=db)

    def stat(self, db: Any) -> Any:
        return self._write.stat(db)

    def put(self, key: bytes, value: Readable, db: Any = None, append: bool = False) -> bool:
        name = self._names[db]
        macs, change = self._sealer.macs, self.change
        if name == "records":
            self._write.put(key, self._sealer.add_record(change, value), db=self._tables.record_seals)
        elif name == "chunks":
            checkpoint_id, index = CHUNK_KEY.unpack(key)
            known = change.chunks.get(checkpoint_id, [])[:index]
            change.chunks[checkpoint_id] = [*known, macs.chunk(key, value)]
        elif name in SUMMED_TABLES and not (name == "meta" and key in _UNSEALED_META):
            change.replace(name, key, self._old(name, key), macs.row(name, key, value))
        put = self._write.put(key, value, db=db, append=append)
        if name == "checkpoints":  # it counts from here on, and so do its chunks
            chunks = b"".join(change.chunks.pop(SEQUENCE_KEY.unpack(key)[0], ()))
            self.put(key, chunks, db=self._tables.checkpoint_seals)
        return put

    def delete(self, key: bytes, db: Any = None) -> bool:
        value = self._write.get(key, db=db)
        if value is None:
            return False
        self.deleted(self._names[db], key, value)
        return self._write.delete(key, db=db)

    def cursor(self, db: Any) -> Any:
        return _SealedCursor(self, self._names[db], self._write.cursor(db))

    def _old(self, name: str, key: bytes) -> int | None:
        if name in _KEPT_TABLES:
            return self._sealer.kept(self.change, name, key)
        value = self._write.get(key, db=getattr(self._tables, name))
        return None if value is None else self._sealer.macs.row(name, key, value)

    def deleted(self, name: str, key: bytes, value: Readable) -> None:
        """A row is about to be."""
        if name == "records":
            (sequence_id,) = SEQUENCE_KEY.unpack(key)
            if sequence_id > 0:  # its own stays: the MAC of the next one covers it
                self._write.delete(SEQUENCE_KEY.pack(sequence_id - 1), db=self._tables.record_seals)
        elif name in SUMMED_TABLES and not (name == "meta" and key in _UNSEALED_META):
            self.change.replace(name, key, self._sealer.macs.row(name, key, value), None)
            if name == "checkpoints":
                self.delete(key, db=self._tables.checkpoint_seals)
        elif name == "chunks":  # of an attempt that another one takes the place of, or of a checkpoint that has gone
            self.change.chunks.pop(CHUNK_KEY.unpack(key)[0], None)


class _SealedCursor:
    def __init__(self, transaction: SealedTransaction, name: str, cursor: lmdb.Cursor[memoryview]) -> None:
        self._transaction = transaction
        self._name = name
        self._cursor = cursor

    def __enter__(self) -> _SealedCursor:
        return self

    def __exit__(self, *args: object) -> None:
        self._cursor.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def __iter__(self) -> Iterator[tuple[memoryview, memoryview]]:
        return iter(self._cursor)

    def delete(self) -> bool:
        self._transaction.deleted(self._name, bytes(self._cursor.key()), self._cursor.value())
        return self._cursor.delete()


# --- giving a log a key, and taking it away ---------------------------------------------------------------------------


def seal_all(
    environment: lmdb.Environment,
    write: WriteTransaction,
    tables: Tables,
    key: LogKey,
    identity: LogIdentity,
    first_sequence_id: int | None = None,
) -> tuple[Macs, Tables]:
    """Give all that the log holds now the MACs of ``key``: what is in it counts as right from here on.

    ``first_sequence_id``: from which record on it was authenticated before, as known otherwise.
    """
    tables = make_seal_tables(environment, tables, write)
    first, last = first_and_last_sequence_id(write, tables)
    marker = Marker(
        key.id, secrets.token_bytes(_NONCE_SIZE_BYTES), last + 1 if first_sequence_id is None else first_sequence_id
    )
    macs = Macs(key, identity, marker)
    for table in (tables.record_seals, tables.checkpoint_seals):
        if table is not None:
            write.drop(table, delete=False)
    head = macs.genesis
    if first > 0:
        write.put(SEQUENCE_KEY.pack(first - 1), head, db=tables.record_seals)
    with write.cursor(tables.records) as cursor:
        for sequence_key, value in cursor:
            head = macs.record(head, value)
            write.put(bytes(sequence_key), head, db=tables.record_seals)
    with write.cursor(tables.checkpoints) as cursor:
        checkpoint_keys = [bytes(checkpoint_key) for checkpoint_key in cursor.iternext(values=False)]
    for checkpoint_key in checkpoint_keys:
        (checkpoint_id,) = SEQUENCE_KEY.unpack(checkpoint_key)
        chunks = b"".join(_chunk_macs(write, tables, macs, checkpoint_id))
        write.put(checkpoint_key, chunks, db=tables.checkpoint_seals)
    _put_meta(write, tables, log_format.META_FORMAT, log_format.AUTHENTICATED_VERSION)
    _put_meta(write, tables, META_AUTHENTICATED, (marker.key_id, marker.nonce, marker.first_sequence_id))
    seal_state(write, tables, macs)
    return macs, tables


def seal_state(write: WriteTransaction, tables: Tables, macs: Macs) -> None:
    """The small tables are right as they are now, and the log ends with its last record."""
    tags = b"".join([macs.tag(table, _sum(write, tables, macs, table)) for table in SUMMED_TABLES])
    _put_meta(write, tables, META_SEAL, macs.seal(_head(write, tables, macs), tags))


def unseal_all(write: WriteTransaction, tables: Tables) -> None:
    """Make it a log without a key, as it was before it had one."""
    for table in (tables.record_seals, tables.checkpoint_seals):
        if table is not None:
            write.drop(table, delete=True)
    write.delete(META_AUTHENTICATED, db=tables.meta)
    write.delete(META_SEAL, db=tables.meta)
    _put_meta(write, tables, log_format.META_FORMAT, log_format.FORMAT_VERSION)


def cut_seals(write: WriteTransaction, tables: Tables, macs: Macs, sequence_id: int, checkpoint_ids: list[int]) -> None:
    """The records from ``sequence_id`` on and those checkpoints were removed, by hand."""
    if tables.record_seals is None or tables.checkpoint_seals is None:
        return
    with write.cursor(tables.record_seals) as cursor:
        found = cursor.set_range(SEQUENCE_KEY.pack(sequence_id))
        while found:
            cursor.delete()
            found = bool(cursor.key())
    for checkpoint_id in checkpoint_ids:
        write.delete(SEQUENCE_KEY.pack(checkpoint_id), db=tables.checkpoint_seals)
    seal_state(write, tables, macs)


def _chunk_macs(write: WriteTransaction, tables: Tables, macs: Macs, checkpoint_id: int) -> Iterator[bytes]:
    index = 0
    while (value := write.get(key := CHUNK_KEY.pack(checkpoint_id, index), db=tables.chunks)) is not None:
        yield macs.chunk(key, value)
        index += 1


def _put_meta(write: WriteTransaction, tables: Tables, key: bytes, payload: object) -> None:
    write.put(key, log_format.seal(b"meta", key, payload), db=tables.meta)
