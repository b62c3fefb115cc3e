"""The tables of messages that fail alone: the verdicts on them, the dead letters, and what operators did about them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import lmdb
import msgspec

from coordinator.core.errors import DamagedLogError, fail
from coordinator.core.interfaces import NO_SUSPECT, AuditEntry, Letter, Suspect
from coordinator.log import format as log_format
from coordinator.log.environment import Tables
from coordinator.log.format import MESSAGE_KEY, META_SUSPECT, SEQUENCE_KEY
from coordinator.log.journal import Rows
from protocol.verdicts import MessageKey, Verdict

ReadTransaction: TypeAlias = "lmdb.Transaction[memoryview]"
WriteTransaction: TypeAlias = "lmdb.Transaction[memoryview]"

_VERDICT = msgspec.msgpack.Decoder(Verdict)
_LETTER = msgspec.msgpack.Decoder(tuple[int, Verdict])
_AUDIT = msgspec.msgpack.Decoder(tuple[int, str, str])
_SUSPECT = msgspec.msgpack.Decoder(tuple[int, int, int, int])


def letter_name(key: MessageKey) -> str:
    """How people call it: SEQ:INDEX; of a step with the task and the step behind."""
    return ":".join(map(str, key if any(key[2:]) else key[:2]))


# --- writing ----------------------------------------------------------------------------------------------------------


def verdict_rows(verdicts: Iterable[Verdict], now_ns: int) -> Rows:
    """What the log keeps of them. ``now_ns``: when they were given."""
    rows: Rows = {}
    for verdict in verdicts:
        key = MESSAGE_KEY.pack(*verdict.key)
        rows["verdicts", key] = log_format.seal(b"verdicts", key, verdict.without_letter())
        if verdict.is_letter:
            rows["letters", key] = log_format.seal(b"letters", key, (now_ns, verdict))
    return rows


def letter_size(letter: Letter) -> int:
    """What it takes in the log, in bytes."""
    rows = verdict_rows([letter.verdict], letter.time_ns)
    return sum(len(value) for (table, _), value in rows.items() if table == "letters")


def suspect_row(suspect: Suspect) -> Rows:
    payload = (suspect.sequence_id, suspect.message_index, suspect.runs_count, suspect.last_sequence_id)
    return {("meta", META_SUSPECT): log_format.seal(b"meta", META_SUSPECT, payload)}


def remove_letters(write: WriteTransaction, tables: Tables, keys: Iterable[MessageKey]) -> None:
    for key in keys:
        write.delete(MESSAGE_KEY.pack(*key), db=_writable(tables.letters))


def put_audit(write: WriteTransaction, tables: Tables, entries: Iterable[AuditEntry]) -> None:
    table = _writable(tables.audit)
    for entry in entries:
        with write.cursor(table) as cursor:
            number = SEQUENCE_KEY.unpack(cursor.key())[0] + 1 if cursor.last() else 1
        key = SEQUENCE_KEY.pack(number)
        write.put(key, log_format.seal(b"audit", key, (entry.time_ns, entry.who, entry.what)), db=table)


def _writable(table: lmdb._Database | None) -> lmdb._Database:
    if table is None:
        fail("a log is written that has no tables of verdicts yet")
    return table


# --- reading ----------------------------------------------------------------------------------------------------------


def load_verdicts(transaction: ReadTransaction, tables: Tables, first_sequence_id: int = 0) -> list[Verdict]:
    """On the records from ``first_sequence_id`` on, in their order. Raises DamagedLogError: each of them counts."""
    rows = _rows(transaction, tables.verdicts, log_format.record_key(first_sequence_id))
    return [log_format.unseal(b"verdicts", key, bytes(value), _VERDICT) for key, value in rows]


def letter_sizes(transaction: ReadTransaction, tables: Tables) -> dict[MessageKey, int]:
    """What each dead letter takes, in bytes, in the order of their records; damaged ones as well."""
    rows = _rows(transaction, tables.letters)
    return {_message_key(key): len(value) for key, value in rows if len(key) == MESSAGE_KEY.size}


def load_letter(transaction: ReadTransaction, tables: Tables, key: MessageKey) -> Letter | None:
    """None where there is none. Raises DamagedLogError."""
    try:
        packed = MESSAGE_KEY.pack(*key)
    except struct.error:
        return None  # no message can have it
    value = None if tables.letters is None else transaction.get(packed, db=tables.letters)
    if value is None:
        return None
    try:
        time_ns, verdict = log_format.unseal(b"letters", packed, bytes(value), _LETTER)
    except DamagedLogError as error:
        raise DamagedLogError(f"the dead letter {letter_name(key)} is damaged: {error}", -1) from None
    return Letter(verdict, time_ns)


def load_audit(transaction: ReadTransaction, tables: Tables, problems: list[str]) -> list[AuditEntry]:
    """Oldest first. A damaged entry is left out and told in ``problems``."""
    entries = []
    for key, value in _rows(transaction, tables.audit):
        try:
            entries.append(AuditEntry(*log_format.unseal(b"audit", key, bytes(value), _AUDIT)))
        except DamagedLogError as error:
            problems.append(f"an entry of what operators did is left out: {error}")
    return entries


def load_suspect(transaction: ReadTransaction, tables: Tables) -> Suspect:
    """Raises DamagedLogError."""
    value = transaction.get(META_SUSPECT, db=tables.meta)
    return NO_SUSPECT if value is None else Suspect(*log_format.unseal(b"meta", META_SUSPECT, bytes(value), _SUSPECT))


def _message_key(key: bytes) -> MessageKey:
    sequence_id, message_index, task, step = MESSAGE_KEY.unpack(key)
    return sequence_id, message_index, task, step


def _rows(
    transaction: ReadTransaction, table: lmdb._Database | None, first: bytes = b"\0"
) -> Iterator[tuple[bytes, memoryview]]:
    if table is None:  # the log is older
        return
    with transaction.cursor(table) as cursor:
        found = cursor.set_range(first)
        while found:
            yield bytes(cursor.key()), cursor.value()
            found = cursor.next()
