"""What each failure of a machine or of the database does to an instance in PostgreSQL; docs/guarantees.md shows it.

scripts/soak --ha brings about each of them and looks for what is said here.

python -m tests.soak.outcomes       prints the table that the site shows there
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(enum.Enum):
    KILL = "kill -9 of an instance"
    MACHINE = "kill -9 of a machine"
    STOP = "SIGSTOP, longer than the lease"
    TERM = "SIGTERM"
    PROMOTE = "the database's primary is lost, a standby promoted"
    PROMOTE_AND_KILL = "the same, and kill -9 of an instance"
    PROMOTE_BEHIND = "a standby is promoted that lacks the last commits, later one that has them"
    CRASH = "the database's primary crashes and restarts"
    BACKENDS = "backends are killed, longer than the lease"
    CONNECTIONS = "no connection is left, longer than the lease"
    STANDBYS = "the database's standbys are silent"
    CUT = "a machine's cable is cut, longer than the lease"
    DISK = "the primary's disk is full"


class Writer(enum.Enum):
    """What becomes of who has the log."""

    GONE = "gone"
    FENCED = "fenced"
    HANDS_OVER = "hands over"
    WAITS = "waits"
    WAITS_OR_FENCED = "waits, or fenced"
    STOPPED = "stopped"


class Follower(enum.Enum):
    TAKES_OVER = "takes over"
    WAITS = "waits"
    WAITS_OR_TAKES_OVER = "waits, or takes over"
    FOLLOWS = "follows"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Cells:
    writer: Writer
    follower: Follower
    callers: str


CELLS = {
    Fault.KILL: Cells(Writer.GONE, Follower.TAKES_OVER, "wait until the lease has run out"),
    Fault.MACHINE: Cells(Writer.GONE, Follower.TAKES_OVER, "wait until the leases have run out"),
    Fault.STOP: Cells(Writer.FENCED, Follower.TAKES_OVER, "wait until the lease has run out"),
    Fault.TERM: Cells(Writer.HANDS_OVER, Follower.TAKES_OVER, "wait for the move"),
    Fault.PROMOTE: Cells(Writer.WAITS_OR_FENCED, Follower.WAITS_OR_TAKES_OVER, "wait for the promotion"),
    Fault.PROMOTE_AND_KILL: Cells(Writer.GONE, Follower.TAKES_OVER, "wait for the longer one of the two"),
    Fault.PROMOTE_BEHIND: Cells(Writer.STOPPED, Follower.STOPPED, "wait until one is promoted that has all"),
    Fault.CRASH: Cells(Writer.WAITS_OR_FENCED, Follower.WAITS_OR_TAKES_OVER, "wait for the restart"),
    Fault.BACKENDS: Cells(Writer.WAITS_OR_FENCED, Follower.WAITS_OR_TAKES_OVER, "wait for one of the two to append"),
    Fault.CONNECTIONS: Cells(Writer.WAITS_OR_FENCED, Follower.WAITS_OR_TAKES_OVER, "wait until there are some again"),
    Fault.STANDBYS: Cells(Writer.WAITS, Follower.FOLLOWS, "wait until one of the standbys answers"),
    Fault.CUT: Cells(Writer.FENCED, Follower.TAKES_OVER, "wait until the leases have run out"),
    Fault.DISK: Cells(Writer.STOPPED, Follower.WAITS_OR_TAKES_OVER, "wait until there is room"),
}


def document() -> str:
    lines = ["| | who has the log | who follows | callers |", "| --- | --- | --- | --- |"]
    for fault, cells in CELLS.items():
        lines.append(f"| {fault.value} | {cells.writer.value} | {cells.follower.value} | {cells.callers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(document())
