"""Shared parts of all commands: errors that end a command, and output as lines, JSON or tables."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import click

from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import did_you_mean, printable, printable_json, printable_message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH_UNLIMITED = 1_000_000  # characters: output for a program is neither cut off nor folded


class FailedError(click.ClickException):
    """Raised to end a command with one line and a status: 1, if none is given."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(printable_message(f"error: {self.message}"), file=file or sys.stderr)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that no temporary files stay; then it ends the process."""
    is_ended = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_ended
        is_ended = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # else the command has a handler of its own
            signal.signal(signal.SIGTERM, before)
        if is_ended:
            with contextlib.suppress(OSError):
                echo("interrupted: SIGTERM", err=True)
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise our errors, and those of the system, as FailedError."""
    try:
        yield
    except ImmortalError as error:
        raise FailedError(str(error)) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends quietly: the reader has closed our output
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
            with contextlib.suppress(OSError):  # else Python fails at its end to write what is left, with status 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise FailedError(f"the output can't be written: {error.strerror}") from None
        raise FailedError(str(error)) from None


class Commands(click.Group):
    """Command group that reports each of our errors as one line."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _one_line_errors():  # it prints --help and --version
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        is_outermost = ctx.parent is None and threading.current_thread() is threading.main_thread()
        with _one_line_errors():
            try:
                with sigterm_as_interrupt() if is_outermost else contextlib.nullcontext():
                    return super().invoke(ctx)
            except KeyboardInterrupt:
                raise FailedError("interrupted", 128 + signal.SIGINT) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            hint = did_you_mean(args[0], known) or f": there are {', '.join(known)}"
            ctx.fail(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def echo(text: str, *, err: bool = False, file: IO[str] | None = None) -> None:
    """Print one line, with unsafe characters escaped, since its content is from outside. Tables escape their cells."""
    click.echo(printable(text), err=err, file=file)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        echo(line, err=err)


def echo_json(value: object) -> None:
    echo(printable_json(value))


NUMBER_DIGITS_MAX = 18  # of a record: the log has 64 bits for it


class RecordPlace(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """Parameter type SEQ or SEQ:MESSAGE, for a record or a message in it."""

    name = "record[:message]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        sequence_id, colon, message = str(value).partition(":")
        if not (sequence_id.isdecimal() and (message.isdecimal() if colon else True)):
            self.fail(
                f"{value!r}: a record's number was expected, or one with a message's number: 12 or 12:3", param, ctx
            )
        if max(len(sequence_id), len(message)) > NUMBER_DIGITS_MAX:
            self.fail(f"{value!r}: a number of at most {NUMBER_DIGITS_MAX} digits was expected", param, ctx)
        return int(sequence_id), int(message) if colon else None


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 record", "1,200 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number_text(value: object) -> str:
    return "-" if value is None else str(value)


def size_text(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


# --- tables: rich is loaded only for a table, since it costs a process 3 MiB ------------------------------------------


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), title: str | None = None
) -> None:
    """Print a table; columns named in ``right`` are aligned right. A terminal folds lines that are too long.

    A cell is shown without rich's markup. It can have several lines; unsafe characters in them are escaped.
    """
    from rich.text import Text

    console = make_console()
    if title:
        console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(make_table(heads, rows, right))


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Iterator[str]:
    """Format a table like :func:`print_table`, as lines."""
    console = make_console(is_plain=True)
    with console.capture() as captured:
        console.print(make_table(heads, rows, right))
    yield from (line.rstrip() for line in captured.get().splitlines())


def make_console(*, is_plain: bool = False) -> Console:
    from rich.console import Console

    console = Console(color_system=None) if is_plain else Console()
    return Console(color_system=None, width=_WIDTH_UNLIMITED) if is_plain or not console.is_terminal else console


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(map(printable, cell.split("\n")))) for cell in row))
    return table
