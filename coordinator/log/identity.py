"""Identity of a log: owner, format, first and last record; checks of its values; and moments named by operators.

A check ensures that a value is the right record of this log. A moment is a record's number or a time.
"""

from __future__ import annotations

import re
import struct
import time as clock
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Protocol

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError, LogError, LogFormatError, LogIdentityError
from immortal.coordinator.log import format as log_format
from immortal.coordinator.log.format import SEQUENCE_KEY
from immortal.protocol import decoding
from immortal.protocol.checksum import crc64
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.record import RecordHeader, verify_record
from immortal.protocol.trailer import Trailer, check_trailer, decode_trailer
from immortal.protocol.varint import Readable

_IDENTITY = struct.Struct("<QQ")  # committer ID, time of creation


class TableReader(Protocol):
    """The part of a View that this module needs."""

    def get(self, table: str, key: bytes) -> Readable | None: ...
    def scan(self, table: str, first: bytes = b"") -> Iterator[tuple[Readable, Readable]]: ...
    def scan_back(self, table: str, last: bytes | None = None) -> Iterator[tuple[Readable, Readable]]: ...


class LogIdentity(Struct, frozen=True):
    """Owner, format version and creation time of a log."""

    format_version: int
    instance_name: str
    committer_id: int
    created_ns: int

    @property
    def check(self) -> int:
        """Initial value for the CRCs of files beside the tables, so that a file of another log never matches."""
        return crc64(_IDENTITY.pack(self.committer_id, self.created_ns))

    @property
    def is_encrypted(self) -> bool:
        return self.format_version == log_format.ENCRYPTED_VERSION

    def rows(self) -> list[tuple[str, bytes, bytes]]:
        """Return the rows of a new log."""
        values: dict[bytes, object] = {
            log_format.META_FORMAT: self.format_version,
            log_format.META_INSTANCE: self.instance_name,
            log_format.META_COMMITTER_ID: self.committer_id,
            log_format.META_CREATED: self.created_ns,
        }
        return [meta_row(key, payload) for key, payload in values.items()]


def meta_row(key: bytes, payload: object) -> tuple[str, bytes, bytes]:
    return "meta", key, log_format.seal(b"meta", key, payload)


def meta_value(
    view: TableReader, key: bytes, decoder: decoding.Decoder[log_format.Decoded]
) -> log_format.Decoded | None:
    """Return a value of the meta table; None if it is absent. Raises DamagedLogError."""
    value = view.get("meta", key)
    return None if value is None else log_format.unseal(b"meta", key, bytes(value), decoder)


def first_and_last_sequence_id(view: TableReader) -> tuple[int, int]:
    """Return the first and last kept record; first is last + 1 if there is none. Raises DamagedLogError."""
    for key, _ in view.scan("records"):
        (first,) = SEQUENCE_KEY.unpack(key)
        return first, SEQUENCE_KEY.unpack(next(view.scan_back("records"))[0])[0]
    trimmed = meta_value(view, log_format.META_TRIMMED, log_format.INT)
    last = -1 if trimmed is None else trimmed
    return last + 1, last


def read_identity(view: TableReader, label: str, instance_name: str | None) -> LogIdentity:
    """Read the log's identity. Raises LogFormatError (none, or a newer version), LogIdentityError, DamagedLogError."""
    version = check_format(view, label)
    name = _required(view, label, log_format.META_INSTANCE, log_format.TEXT)
    if instance_name is not None and name != instance_name:
        raise LogIdentityError(
            f"the log in {label} belongs to instance {name!r}, not to {instance_name!r}: check the log folder's path"
        )
    committer_id = _required(view, label, log_format.META_COMMITTER_ID, log_format.INT)
    created_ns = _required(view, label, log_format.META_CREATED, log_format.INT)
    return LogIdentity(version, name, committer_id, created_ns)


def check_format(view: TableReader, label: str) -> int:
    """Return the format version. Raises LogFormatError if this program does not read it, DamagedLogError."""
    version = _required(view, label, log_format.META_FORMAT, log_format.INT)
    if version in log_format.FORMAT_VERSIONS_READ:
        return version
    if version > log_format.ENCRYPTED_VERSION:
        remedy = "use the newer version of the program that wrote it"
    else:
        remedy = "no release wrote it, and none reads it; move that folder away to start with a new, empty log"
    raise LogFormatError(
        f"the log in {label} has format version {version}, this program reads version"
        f" {log_format.ENCRYPTED_VERSION}: {remedy}"
    )


def _required(
    view: TableReader, label: str, key: bytes, decoder: decoding.Decoder[log_format.Decoded]
) -> log_format.Decoded:
    value = meta_value(view, key, decoder)
    if value is None:
        raise LogFormatError(f"there is no complete log in {label}: its meta table has no {key.decode()!r}")
    return value


# Checks of a log value: its record, its trailer, and that both belong to this position of this log.


def verify_value(value: Readable, expected_sequence_id: int, committer_id: int) -> tuple[RecordHeader, Trailer]:
    """Check and decode a value of the log. Raises DamagedLogError with the damage."""
    header = _verify_record(value, expected_sequence_id, committer_id)
    try:
        return header, decode_trailer(value[header.size_bytes :], header.check)
    except RemoteProtocolError as error:
        raise _trailer_error(error, expected_sequence_id) from None


def check_value(value: Readable, expected_sequence_id: int, committer_id: int) -> RecordHeader:
    """Check a value for the app like :func:`verify_value`; check the trailer's CRC without decoding it."""
    header = _verify_record(value, expected_sequence_id, committer_id)
    try:
        check_trailer(memoryview(value)[header.size_bytes :], header.check)
    except RemoteProtocolError as error:
        raise _trailer_error(error, expected_sequence_id) from None
    return header


def logged_time_ns(value: Readable, sequence_id: int, committer_id: int) -> int:
    """Return the time of a record; 0 if it is damaged, which is reported when it is read."""
    try:
        return verify_value(value, sequence_id, committer_id)[1].time_ns
    except DamagedLogError:
        return 0


def _verify_record(value: Readable, expected_sequence_id: int, committer_id: int) -> RecordHeader:
    try:
        header = verify_record(value)
    except RemoteProtocolError as error:
        raise DamagedLogError(f"record {expected_sequence_id} is damaged: {error}", expected_sequence_id) from None
    if header.sequence_id != expected_sequence_id:
        raise DamagedLogError(
            f"record {expected_sequence_id} is in the wrong place: the log holds record {header.sequence_id} there",
            expected_sequence_id,
        )
    if header.committer_id != committer_id:
        raise DamagedLogError(
            f"record {expected_sequence_id} is in the wrong place: it was written by committer"
            f" {header.committer_id}, this log belongs to committer {committer_id}",
            expected_sequence_id,
        )
    return header


def _trailer_error(error: RemoteProtocolError, sequence_id: int) -> DamagedLogError:
    how = "is damaged" if isinstance(error, DamagedRecordError) else "cannot be read"
    return DamagedLogError(f"the trailer of record {sequence_id} {how}: {error}", sequence_id)


def checked_prefix(values: list[bytes], first_sequence_id: int, committer_id: int) -> list[bytes]:
    """Return ``values`` up to the first damaged one. Raises DamagedLogError if that is the first one."""
    for index, value in enumerate(values):
        try:
            check_value(value, first_sequence_id + index, committer_id)
        except DamagedLogError:
            if index == 0:
                raise
            return values[:index]
    return values


_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Time(Struct, frozen=True):
    """Point in time: ``ns`` since 1970, UTC."""

    ns: int


class MomentError(LogError):
    """Raised if a text is not a moment, or names a moment that the log does not have."""


def parse_duration_ns(text: str) -> int | None:
    """Return the duration that ``text`` gives, such as "90s", "10m", "2h" or "7d"; None for another text."""
    matched = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    return None if matched is None else int(matched[1]) * _UNIT_S[matched[2]] * 10**9


def parse_moment(text: str) -> int | Time:
    """Return the sequence ID or time that ``text`` gives. A time without a zone is UTC; "10m" means before now.

    Raises MomentError.
    """
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    if (since_ns := parse_duration_ns(text)) is not None:
        return Time(max(0, clock.time_ns() - since_ns))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise MomentError(
            f"{text!r}: a record's number, or a time such as 2026-01-31T12:00:00Z, or 10m, 2h or 7d before now,"
            " was expected"
        ) from None
    since = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - _EPOCH
    return Time(since // timedelta(microseconds=1) * 1_000)
