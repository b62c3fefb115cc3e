"""Command that shows all instances and their busiest streams at a terminal, live: top."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from immortal.cli.options import complete_instance, instance_names, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.presenters.fleet import RATE_SPAN_S_MIN, RECEIVED, RECORDS, SENT, Fleet, Row, Stream, streams
from immortal.presenters.status import age_text, duration_text, rate_text
from immortal.protocol.command_line import counted, make_console, make_table, size_text
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

DRAWN_EACH_S = 0.5
ONCE_WAIT_S = 60.0
STREAMS_SHOWN_MAX = 8
PROBLEM_WIDTH_MIN = 12
CTRL_Z = "\x1a"
HELP = "q: quit   s, S: sort by the next, previous column   r: reverse   space, b: next, previous page"


class _Column(NamedTuple):
    """Column of a table. ``value``: rows are sorted by it, the largest first, names in alphabetical order.

    ``rank``: a narrow terminal drops the columns with the largest ranks.
    """

    head: str
    rank: int
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = str


_INSTANCES = (
    _Column("instance", 0, lambda row: row.name),
    _Column("state", 1, lambda row: row.state),
    _Column("role", 11, lambda row: row.role),
    _Column("records/s", 3, lambda row: row.rate(RECORDS), rate_text),
    _Column("in/s", 6, lambda row: row.rate(RECEIVED), rate_text),
    _Column("out/s", 7, lambda row: row.rate(SENT), rate_text),
    _Column("backlog", 4, lambda row: row.backlog),
    _Column("unacked", 8, lambda row: row.unacknowledged),
    _Column("waiting", 5, lambda row: row.handlers),
    _Column("oldest", 9, lambda row: row.oldest_s, age_text),
    _Column("checkpoint", 10, lambda row: row.checkpoint_age_s, age_text),
    _Column("log", 12, lambda row: row.log_bytes, size_text),
    _Column("problems", 2, lambda row: row.problems, "; ".join),
)
_STREAMS = (
    _Column("from", 0, lambda one: one.source),
    _Column("to", 0, lambda one: one.to),
    _Column("messages/s", 1, lambda one: one.rate, rate_text),
    _Column("unacked", 3, lambda one: one.unacknowledged),
    _Column("waiting", 6, lambda one: one.waiting_bytes, size_text),
    _Column("p50", 5, lambda one: one.times and one.times.p50_ns, duration_text),
    _Column("p99", 4, lambda one: one.times and one.times.p99_ns, duration_text),
    _Column("problem", 2, lambda one: [one.problem] if one.problem else [], "; ".join),
)
_SORTS = [column.head for column in _INSTANCES]
_KEYS = dict.fromkeys(("s", "\x1b[C"), (1, 0)) | dict.fromkeys(("S", "\x1b[D"), (-1, 0))
_KEYS |= dict.fromkeys((" ", "\x1b[B", "\x1b[6~"), (0, 1)) | dict.fromkeys(("b", "\x1b[A", "\x1b[5~"), (0, -1))
"""Keys, arrows among them, that choose another column to sort by (first number) or another page (second)."""
_LEFT = {"instance", "state", "role", "problems", "from", "to", "problem"}


class _Screen:
    """Tables of instances and streams, as wide and high as the terminal is when they are drawn."""

    def __init__(self, home: str, sort: str, names: Sequence[str], *, is_live: bool) -> None:
        self._home, self._sort, self._names, self._is_live = home, _SORTS.index(sort), names, is_live
        self._first, self._page, self._is_reversed = 0, 0, False
        self._rows: list[Row] = []
        self._streams: list[Stream] = []

    def show(self, rows: list[Row]) -> None:
        self._rows = [row for row in rows if not self._names or row.name in self._names]
        shown = {row.name for row in self._rows}
        self._streams = [one for one in streams(rows) if one.source in shown or one.to in shown]

    def press(self, key: str) -> None:
        column, page = _KEYS.get(key, (0, 0))
        self._sort = (self._sort + column) % len(_SORTS)
        self._first = max(0, min(self._first + page * self._page, len(self._rows) - 1))
        self._is_reversed ^= key == "r"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        rows, shown = self._sorted(), self._streams
        if self._is_live:
            height = options.height or console.height
            shown = shown[: min(STREAMS_SHOWN_MAX, height // 4)]
            self._page = max(1, height - len(shown) - (6 if shown else 3))
            running = sum(row.tone in ("good", "busy") for row in rows)
            said = f"by {_SORTS[self._sort]}; {counted(len(rows), 'instance')}: {running} running,"
            said += f" {sum(bool(row.problems) for row in rows)} with problems, in {self._home}"
            yield Text(said, no_wrap=True)
            rows = rows[self._first : self._first + self._page]
        yield _table(_INSTANCES, rows, options.max_width, [row.tone == "bad" for row in rows])
        if shown:
            yield ""
            yield _table(_STREAMS, shown, options.max_width, [bool(one.problem) for one in shown])
        if self._is_live:
            yield Text(HELP, no_wrap=True, style="dim")

    def _sorted(self) -> list[Row]:
        column = _INSTANCES[self._sort]
        rows = sorted(self._rows, key=lambda row: (-(row.rate(RECORDS) or 0.0), row.name))
        if column.head in ("instance", "state", "role"):
            return sorted(rows, key=column.value, reverse=self._is_reversed)
        sizes = {row: len(value) if isinstance(value := column.value(row), list) else value for row in rows}
        return sorted(rows, key=lambda row: -1 if sizes[row] is None else sizes[row], reverse=not self._is_reversed)


def _table(columns: Sequence[_Column], rows: Sequence[Any], width: int, are_bad: Sequence[bool]) -> Table:
    """Return a table of the most important columns that fit; long texts in the last column are cut."""
    cells = {
        column: ["" if (one := column.value(row)) is None else printable(column.text(one)) for row in rows]
        for column in columns
    }  # a line each: names from outside can hold the end of one
    widths = {column: 2 + max(map(len, [column.head, *texts])) for column, texts in cells.items()}
    widths[columns[-1]] = min(widths[columns[-1]], PROBLEM_WIDTH_MIN)
    while len(cells) > 1 and sum(widths[column] for column in cells) - 2 > width:
        del cells[max(cells, key=lambda column: column.rank)]
    heads = [column.head for column in cells]
    table = make_table(heads, zip(*cells.values(), strict=True), {*heads} - _LEFT)
    for shown in table.columns:
        shown.no_wrap, shown.overflow = True, "ellipsis"
    if columns[-1] in cells:
        table.columns[-1].max_width = width - sum(widths[column] for column in cells) + PROBLEM_WIDTH_MIN
    for line, is_bad in zip(table.rows, are_bad, strict=True):
        line.style = "red" if is_bad else ""
    return table


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Read each key at once, without echo, from the terminal: yields a function that waits for keys.

    Ctrl-Z is a key too, so that the screen is put back before the process is suspended.
    """
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(timeout_s: float) -> list[str]:
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return []
        typed = os.read(descriptor, 256).decode(errors="replace")
        return re.findall(r"\x1b\[[0-9;]*.|.", typed, re.DOTALL) or ["q"]  # the terminal is gone

    try:
        tty.setcbreak(descriptor)
        mode = termios.tcgetattr(descriptor)
        mode[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, mode)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=instance_names, shell_complete=complete_instance)
@click.option("--once", is_flag=True, help="Print the tables once; the default without a terminal.")
@click.option("--sort", type=click.Choice(_SORTS), default="problems", show_default=True, help="Column to sort by.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=RATE_SPAN_S_MIN, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@pass_registry
def top(registry: Registry, names: tuple[str, ...], once: bool, sort: str, interval_s: float) -> None:
    """Watch all instances, or NAME..., and the busiest streams; 'q' quits.

    The columns show state, rates per second (records logged, messages in and out), backlog, unacknowledged messages,
    waiting handlers and the longest wait, age of the checkpoint, size of the log, and problems.
    """
    for name in names:
        registry.load(name)
    console = make_console()
    is_live = not once and console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()
    screen = _Screen(str(registry.home), sort, names, is_live=is_live)
    with contextlib.closing(Fleet(registry, lambda *_: contextlib.nullcontext(), interval_s)) as fleet:
        if is_live:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is put back
            with contextlib.suppress(KeyboardInterrupt):
                while _watch(fleet, screen, console):
                    os.killpg(0, signal.SIGTSTP)
            return
        fleet.refresh(ONCE_WAIT_S)
        time.sleep(interval_s)
        fleet.refresh(ONCE_WAIT_S)
        screen.show(fleet.rows())
        console.print(screen)


def _watch(fleet: Fleet, screen: _Screen, console: Console) -> bool:
    """Show the screen until a key ends it; return True if it is suspended."""
    from rich.control import Control
    from rich.screen import Screen

    with _keys() as wait, contextlib.ExitStack() as at_end:
        at_end.callback(console.show_cursor, True)  # before the screen is taken: Ctrl-C can come at any time
        at_end.callback(console.set_alt_screen, False)
        console.set_alt_screen(True)
        console.show_cursor(False)
        while True:
            screen.show(fleet.rows())
            console.control(Control.home())
            console.print(Screen(screen), end="")
            for key in wait(DRAWN_EACH_S):
                if key in ("q", "Q", CTRL_Z):
                    return key == CTRL_Z
                screen.press(key)
