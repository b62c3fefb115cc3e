"""Fault matrix: the effect of each failure of a disk, process or clock on each kind of thing; docs/guarantees.md.

python -m tests.faults.matrix       prints the table and the list that the site shows there
"""

from __future__ import annotations

import enum
import textwrap
from collections import Counter
from dataclasses import dataclass


class Fault(enum.Enum):
    PROCESS_KILL = "process kill"
    LOST_PAGES = "loss of unsynced pages"
    BIT_FLIP = "bit flip"
    TRUNCATION = "truncation"
    FULL_DISK = "full disk"
    FAILED_SYNC = "failed sync"
    ONE_SYNC = "one failed sync"
    LATE_SYNC = "failed sync, bytes readable"
    LATE_WRITE = "failed write, bytes readable"
    READ_ERROR = "read error"
    SLOW_DISK = "slow disk"
    CLOCK_JUMP = "clock jump"


class Thing(enum.Enum):
    RECORD = "log record"
    META = "log meta"
    CHUNK = "checkpoint chunk"
    REGISTRY = "registry file"
    SPILL = "spilled call"


class Outcome(enum.Enum):
    RECOVERED = "recovered"
    FALLS_BACK = "falls back"
    STOPPED = "stopped"
    REFUSED = "refused"


@dataclass(frozen=True)
class Cell:
    """Cell of the matrix. ``says``: a part of the message, word for word. ``way_out``: an operator's remedy."""

    outcome: Outcome
    what: str
    says: str = ""
    way_out: str = ""


RECOVERED, FALLS_BACK, STOPPED, REFUSED = Outcome.RECOVERED, Outcome.FALLS_BACK, Outcome.STOPPED, Outcome.REFUSED
RESTORE = "restore"
ROOM = "make room"
UNKNOWN = "what is on disk is unknown until it is opened again"
START = "repair the disk"
VERIFY = "`immortal log verify NAME` names the place; repair the disk, or restore"
NOT_DURABLE = Cell(STOPPED, "the next start makes durable what it can read before that counts", UNKNOWN, START)
SHARES_ITS_COMMIT = Cell(STOPPED, "as records: the same commit", UNKNOWN, START)
LEAVES_THOSE_BEFORE = Cell(STOPPED, "earlier checkpoints stay", UNKNOWN, START)
NO_SPACE = "is full: the transaction was not written"
UNCHANGED = "the command fails with status 1; the file is unchanged"

CELLS: dict[tuple[Fault, Thing], Cell] = {
    (Fault.PROCESS_KILL, Thing.RECORD): Cell(RECOVERED, "a record that was being written is there whole or not at all"),
    (Fault.PROCESS_KILL, Thing.META): Cell(RECOVERED, "positions and epoch match the last commit"),
    (Fault.PROCESS_KILL, Thing.CHUNK): Cell(
        RECOVERED, "a checkpoint without a header does not count; the one before it does"
    ),
    (Fault.PROCESS_KILL, Thing.REGISTRY): Cell(
        RECOVERED, "the file is old or new, and whole; repeat a registration that was cut off"
    ),
    (Fault.PROCESS_KILL, Thing.SPILL): Cell(
        RECOVERED, "each call is executed once; the replay makes again what was not durable"
    ),
    (Fault.LOST_PAGES, Thing.RECORD): Cell(RECOVERED, "an acknowledgement waits for the sync"),
    (Fault.LOST_PAGES, Thing.META): Cell(RECOVERED, "LMDB syncs pages, then the meta page, then the commit returns"),
    (Fault.LOST_PAGES, Thing.CHUNK): Cell(RECOVERED, "chunks are synced before their header, trimming comes after it"),
    (Fault.LOST_PAGES, Thing.REGISTRY): Cell(RECOVERED, "a new file is synced, renamed, then its folder is synced"),
    (Fault.LOST_PAGES, Thing.SPILL): Cell(RECOVERED, "records are synced before the calls that they cause"),
    (Fault.BIT_FLIP, Thing.RECORD): Cell(
        STOPPED,
        "recovery stops there with status 3",
        "is damaged",
        "`immortal recover NAME` shows the loss; use a copy, or `--truncate-at`",
    ),
    (Fault.BIT_FLIP, Thing.META): Cell(
        STOPPED,
        "status 3 at the start, for small tables and LMDB's pages. A row of the table of input positions is repaired,"
        " with a notice",
        "is damaged",
        RESTORE,
    ),
    (Fault.BIT_FLIP, Thing.CHUNK): Cell(
        FALLS_BACK, "the checkpoint before is used; if there is none, stopped", "falling back to the one before"
    ),
    (Fault.BIT_FLIP, Thing.REGISTRY): Cell(
        REFUSED,
        "the file, line and field are named. A changed value that is valid is accepted: settings have no check bytes",
        ".toml",
        "correct the line; messages about keys and marks name their file",
    ),
    (Fault.BIT_FLIP, Thing.SPILL): Cell(
        STOPPED,
        "the call and those after it are not sent: status 3 at its turn, with peer and position; in the head of a row,"
        " at the start",
        "damaged",
        RESTORE + "; streams of peers that are ahead of the copy stop and name `immortal peers reset`"
        " ([how-to/peers.md](how-to/peers.md))",
    ),
    (Fault.TRUNCATION, Thing.RECORD): Cell(
        STOPPED, "found before the file is mapped: status 3", "is truncated", RESTORE
    ),
    (Fault.TRUNCATION, Thing.META): Cell(STOPPED, "found before the file is mapped: status 3", "LMDB", RESTORE),
    (Fault.TRUNCATION, Thing.CHUNK): Cell(STOPPED, "as records: the same file", "is truncated", RESTORE),
    (Fault.TRUNCATION, Thing.SPILL): Cell(STOPPED, "as records: the same file", "is truncated", RESTORE),
    (Fault.TRUNCATION, Thing.REGISTRY): Cell(
        REFUSED,
        "as for a bit flip; a file that ends between two lines is read without the missing lines",
        ".toml",
        "write the settings again: `immortal unregister NAME` keeps the log",
    ),
    (Fault.FULL_DISK, Thing.RECORD): Cell(STOPPED, "status 1", NO_SPACE, ROOM),
    (Fault.FULL_DISK, Thing.META): Cell(STOPPED, "status 1", NO_SPACE, ROOM),
    (Fault.FULL_DISK, Thing.CHUNK): Cell(STOPPED, "status 1; earlier checkpoints stay", NO_SPACE, ROOM),
    (Fault.FULL_DISK, Thing.REGISTRY): Cell(REFUSED, UNCHANGED, "No space left on device", "make room"),
    (Fault.FULL_DISK, Thing.SPILL): Cell(
        STOPPED,
        "status 1; `--spill-limit-mb`, `--log-limit-mb` and `--disk-free-mb` slow the app before that",
        NO_SPACE,
        ROOM,
    ),
    (Fault.FAILED_SYNC, Thing.RECORD): Cell(STOPPED, "status 1; a sync is never retried", UNKNOWN, START),
    (Fault.FAILED_SYNC, Thing.META): Cell(
        STOPPED,
        "as records. After a failed sync of LMDB's meta page the next start keeps that transaction, with a notice",
        UNKNOWN,
        START,
    ),
    (Fault.FAILED_SYNC, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.FAILED_SYNC, Thing.REGISTRY): Cell(REFUSED, UNCHANGED, "Input/output error", "repair the disk"),
    (Fault.FAILED_SYNC, Thing.SPILL): Cell(STOPPED, "status 1; a sync is never retried", UNKNOWN, START),
    (Fault.ONE_SYNC, Thing.RECORD): Cell(
        STOPPED,
        "status 1, for LMDB's pages, its meta page and the journal: the disk is not trusted before a start has read it",
        UNKNOWN,
        START,
    ),
    (Fault.ONE_SYNC, Thing.META): SHARES_ITS_COMMIT,
    (Fault.ONE_SYNC, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.ONE_SYNC, Thing.REGISTRY): Cell(
        REFUSED,
        UNCHANGED + ", or new and whole if the sync of the folder failed",
        "Input/output error",
        "run the command again",
    ),
    (Fault.ONE_SYNC, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.LATE_SYNC, Thing.RECORD): NOT_DURABLE,
    (Fault.LATE_SYNC, Thing.META): SHARES_ITS_COMMIT,
    (Fault.LATE_SYNC, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.LATE_SYNC, Thing.REGISTRY): Cell(REFUSED, "as for one failed sync", "Input/output error", "repair the disk"),
    (Fault.LATE_SYNC, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.LATE_WRITE, Thing.RECORD): NOT_DURABLE,
    (Fault.LATE_WRITE, Thing.META): SHARES_ITS_COMMIT,
    (Fault.LATE_WRITE, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.LATE_WRITE, Thing.REGISTRY): Cell(REFUSED, UNCHANGED, "Input/output error", "repair the disk"),
    (Fault.LATE_WRITE, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.READ_ERROR, Thing.RECORD): Cell(
        STOPPED,
        "SIGBUS before anything wrong is executed; `immortal run` says so, and with `--restart` tries again",
        "the file of its log may be damaged",
        VERIFY,
    ),
    (Fault.READ_ERROR, Thing.META): Cell(STOPPED, "status 1 at the start", "cannot be read", START),
    (Fault.READ_ERROR, Thing.CHUNK): Cell(STOPPED, "as records", "cannot be read at byte", VERIFY),
    (Fault.READ_ERROR, Thing.REGISTRY): Cell(
        REFUSED, "command or start fails with status 1", "cannot be read: Input/output error", "repair the disk"
    ),
    (Fault.READ_ERROR, Thing.SPILL): Cell(
        STOPPED, "SIGBUS when it is read, before anything wrong is sent", "cannot be read at byte", VERIFY
    ),
    (Fault.SLOW_DISK, Thing.RECORD): Cell(
        RECOVERED, "larger groups; `immortal status` shows the time of a commit", "its disk is slow"
    ),
    (Fault.SLOW_DISK, Thing.META): Cell(RECOVERED, "as records: the same commit", "its disk is slow"),
    (Fault.SLOW_DISK, Thing.CHUNK): Cell(RECOVERED, "takes longer; input is accepted meanwhile"),
    (Fault.SLOW_DISK, Thing.REGISTRY): Cell(RECOVERED, "the command takes longer"),
    (Fault.SLOW_DISK, Thing.SPILL): Cell(RECOVERED, "as records: the same commit", "its disk is slow"),
    (Fault.CLOCK_JUMP, Thing.RECORD): Cell(
        RECOVERED,
        "for an hour, three days, ten years, ahead or back: records use the instance's own time, which never goes back;"
        " the jump is told once",
        "the instance's time",
    ),
    (Fault.CLOCK_JUMP, Thing.META): Cell(RECOVERED, "no client or key is forgotten, nothing is done twice"),
    (Fault.CLOCK_JUMP, Thing.CHUNK): Cell(RECOVERED, "`--keep-log-days` counts time in which the instance ran"),
    (Fault.CLOCK_JUMP, Thing.REGISTRY): Cell(RECOVERED, "no file depends on a time"),
    (Fault.CLOCK_JUMP, Thing.SPILL): Cell(RECOVERED, "waiting calls have no age: sent once"),
}


def table() -> str:
    """Return the outcomes, in Markdown."""
    lines = ["| | " + " | ".join(thing.value for thing in Thing) + " |", "| --- " * (len(Thing) + 1) + "|"]
    for fault in Fault:
        cells = " | ".join(CELLS[fault, thing].outcome.value for thing in Thing)
        lines.append(f"| {fault.value} | {cells} |")
    return "\n".join(lines)


def details() -> str:
    """Return an item for each fault, in Markdown: things of one outcome together, the usual message and remedy once."""
    return "\n".join(
        line
        for fault in Fault
        for line in textwrap.wrap(
            _item(fault), 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    )


def _item(fault: Fault) -> str:
    cells = {thing: CELLS[fault, thing] for thing in Thing}
    (common, count), *_ = Counter((cell.says, cell.way_out) for cell in cells.values()).most_common(1)
    shared = common if count > 1 else ("", "")
    told = _told(*shared)
    if shared == (UNKNOWN, START) and fault is not Fault.FAILED_SYNC:  # FAILED_SYNC is the first with this text
        told = " (as above)"
    groups: dict[Cell, list[str]] = {}
    for thing, cell in cells.items():
        groups.setdefault(cell, []).append(thing.value)
    parts = [
        f"*{', '.join(things)}*: {cell.what}" + (_told(cell.says, cell.way_out) if _pair(cell) != shared else "")
        for cell, things in groups.items()
    ]
    return f"- **{fault.value.capitalize()}**{told}. {'. '.join(parts)}."


def _pair(cell: Cell) -> tuple[str, str]:
    return cell.says, cell.way_out


def _told(says: str, way_out: str) -> str:
    told = [f'"{says}"'] * bool(says) + [f"remedy: {way_out}"] * bool(way_out)
    return f" ({'; '.join(told)})" if told else ""


def document() -> str:
    """Return the table and the list that the site shows in docs/guarantees.md."""
    return f"{table()}\n\n{details()}\n"


if __name__ == "__main__":
    print(document(), end="")
