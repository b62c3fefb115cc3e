"""The high-water mark of a log: its last committed record, in a file of its own that damage to the log leaves alone.

It is written after the commit and without a sync, so it can only be older than the log. docs/decisions/0014 has the
reasons.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from msgspec import Struct

from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.log.backend import Mac, View
from immortal.coordinator.log.format import MAC_SIZE_BYTES, SEQUENCE_KEY
from immortal.coordinator.log.identity import LogIdentity, check_value, first_and_last_sequence_id
from immortal.protocol.checksum import crc64
from immortal.protocol.files import FILE_MODE, sync_folder
from immortal.protocol.varint import Readable

FILE_NAME = "high-water-mark"
_MAGIC = b"IMH1"
_MAGIC_AUTHENTICATED = b"IMH2"  # has a MAC in place of the CRC
_CHECKED = struct.Struct("<4sIQQ")  # magic, zero, sequence ID, check of the record
_CRC_SIZE_BYTES = 8


class Mark(Struct, frozen=True):
    sequence_id: int
    check: int  # the last 8 bytes of the record's value: the CRC of its trailer, which covers the record


class HighWaterMark:
    """The mark of the log in ``folder``; the file is opened by the first :meth:`put`."""

    def __init__(self, folder: Path, identity: LogIdentity, mac: Mac | None = None) -> None:
        """``mac``: that of an authenticated log, where its key is at hand."""
        self.path = folder / FILE_NAME
        self._mac = mac
        self._seed = identity.check
        self._descriptor: int | None = None

    def read(self) -> Mark | None:
        """Read the mark. None where there is none, or it can't be checked without the log's key.

        Raises ValueError for a damaged one, or one that the log's key did not make; OSError.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if not data:
            return None  # left by a process that ended right after creating it
        if len(data) >= _CHECKED.size:
            magic, _, sequence_id, check = _CHECKED.unpack_from(data)
            if data == self._encode(sequence_id, check):
                return Mark(sequence_id, check)
            if magic == _MAGIC_AUTHENTICATED and len(data) == _CHECKED.size + MAC_SIZE_BYTES and self._mac is None:
                return None
            if self._mac is not None:
                raise ValueError(
                    f"{self.path} is not authentic, or damaged: it is left out, and records that were removed at the"
                    " end of the log would not be missed"
                )
        raise ValueError(f"{self.path} is damaged, or of another log: it is left out")

    def missing_data(self, view: View, mark: Mark | None) -> str | None:
        """Describe committed data that the log lacks, compared with ``mark``; None: nothing is missing."""
        if mark is None:
            return None
        _, last = first_and_last_sequence_id(view)
        if mark.sequence_id > last:
            what = f"record {mark.sequence_id} is missing"
            if mark.sequence_id > last + 1:
                what = f"records {last + 1} to {mark.sequence_id} are missing"
            return f"{what}: the log in {self.path.parent} ends with record {last}, {self._way_out(mark)}"
        value = view.get("records", SEQUENCE_KEY.pack(mark.sequence_id))
        if value is None or check_of(value) == mark.check or not _is_sound(value, mark.sequence_id):
            return None  # trimmed; equal; or damaged, which reading it reports
        return (
            f"record {mark.sequence_id} is not the one that was committed: the log in {self.path.parent} is another"
            f" copy, {self._way_out(mark)}"
        )

    def _way_out(self, mark: Mark) -> str:
        return (
            f"and record {mark.sequence_id} with check {mark.check:016x} was committed; restore data.mdb and journal"
            f" from a copy that has it (where there is none, 'rm {self.path}' lets the log go on without: others may"
            " have been told of what is lost then)"
        )

    def put(self, sequence_id: int, value: Readable) -> None:
        """Note that a record is durable. If the mark can't be written, it stays older than it could be."""
        with contextlib.suppress(OSError):
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            os.pwrite(self._descriptor, self._encode(sequence_id, check_of(value)), 0)

    def remove(self) -> None:
        """Remove the mark after an operator has cut the log. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _encode(self, sequence_id: int, check: int) -> bytes:
        if self._mac is not None:
            checked = _CHECKED.pack(_MAGIC_AUTHENTICATED, 0, sequence_id, check)
            return checked + self._mac(checked)
        checked = _CHECKED.pack(_MAGIC, 0, sequence_id, check)
        return checked + crc64(checked, self._seed).to_bytes(_CRC_SIZE_BYTES, "little")


def _is_sound(value: Readable, sequence_id: int) -> bool:
    try:
        check_value(bytes(value), sequence_id, int.from_bytes(value[:4], "little"))
    except DamagedLogError:
        return False
    return True


def check_of(value: Readable) -> int:
    return int.from_bytes(value[-_CRC_SIZE_BYTES:], "little")
