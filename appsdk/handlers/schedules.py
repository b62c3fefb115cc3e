"""Schedules of methods: in each period, or at the times of a cron expression.

The next run of a period follows from the one before. That of a cron expression follows from time zone data too, which
differ between machines and years: so it is worked out once, and goes into the log with the time.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from immortal.appsdk.calls.context import datetime_of
from immortal.appsdk.errors import DefinitionError

TIME_NS_MAX = (1 << 63) - 1  # since the Unix epoch: what 8 bytes hold, the year 2262

_UNITS_NS = {
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 7 * 86_400 * 10**9,
}


class Period:
    """Schedule of ``@every``. Raises DefinitionError."""

    def __init__(self, given: object) -> None:
        self.period_ns = _period_ns(given)
        self.text = f"every {given}"  # as its class says it

    def next_ns(self, time_ns: int, due_ns: int | None) -> int:
        """Return the first time after ``time_ns``, both ns since the Unix epoch; ``due_ns``: one of its times."""
        if due_ns is None:
            return time_ns + self.period_ns
        return due_ns + ((time_ns - due_ns) // self.period_ns + 1) * self.period_ns


def _period_ns(period: object) -> int:
    period_ns = 0
    if isinstance(period, timedelta):
        period_ns = period // timedelta(microseconds=1) * 1000
    elif isinstance(period, str) and (found := re.fullmatch(r"(\d{1,9})(ms|s|m|h|d|w)", period.strip())):
        period_ns = int(found[1]) * _UNITS_NS[found[2]]
    if period_ns <= 0:
        raise DefinitionError(
            f'@every({period!r}): a period was expected, such as "10m" (ms, s, m, h, d or w) or timedelta(minutes=10)'
        )
    return period_ns


class Cron:
    """Schedule of ``@cron``. Raises DefinitionError."""

    def __init__(self, expression: object, zone: object) -> None:
        from cronsim import CronSim, CronSimError  # here: few apps need it

        self._cronsim = CronSim
        if not isinstance(expression, str):
            raise DefinitionError(f'@cron({expression!r}): a cron expression was expected, such as "0 3 * * mon"')
        self._expression = expression
        self._zone = _zone(zone)
        self.text = f"{expression} ({zone})"
        try:
            never = next(CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC)), None) is None
        except CronSimError as error:
            raise DefinitionError(
                f"@cron({expression!r}): {error}: five fields were expected, minute, hour, day of the month, month and "
                f'day of the week, such as "0 3 * * mon"'
            ) from None
        if never:
            raise DefinitionError(f"@cron({expression!r}): there is no such day")

    def next_ns(self, time_ns: int) -> int:
        """Return the first time after ``time_ns``, both ns since the Unix epoch. Not for replays: see above."""
        moment = next(self._cronsim(self._expression, datetime_of(time_ns).astimezone(self._zone)), None)
        if moment is None:  # not within 50 years
            return TIME_NS_MAX
        return min((moment - datetime_of(0)) // timedelta(microseconds=1) * 1000, TIME_NS_MAX)


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        if not isinstance(name, str):
            raise TypeError
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError, TypeError):
        raise DefinitionError(
            f'@cron(..., tz={name!r}): this machine knows no such time zone: a name such as "Europe/Berlin" was '
            f"expected (without any, install the package tzdata)"
        ) from None


Schedule = Period | Cron
