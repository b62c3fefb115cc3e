"""Numbered rules that a log keeps from its beginning, and names of the places that draw random numbers."""

from __future__ import annotations

import dis
from enum import IntEnum
from types import CodeType, FrameType


class Rules(IntEnum):
    """Rules by which the SDK makes output from input. A log keeps those that it began with; its checkpoints name them.

    A change of what the same log would make again gets a new number here, and keeps the old way for older logs.
    """

    V0_1 = 5


NEWEST = max(Rules)
"""Rules of a log that begins now."""


class OrderRules(IntEnum):
    """Rules of ordered multicasts and handles, which have numbers of their own in checkpoints."""

    V0_1 = 2


NEWEST_ORDER = max(OrderRules)
"""Order rules of a log that begins now."""


# The places in the code that draw random numbers, by name.
#
# A replay needs the same names again, from code that was formatted, commented, moved within its file, shipped without
# its source or compiled by another version of Python since. So a name is made of what all these leave as it is: the
# function, and the method that is called on ``immortal.random``, or on the UUID, there. docs/decisions/0022 has the
# reasons.


_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SKIPPED = ("EXTENDED_ARG", "CALL")  # a call, of getattr(), is two instructions in Python 3.11, the frame at the first


class CallSites:
    """Names of the places in the code that draw random numbers."""

    def __init__(self) -> None:
        self.rules = NEWEST
        self._sites: dict[tuple[CodeType, int | str], bytes] = {}

    def site(self, frame: FrameType, method: str | None) -> bytes:
        """Name the place that draws. ``method``: of ``immortal.random``; None: read the code behind the call."""
        key = frame.f_code, frame.f_lasti if method is None else method
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _by_function(frame, method).encode()
        return site


def _by_function(frame: FrameType, method: str | None) -> str:
    # Python 3.12 makes no functions of comprehensions any more.
    names = [name for name in frame.f_code.co_qualname.split(".") if name not in _COMPREHENSIONS]
    method = _attribute_of_result(frame) if method is None else method
    return f"{'.'.join(names).removesuffix('.<locals>')}\n{method}"


def _attribute_of_result(frame: FrameType) -> str:
    """Return the attribute taken of a call's result, as ``hex`` of ``immortal.uuid4().hex``; "" if none is taken.

    Not which call it is, first or second: versions of Python write the body of a ``finally`` and the condition of a
    ``while`` a different number of times.
    """
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti and instruction.opname not in _SKIPPED:
            return str(instruction.argval) if instruction.opname in _ATTRIBUTES else ""
    return ""
