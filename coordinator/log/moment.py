"""Moments of a log as an operator gives them: a record's number or a time."""

from __future__ import annotations

import re
import time as clock
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from immortal.coordinator.core.errors import LogError

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Time(Struct, frozen=True):
    """A point in time: ``ns`` since 1970, UTC."""

    ns: int


class MomentError(LogError):
    """Raised if a text names no moment, or a moment that the log does not have."""


def parse_moment(text: str) -> int | Time:
    """Return the sequence ID or the time that ``text`` gives. A time without a zone is UTC; "10m" is before now.

    Raises MomentError.
    """
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    if matched := re.fullmatch(r"([0-9]{1,9})([smhd])", text):
        return Time(max(0, clock.time_ns() - int(matched[1]) * _UNIT_S[matched[2]] * 10**9))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise MomentError(
            f"{text!r}: a record's number, or a time such as 2026-01-31T12:00:00Z, or 10m, 2h or 7d before now,"
            " was expected"
        ) from None
    since = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - _EPOCH
    return Time(since // timedelta(microseconds=1) * 1_000)
