"""How deeply what is sent may be nested: refused where it is made, so that nobody else has to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from immortal.appsdk.calls.codec import encoder
from immortal.protocol.limits import NESTING_MAX, NESTING_MAX_DEFAULT
from immortal.protocol.nesting import is_nested_beyond, nesting_depth

NESTING_VARIABLE = "IMMORTAL_NESTING_MAX"
"""What other instances take, where their setting ``nesting_max`` is another than by default."""


def _limit() -> int:
    given = os.environ.get(NESTING_VARIABLE, "")
    return min(int(given), NESTING_MAX) if given.isdecimal() and int(given) > 0 else NESTING_MAX_DEFAULT


nesting_max = _limit()


def is_too_deep(arguments: bytes) -> bool:
    """Of an encoded array of arguments, which does not count itself. Shorter ones than ``nesting_max`` never are."""
    return is_nested_beyond(arguments, 0, len(arguments), nesting_max + 1)


def depth_in_words(name: str, parameters: Iterable[object], arguments: Sequence[Any]) -> str:
    """Which of the arguments of ``name`` are nested too deeply."""
    named = zip(arguments, chain(parameters, repeat("")), strict=False)  # those of a client are numbered without end
    depths = [(nesting_depth(encoder.encode(value)), parameter) for value, parameter in named]
    deepest, parameter = max(depths, key=itemgetter(0), default=(0, ""))
    what = "what it sends" if parameter == "" else f"parameter {parameter!r}"
    return (
        f"{name}: {what} is nested {deepest} levels deep, at most {nesting_max} are possible: flatten it, or send it "
        f"as bytes"
    )


def check_value(name: str, value: bytes) -> None:
    """Raises TypeError for an encoded value that is nested too deeply."""
    if len(value) > nesting_max and is_nested_beyond(value, 0, len(value), nesting_max):
        raise TypeError(f"{name} is nested {nesting_depth(value)} levels deep, at most {nesting_max} are possible")
