"""What the commands share: how an error ends a command, options, plain JSON."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from coordinator.config import ConfigError, InstanceSettings, check_instance_name, near_miss
from coordinator.config.values import check_app
from coordinator.instances.registry import Registry, RegistryError
from coordinator.notices import LOG_FORMATS, LOG_LEVELS
from protocol.errors import ImmortalError
from protocol.shown import printable, printable_json, printable_message

if TYPE_CHECKING:
    from rich.text import Text

Function = TypeVar("Function", bound=Callable[..., Any])


class FailedError(click.ClickException):
    """Ends a command with one line and status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(printable_message(f"error: {self.message}"), file=file or sys.stderr)


class Commands(click.Group):
    """A group whose commands end in one clear line, whatever of ours goes wrong."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ImmortalError as error:
            raise FailedError(str(error)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # click ends quietly: who reads our output has seen enough
            raise FailedError(str(error)) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            hint = near_miss(args[0], known) or f": there are {', '.join(known)}"
            ctx.fail(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def instance_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: an impossible name is wrong usage."""
    if value is None:
        return None
    try:
        return check_instance_name(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def app_name(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback, as the one above."""
    try:
        return None if value is None else check_app(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def message_id(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A click callback: SEQ:INDEX, or some of them, as (record, message)."""
    if value is None:
        return None
    return tuple(_message_id(text) for text in value) if isinstance(value, tuple) else _message_id(value)


def _message_id(text: str) -> tuple[int, int]:
    sequence_id, colon, index = text.partition(":")
    if not (colon and all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (sequence_id, index))):
        raise click.BadParameter(f"{text!r}: a record's number and a message's in it were expected, such as 312:0")
    return int(sequence_id), int(index)


def complete_instance(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: the registered instances that begin so. None where the registry can't be read."""
    with contextlib.suppress(ImmortalError):
        names = Registry(ctx.find_root().params["home"]).names()
        return [name for name in names if name.startswith(incomplete)]
    return []


def name_argument(function: Function) -> Function:
    return click.argument("name", callback=instance_name, shell_complete=complete_instance)(function)


def log_options(function: Function) -> Function:
    function = click.option(
        "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="What is logged at least."
    )(function)
    return click.option(
        "--log-format", type=click.Choice(LOG_FORMATS), default="human", show_default=True, help="The form of the log."
    )(function)


def promote_option(function: Function) -> Function:
    return click.option(
        "--promote",
        is_flag=True,
        help="After a recovery, begin to work before a checkpoint is taken: for large states.",
    )(function)


def follow_option(function: Function) -> Function:
    return click.option(
        "--follow",
        is_flag=True,
        help="While another process runs the instance, follow its log, ready to take over when that is gone.",
    )(function)


def trust_pickle_option(function: Function) -> Function:
    return click.option(
        "--trust-pickle",
        is_flag=True,
        help="Read states that pickle wrote also of a log that this home did not make: that runs what is in them.",
    )(function)


def json_option(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def require_log(settings: InstanceSettings) -> None:
    """Raises RegistryError where the instance has not been started yet."""
    from coordinator.log import log_exists

    if not log_exists(settings.log):
        raise RegistryError(f"{settings.name!r} has not been started yet: there is no log in {settings.log}")


def operator_name() -> str:
    """Who runs this command, for the log."""
    import pwd

    try:
        login = os.getlogin()
    except OSError:  # no terminal
        try:
            login = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            login = "somebody"
    return f"{login} (uid {os.getuid()}, process {os.getpid()})"


def echo(text: str, *, err: bool = False, file: IO[str] | None = None) -> None:
    """One line. All that commands print comes through here, or is a :func:`cell`: what is in it came from outside."""
    click.echo(printable(text), err=err, file=file)


def cell(text: str) -> Text:
    """Of a table: as it is, without rich's markup. It may have lines of ours; names in it were made printable."""
    from rich.text import Text

    return Text("\n".join(map(printable, text.split("\n"))))


pass_registry = click.make_pass_decorator(Registry)


def echo_json(value: object) -> None:
    echo(printable_json(value))
