"""What each failure of a disk, process or clock does to each kind of thing on the disk; docs/guarantees.md shows it.

python -m tests.faults.matrix       prints the table and the list as they stand there
"""

from __future__ import annotations

import enum
import textwrap
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
    """``says``: what stands in the message, word for word. ``way_out``: what an operator does then."""

    outcome: Outcome
    what: str
    says: str = ""
    way_out: str = ""


RECOVERED, FALLS_BACK, STOPPED, REFUSED = Outcome.RECOVERED, Outcome.FALLS_BACK, Outcome.STOPPED, Outcome.REFUSED
RESTORE = "restore the log from a copy that holds all that was acknowledged"
ROOM = "make room and start again; what was acknowledged is there"
UNKNOWN = "what is on disk is unknown until it is opened again"
START = "mend the disk and start again; what was acknowledged is there"
NOT_DURABLE = Cell(
    STOPPED,
    "status 1; what the next start can read of it counts only once that start has made it durable",
    UNKNOWN,
    START,
)
SHARES_ITS_COMMIT = Cell(STOPPED, "as for records: they share each commit", UNKNOWN, START)
LEAVES_THOSE_BEFORE = Cell(STOPPED, "as for records; the checkpoints before stay", UNKNOWN, START)

CELLS: dict[tuple[Fault, Thing], Cell] = {
    (Fault.PROCESS_KILL, Thing.RECORD): Cell(
        RECOVERED, "all that was acknowledged is there; what was being written is there whole or not at all"
    ),
    (Fault.PROCESS_KILL, Thing.META): Cell(
        RECOVERED, "positions and epoch are as of the last commit, together with its records"
    ),
    (Fault.PROCESS_KILL, Thing.CHUNK): Cell(
        RECOVERED, "a checkpoint without its header does not count: the one before it does, and the records behind it"
    ),
    (Fault.PROCESS_KILL, Thing.REGISTRY): Cell(
        RECOVERED, "the file is as it was before, or whole; a registration that was cut off can be made again"
    ),
    (Fault.PROCESS_KILL, Thing.SPILL): Cell(
        RECOVERED,
        "each call is executed once: one that was not durable is made again by the replay",
    ),
    (Fault.LOST_PAGES, Thing.RECORD): Cell(
        RECOVERED, "an acknowledgement waits for the sync, so what is lost was promised to nobody"
    ),
    (Fault.LOST_PAGES, Thing.META): Cell(
        RECOVERED, "LMDB syncs its pages before the page that makes them count, and that page before the commit returns"
    ),
    (Fault.LOST_PAGES, Thing.CHUNK): Cell(
        RECOVERED, "chunks are synced before the header that makes them count; the log is trimmed only after it"
    ),
    (Fault.LOST_PAGES, Thing.REGISTRY): Cell(
        RECOVERED, "a new file is synced before it takes its name, and the folder after that"
    ),
    (Fault.LOST_PAGES, Thing.SPILL): Cell(
        RECOVERED, "the records that cause a call are synced before it is spilled: what is lost of it is made again"
    ),
    (Fault.BIT_FLIP, Thing.RECORD): Cell(
        STOPPED,
        "the recovery stops there with status 3, and `immortal run` does not start it again",
        "is damaged",
        "`immortal recover NAME` says what is lost; a copy of the log, or `--truncate-at`",
    ),
    (Fault.BIT_FLIP, Thing.META): Cell(
        STOPPED,
        "a small table, or one of LMDB's own pages, is found damaged at the start: status 3. Only a row of the table of"
        " input positions is put right, from its flipped bit or from the records, and it is said so",
        "is damaged",
        RESTORE,
    ),
    (Fault.BIT_FLIP, Thing.CHUNK): Cell(
        FALLS_BACK,
        "the checkpoint before it is taken, and the records behind that; with one checkpoint only, it stops",
        "falling back to the one before",
    ),
    (Fault.BIT_FLIP, Thing.REGISTRY): Cell(
        REFUSED,
        "refused with the file, the line and the field where it makes no sense; a value that is a valid other one is"
        " taken for what was meant: settings have no check bytes, since people edit them",
        ".toml",
        "mend the line; keys and wishes have their own messages, which name the file",
    ),
    (Fault.BIT_FLIP, Thing.SPILL): Cell(
        STOPPED,
        "the call is not sent, nor one behind it: status 3 when its turn comes, with the peer and the position. In the"
        " head of a row it is found at the start",
        "damaged",
        RESTORE + "; where it was started and met its peers since the copy was made, their streams stop and name"
        " `immortal peers reset` ([how-to/peers.md](how-to/peers.md))",
    ),
    (Fault.TRUNCATION, Thing.RECORD): Cell(
        STOPPED, "found before the file is mapped: status 3", "is truncated", RESTORE
    ),
    (Fault.TRUNCATION, Thing.META): Cell(STOPPED, "found before the file is mapped: status 3", "LMDB", RESTORE),
    (Fault.TRUNCATION, Thing.CHUNK): Cell(
        STOPPED, "one file holds records and checkpoints: as for records", "is truncated", RESTORE
    ),
    (Fault.TRUNCATION, Thing.SPILL): Cell(STOPPED, "a table of the same file: as for records", "is truncated", RESTORE),
    (Fault.TRUNCATION, Thing.REGISTRY): Cell(
        REFUSED,
        "as for a bit flip; a file that ends between two lines reads as one without the lines that are missing",
        ".toml",
        "write the settings again: `immortal unregister NAME` keeps the log",
    ),
    (Fault.FULL_DISK, Thing.RECORD): Cell(STOPPED, "status 1", "is full: the transaction was not written", ROOM),
    (Fault.FULL_DISK, Thing.META): Cell(STOPPED, "status 1", "is full: the transaction was not written", ROOM),
    (Fault.FULL_DISK, Thing.CHUNK): Cell(
        STOPPED, "status 1; the checkpoints before stay", "is full: the transaction was not written", ROOM
    ),
    (Fault.FULL_DISK, Thing.REGISTRY): Cell(
        REFUSED, "the command ends with status 1; the file is as it was", "No space left on device", "make room"
    ),
    (Fault.FULL_DISK, Thing.SPILL): Cell(
        STOPPED,
        "status 1. `--spill-limit-mb`, `--log-limit-mb` and `--disk-free-mb` slow the app before it comes to that",
        "is full: the transaction was not written",
        ROOM,
    ),
    (Fault.FAILED_SYNC, Thing.RECORD): Cell(STOPPED, "status 1; a sync is never tried again", UNKNOWN, START),
    (Fault.FAILED_SYNC, Thing.META): Cell(
        STOPPED,
        "status 1; a sync is never tried again. Where it was that of LMDB's meta page, the next start takes that"
        " transaction for what the log ends with, and says so",
        UNKNOWN,
        START,
    ),
    (Fault.FAILED_SYNC, Thing.CHUNK): Cell(STOPPED, "status 1; the checkpoints before stay", UNKNOWN, START),
    (Fault.FAILED_SYNC, Thing.REGISTRY): Cell(
        REFUSED, "the command ends with status 1; the file is as it was", "Input/output error", "mend the disk"
    ),
    (Fault.FAILED_SYNC, Thing.SPILL): Cell(STOPPED, "status 1; a sync is never tried again", UNKNOWN, START),
    (Fault.ONE_SYNC, Thing.RECORD): Cell(
        STOPPED,
        "as where all fail: of LMDB's pages, of its meta page or of the journal, the disk is not believed again before"
        " a start has read it",
        UNKNOWN,
        START,
    ),
    (Fault.ONE_SYNC, Thing.META): SHARES_ITS_COMMIT,
    (Fault.ONE_SYNC, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.ONE_SYNC, Thing.REGISTRY): Cell(
        REFUSED,
        "the command ends with status 1; the file is as it was, or whole where it was the sync of the folder, and then"
        " the command says so when it is run again",
        "Input/output error",
        "run the command again",
    ),
    (Fault.ONE_SYNC, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.LATE_SYNC, Thing.RECORD): NOT_DURABLE,
    (Fault.LATE_SYNC, Thing.META): SHARES_ITS_COMMIT,
    (Fault.LATE_SYNC, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.LATE_SYNC, Thing.REGISTRY): Cell(REFUSED, "as where one sync fails", "Input/output error", "mend the disk"),
    (Fault.LATE_SYNC, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.LATE_WRITE, Thing.RECORD): NOT_DURABLE,
    (Fault.LATE_WRITE, Thing.META): SHARES_ITS_COMMIT,
    (Fault.LATE_WRITE, Thing.CHUNK): LEAVES_THOSE_BEFORE,
    (Fault.LATE_WRITE, Thing.REGISTRY): Cell(
        REFUSED, "the command ends with status 1; the file is as it was", "Input/output error", "mend the disk"
    ),
    (Fault.LATE_WRITE, Thing.SPILL): SHARES_ITS_COMMIT,
    (Fault.READ_ERROR, Thing.RECORD): Cell(
        STOPPED,
        "LMDB reads through a map: the kernel ends the process with SIGBUS, before anything wrong is executed;"
        " `immortal run` says so, and with `--restart` tries again",
        "the file of its log may be damaged",
        "`immortal log verify NAME` names the place; mend the disk, or " + RESTORE,
    ),
    (Fault.READ_ERROR, Thing.META): Cell(STOPPED, "found at the start: status 1", "cannot be read", START),
    (Fault.READ_ERROR, Thing.CHUNK): Cell(
        STOPPED,
        "as for records; `immortal log verify NAME` names the first byte that cannot be read",
        "cannot be read at byte",
        "mend the disk, or " + RESTORE,
    ),
    (Fault.READ_ERROR, Thing.REGISTRY): Cell(
        REFUSED, "the command, or the start, ends with status 1", "cannot be read: Input/output error", "mend the disk"
    ),
    (Fault.READ_ERROR, Thing.SPILL): Cell(
        STOPPED,
        "as for records: SIGBUS when it is read back, before anything wrong is sent; `immortal log verify NAME` names"
        " the first byte that cannot be read",
        "cannot be read at byte",
        "mend the disk, or " + RESTORE,
    ),
    (Fault.SLOW_DISK, Thing.RECORD): Cell(
        RECOVERED, "all goes on, in larger groups; `immortal status` says what a commit takes", "its disk is slow"
    ),
    (Fault.SLOW_DISK, Thing.META): Cell(RECOVERED, "as for records: they share each commit", "its disk is slow"),
    (Fault.SLOW_DISK, Thing.CHUNK): Cell(RECOVERED, "a checkpoint takes longer; input is accepted meanwhile"),
    (Fault.SLOW_DISK, Thing.REGISTRY): Cell(RECOVERED, "the command takes longer"),
    (Fault.SLOW_DISK, Thing.SPILL): Cell(RECOVERED, "as for records: they share each commit", "its disk is slow"),
    (Fault.CLOCK_JUMP, Thing.RECORD): Cell(
        RECOVERED,
        "an hour, three days or ten years, ahead or back, at any time: records go on in the instance's own time, which"
        " never goes back, also through a kill in that moment; the jump is told once, and is not believed at first",
        "the instance's time",
    ),
    (Fault.CLOCK_JUMP, Thing.META): Cell(
        RECOVERED, "no client and no key is forgotten for it: nothing is done twice because of a clock"
    ),
    (Fault.CLOCK_JUMP, Thing.CHUNK): Cell(
        RECOVERED,
        "what `--keep-log-days` keeps is counted in time in which the instance ran: nothing is trimmed for it",
    ),
    (Fault.CLOCK_JUMP, Thing.REGISTRY): Cell(RECOVERED, "no file there depends on a time"),
    (Fault.CLOCK_JUMP, Thing.SPILL): Cell(RECOVERED, "what waits for a peer has no age: it waits, and is sent once"),
}


def table() -> str:
    """The outcomes, in Markdown."""
    lines = ["| | " + " | ".join(thing.value for thing in Thing) + " |", "| --- " * (len(Thing) + 1) + "|"]
    for fault in Fault:
        cells = " | ".join(CELLS[fault, thing].outcome.value for thing in Thing)
        lines.append(f"| {fault.value} | {cells} |")
    return "\n".join(lines)


def details() -> str:
    """Each cell in an item of a list, in Markdown."""
    parts = []
    for fault in Fault:
        lines = [f"**{fault.value[0].upper()}{fault.value[1:]}**", ""]
        for thing in Thing:
            cell = CELLS[fault, thing]
            line = f"- {thing.value}: {cell.outcome.value}: {cell.what}."
            if cell.says:
                line += f' It says "{cell.says}".'
            if cell.way_out:
                line += f" Way out: {cell.way_out}."
            lines += textwrap.wrap(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def document() -> str:
    """What stands in docs/guarantees.md between its two marks."""
    return f"{table()}\n\n{details()}\n"


if __name__ == "__main__":
    print(document(), end="")
