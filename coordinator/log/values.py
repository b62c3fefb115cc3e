"""Checks of a log value: the record, its trailer, and that both are where they belong."""

from __future__ import annotations

from immortal.coordinator.core.errors import DamagedLogError
from immortal.protocol.errors import DamagedRecordError, RemoteProtocolError
from immortal.protocol.record import RecordHeader, verify_record
from immortal.protocol.trailer import Trailer, check_trailer, decode_trailer
from immortal.protocol.varint import Readable


def verify_value(value: Readable, expected_sequence_id: int, committer_id: int) -> tuple[RecordHeader, Trailer]:
    """Check and decode a value of the log. Raises DamagedLogError, which says what is damaged."""
    header = _verify_record(value, expected_sequence_id, committer_id)
    try:
        return header, decode_trailer(value[header.size_bytes :], header.check)
    except RemoteProtocolError as error:
        raise _trailer_error(error, expected_sequence_id) from None


def check_value(value: Readable, expected_sequence_id: int, committer_id: int) -> RecordHeader:
    """As :func:`verify_value`, but the trailer's CRC is checked without decoding it: for the way to the app."""
    header = _verify_record(value, expected_sequence_id, committer_id)
    try:
        check_trailer(memoryview(value)[header.size_bytes :], header.check)
    except RemoteProtocolError as error:
        raise _trailer_error(error, expected_sequence_id) from None
    return header


def logged_time_ns(value: Readable, sequence_id: int, committer_id: int) -> int:
    """The time of a record; 0 where it is damaged, which whoever reads it will find."""
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
    if isinstance(error, DamagedRecordError):
        return DamagedLogError(f"the trailer of record {sequence_id} is damaged: {error}", sequence_id)
    return DamagedLogError(f"the trailer of record {sequence_id} cannot be read: {error}", sequence_id)


def checked_prefix(values: list[bytes], first_sequence_id: int, committer_id: int) -> list[bytes]:
    """Those of ``values`` before the first damaged one. Raises DamagedLogError if that is the first."""
    for index, value in enumerate(values):
        try:
            check_value(value, first_sequence_id + index, committer_id)
        except DamagedLogError:
            if index == 0:
                raise
            return values[:index]
    return values
