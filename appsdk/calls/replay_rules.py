"""Numbered rules of replay that a log keeps from its beginning, and names of the places that draw random numbers."""

from __future__ import annotations

import dis
from enum import IntEnum
from types import CodeType, FrameType


class Rules(IntEnum):
    """Rules by which the SDK makes output from input. A log keeps the rules that it began with; checkpoints name them.

    A change of the output for the same log needs a new number here, and the old behaviour for older logs.
    """

    V0_1 = 5


NEWEST = max(Rules)
"""Rules of a new log."""


class OrderRules(IntEnum):
    """Rules of ordered multicasts and handles, which have their own numbers in checkpoints."""

    V0_1 = 2


NEWEST_ORDER = max(OrderRules)
"""Order rules of a new log."""


# Names of the places in the code that draw random numbers.
#
# A replay needs the same names again, even if the code was formatted, commented, moved within its file, shipped without
# its source or compiled by another version of Python. So a name consists of what all these keep: the function, and the
# method that is called there on ``immortal.random`` or on the UUID. docs/decisions/0022 has the reasons.


_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SKIPPED = ("EXTENDED_ARG", "CALL")  # getattr() is two instructions in Python 3.11; the frame is at the first


class CallSites:
    """Cache of the names of places in the code that draw random numbers."""

    def __init__(self) -> None:
        self.rules = NEWEST
        self._sites: dict[tuple[CodeType, int | str], bytes] = {}

    def site(self, frame: FrameType, method: str | None) -> bytes:
        """Return the name of the place in ``frame``. ``method``: of ``immortal.random``; None: find it in the code."""
        key = frame.f_code, frame.f_lasti if method is None else method
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _by_function(frame, method).encode()
        return site


def _by_function(frame: FrameType, method: str | None) -> str:
    # Python 3.12 compiles comprehensions inline, without functions.
    names = [name for name in frame.f_code.co_qualname.split(".") if name not in _COMPREHENSIONS]
    method = _attribute_of_result(frame) if method is None else method
    return f"{'.'.join(names).removesuffix('.<locals>')}\n{method}"


def _attribute_of_result(frame: FrameType) -> str:
    """Return the attribute that is read from a call's result, ``hex`` of ``immortal.uuid4().hex``; "" if none is.

    The number of the call (first or second) is no part of a name: versions of Python compile the body of a ``finally``
    and the condition of a ``while`` a different number of times.
    """
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti and instruction.opname not in _SKIPPED:
            return str(instruction.argval) if instruction.opname in _ATTRIBUTES else ""
    return ""
