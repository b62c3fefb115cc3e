"""What a verification finds, and how bad it is."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class Severity(Enum):
    NOTE = "note"  # nothing is lost
    DAMAGE = "damage"  # something is not what was written, and recovery does not need it
    FATAL = "fatal"  # recovery will stop there, or go wrong


class Finding(Struct, frozen=True):
    """One thing that is wrong. ``message`` says what, where, and what it means."""

    severity: Severity
    place: str  # "file", "meta", "checkpoint 3", "record 812", "sources", ...
    message: str
    records: tuple[int, int] | None = None  # the first and the last of those that are damaged or missing
