"""What the SDK does in a way that each replay has to do again, and may do otherwise in a log that is begun today."""

from __future__ import annotations

from enum import IntEnum


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
