"""A moment of a log as people type it: a record's number, or a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click
from msgspec import Struct

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Time(Struct, frozen=True):
    """``ns`` since 1970, UTC."""

    ns: int


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """SEQ or TIME: a sequence ID as an int, or a :class:`Time`. A time without a zone is UTC."""

    name = "record|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Time:
        if isinstance(value, int | Time):
            return value
        text = str(value)
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"{text!r}: a record's number, or a time such as 2026-01-31T12:00:00Z, was expected", param, ctx)
        since = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - _EPOCH
        return Time(since // timedelta(microseconds=1) * 1_000)
