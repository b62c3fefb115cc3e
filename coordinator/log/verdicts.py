"""Tables of messages that failed alone: verdicts, dead letters, and operators' actions on them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

import msgspec

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.interfaces import NO_SUSPECT, AuditEntry, Letter, Suspect
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.backend import Row, View
from immortal.coordinator.log.format import MESSAGE_KEY, META_SUSPECT, SEQUENCE_KEY
from immortal.coordinator.log.identity import meta_row
from immortal.protocol import decoding
from immortal.protocol.varint import Readable
from immortal.protocol.verdicts import MessageKey, Verdict

_VERDICT = decoding.Decoder(Verdict)
_LETTER = decoding.Decoder(tuple[int, Verdict])
_AUDIT = decoding.Decoder(tuple[int, str, str])
_SUSPECT = decoding.Decoder(Annotated[list[int], msgspec.Meta(min_length=4, max_length=5)])


def dead_letter_name(key: MessageKey) -> str:
    """Return a dead letter's name for people: SEQ:INDEX; for a step of a task, with the task and the step."""
    return ":".join(map(str, key if any(key[2:]) else key[:2]))


def verdict_rows(verdicts: Iterable[Verdict], now_ns: int) -> list[Row]:
    """Return the rows for ``verdicts``. ``now_ns``: when they were given, ns since the Unix epoch."""
    rows: list[Row] = []
    for verdict in verdicts:
        key = MESSAGE_KEY.pack(*verdict.key)
        rows.append(("verdicts", key, log_format.seal(b"verdicts", key, verdict.without_dead_letter())))
        if verdict.is_dead_letter:
            rows.append(("letters", key, log_format.seal(b"letters", key, (now_ns, verdict))))
    return rows


def suspect_row(suspect: Suspect) -> Row:
    payload = [suspect.sequence_id, suspect.message_index, suspect.runs_count, suspect.last_sequence_id]
    return meta_row(META_SUSPECT, [*payload, suspect.task] if suspect.task else payload)


def audit_rows(view: View, entries: Iterable[AuditEntry]) -> list[Row]:
    """Return rows that append ``entries`` to the table of audit entries."""
    last = next((SEQUENCE_KEY.unpack(key)[0] for key, _ in view.scan_back("audit")), 0)
    rows: list[Row] = []
    for number, entry in enumerate(entries, start=last + 1):
        key = SEQUENCE_KEY.pack(number)
        rows.append(("audit", key, log_format.seal(b"audit", key, (entry.time_ns, entry.who, entry.what))))
    return rows


def load_verdicts(view: View, first_sequence_id: int = 0) -> list[Verdict]:
    """Return the verdicts on the records from ``first_sequence_id`` on, in order.

    Raises DamagedLogError if any is damaged.
    """
    return _unseal_verdicts(view.scan("verdicts", log_format.record_key(first_sequence_id)))


def load_last_verdicts(view: View, count_max: int) -> list[Verdict]:
    """Return the last verdicts, newest first. Raises DamagedLogError if any is damaged."""
    return _unseal_verdicts(islice(view.scan_back("verdicts"), count_max))


def _unseal_verdicts(rows: Iterable[tuple[Readable, Readable]]) -> list[Verdict]:
    return [log_format.unseal(b"verdicts", bytes(key), bytes(value), _VERDICT) for key, value in rows]


def dead_letter_sizes(view: View) -> dict[MessageKey, int]:
    """Return the stored size of each dead letter in bytes, in the order of their records, including damaged ones."""
    return {_message_key(key): len(value) for key, value in view.scan("letters") if len(key) == MESSAGE_KEY.size}


def load_dead_letter(view: View, key: MessageKey) -> Letter | None:
    """Read a dead letter; return None if there is none. Raises DamagedLogError."""
    try:
        packed = MESSAGE_KEY.pack(*key)
    except struct.error:
        return None  # no message has such a key
    value = view.get("letters", packed)
    if value is None:
        return None
    try:
        time_ns, verdict = log_format.unseal(b"letters", packed, bytes(value), _LETTER)
    except DamagedLogError as error:
        raise DamagedLogError(f"the dead letter {dead_letter_name(key)} is damaged: {error}", -1) from None
    return Letter(verdict, time_ns)


def load_audit(view: View, problems: list[str]) -> list[AuditEntry]:
    """Read audit entries, oldest first. Leave out damaged ones and describe them in ``problems``."""
    entries = []
    for key, value in view.scan("audit"):
        try:
            entries.append(AuditEntry(*log_format.unseal(b"audit", bytes(key), bytes(value), _AUDIT)))
        except DamagedLogError as error:
            problems.append(f"an entry of what operators did is left out: {error}")
    return entries


def load_suspect(view: View) -> Suspect:
    """Read the suspect: the message that may have ended the app's process. Raises DamagedLogError."""
    value = view.get("meta", META_SUSPECT)
    return NO_SUSPECT if value is None else Suspect(*log_format.unseal(b"meta", META_SUSPECT, bytes(value), _SUSPECT))


def _message_key(key: Readable) -> MessageKey:
    sequence_id, message_index, task, step = MESSAGE_KEY.unpack(key)
    return sequence_id, message_index, task, step
