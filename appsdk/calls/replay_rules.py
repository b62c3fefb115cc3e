"""Numbered rules that a log keeps from its beginning, and the names of the places that draw random numbers."""

from __future__ import annotations

import dis
import linecache
from enum import IntEnum
from types import CodeType, FrameType


class Rules(IntEnum):
    """A log keeps the rules that it was begun with; its checkpoints say which."""

    FIRST = 1
    """A random stream for the function's qualified name and the text of the line. Signals are kept without a limit."""

    SECOND = 2
    """... for the function's qualified name and the method that is called. Signals that wait for nobody are limited."""

    THIRD = 3
    """Integers of any size, and what is annotated ``Any`` with its types, are sent. The state is kept as what it is,
    types included, or refused."""

    RAISED_WHOLE = 4
    """... and declared exceptions are sent with the fields that their classes keep (raised.py)."""

    NESTING = 5
    """... and handlers send nothing that is nested too deeply."""


NEWEST = max(Rules)
"""Those of a log that is begun now."""


class OrderRules(IntEnum):
    """The same for ordered multicasts and handles: another number, as these have checkpoints of their own kind."""

    FIRST = 1

    SECOND = 2
    """A multicast that is late moves behind what came meanwhile. The end of a handle is heard before any copy. What an
    instance sends to itself keeps its order with its own multicasts."""


NEWEST_ORDER = max(OrderRules)


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
    """Names the places in the code that draw."""

    def __init__(self) -> None:
        self.rules = NEWEST
        self._sites: dict[tuple[CodeType, int | str], bytes] = {}
        self._lines: dict[str, list[str]] = {}

    def use(self, rules: Rules) -> None:
        """From here on places are named by ``rules``."""
        self.rules = rules
        self._sites.clear()

    @property
    def limits_nesting(self) -> bool:
        return self.rules >= Rules.NESTING

    def load(self, file_name: str) -> None:
        """Remember the text of a file as it is now: later it may have been edited under a running app."""
        if file_name not in self._lines:
            self._lines[file_name] = linecache.getlines(file_name)

    def site(self, frame: FrameType, method: str | None) -> bytes:
        """``method``: the method of ``immortal.random`` that is called there; None: read the code behind the call."""
        by_line = self.rules is Rules.FIRST
        key = frame.f_code, frame.f_lineno if by_line else frame.f_lasti if method is None else method
        site = self._sites.get(key)
        if site is None:
            name = self._by_line(frame) if by_line else _by_function(frame, method)
            site = self._sites[key] = name.encode()
        return site

    def _by_line(self, frame: FrameType) -> str:
        code, line_number = frame.f_code, frame.f_lineno
        self.load(code.co_filename)
        lines = self._lines[code.co_filename]
        if 0 < line_number <= len(lines):
            line = lines[line_number - 1].strip()
            place = line.replace("immortal.", "self.")  # the form that lines had when these logs began
        else:  # no source at hand
            place = f"+{line_number - code.co_firstlineno}"
        return f"{code.co_qualname}\n{place}"


def _by_function(frame: FrameType, method: str | None) -> str:
    # Python 3.12 makes no functions of comprehensions any more.
    names = [name for name in frame.f_code.co_qualname.split(".") if name not in _COMPREHENSIONS]
    method = _attribute_of_result(frame) if method is None else method
    return f"{'.'.join(names).removesuffix('.<locals>')}\n{method}"


def _attribute_of_result(frame: FrameType) -> str:
    """``hex`` of ``immortal.uuid4().hex``; "" where no attribute is taken.

    Not which call it is, first or second: versions of Python write the body of a ``finally`` and the condition of a
    ``while`` a different number of times.
    """
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti and instruction.opname not in _SKIPPED:
            return str(instruction.argval) if instruction.opname in _ATTRIBUTES else ""
    return ""
