"""What a what-if has not worked out: its inputs are those of the log, whatever the new code would have led to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum

from msgspec import Struct

from immortal.coordinator.core.interfaces import ONESELF, is_outside
from immortal.protocol.command_line import counted
from immortal.replay.compare import Side
from immortal.replay.what_if import WhatIf

NAMES_MAX = 5


class Why(Enum):
    ONESELF = "calls to itself"
    OTHERS = "calls to others"
    CLIENTS = "answers to clients"
    WAITING = "waiting"
    FAILURE = "failure"


class Unknown(Struct, frozen=True):
    """``count``: of what has consequences that nobody has worked out. ``text``: in words.

    ``hides_state``: the instance's own inputs would be others, so its state at the end is not known, and no difference
    found there is none.
    """

    why: Why
    count: int
    hides_state: bool
    text: str


def not_worked_out(name: str, outcome: WhatIf, waiting: int) -> list[Unknown]:
    """``name``: the instance. ``waiting``: so many handlers wait for answers that the log does not have."""
    return list(_not_worked_out(name, outcome, waiting))


def _not_worked_out(name: str, outcome: WhatIf, waiting: int) -> Iterator[Unknown]:
    counts: Counter[str] = Counter()
    for (destination, _, _), kinds in outcome.findings.counts.items():
        counts[ONESELF if destination == name else destination] += kinds.total()
    if own := counts.pop(ONESELF, 0):
        text = f"what {counted(own, 'other call')} to itself would do: the log's were handled in their place"
        yield Unknown(
            Why.ONESELF, own, hides_state=True, text=f"{text}, so the state and the calls made then may differ"
        )
    clients = sum(count for destination, count in counts.items() if is_outside(destination))
    if others := counts.total() - clients:
        names = sorted(destination for destination in counts if not is_outside(destination))
        shown = ", ".join(names[:NAMES_MAX]) + (", ..." if len(names) > NAMES_MAX else "")
        text = f"what {shown} would do with {counted(others, 'other call')}, and send back"
        yield Unknown(Why.OTHERS, others, hides_state=False, text=text)
    if clients:
        text = f"what clients would do with {counted(clients, 'other answer')}"
        yield Unknown(Why.CLIENTS, clients, hides_state=False, text=text)
    if waiting:
        text = f"what {counted(waiting, 'handler')} would do with the answers that the log does not have"
        yield Unknown(Why.WAITING, waiting, hides_state=True, text=text)
    new = outcome.results.get(Side.NEW)
    failed = {side: result.failure for side, result in outcome.results.items() if result.failure is not None}
    if outcome.upgrade_error:
        yield Unknown(Why.FAILURE, 1, hides_state=True, text="what the new code would do with any record")
    elif failed and new is not None:
        first = min(failure.sequence_id for failure in failed.values())
        text = (
            f"what is different behind record {first}, where the {' and the '.join(s.value for s in failed)} code fails"
        )
        yield Unknown(Why.FAILURE, len(failed), hides_state=True, text=text)
