"""Lines for people."""

from __future__ import annotations

import sys

from immortal.protocol.shown import printable_message


def say(text: str) -> None:
    """``text`` may have names from elsewhere: what a terminal would obey is escaped."""
    print(printable_message(text), flush=True)  # noqa: T201 (for a person)


def complain(text: str) -> None:
    print(printable_message(text), file=sys.stderr, flush=True)  # noqa: T201
